"""Waiting for observers, backfilling and removing them: in this process, over a row store, be it a
model or Google's emulator, and over real servers."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import percolator
import percolator.testing
from percolator import Database, DeadlineExceeded, SchemaError, Table, UsageError, codecs, observes
from percolator.aio.observing import worker_context
from percolator.errors import CellAddress
from percolator.formats.records import KIND_PUT
from percolator.observers.backfill import backfill, owed_by
from percolator.observers.context import WorkerContext, WorkRequest
from percolator.observers.definition import Observer
from percolator.observers.registration import Removed, remove_observer
from percolator.observers.worker import Worker, start_in_advance
from percolator.protocol.announcing import Announcement
from percolator.protocol.write_set import WriteSteps
from percolator.routing.cells import APPLIED
from percolator.schema import Column
from percolator.v1.master_pb2 import (
    ChangeObserversRequest,
    OwedBackfill,
    ReportBackfillRequest,
)
from percolator.v1.master_pb2 import Observer as Registered
from tests.contracts.conftest import ENGINES

pytestmark = pytest.mark.parametrize("db", ENGINES, indirect=True, scope="module")


class Pages:
    """A table of pages, and an observer that writes the length of each."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.table: Table[str] = Table(f"pages-{uuid.uuid4().hex[:8]}")
        self.body: Column[str] = self.table.column("body", codecs.text)
        self.length: Column[int] = self.table.column("length", codecs.integer)
        self.runs: Counter[str] = Counter()
        self._counting = threading.Lock()
        db.create_table(self.table, splits=["m"])

    def measure(self, tx: percolator.Transaction, row: str) -> None:
        with self._counting:
            self.runs[row] += 1
        tx.set(row, self.length, len(tx.get(row, self.body, "")))

    def observer(self, *, backfill: bool = True) -> Observer:
        return observes(self.body, name="measure", backfill=backfill)(self.measure)

    def start_in_advance(self, observer: Observer) -> None:
        """Start of a worker before its table exists."""

        async def start(context: WorkerContext, _: str) -> None:
            await start_in_advance(Worker(context, [observer]))

        self.call(start)

    def awaited(self) -> list[str]:
        """The observers that are registered for the table before it exists."""

        async def read(context: WorkerContext, table: str) -> list[str]:
            tables = await context.catalog.awaited(context.env.deadline())
            return [one.name for found in tables if found.name == table for one in found.observers]

        found: list[str] = self.call(read)
        return found

    def run_observers(self) -> None:
        """Runs the observer until nothing waits."""
        with self.db.run_observers([self.observer()]):
            self.db.wait_for_observers(timeout=60)

    def owed(self) -> OwedBackfill | None:
        async def read(context: WorkerContext, table: str) -> OwedBackfill | None:
            return owed_by(await context.describe(table), "measure")

        found: OwedBackfill | None = self.call(read)
        return found

    def write(self, rows: int, body: str = "text") -> list[str]:
        names = [f"{'az'[number % 2]}{number:03}" for number in range(rows)]
        self.db.set_many((name, {self.body: body}) for name in names)
        return names

    def lengths(self) -> dict[str, int]:
        rows = self.db.snapshot().scan(self.table, columns=[self.length])
        return {row.key: row[self.length] for row in rows}

    # ------------------------------------------------------------------ behind the API

    def call(self, function: Any, *arguments: Any, **keywords: Any) -> Any:
        """A function of the observers' runtime, on this database's connection."""

        async def run() -> Any:
            context = worker_context(self.db._asynchronous.internal.engine)
            return await function(context, self.table.name, *arguments, **keywords)

        return self.db._loop_thread.call(run)

    def change(self, **fields: Any) -> None:
        async def change(context: WorkerContext, table: str) -> None:
            request = ChangeObserversRequest(table=table, **fields)
            await context.catalog.change_observers(request, context.env.deadline())

        self.call(change)

    def register(self) -> None:
        self.change(add=[Registered(name="measure", columns=[b"body"])])

    def notified(self) -> list[str]:
        """Rows with a notification."""

        async def look(context: WorkerContext, table: str) -> list[str]:
            described = await context.describe(table)
            answers = context.notifications.survey(WorkRequest(described.table_id))
            return [one.row.decode() async for answer in answers for one in answer.waiting]

        return sorted(self.call(look))


