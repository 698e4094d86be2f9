"""The library inside Spark executors, which fork: each process opens its own channels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

import pytest
from pyspark.sql import DataFrameReader, SparkSession

import percolator
from percolator import loop_thread
from services.local.cluster import LocalCluster
from tests.spark.tables import CATALOG, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    # Spark leaves sockets to its gateway open when it stops.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PARTITIONS = 4
TIMESTAMPS_EACH = 200


class Relay:
    """Another address of a server, until it is closed."""

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
        pass  # one of the two has gone
    writer.close()


def test_executors_that_cannot_reach_the_cluster_say_so_in_the_words_of_the_option(
    read: Callable[..., DataFrameReader], db: percolator.Database, cluster: LocalCluster
) -> None:
    pages, relay = Pages(db, 4), Relay(cluster.address)
    options = {"address": relay.address, "catalog": CATALOG, "timeout_seconds": 2}
    frame = read(pages.name, **options).load().where("url = 'a00000'")
    assert frame._jdf.queryExecution().executedPlan() is not None  # the driver did reach it
    relay.close()
    with pytest.raises(Exception, match=f"address: no cluster answers at {relay.address} from"):
        frame.collect()


def test_executors_take_timestamps_that_are_never_repeated(
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
