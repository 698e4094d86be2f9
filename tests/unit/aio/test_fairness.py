"""Clients that know nothing of each other, and write the same two cells all the time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median, quantiles

from percolator import Limits, RetryPolicy
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import accounts, balance

CLIENTS = 10
SECONDS = 2.0
"""In virtual time: about 1,600 transactions, whose waits do not differ from those of 8 s. They cost
half a second of CPU; what costs more can miss the wall-clock limit of a test on a machine
that has little time for it."""
ROWS = ("bob", "joe")
WAIT_TIMES_MAX = 20.0
"""How much longer than most the unluckiest of a hundred may wait."""
ATTEMPTS_MAX = 5.0


class Distant(ClusterInMemory):
    """Answers as late as a cluster of processes does."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._delays = random.Random(1)

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        await self._delay(0.001)
        return await super().get_timestamps(request)

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        await self._delay(0.001)
        return await super().read(request)

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        await self._delay(0.003)
        return await super().mutate(request)

    async def _delay(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (0.5 + self._delays.random()))


@asynccontextmanager
async def clients(number: int) -> AsyncIterator[list[Database]]:
    clock = VirtualClock(asyncio.get_running_loop())
    network = InProcessNetwork({ADDRESS: Distant(clock)})
    policy = RetryPolicy(deadline_seconds=600.0)
    async with AsyncExitStack() as stack:
        opened = []
        for seed in range(number):
            world = World(clock, network, random.Random(seed))
            db = await connect_to(world, [ADDRESS], Limits(), policy)
            opened.append(await stack.enter_async_context(db))
        await opened[0].create_table(accounts)
        yield opened


async def test_the_unluckiest_wait_hardly_longer_than_most() -> None:
    """With pauses after conflicts alone, winners go on winning, and the others wait for seconds."""
    chance, attempts, waits = random.Random(1), 0, list[float]()
    now = asyncio.get_running_loop().time

    async def increment(tx: Transaction, row: str) -> None:
        nonlocal attempts
        attempts += 1
        await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)

    async def work(db: Database, until: float) -> None:
        while (began := now()) < until:
            await db.run(increment, chance.choice(ROWS))
            waits.append(now() - began)

    async with clients(CLIENTS) as opened:
        until = now() + SECONDS
        await asyncio.gather(*(work(db, until) for db in opened))
        async with opened[0].snapshot() as snapshot:
            found = await snapshot.get_many(accounts, ROWS, [balance])
    assert sum(row[balance] for row in found) == len(waits)
    assert quantiles(waits, n=100)[98] <= WAIT_TIMES_MAX * median(waits)
    assert attempts <= ATTEMPTS_MAX * len(waits)