@pytest.fixture
def pages(db: Database) -> Iterator[Pages]:
    made = Pages(db)
    yield made
    db.drop_table(made.table)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_run_is_told_what_the_last_one_has_seen(db: Database, is_blocking: bool) -> None:
    pages = Pages(db)
    told: list[tuple[str, str | None]] = []

    def blocking(tx: percolator.Transaction, row: str) -> None:
        told.append((tx.previous(row, pages.body, "nothing"), tx.get(row, pages.body)))

    async def asynchronous(tx: percolator.aio.Transaction, row: str) -> None:
        told.append((await tx.previous(row, pages.body, "nothing"), await tx.get(row, pages.body)))

    observer = observes(pages.body, name="told")(blocking if is_blocking else asynchronous)
    long = "long" * 1_000
    for bodies in (["first"], ["second", long], [None], ["last"]):
        for body in bodies:
            with db.transaction() as tx:
                if body is None:
                    tx.delete_row(pages.table, "a")
                else:
                    tx.set("a", pages.body, body)
        with db.run_observers([observer]):
            db.wait_for_observers()
    assert told == [("nothing", "first"), ("first", long), (long, None), ("nothing", "last")]


def test_cells_that_were_written_before_are_handled_once_an_observer_is_registered(
    pages: Pages,
) -> None:
    rows = pages.write(40)
    with pages.db.run_observers([pages.observer()]):
        pages.db.wait_for_observers(timeout=30)
        assert pages.lengths() == dict.fromkeys(rows, 4)
    assert pages.owed() is None
    before = +pages.runs
    pages.run_observers()
    assert pages.runs == before


def test_without_a_backfill_only_later_cells_are_handled(pages: Pages) -> None:
    rows = pages.write(10)
    measure = pages.observer(backfill=False)
    with pages.db.run_observers([measure]):
        pages.db.wait_for_observers(timeout=30)
        assert (pages.lengths(), pages.owed()) == ({}, None)
        later = pages.write(2)
        pages.db.wait_for_observers(timeout=30)
        assert pages.lengths() == dict.fromkeys(later, 4)
        assert pages.db.backfill(measure) == 10
        pages.db.wait_for_observers(timeout=30)
        assert pages.lengths() == dict.fromkeys(rows, 4)


def test_waiting_counts_a_backfill_before_any_worker_has_begun_it(pages: Pages) -> None:
    rows = pages.write(6)
    pages.db.register_observers([pages.observer()])
    assert pages.notified() == []
    with pytest.raises(DeadlineExceeded, match="a backfill for 'measure' of 'pages-"):
        pages.db.wait_for_observers(timeout=2)
    pages.change(pause=["measure"])
    pages.db.wait_for_observers(timeout=30)
    pages.change(resume=["measure"])
    with pages.db.run_observers([pages.observer()]), pages.db.run_observers([pages.observer()]):
        pages.db.wait_for_observers(timeout=30)
    assert pages.lengths() == dict.fromkeys(rows, 4)


def test_an_owed_backfill_goes_on_where_another_worker_has_left_it(pages: Pages) -> None:
    rows = pages.write(20)
    pages.db.register_observers([pages.observer()])
    owed = pages.owed()
    assert owed is not None

    async def report(context: WorkerContext, table: str) -> None:
        described = await context.describe(table)
        request = ReportBackfillRequest(
            table_id=described.table_id,
            observer="measure",
            version=owed.version,
            row=b"a010",
            cells=5,
        )
        await context.catalog.report_backfill(request, context.env.deadline())

    pages.call(report)
    pages.run_observers()
    assert (set(pages.lengths()), pages.owed()) == ({row for row in rows if row >= "a010"}, None)


def test_a_table_is_created_with_the_observers_that_wait_for_it(db: Database) -> None:
    """The first commit notifies them, even those that want nothing older than they are."""
    early, later = Pages(db), Pages(db)
    for pages, wants_backfill in ((early, True), (later, False)):
        db.drop_table(pages.table)
        other = observes(pages.length, name="measure")(pages.measure)
        for observer in (other, pages.observer(backfill=wants_backfill)):
            with pytest.raises(SchemaError, match="there is no table"):
                pages.start_in_advance(observer)
        assert pages.awaited() == ["measure"]
        db.create_table(pages.table, splits=["m"])
        assert (pages.awaited(), pages.owed()) == ([], None)
        rows = pages.write(4)
        with db.run_observers([pages.observer(backfill=wants_backfill)]):
            db.wait_for_observers(timeout=30)
        assert pages.lengths() == dict.fromkeys(rows, 4)
        db.drop_table(pages.table)


