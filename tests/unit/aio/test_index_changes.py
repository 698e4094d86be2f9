"""Another client drops an index, or makes it again, while a program is at work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from percolator import Column, ConflictError, RetryPolicy, SchemaError, Table, codecs
from percolator.aio import Database, Transaction, find
from percolator.aio.connecting import connect_to
from percolator.aio.index_build import IndexBuild
from percolator.aio.transaction import Outcome
from percolator.errors import CellAddress
from percolator.protocol.cleanup import push_step
from percolator.protocol.commit import Commit
from percolator.protocol.conflicts import MetLock
from percolator.protocol.indexes import BUILDING, READY
from percolator.protocol.read import FoundRow
from percolator.routing.cells import APPLIED, RowRequest
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.in_process_network import InProcessNetwork
from percolator.timestamps import NEWEST
from percolator.v1 import master_pb2
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.world import World
from tests.simulation.planted_index_bugs import (
    a_commit_goes_on_under_another_schema,
    an_index_is_built_past_older_locks,
    locks_are_set_under_any_schema,
    schemas_are_as_young_as_any_epoch,
)
from tests.unit.connected import TWO_PHASES, Cluster, balance, put

ON_BOTH = pytest.mark.usefixtures("engine_of_cells")

people = Table("people")
city = people.column("city", codecs.text, indexed=True)
email = people.column("email", codecs.text, unique=True)


@pytest.fixture
@asynccontextmanager
async def other(db: Database, cluster: Cluster) -> AsyncIterator[Database]:
    """Another client. Both know the table, with its indexes and a row."""
    await db.create_table(people)
    await put(db, city, ann="Rome")
    await put(db, email, ann="a@x")
    engine = db.internal.engine
    world = World(engine.world.clock, InProcessNetwork({ADDRESS: cluster}), random.Random(2))
    connecting = connect_to(world, [ADDRESS], TWO_PHASES, RetryPolicy(), rows=engine._rows)
    async with await connecting as other:
        yield other


@pytest.mark.parametrize("column", [city, email], ids=["indexed", "unique"])
@pytest.mark.parametrize("again", [False, True], ids=["dropped", "made again"])
async def test_a_commit_with_entries_of_a_dropped_index_is_to_be_run_again(
    db: Database, other: Database, column: Column[str], again: bool
) -> None:
    await other.drop_index(people, column.name.decode())
    if again:
        await other.create_index(column)
    tx = db.transaction()
    tx.set("ann", column, "new")
    with pytest.raises(ConflictError, match=r"the indexes of .* were changed"):
        await tx.commit()
    assert tx.outcome is Outcome.ABORTED
    await put(db, column, ann="newer")
    if again:
        assert await other.check_index(column) == []


async def test_a_dropped_index_is_not_found(db: Database, other: Database) -> None:
    await other.drop_index(people, "city")
    async with db.snapshot() as snapshot:
        with pytest.raises(SchemaError, match="table 'people' has no index 'city'"):
            [row async for row in snapshot.find(city, "Rome")]


@ON_BOTH
async def test_an_index_that_was_made_again_is_found(db: Database, other: Database) -> None:
    await other.drop_index(people, "city")
    await other.create_index(city)
    async with db.snapshot() as snapshot:
        assert [row.key async for row in snapshot.find(city, "Rome")] == ["ann"]


async def test_a_look_up_whose_index_is_made_again_and_again_ends_at_its_deadline(
    db: Database, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = db.internal.engine.world.clock

    async def make_again(*_: object) -> None:
        await clock.sleep(0.01)
        await other.drop_index(people, "city")
        await other.create_index(city)
        raise SchemaError("index 'city' was dropped")

    monkeypatch.setattr(find, "require_ready", make_again)
    began = clock.monotonic_seconds()
    async with db.snapshot(timeout=1.0) as snapshot:
        with pytest.raises(SchemaError, match="index 'city' was dropped"):
            [row async for row in snapshot.find(city, "Rome")]
    assert 1.0 <= clock.monotonic_seconds() - began < 1.5


async def test_a_build_during_which_a_load_begins_reads_the_table_again(
    db: Database, other: Database
) -> None:
    engine = other.internal.engine
    info = await engine.catalog.table("people", engine.now() + 10.0)
    loading = db._index(info, "city", None)

    class Build(IndexBuild):
        snapshots = 0

        async def _add_all(self, progress: Callable[[int], None] | None) -> int:
            count = await super()._add_all(progress)
            self.snapshots += 1
            if self.snapshots == 1:
                await loading.mark(BUILDING)
            return count

    (index,) = [one for one in info.schema.indexes if one.name == "city"]
    build = Build(other, engine, info.table_id, index, 10.0)
    assert (await build.build(), build.snapshots) == (1, 2)
    assert await loading.state() == READY


async def test_a_build_whose_index_is_dropped_says_so(
    db: Database, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = IndexBuild._pages

    async def dropped_meanwhile(
        self: IndexBuild, *arguments: Any
    ) -> AsyncGenerator[list[FoundRow], None]:
        async with aclosing(pages(self, *arguments)) as found:
            async for page in found:
                await db.drop_index(people, "city")
                yield page

    monkeypatch.setattr(IndexBuild, "_pages", dropped_meanwhile)
    with pytest.raises(SchemaError, match="'people': index 'city' was dropped while it was built"):
        await other.create_index(city)


# Rules of clients that know different schemas. A seed of the simulator seldom has the interleaving
# that shows a mistake in one of them, so they are planted here.

later = Table("later")
plain = later.column("city", codecs.text)
indexed = Table("later").column("city", codecs.text, indexed=True)
PLANTED = pytest.mark.parametrize("is_planted", [False, True], ids=["correct", "planted"])


async def write(tx: Transaction, column: Column[str]) -> None:
    """Writes a row, in a transaction whose primary is in another table."""
    tx.set("primary", balance, 1)
    tx.set("ann", column, "Rome")


@ON_BOTH
@PLANTED
async def test_a_client_that_has_not_heard_of_an_index_commits_nothing_without_its_entry(
    db: Database,
    other: Database,
    cluster: Cluster,
    is_planted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await db.create_table(later)
    await put(db, plain, zoe="Bern")
    await other.create_index(indexed)
    asked = cluster.describe_table
    if is_planted:
        locks_are_set_under_any_schema(monkeypatch)
        schemas_are_as_young_as_any_epoch(monkeypatch)
        hearing = asyncio.Event()

        async def wait(request: master_pb2.DescribeTableRequest) -> Any:
            await hearing.wait()
            return await asked(request)

        monkeypatch.setattr(cluster, "describe_table", wait)
        tx = db.transaction()
        await write(tx, plain)
        await tx.commit()
        hearing.set()
    else:
        await db.run(write, plain)
    assert (await other.check_index(indexed) != []) == is_planted


def overtaken_by(change: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit has the entries of all indexes, and no locks yet, when this happens."""
    correct = Commit.prewrite

    async def overtaken(self: Commit, deadline: float) -> int | None:
        monkeypatch.setattr(Commit, "prewrite", correct)
        await change()
        return await correct(self, deadline)

    monkeypatch.setattr(Commit, "prewrite", overtaken)


