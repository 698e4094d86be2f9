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
from percolator.services.local.cluster import LocalCluster
from tests.spark.gates import GATES, Gates
from tests.spark.sessions import local_session
from tests.spark.tables import CATALOG, Pages, Read

LONGEST = (
    "test_faults.py",
    "test_webindex_batch.py",
    "test_reading.py",
    "test_streaming.py",
)
"""They come first, or one would still run when all others have ended. Those that wait for drivers
of their own leave the cores to others meanwhile, so they come first of all."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


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
def pages(db: percolator.Database) -> Pages:
    """An empty table."""
    return Pages(db)


@pytest.fixture
def given(cluster: LocalCluster, pages: Pages) -> dict[str, str]:
    """The options of a job that reads or writes `pages`."""
    return {"address": cluster.address, "table": pages.name, "catalog": CATALOG}


@pytest.fixture
def read(spark: SparkSession, cluster: LocalCluster) -> Read:
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