def test_an_observer_of_a_table_that_does_not_exist_is_removed(db: Database) -> None:
    pages = Pages(db)
    db.drop_table(pages.table)
    with pytest.raises(SchemaError, match="there is no table"):
        pages.start_in_advance(pages.observer())
    assert pages.call(remove_observer, "measure") == Removed(True, 0, 0)
    assert pages.awaited() == []
    with pytest.raises(SchemaError, match="there is no table"):
        pages.call(remove_observer, "measure")


def test_what_was_answered_is_answered_again_only_when_that_is_asked_for(pages: Pages) -> None:
    rows = pages.write(10)
    measure = pages.observer()
    with pages.db.run_observers([measure]):
        pages.db.backfill(measure)
        pages.db.wait_for_observers(timeout=30)
        before = +pages.runs
        pages.db.backfill(measure)
        pages.db.wait_for_observers(timeout=30)
        assert (pages.runs, pages.notified()) == (before, [])
        assert pages.db.backfill(measure, again=True) == 10
        pages.db.wait_for_observers(timeout=30)
    assert all(pages.runs[row] > before[row] for row in rows)


def test_deletes_wake_no_observer_that_does_not_want_them_and_leave_nothing_behind(
    pages: Pages,
) -> None:
    @observes(pages.body, name="measure", deletes=False)
    def consume(tx: percolator.Transaction, row: str) -> None:
        pages.measure(tx, row)
        tx.delete(row, pages.body)

    rows = pages.write(10)
    pages.db.register_observers([consume])
    assert pages.db.backfill(consume) == 10
    with pages.db.transaction() as tx:
        tx.delete(rows[0], pages.body)
    with pages.db.run_observers([consume]):
        quiet = pages.db.wait_for_observers(timeout=30)
    assert (pages.notified(), pages.runs) == ([], Counter(rows[1:]))
    assert not quiet.dead_letters


def test_a_backfill_goes_on_where_it_broke_off(pages: Pages) -> None:
    rows = pages.write(20)
    pages.register()
    done = pages.call(backfill, "measure", end=b"a010")
    assert (done.cells, pages.notified()) == (5, rows[:10:2])
    done = pages.call(backfill, "measure", start=done.row)
    assert (done.cells, pages.notified()) == (15, sorted(rows))


def test_only_a_registered_observer_is_backfilled(pages: Pages) -> None:
    pages.write(1)
    with pytest.raises(SchemaError, match="measure"):
        pages.db.backfill(pages.observer())
    assert pages.notified() == []


def test_waiting_returns_when_a_chain_of_observers_is_at_its_end(pages: Pages) -> None:
    """Work moves between rows and tablets all the time: none of it may be overlooked."""
    doubled = pages.table.column("doubled", codecs.integer)
    moved = pages.table.column("moved", codecs.integer)

    @observes(pages.length, name="double")
    async def double(tx: percolator.aio.Transaction, row: str) -> None:
        await tx.set(row[::-1], doubled, 2 * await tx.get(row, pages.length, 0))

    @observes(doubled, name="move")
    async def move(tx: percolator.aio.Transaction, row: str) -> None:
        await tx.set(row[::-1], moved, await tx.get(row, doubled, 0))

    with pages.db.run_observers([pages.observer(), double, move]):
        for body in ("one", "three"):
            rows = pages.write(30, body)
            pages.db.wait_for_observers(timeout=60)
            found = {
                r.key: r[moved] for r in pages.db.snapshot().scan(pages.table, columns=[moved])
            }
            assert found == dict.fromkeys(rows, 2 * len(body))


def test_waiting_that_times_out_says_for_what(pages: Pages) -> None:
    pages.register()
    pages.write(3)
    with pytest.raises(DeadlineExceeded, match=f"3 for 'measure' of '{pages.table.name}'"):
        pages.db.wait_for_observers(timeout=2)


def test_a_lock_on_an_observed_column_is_waited_for(pages: Pages) -> None:
    """Its transaction may already have committed: then nothing else shows the change yet."""
    pages.register()

    async def lock(context: WorkerContext, table: str) -> WriteSteps:
        table_id = (await context.describe(table)).table_id
        cell = CellAddress(table_id, b"a", b"body")
        start = await context.env.timestamps.get()
        write = WriteSteps(start, {cell: (KIND_PUT, b"text")}, 1024)
        if context.env.announcing is not None:
            announcement = Announcement(context.env, context.env.announcing, write)
            await announcement.announce(write.cells, context.env.deadline())
        step = write.prewrite_step(cell, start + 1, 60_000)
        assert await context.env.cells.mutate([step], context.env.deadline()) == [APPLIED]
        return write

    async def commit(context: WorkerContext, table: str, write: WriteSteps) -> None:
        schema = await context.env.schema(write.primary.table_id, context.env.deadline())
        end = await context.env.timestamps.get()
        step = write.commit_primary_step(schema, write.start + 1, end)
        assert await context.env.cells.mutate([step], context.env.deadline()) == [APPLIED]

    write = pages.call(lock)
    with pytest.raises(DeadlineExceeded, match=f"1 locked in '{pages.table.name}'"):
        pages.db.wait_for_observers(timeout=2)
    with pages.db.run_observers([pages.observer()]):
        pages.call(commit, write)
        pages.db.wait_for_observers(timeout=30)
    assert pages.lengths() == {"a": 4}


