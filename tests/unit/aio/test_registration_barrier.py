"""Once observers are registered, every commit notifies them, even by clients that do not know yet.

A transaction may have begun, and locked its cells, under the older schema. What counts is the
schema under which each cell is *committed*: the tablet refuses a commit made for another version,
and its sender prepares it again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from percolator import Limits, RetryPolicy, Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.observing import worker_context
from percolator.observers.context import WorkRequest
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import written_out

pages = Table("pages")
body = pages.column("body", codecs.text)
title = pages.column("title", codecs.text)

Matches = Callable[[pb.Mutation], bool]


def commits(row: bytes) -> Matches:
    return lambda mutation: (
        mutation.row == row and any(change.space == SPACE_WRITE for change in mutation.changes)
    )


def prewrites(mutation: pb.Mutation) -> bool:
    return any(
        change.space == SPACE_LOCK and change.kind == pb.Change.KIND_PUT
        for change in mutation.changes
    )


class Cluster(ClusterInMemory):
    """Registers an observer of `body` just before it accepts a certain mutation."""

    register_before: Matches | None = None
    lost: Matches | None = None
    """The first such mutation, and everything after it, is lost."""
    dead = False
    registered = False

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        mutations = [one for batch in request.batches for one in written_out(batch)]
        if self.lost is not None and any(map(self.lost, mutations)):
            self.dead = True
        if self.dead:
            await asyncio.get_running_loop().create_future()
        if self.register_before is not None and any(map(self.register_before, mutations)):
            self.register_before = None
            await self.register()
        return await super().mutate(request)

    async def register(self) -> None:
        observer = master_pb2.Observer(name="index", columns=[b"body"])
        request = master_pb2.ChangeObserversRequest(table="pages", add=[observer])
        self.registered = True
        await self.change_observers(request)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Cluster, Callable[[], Database]]]:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = Cluster(clock)
    opened: list[Database] = []

    async def connect() -> Database:
        world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(len(opened)))
        limits = Limits(one_round_cells_max=0)
        opened.append(await connect_to(world, [ADDRESS], limits, RetryPolicy()))
        return opened[-1]

    for _ in range(2):
        database = await connect()
        await database.create_table(pages, splits=["m"], exist_ok=True)
        # It now knows the schema and the tablets, and has no reason to ask for them again.
        await database.set_many((row, {title: "text"}) for row in ("a", "z"))
    databases = iter(opened)
    try:
        yield cluster, lambda: next(databases)
    finally:
        cluster.dead = False
        for database in opened:
            await database.close()


async def notified(database: Database) -> dict[bytes, tuple[int, ...]]:
    context = worker_context(database.internal.engine)
    table = await context.describe("pages")
    answers = context.notifications.survey(WorkRequest(table.table_id))
    return {one.row: one.timestamps async for answer in answers for one in answer.waiting}


@pytest.mark.parametrize("moment", [prewrites, commits(b"a")])
async def test_a_registration_during_a_commit_misses_none_of_its_cells(
    moment: Matches,
) -> None:
    async with connected() as (cluster, client):
        stale, other = client(), client()
        cluster.register_before = moment
        async with stale.transaction() as tx:
            for row in ("a", "b", "z"):
                await tx.set(row, body, "text")
        assert cluster.registered
        await asyncio.sleep(1)
        commit = tx.commit_timestamp
        assert commit is not None
        assert await notified(other) == dict.fromkeys([b"a", b"b", b"z"], (commit,))


async def test_cells_committed_after_the_registration_notify_though_the_primary_was_before() -> (
    None
):
    async with connected() as (cluster, client):
        stale, other = client(), client()
        cluster.register_before = commits(b"z")
        async with stale.transaction() as tx:
            await tx.set("a", body, "text")
            await tx.set("z", body, "text")
        await asyncio.sleep(1)
        assert cluster.registered
        commit = tx.commit_timestamp
        assert commit is not None
        assert await notified(other) == {b"z": (commit,)}


async def test_rolling_forward_for_a_dead_owner_notifies_under_the_present_schema() -> None:
    async with connected() as (cluster, client):
        owner, passer_by = client(), client()
        cluster.lost = commits(b"z")
        async with owner.transaction() as tx:
            await tx.set("a", title, "text")
            await tx.set("z", body, "text")
        await asyncio.sleep(1)
        assert cluster.dead
        cluster.dead, cluster.lost = False, None
        await cluster.register()
        commit = tx.commit_timestamp
        assert commit is not None
        async with passer_by.snapshot() as snapshot:
            assert await snapshot.get("z", body) == "text"
        await passer_by.internal.engine.env.background.drain(10.0)
        assert (await notified(passer_by))[b"z"] == (commit,)


async def test_a_commit_to_a_column_that_is_no_longer_observed_notifies_no_observer() -> None:
    async with connected() as (cluster, client):
        stale, other = client(), client()
        await cluster.register()
        await stale.internal.engine.catalog.describe("pages", stale.internal.engine.now() + 1)
        removal = master_pb2.ChangeObserversRequest(table="pages", remove=["index"])
        await cluster.change_observers(removal)
        async with stale.transaction() as tx:
            await tx.set("a", body, "text")
        assert await notified(other) == {}
