"""Once observers are registered, every commit notifies them, even by clients that do not know yet.

A transaction may have begun, and locked its cells, under the older schema. What counts is the
schema under which each cell is *committed*: the tablet refuses a commit made for another version,
and its sender prepares it again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from percolator import ConflictError, Limits, RetryPolicy, Table, aio, codecs, observes
from percolator.aio import Database
from percolator.aio.activity import ProcessActivity
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.aio.observing import worker_context
from percolator.bigtable.store import BigtableStore
from percolator.errors import CellAddress, UsageError
from percolator.observers.context import Waiting, WorkRequest
from percolator.rowstore.layout import Times
from percolator.testing import connect_async
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, ClusterOverRows
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE
from percolator.v1.master_pb2 import ChangeObserversRequest
from percolator.wire.sessions import ACTIVITY_BYTES_MAX
from percolator.world import World
from tests.simulation.virtual_time import WALL_MILLISECONDS, VirtualClock
from tests.unit.connected import TWO_PHASES, accounts, balance, connected, put, written_out

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
async def two_clients() -> AsyncIterator[tuple[Cluster, Callable[[], Database]]]:
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


async def waiting_in(database: Database, table: str) -> list[Waiting]:
    context = worker_context(database.internal.engine)
    info = await context.describe(table)
    answers = context.notifications.survey(WorkRequest(info.table_id))
    return [one async for answer in answers for one in answer.waiting]


async def notified(database: Database) -> dict[bytes, tuple[int, ...]]:
    return {one.row: one.timestamps for one in await waiting_in(database, "pages")}


@pytest.mark.parametrize(
    ("moment", "rows", "notifying"),
    [
        pytest.param(prewrites, "abz", [b"a", b"b", b"z"], id="before any cell is locked"),
        pytest.param(commits(b"a"), "abz", [b"a", b"b", b"z"], id="before the primary commits"),
        pytest.param(commits(b"z"), "az", [b"z"], id="after the primary has committed"),
    ],
)
async def test_a_registration_during_a_commit_misses_no_cell_that_is_committed_after_it(
    moment: Matches, rows: str, notifying: list[bytes]
) -> None:
    async with two_clients() as (cluster, client):
        stale, other = client(), client()
        cluster.register_before = moment
        async with stale.transaction() as tx:
            for row in rows:
                await tx.set(row, body, "text")
        await asyncio.sleep(1)
        assert cluster.registered
        commit = tx.commit_timestamp
        assert commit is not None
        assert await notified(other) == dict.fromkeys(notifying, (commit,))


async def test_rolling_forward_for_a_dead_owner_notifies_under_the_present_schema() -> None:
    async with two_clients() as (cluster, client):
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
        assert await passer_by.get("z", body) == "text"
        await passer_by.internal.engine.env.background.drain(10.0)
        assert (await notified(passer_by))[b"z"] == (commit,)


async def test_a_commit_to_a_column_that_is_no_longer_observed_notifies_no_observer() -> None:
    async with two_clients() as (cluster, client):
        stale, other = client(), client()
        await cluster.register()
        await stale.internal.engine.catalog.describe("pages", stale.internal.engine.now() + 1)
        removal = master_pb2.ChangeObserversRequest(table="pages", remove=["index"])
        await cluster.change_observers(removal)
        await put(stale, body, a="text")
        assert await notified(other) == {}


# A weak observer that another client has registered hears of every later notification.

orders = Table("orders")
price = orders.column("price", codecs.integer)


@asynccontextmanager
async def _over_rows() -> AsyncIterator[tuple[Database, ClusterInMemory]]:
    clock = VirtualClock(asyncio.get_running_loop())
    store = InProcessNetwork({MODEL.address: BigtableInMemory()})
    cluster = ClusterOverRows(clock, store, MODEL)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    rows = Rows(BigtableStore(store, MODEL), Times(WALL_MILLISECONDS - 1_000))
    async with await connect_to(world, [ADDRESS], TWO_PHASES, RetryPolicy(), rows=rows) as db:
        await db.create_table(accounts)
        yield db, cluster


async def _registered(cluster: ClusterInMemory, name: str) -> None:
    """By another client, so that this one is not told."""
    observer = master_pb2.Observer(name=name, columns=[balance.name], weak=True)
    await cluster.change_observers(
        master_pb2.ChangeObserversRequest(table="accounts", add=[observer])
    )


@pytest.mark.parametrize("writes", [True, False], ids=["with a write elsewhere", "alone"])
@pytest.mark.parametrize("store", [connected, _over_rows], ids=["tablets", "rows"])
async def test_a_notification_reaches_observers_that_this_client_has_not_heard_of(
    store: Callable[[], AbstractAsyncContextManager[tuple[Database, ClusterInMemory]]],
    writes: bool,
) -> None:
    async with store() as (db, cluster):
        await db.create_table(orders)
        await _registered(cluster, "known")
        engine = db.internal.engine
        info = await engine.catalog.table("accounts", engine.now() + 1.0)
        await engine.catalog.refresh(info.table_id, engine.now() + 1.0)
        await _registered(cluster, "new")
        async with db.transaction() as tx:
            await tx.notify("a", balance)
            if writes:
                await tx.set("one", price, 1)
        waiting = await waiting_in(db, "accounts")
        assert {one.observer for one in waiting} == {b"known", b"new"}
        assert {one.timestamps for one in waiting} == {(tx.commit_timestamp,)}


@pytest.mark.parametrize("store", [connected, _over_rows], ids=["tablets", "rows"])
async def test_the_first_observer_of_a_column_is_notified_by_a_client_that_ran_before(
    store: Callable[[], AbstractAsyncContextManager[tuple[Database, ClusterInMemory]]],
) -> None:
    """It had said that the column has no weak observer, for as long as it only notified."""
    async with store() as (db, cluster):
        async with db.transaction() as tx:
            with pytest.raises(UsageError, match="has no weak observer"):
                await tx.notify("a", balance)
        await _registered(cluster, "first")
        async with db.transaction() as tx:
            await tx.notify("a", balance)
        assert {one.observer for one in await waiting_in(db, "accounts")} == {b"first"}


# A process says what its transactions and observers do, as briefly as the lock service asks.

people = Table("people")
name = people.column("name", codecs.text)
length = people.column("length", codecs.integer)


@pytest.fixture
@asynccontextmanager
async def people_db() -> AsyncIterator[Database]:
    async with connect_async() as db:
        await db.create_table(people)
        yield db


@observes(name)
async def measure(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, length, len(await tx.get(row, name, default="")))


async def test_commits_and_conflicts_are_counted_with_the_cell(people_db: Database) -> None:
    await put(people_db, name, a="ann")
    loser = people_db.transaction()
    assert await loser.get("a", name) == "ann"
    await put(people_db, name, a="eve")
    await loser.set("a", name, "joe")
    with pytest.raises(ConflictError):
        await loser.commit()
    report = people_db.internal.engine.activity.report()
    assert (report.commits, report.conflicts) == (2, 1)
    [cell] = report.cells
    assert (cell.row, cell.column, cell.conflicts) == (b"a", b"name", 1)


async def test_observers_are_reported_while_they_run_and_not_after(people_db: Database) -> None:
    activity = people_db.internal.engine.activity
    async with people_db.run_observers([measure]):
        await put(people_db, name, a="ann")
        await people_db.wait_for_observers()
        [one] = activity.report().observers
        assert (one.table, one.observer, one.runs, one.commits) == ("people", "measure", 1, 1)
    assert not activity.report().observers


async def test_observers_whose_table_was_dropped_are_no_longer_reported(
    people_db: Database,
) -> None:
    """Another table may have its name: for its changes, no worker would be missed."""
    activity = people_db.internal.engine.activity
    async with people_db.run_observers([measure]):
        await people_db.drop_table(people)
        await people_db.create_table(people)
        await people_db.register_observers([measure])
        await asyncio.sleep(5.0)
        assert not activity.report().observers
        assert await activity.running_observers() == set()


async def test_paused_observers_are_reported(people_db: Database) -> None:
    engine = people_db.internal.engine
    async with people_db.run_observers([measure]):
        pause = ChangeObserversRequest(table="people", pause=["measure"])
        await engine.catalog.change_observers(pause, engine.now() + 10.0)
        await asyncio.sleep(5.0)
        assert [one.observer for one in engine.activity.report().observers] == ["measure"]


async def test_a_report_keeps_within_the_limit_and_leaves_out_what_matters_least(
    people_db: Database,
) -> None:
    activity = ProcessActivity()
    for number in range(100):
        activity.tally.lost_at(CellAddress(1, b"%03d" % number + b"x" * 5_000, b"c" * 3_000))
    async with people_db.run_observers([measure]) as worker:
        activity.workers.add(worker)
        report = activity.report()
    assert report.ByteSize() <= ACTIVITY_BYTES_MAX
    assert (report.conflicts, len(report.cells)) == (100, 0)
    assert [one.observer for one in report.observers] == ["measure"]