def test_paused_observers_are_notified_and_not_waited_for(pages: Pages) -> None:
    pages.register()
    pages.change(pause=["measure"])
    rows = pages.write(4)
    quiet = pages.db.wait_for_observers(timeout=30)
    assert (pages.table.name, "measure") in quiet.paused
    assert pages.notified() == sorted(rows)
    with pages.db.run_observers([pages.observer()]):
        pages.db.wait_for_observers(timeout=30)
        assert pages.lengths() == {}
        pages.change(resume=["measure"])
        pages.db.wait_for_observers(timeout=30)
    assert pages.lengths() == dict.fromkeys(rows, 4)


def test_an_observer_with_work_left_is_removed_only_with_its_work(pages: Pages) -> None:
    pages.register()
    pages.write(5)
    with pytest.raises(UsageError, match="has pending notifications"):
        pages.call(remove_observer, "measure")
    assert len(pages.notified()) == 5
    removed = pages.call(remove_observer, "measure", purge=True)
    assert removed == Removed(was_registered=True, purged=5, left=0)
    assert pages.notified() == []
    pages.write(1)
    assert pages.notified() == []
    for purge in (False, True):
        with pytest.raises(SchemaError, match="measure"):
            pages.call(remove_observer, "measure", purge=purge)


def test_an_observer_without_work_is_removed(pages: Pages) -> None:
    pages.register()
    assert pages.call(remove_observer, "measure") == Removed(True, 0, 0)


def test_registering_the_same_again_changes_nothing_for_others(pages: Pages) -> None:
    """Every start of a worker registers its observers."""

    def version() -> int:
        async def read(context: WorkerContext, table: str) -> int:
            return int((await context.describe(table)).schema_version)

        return int(pages.call(read))

    for _ in range(2):
        pages.db.register_observers([pages.observer()])
        with pages.db.run_observers([pages.observer()]):
            assert version() == 2
    wider = observes(pages.body, pages.length, name="measure")(pages.measure)
    with pytest.raises(percolator.InvalidArgument, match="another observer 'measure'"):
        pages.db.register_observers([wider])
    other = partial(pages.change, add=[Registered(name="measure", columns=[b"length"])])
    with pytest.raises(percolator.InvalidArgument, match="another observer 'measure'"):
        other()
    assert version() == 2
    other(replace=True)
    assert version() == 3


@pytest.mark.parametrize("registered", ["before", "while it is written"])
def test_observers_run_for_what_a_shared_transaction_has_written(
    pages: Pages, registered: str
) -> None:
    """Its driver does not know the cells, and its tasks may not know the observer."""
    if registered == "before":
        pages.register()
    with pages.db.shared_transaction() as whole:
        receipts = []
        for task, rows in (("one", ["a1", "z1"]), ("two", ["a2"])):
            with pages.db.share(whole.ticket, task=task) as share:
                for row in rows:
                    share.set(row, pages.body, f"by {task}")
                receipts.append(share.finish())
        with pages.db.share(whole.ticket, task="three") as share:
            share.set("a3", pages.body, "not chosen")
            share.finish()
        if registered != "before":
            pages.register()
        whole.commit(receipts)
    pages.run_observers()
    assert pages.lengths() == dict.fromkeys(["a1", "a2", "z1"], len("by one"))


def test_a_shared_transaction_is_not_committed_into_a_table_that_is_gone_from_the_rows(
    db: Database,
) -> None:
    if db._asynchronous.internal.engine.intents is None:
        pytest.skip("tablets refuse by themselves")
    gone, stays = Pages(db), Pages(db)
    with db.shared_transaction() as whole:
        with db.share(whole.ticket, task="one") as share:
            share.set("a", gone.body, "text")
            share.set("a", stays.body, "text")
            receipt = share.finish()
        db.drop_table(gone.table)
        with pytest.raises(SchemaError):
            whole.commit([receipt])
    assert list(db.snapshot().scan(stays.table)) == []
