"""The library inside Spark executors, which fork: each process opens its own channels."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from services.local.cluster import LocalCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(180),
    # Spark leaves sockets to its gateway open when it stops.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PARTITIONS = 4
TIMESTAMPS_EACH = 200


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("percolator-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    yield session
    session.stop()


def test_executors_take_timestamps_that_are_never_repeated(
    spark: SparkSession, tmp_path: Path
) -> None:
    with LocalCluster(tmp_path, tablet_servers=0) as cluster:
        address = cluster.processes["oracle"].address

        # Inside the test, so that it is pickled by value: executors do not know this module.
        def take(partition: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
            import asyncio

            from percolator.wire.channels import GrpcNetwork
            from percolator.wire.timestamp_source import TimestampSource
            from percolator.world import MachineClock, World, machine_random

            async def timestamps() -> list[int]:
                network = GrpcNetwork()
                source = TimestampSource(
                    World(MachineClock(), network, machine_random()), [address]
                )
                try:
                    return [await source.get() for _ in range(TIMESTAMPS_EACH)]
                finally:
                    await source.close()
                    await network.close()

            for number in partition:
                yield number, asyncio.run(timestamps())

        numbers = spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS)
        taken = dict(numbers.mapPartitions(take).collect())

    assert sorted(taken) == list(range(PARTITIONS))
    everything = [timestamp for timestamps in taken.values() for timestamp in timestamps]
    assert len(set(everything)) == PARTITIONS * TIMESTAMPS_EACH
    assert all(timestamps == sorted(timestamps) for timestamps in taken.values())
