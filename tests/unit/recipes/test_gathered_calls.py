"""Calls that are gathered on one transaction, by a client that does not know the tables yet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator import Limits, RetryPolicy, Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.recipes import CombineQueue, ExportQueue, Index, ShardedCounter
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import master_pb2
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

people = Table("people")
city = people.column("city", codecs.text)
visits = people.column("visits", codecs.integer)
sums = CombineQueue("sums", key=codecs.text, value=codecs.integer, combine=sum)
out = ExportQueue("out", key=codecs.text, value=codecs.integer)
counter = ShardedCounter("counter")
by_city: Index[str, str, str] = Index("by city", on=city, value=codecs.text)


class SuspendingCluster(ClusterInMemory):
    """Looks tables up with a suspension, as over a network."""

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        await asyncio.sleep(0)
        return await super().describe_table(request)


@asynccontextmanager
async def fresh_client() -> AsyncIterator[Database]:
    clock = VirtualClock(asyncio.get_running_loop())
    world = World(clock, InProcessNetwork({ADDRESS: SuspendingCluster(clock)}), random.Random(1))
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as first:
        await first.create_table(people)
        for recipe in (sums, out, counter, by_city):
            await recipe.create(first)
        async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as fresh:
            yield fresh


async def test_gathered_additions_to_a_queue_all_count() -> None:
    async with fresh_client() as db:
        async with db.transaction() as tx:
            await asyncio.gather(*(sums.add(tx, "home", 1) for _ in range(10)))
        async with db.snapshot() as snapshot:
            assert await sums.get(snapshot, "home") == 10


async def test_gathered_exports_are_all_put() -> None:
    async with fresh_client() as db:
        async with db.transaction() as tx:
            await asyncio.gather(*(out.put(tx, "home", number) for number in range(10)))
        async with db.snapshot() as snapshot:
            assert await out.pending(snapshot) == 10


async def test_gathered_additions_to_a_sharded_counter_all_count() -> None:
    async with fresh_client() as db:
        async with db.transaction() as tx:
            await asyncio.gather(*(counter.add(tx, "home", 1) for _ in range(10)))
        async with db.snapshot() as snapshot:
            assert await counter.value(snapshot, "home") == 10


async def test_gathered_increments_of_a_cell_all_count() -> None:
    async with fresh_client() as db:
        async with db.transaction() as tx:
            sums_seen = await asyncio.gather(*(tx.increment("ann", visits) for _ in range(10)))
        assert sums_seen == list(range(1, 11))
        assert await db.get("ann", visits) == 10


async def test_an_index_agrees_with_the_last_of_gathered_writes_of_a_row() -> None:
    async with fresh_client() as db:
        async with db.transaction() as tx:
            await asyncio.gather(*(by_city.set(tx, "ann", one) for one in ("Rome", "Bern", "Oslo")))
        async with db.snapshot() as snapshot:
            assert await by_city.range(snapshot) == [("Oslo", "ann")]
            assert await by_city.check(snapshot) == []
