"""The library inside Spark executors, which fork: each process opens its own channels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

import pytest
from pyspark.sql import DataFrameReader, SparkSession

import percolator
import percolator.spark
from percolator.blocking import loop_thread
from percolator.services.local.cluster import LocalCluster
from tests.spark.tables import CATALOG, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    # Spark leaves the sockets to its gateway open when it stops.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PARTITIONS = 4
TIMESTAMPS_EACH = 200


class Relay:
    """A second address for a server, until the relay is closed."""

    def __init__(self, server: str) -> None:
        self._host, _, self._port = server.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._listening = loop_thread.shared().call(self._listen)
        self.address = f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        async def close() -> None:
            self._listening.close()
            for writer in self._writers:
                writer.close()

        loop_thread.shared().call(close)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._join, "127.0.0.1", 0)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, there_writer]
        await asyncio.gather(_pass_on(reader, there_writer), _pass_on(there_reader, writer))


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except ConnectionError:
        pass  # one of the two sides has closed
    writer.close()


def test_executors_that_cannot_reach_the_cluster_name_the_option_and_the_address(
    read: Callable[..., DataFrameReader], db: percolator.Database, cluster: LocalCluster
) -> None:
    pages, relay = Pages(db, 4), Relay(cluster.address)
    options = {"address": relay.address, "catalog": CATALOG, "timeout_seconds": 2}
    frame = read(pages.name, **options).load().where("url = 'a00000'")
    assert (
        frame._jdf.queryExecution().executedPlan() is not None
    )  # the driver has reached the cluster
    relay.close()
    with pytest.raises(Exception, match=f"address: no cluster answers at {relay.address} from"):
        frame.collect()


def test_timestamps_taken_by_executors_are_unique_and_increase(
    spark: SparkSession, cluster: LocalCluster
) -> None:
    address = cluster.processes["oracle"].address

    # Inside the test, so that it is pickled by value: executors do not know this module.
    def take(partition: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        import asyncio

        from percolator.wire.channels import GrpcNetwork
        from percolator.wire.timestamp_source import TimestampSource
        from percolator.world import MachineClock, World, machine_random

        async def timestamps() -> list[int]:
            network = GrpcNetwork()
            source = TimestampSource(World(MachineClock(), network, machine_random()), [address])
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


def test_a_python_worker_has_one_connection_for_all_its_tasks(
    spark: SparkSession, cluster: LocalCluster, db: percolator.Database
) -> None:
    pages, address = Pages(db, 4), cluster.address
    name = pages.name

    def look(numbers: Iterable[int]) -> Iterator[tuple[int, int, bool, int]]:
        import gc
        import os

        import percolator.spark
        from percolator import Table, codecs

        found = percolator.spark.database(address)
        with found.snapshot() as snapshot:
            titles = Table(name).column("meta:title", codecs.text)
            read = snapshot.get("a00000", titles) == "title of a00000"
        yield os.getpid(), id(found), read, gc.get_freeze_count()

    looked = []
    for _ in range(2):
        numbers = spark.sparkContext.parallelize(range(PARTITIONS), PARTITIONS)
        looked += numbers.mapPartitions(look).collect()
    assert all(read for _, _, read, _ in looked)
    processes = {process for process, *_ in looked}
    assert len({(process, database) for process, database, *_ in looked}) == len(processes)
    assert len(processes) < len(looked)
    assert all(frozen for *_, frozen in looked), "Spark collects garbage after each task"


def test_a_connection_that_a_task_has_closed_is_made_again(cluster: LocalCluster) -> None:
    """`with percolator.spark.database() as db` is easily written, and closes it for all others."""
    with percolator.spark.database(cluster.address) as first:
        assert percolator.spark.database(cluster.address) is first
    again = percolator.spark.database(cluster.address)
    assert again.timestamp()
    assert percolator.spark.database(cluster.address) is again


def test_a_function_that_captures_a_database_is_refused_with_what_to_use_instead(
    spark: SparkSession, db: percolator.Database
) -> None:
    frame = spark.range(2)
    with pytest.raises(Exception, match=r"call percolator\.spark\.database\(\) instead"):
        frame.foreachPartition(lambda rows: db.close())
