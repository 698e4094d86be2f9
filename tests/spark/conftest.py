"""One Spark session and one cluster for all tests that need them: both take seconds to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrameReader, DataFrameWriter, SparkSession

import percolator
from services.local.cluster import LocalCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A task is given three attempts. Made before the client is used: Java is started by a fork."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
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
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
        yield started


@pytest.fixture(scope="session")
def db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address) as database:
        yield database


@pytest.fixture
def read(spark: SparkSession, cluster: LocalCluster) -> Callable[..., DataFrameReader]:
    def reading(table: str, **options: object) -> DataFrameReader:
        given = {"address": cluster.address, "table": table, **options}
        return spark.read.format("percolator").options(**given)  # type: ignore[arg-type]

    return reading


@pytest.fixture
def write(cluster: LocalCluster) -> Callable[..., DataFrameWriter]:
    def writing(frame: object, table: str, **options: object) -> DataFrameWriter:
        given = {"address": cluster.address, "table": table, **options}
        return frame.write.format("percolator").options(**given).mode("append")  # type: ignore[attr-defined,no-any-return]

    return writing
