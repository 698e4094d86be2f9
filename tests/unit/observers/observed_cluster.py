"""A small cluster in memory, in virtual time, whose columns are observed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from percolator import Column, Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.observing import worker_context
from percolator.limits import Limits
from percolator.observers.context import Waiting, WorkRequest
from percolator.observers.dead_letters import DeadLetter, DeadLetterBox, DeadLetters
from percolator.observers.definition import Observer
from percolator.observers.registration import register
from percolator.observers.runs import ObserverRun
from percolator.observers.watched import Watched
from percolator.observers.work_queue import Work
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

docs = Table("docs")
source = docs.column("source", codecs.integer)
copy = docs.column("copy", codecs.integer)
total = docs.column("total", codecs.integer)

WAIT_SECONDS = 60.0
"""Seconds of virtual time."""


class Observed:
    """A database, with the operations that tests need."""

    def __init__(self, db: Database, cluster: ClusterInMemory) -> None:
        self.db = db
        self.cluster = cluster
        self.context = worker_context(db.internal.engine)

    async def put(self, row: str, value: int) -> int:
        """Changes the source; returns the commit timestamp."""
        tx = self.db.transaction()
        await tx.set(row, source, value)
        commit = await tx.commit()
        assert commit is not None
        return commit

    async def delete(self, row: str) -> None:
        async with self.db.transaction() as tx:
            await tx.delete(row, source)

    async def get(self, row: str, column: Column[int] = copy) -> int | None:
        return await self.db.get(row, column)

    async def waiting(self) -> list[Waiting]:
        """All stored notifications, once every cell is committed."""
        await self.db.internal.engine.env.background.drain(1.0)
        deadline = self.context.env.deadline()
        table_id = (await self.db.internal.engine.table(docs, deadline)).table_id
        found = self.context.notifications.survey(WorkRequest(table_id))
        return [one async for answer in found for one in answer.waiting]

    async def work_for(self, observer: Observer) -> Work:
        """The only work that is found for an observer, which it registers first."""
        (watched,) = await register(self.context, [observer])
        (waiting,) = [one for one in await self.waiting() if one.observer == watched.id]
        return self.work_of(watched, waiting)

    @staticmethod
    def work_of(watched: Watched, waiting: Waiting) -> Work:
        work = Work(watched, waiting.row, waiting.column, 0.0)
        work.timestamps.update(waiting.timestamps)
        return work

    @staticmethod
    def work_of_row(watched: Watched, row: str) -> Work:
        return Work(watched, row.encode(), source.name, 0.0)

    def run_of(self, work: Work) -> ObserverRun:
        """A run that has not begun yet, and that cannot put anything aside."""
        return ObserverRun(self.context, DeadLetters(self.context, 0), work)

    async def dead_letters(self) -> list[DeadLetter]:
        return [letter async for letter in DeadLetterBox(self.context).look_through()]

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Waits until observers have made the condition true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not await condition():
                await self.context.world.clock.sleep(0.01)

    async def until_copied(self, row: str, value: int | None) -> None:
        async def is_copied() -> bool:
            return await self.get(row) == value

        await self.until(is_copied)

    async def put_and_copy(self, row: str, value: int) -> None:
        """Changes the source, and waits until an observer has copied it."""
        await self.put(row, value)
        await self.until_copied(row, value)

    async def until_nothing_waits(self) -> None:
        async def is_quiet() -> bool:
            return not await self.waiting()

        await self.until(is_quiet)


@asynccontextmanager
async def observed(*, seed: int = 1, limits: Limits | None = None) -> AsyncIterator[Observed]:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = ClusterInMemory(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(seed))
    async with await connect_to(world, [ADDRESS], limits or Limits(), RetryPolicy()) as db:
        await db.create_table(docs, splits=["m"])
        yield Observed(db, cluster)
