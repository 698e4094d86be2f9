"""One Spark session and one cluster for all tests: both take seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrameReader, DataFrameWriter, SparkSession

import percolator
import percolator.spark
from services.local.cluster import LocalCluster
from tests.spark.gated_source import GatedDataSource
from tests.spark.gates import GATES, Gates

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Gives tasks three attempts. Made before any use of the client: Spark forks to start Java."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ[GATES] = str(tmp_path_factory.mktemp("gates"))
    session = (
        SparkSession.builder.master("local[2,3]")
        .appName("percolator-tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.catalogImplementation", "in-memory")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(GatedDataSource)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def gates(spark: SparkSession) -> Gates:
    """Where the processes of this session halt, if they write with the data source `gated`."""
    return Gates(Path(os.environ[GATES]))


@pytest.fixture(scope="session")
def cluster(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
        yield started
        percolator.spark.database(started.address).close()  # the one of snapshots and merges


@pytest.fixture(scope="session")
def db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address) as database:
        yield database


@pytest.fixture
def read(spark: SparkSession, cluster: LocalCluster) -> Callable[..., DataFrameReader]:
    def reading(table: str, **options: Any) -> DataFrameReader:
        given = {"address": cluster.address, "table": table, **options}
        return spark.read.format("percolator").options(**given)

    return reading


@pytest.fixture
def write(cluster: LocalCluster) -> Callable[..., DataFrameWriter]:
    def writing(frame: Any, table: str, **options: Any) -> DataFrameWriter:
        given = {"address": cluster.address, "table": table, **options}
        return frame.write.format("percolator").options(**given).mode("append")  # type: ignore[attr-defined,no-any-return]

    return writing