@ON_BOTH
async def test_a_commit_that_a_drop_has_overtaken_is_to_be_run_again(
    db: Database, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    overtaken_by(lambda: other.drop_index(people, "city"), monkeypatch)
    tx = db.transaction()
    await write(tx, city)
    with pytest.raises(ConflictError, match=r"the indexes of .* were changed"):
        await tx.commit()
    await db.run(write, city)
    assert await db.get("ann", city) == "Rome"


@ON_BOTH
@PLANTED
async def test_a_commit_that_an_index_has_overtaken_is_to_be_run_again(
    db: Database, other: Database, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.create_table(later)
    await put(db, plain, zoe="Bern")
    overtaken_by(lambda: other.create_index(indexed), monkeypatch)
    if is_planted:
        locks_are_set_under_any_schema(monkeypatch)
        a_commit_goes_on_under_another_schema(monkeypatch)
    tx = db.transaction()
    await write(tx, plain)
    if is_planted:
        await tx.commit()
    else:
        with pytest.raises(ConflictError, match=r"the indexes of .* were changed"):
            await tx.commit()
    assert (await other.check_index(indexed) != []) == is_planted


@PLANTED
async def test_a_build_waits_for_locks_that_were_set_without_entries(
    db: Database, other: Database, is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await db.create_table(later)
    await put(db, plain, zoe="Bern")
    locked, going_on = asyncio.Event(), asyncio.Event()
    correct = Commit.take_commit_timestamp

    async def wait(self: Commit, deadline: float) -> None:
        if not locked.is_set():
            locked.set()
            await going_on.wait()
        await correct(self, deadline)

    monkeypatch.setattr(Commit, "take_commit_timestamp", wait)
    if is_planted:
        an_index_is_built_past_older_locks(monkeypatch)
    tx = db.transaction()
    await write(tx, plain)
    committing = asyncio.ensure_future(tx.commit())
    await locked.wait()
    building = asyncio.ensure_future(other.create_index(indexed))
    await db.internal.engine.world.clock.sleep(1.0)
    assert building.done() == is_planted
    going_on.set()
    await committing
    await building
    assert (await other.check_index(indexed) != []) == is_planted


async def test_a_build_waits_for_a_lock_from_before_the_index_although_a_reader_pushes_it(
    db: Database, other: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reader does that meets more locks than it can name. The build took it for gone."""
    await db.create_table(later)
    locked, going_on = asyncio.Event(), asyncio.Event()
    correct = Commit.take_commit_timestamp

    async def wait(self: Commit, deadline: float) -> None:
        if not locked.is_set():
            locked.set()
            await going_on.wait()
        await correct(self, deadline)

    monkeypatch.setattr(Commit, "take_commit_timestamp", wait)
    tx = db.transaction()
    await write(tx, plain)
    committing = asyncio.ensure_future(tx.commit())
    await locked.wait()
    engine = other.internal.engine
    building = asyncio.ensure_future(other.create_index(indexed))
    await engine.world.clock.sleep(0.5)
    table_id = (await engine.catalog.table("later", engine.now() + 10)).table_id
    cell = CellAddress(table_id, b"ann", plain.name)
    read = RowRead(row=cell.row, columns=[cell.column], timestamp=NEWEST)
    (answer,) = await engine.env.cells.read([RowRequest(table_id, read)], engine.now() + 10)
    (met,) = [MetLock.of(table_id, lock) for lock in answer.locks]
    above = await other.timestamp() + 1
    (pushed,) = await engine.env.cells.mutate([push_step(cell, met.lock, above)], engine.now() + 10)
    assert pushed is APPLIED
    await engine.world.clock.sleep(1.0)
    assert not building.done()
    going_on.set()
    await committing
    await building
    assert await other.check_index(indexed) == []


@ON_BOTH
async def test_a_build_removes_entries_of_values_that_were_replaced_without_the_index(
    db: Database, other: Database, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a row store, a client may know the index before the epoch is raised, and another one not:
    each writes the row."""
    await db.create_table(later)
    await put(db, plain, ann="Rome")
    correct = cluster._tell_tablets

    async def late(table: master_pb2.Table) -> None:
        monkeypatch.setattr(cluster, "_tell_tablets", correct)
        engine = other.internal.engine
        await engine.catalog.refresh(table.table_id, engine.now() + 10.0)
        await put(other, plain, ann="Oslo")
        await put(db, plain, ann="Pisa")
        await correct(table)

    monkeypatch.setattr(cluster, "_tell_tablets", late)
    await other.create_index(indexed)
    assert await other.check_index(indexed) == []
