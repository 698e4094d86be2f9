"""One Spark session and one cluster for all tests: both take seconds to start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrameReader, DataFrameWriter, SparkSession

import percolator
import percolator.spark
from services.local.cluster import LocalCluster
from tests.spark.gates import GATES, Gates
from tests.spark.sessions import local_session

HAVE_DRIVERS = ("test_executor_processes.py", "test_killed_drivers.py")
"""They wait for drivers of their own, so they come first: others use the cores meanwhile."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in HAVE_DRIVERS)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Gives tasks three attempts. Made before any use of the client: Spark forks to start Java."""
    os.environ[GATES] = str(tmp_path_factory.mktemp("gates"))
    session = local_session(tmp_path_factory.mktemp("warehouse"), 2)
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
