"""One run: what it acknowledges, what it deletes, and that it never handles a change twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from percolator import aio, observes
from percolator.aio import Transaction
from percolator.cli.values import stored_cells
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvalidArgument,
    SchemaError,
    SnapshotTooOld,
    UsageError,
)
from percolator.formats.records import RecordKind, WriteRecord, acknowledgement_column
from percolator.observers.dead_letters import DeadLetterBox
from percolator.observers.definition import Observer
from percolator.observers.registration import register, remove_observer
from percolator.observers.runs import Deletions, ObserverRun, summary_of, traceback_of
from percolator.observers.watched_cell import Acknowledgement
from percolator.protocol import steps
from percolator.routing.cells import CellMutation
from percolator.tablet.state import SafePoints
from percolator.testing import run_observers_async
from percolator.v1.cells_pb2 import Space
from tests.unit.observers.observed_cluster import Observed, copy, docs, source, total


@observes(source, name="first")
async def first(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


@observes(source, name="second")
async def second(tx: Any, row: str) -> None: ...


async def answer(world: Observed, observer: Any = first) -> None:
    """Runs an observer once, including the deletion of its notifications."""
    work = await world.work_for(observer)
    run = world.run_of(work)
    assert await run.begin()
    await observer(run.transaction, work.row.decode())
    await run.commit()
    await forget(world, run)


async def forget(world: Observed, run: ObserverRun) -> None:
    """Deletes the notifications that a run has handled."""
    deletions = Deletions(world.context)
    for work in run.works:
        deletions.add(work, [one for one in work.timestamps if one <= run.start])
    await deletions.done()


async def begun(world: Observed, observer: Any = first) -> ObserverRun:
    """A run for the first change of row `a`."""
    await register(world.context, [observer])
    await world.put("a", 1)
    run = world.run_of(await world.work_for(observer))
    assert await run.begin()
    return run


async def test_only_one_of_two_runs_for_a_change_commits_and_a_later_one_has_nothing_to_do(
    world: Observed,
) -> None:
    await register(world.context, [first])
    await world.put("a", 1)
    work = await world.work_for(first)
    one, other, later = world.run_of(work), world.run_of(work), world.run_of(work)
    assert await one.begin()
    assert await other.begin()
    await one.commit()
    with pytest.raises(ConflictError):
        await other.commit()
    assert not await later.begin()


async def test_the_acknowledgement_commits_together_with_the_writes(world: Observed) -> None:
    run = await begun(world)
    await first(run.transaction, "a")
    table_id = run.works[0].watched.table_id
    hidden = CellAddress(table_id, b"a", acknowledgement_column(b"first", b"source"))
    written = {hidden, CellAddress(table_id, b"a", b"copy")}
    assert set(run.transaction.internal.writes.cells) == written
    _, stored = run.transaction.internal.writes.cells[hidden]
    assert Acknowledgement.decode(stored) == Acknowledgement(run.start)
    run.transaction.rollback()


async def test_many_changes_collapse_into_one_run(world: Observed) -> None:
    await register(world.context, [first])
    for value in range(5):
        await world.put("a", value)
    await answer(world)
    assert await world.get("a") == 4
    assert await world.waiting() == []


async def test_a_change_above_the_snapshot_keeps_its_notification(world: Observed) -> None:
    run = await begun(world)
    later = await world.put("a", 2)
    run.works[0].timestamps.add(later)
    await first(run.transaction, "a")
    await run.commit()
    await forget(world, run)
    (left,) = await world.waiting()
    assert left.timestamps == (later,)
    await answer(world)
    assert await world.get("a") == 2


async def test_a_deletion_is_a_change(world: Observed) -> None:
    await register(world.context, [second])
    await world.put("a", 1)
    await answer(world, second)
    await world.delete("a")
    await answer(world, second)
    assert await world.waiting() == []


async def test_a_lock_alone_is_not_a_change(world: Observed) -> None:
    await register(world.context, [first])
    async with world.db.transaction() as tx:
        await tx.lock("a", source)
    assert await world.waiting() == []


async def test_two_observers_of_a_column_each_have_their_own_notifications(world: Observed) -> None:
    await register(world.context, [first, second])
    await world.put("a", 1)
    await answer(world, first)
    assert [one.observer for one in await world.waiting()] == [b"second"]
    await answer(world, second)
    assert await world.waiting() == []


async def test_a_run_for_one_column_says_nothing_about_another(world: Observed) -> None:
    @observes(source, copy, name="both")
    async def both(tx: Any, row: str, column: Any) -> None: ...

    (watched,) = await register(world.context, [both])
    async with world.db.transaction() as tx:
        await tx.set("a", source, 1)
        await tx.set("a", copy, 1)
    waiting = await world.waiting()
    assert sorted(one.column for one in waiting) == [b"copy", b"source"]
    for one in waiting:
        run = world.run_of(world.work_of(watched, one))
        assert await run.begin()
        await run.commit()


async def test_an_observer_may_write_its_own_trigger(world: Observed) -> None:
    @observes(source, name="count-down")
    async def count_down(tx: Any, row: str) -> None:
        left = await tx.get(row, source)
        if left:
            await tx.set(row, source, left - 1)

    async with world.db.run_observers([count_down]):
        await world.put("a", 5)

        async def is_zero() -> bool:
            return await world.get("a", source) == 0

        await world.until(is_zero)
        await world.until_nothing_waits()


async def test_an_observer_that_rolls_its_own_transaction_back_has_failed(world: Observed) -> None:
    run = await begun(world)
    run.transaction.rollback()
    with pytest.raises(UsageError, match="ended its own transaction"):
        await run.commit()


async def test_reading_the_trigger_in_the_function_needs_no_round_trip(world: Observed) -> None:
    run = await begun(world)
    before = run.transaction.statistics.round_trips
    await first(run.transaction, "a")
    assert run.transaction.statistics.round_trips == before
    run.transaction.rollback()


async def test_acknowledgements_are_hidden_from_readers(world: Observed) -> None:
    await register(world.context, [first])
    await world.put("a", 1)
    await answer(world)
    rows = [row async for row in world.db.snapshot().scan(source.table)]
    assert [sorted(row) for row in rows] == [[b"copy", b"source"]]


async def test_a_weak_observer_runs_whenever_it_is_notified(world: Observed) -> None:
    seen: list[str] = []

    @observes(copy, name="weak", weak=True)
    async def weak(tx: Any, row: str) -> None:
        seen.append(row)

    await register(world.context, [weak])
    async with world.db.transaction() as tx:
        await tx.set("a", copy, 1)
    assert await world.waiting() == []
    for _ in range(2):
        async with world.db.transaction() as tx:
            await tx.notify("a", copy)
        await answer(world, weak)
    assert seen == ["a", "a"]
    assert await world.waiting() == []


async def test_a_deletion_that_was_put_aside_is_handled_even_after_it_was_collected(
    world: Observed,
) -> None:
    async with world.db.run_observers([second]) as worker:
        (watched,) = await register(world.context, [second])
        async with world.db.transaction() as tx:
            noted = Acknowledgement(0, has_dead_letter=True)
            tx.internal.writes.put(watched.acknowledgement(b"a", b"source"), noted.encode())
        for _ in range(2):
            now = await world.db.timestamp()
            step = CellMutation(watched.table_id, steps.notify(b"a", b"source", now, (b"second",)))
            await world.context.env.cells.mutate([step], world.context.env.deadline())
            await world.until_nothing_waits()
        counters = worker.counters["docs", "second"]
        assert (counters.commits, counters.acknowledged) == (1, 1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda tx: tx.increment("a", copy), "increment"),
        (lambda tx: tx.delete_row(source.table, "a"), "delete_row"),
        (lambda tx: tx.get("a", source), "get"),
        (lambda tx: tx.get_many(source.table, ["a"]), "get_many"),
    ],
)
async def test_a_call_that_an_observer_does_not_await_fails_the_run(
    world: Observed, call: Any, name: str
) -> None:
    run = await begun(world)
    run.transaction.set("b", copy, 3)  # type: ignore[attr-defined]  # the observer's
    call(run.transaction)
    with pytest.raises(UsageError, match=rf"tx\.{name}\(.*was called without await"):
        await run.commit()
    again = world.run_of(await world.work_for(first))
    assert await again.begin()  # the change does not count as handled
    again.transaction.rollback()
    assert await world.get("b") is None


async def test_calls_that_are_awaited_later_are_no_failure(world: Observed) -> None:
    run = await begun(world)
    transaction: Any = run.transaction
    transaction.set("a", copy, 1)
    await asyncio.gather(*[transaction.set(row, copy, 1) for row in "bc"])
    later = transaction.increment("b", copy)
    await transaction.get("a", source)
    assert await later == 2
    await run.commit()
    assert await world.get("b") == 2


BAD = 13


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def and_wait() -> None:
    own_task().cancel()
    await asyncio.sleep(1.0)


async def and_return() -> None:
    own_task().cancel()


async def and_swallow_the_first() -> None:
    own_task().cancel()
    try:
        await asyncio.sleep(1.0)
    except asyncio.CancelledError:
        own_task().cancel()


async def during_the_commit() -> None:
    asyncio.get_running_loop().call_soon(own_task().cancel)


def cancelling(cancel: Callable[[], Awaitable[None]]) -> Observer:
    @observes(source, name="cancelling", attempts=3, concurrency=1)
    async def cancelled(tx: Any, row: str) -> None:
        if await tx.get(row, source) == BAD:
            await cancel()
        await tx.set(row, copy, 1)

    return cancelled


async def test_an_observer_that_cancels_its_own_task_has_failed(
    caplog: pytest.LogCaptureFixture, world: Observed
) -> None:
    caplog.set_level(logging.CRITICAL, "percolator")
    observer = cancelling(and_wait)
    async with world.db.run_observers([observer]) as worker:
        await world.put("bad", BAD)
        await world.put_and_copy("good", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert (letter.row, letter.error) == (
            b"bad",
            "RuntimeError: the task in which the observer runs was cancelled, as by itself",
        )
        counters = worker.counters["docs", "cancelling"]
        assert (counters.failures, counters.dead_letters) == (3, 1)


async def and_raise() -> None:
    own_task().cancel()
    raise ValueError("and that is all")


async def test_one_that_raises_before_it_hears_of_it_becomes_a_dead_letter(
    caplog: pytest.LogCaptureFixture, world: Observed
) -> None:
    """Otherwise the cancellation would arrive while the change is put aside, again and again."""
    caplog.set_level(logging.CRITICAL, "percolator")
    observer = cancelling(and_raise)
    async with world.db.run_observers([observer]) as worker:
        await world.put("bad", BAD)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert letter.error == "ValueError: and that is all"
        assert worker.counters["docs", "cancelling"].failures == 3


@pytest.mark.parametrize("cancel", [and_return, and_swallow_the_first, during_the_commit])
async def test_one_that_returns_nevertheless_is_not_run_forever(
    cancel: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture, world: Observed
) -> None:
    """Its commit is cancelled. If that came too late, the next run finds the acknowledgement."""
    caplog.set_level(logging.CRITICAL, "percolator")
    observer = cancelling(cancel)
    async with world.db.run_observers([observer]) as worker:
        await world.put("bad", BAD)
        await world.until_nothing_waits()
        assert await world.get("bad") == 1 or await world.dead_letters()
        assert worker.counters["docs", "cancelling"].runs <= 3
        await world.put_and_copy("bad", 1)


async def test_a_loop_that_cancels_all_of_its_tasks_at_its_end_is_not_kept_from_ending(
    world: Observed,
) -> None:
    """As `asyncio.run` does when a program has not stopped its worker. What it interrupts has not
    failed: nobody would run a dead letter again, and the observer has done nothing wrong."""

    @observes(source, name="waiting", concurrency=2, attempts=1)
    async def waiting(tx: Any, row: str) -> None:
        await asyncio.sleep(3600.0)

    worker = world.db.run_observers([waiting], drain_seconds=0.1)
    await worker.start()
    for number in range(5):
        await world.put(f"{number}", number)
    await asyncio.sleep(1.0)
    assert worker._parts is not None
    runs_of_it = list(worker._parts.pool._runs._tasks)
    assert len(runs_of_it) == 2
    running = [*worker._tasks._tasks, *runs_of_it]
    for task in running:
        task.cancel()
    async with asyncio.timeout(1.0):
        await asyncio.gather(*running, return_exceptions=True)
    assert worker.counters["docs", "waiting"].failures == 0
    assert await world.dead_letters() == []
    assert len(await world.waiting()) == 5
    await worker.stop()


runs: list[str] = []


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


@observes(source, name="consuming", deletes=False)
async def consuming(tx: Any, row: str) -> None:
    runs.append(row)
    await tx.set(row, copy, await tx.get(row, source))
    await tx.delete(row, source)


@observes(source, name="consuming", deletes=False)
def consuming_in_a_thread(tx: Any, row: str) -> None:
    runs.append(row)
    tx.set(row, copy, tx.get(row, source))
    tx.delete(row, source)


@observes(source, name="weak", weak=True, deletes=False)
async def weak(tx: Any, row: str) -> None:
    runs.append(row)
    await tx.delete(row, source)


async def notify(world: Observed, row: str) -> None:
    async with world.db.transaction() as tx:
        await tx.notify(row, source)


@pytest.mark.parametrize("observer", [consuming, consuming_in_a_thread])
async def test_an_observer_that_deletes_its_trigger_runs_once_for_each_change(
    observer: Observer, world: Observed
) -> None:
    async with world.db.run_observers([observer]) as worker:
        for value in (1, 2):
            await world.put_and_copy("a", value)
            await world.until_nothing_waits()
        assert runs == ["a", "a"]
        (counters,) = worker.counters.values()
        assert (counters.runs, counters.commits) == (2, 2)


@pytest.mark.parametrize("written_again", [False, True])
async def test_a_change_that_was_deleted_before_its_run_wakes_nothing_unless_written_again(
    world: Observed, written_again: bool
) -> None:
    await register(world.context, [consuming])
    await world.put("a", 1)
    await world.delete("a")
    if written_again:
        await world.put("a", 3)
    async with world.db.run_observers([consuming]):
        await world.until_nothing_waits()
    assert (runs, await world.get("a")) == ((["a"], 3) if written_again else ([], None))


async def test_a_weak_observer_does_not_run_for_a_cell_without_a_value(world: Observed) -> None:
    await register(world.context, [weak])
    await world.put("a", 1)
    await notify(world, "a")
    async with world.db.run_observers([weak]):
        await world.until_nothing_waits()
        await notify(world, "a")
        await notify(world, "never written")
        await world.until_nothing_waits()
    assert runs == ["a"]


async def test_a_cell_that_is_deleted_after_its_backfill_wakes_nothing(world: Observed) -> None:
    await world.put("kept", 1)
    await world.put("deleted", 2)
    await register(world.context, [consuming])
    assert await world.db.backfill(consuming) == 2
    await world.delete("deleted")
    async with world.db.run_observers([consuming]):
        await world.until_nothing_waits()
    assert runs == ["kept"]
    assert await world.db.backfill(consuming, again=True) == 0


@observes(source, name="picky", deletes=False, attempts=1)
async def picky(tx: Any, row: str) -> None:
    runs.append(row)
    raise ValueError(row)


async def test_a_delete_takes_the_dead_letter_of_what_it_deleted_away_without_a_run(
    world: Observed,
) -> None:
    async with world.db.run_observers([picky]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        assert len(await world.dead_letters()) == 1
        await world.delete("a")
        await world.until_nothing_waits()
        assert await world.dead_letters() == []
        assert runs == ["a"]
        await world.put("a", 2)
        await world.until_nothing_waits()
        assert len(await world.dead_letters()) == 1


async def test_run_observers_of_the_test_kit_leaves_deletes_out_too(world: Observed) -> None:
    await world.put("before", 1)
    assert await run_observers_async(world.db, [consuming]) == 1
    await world.put("a", 1)
    await world.delete("a")
    assert await run_observers_async(world.db, [consuming]) == 0
    assert await world.waiting() == []
    assert runs == ["before"]


async def test_deletes_is_a_bool() -> None:
    with pytest.raises(InvalidArgument, match="deletes"):
        observes(source, deletes=0)  # type: ignore[arg-type]


# What the cell held when the observer last ran for it.


class Derived:
    """An observer that keeps what it was told of its cell: (was, is)."""

    def __init__(self, world: Observed, **options: Any) -> None:
        self.world = world
        self.told: list[tuple[int | None, int | None]] = []
        self.problem: Exception | None = None

        @observes(source, name="derived", **options)
        async def derived(tx: Transaction, row: str) -> None:
            was, now = await tx.previous(row, source), await tx.get(row, source)
            if self.problem is not None:
                raise self.problem
            self.told.append((was, now))

        self.observer = derived

    async def run(self) -> tuple[int | None, int | None]:
        await answer(self.world, self.observer)
        return self.told[-1]


async def derived_from_one(world: Observed) -> Derived:
    """An observer that has not run yet for the first change of row `a`."""
    derived = Derived(world)
    await register(world.context, [derived.observer])
    await world.put("a", 1)
    return derived


async def test_a_run_is_told_what_the_last_one_has_seen_not_the_version_before(
    world: Observed,
) -> None:
    derived = await derived_from_one(world)
    assert await derived.run() == (None, 1)
    await world.put("a", 2)
    await world.put("a", 3)
    assert await derived.run() == (1, 3)
    await world.put("a", 3)
    assert await derived.run() == (3, 3)
    async with world.db.transaction() as tx:
        await tx.delete_row(docs, "a")
    assert await derived.run() == (3, None)
    await world.put("a", 4)
    assert await derived.run() == (None, 4)


async def test_it_is_readable_however_much_was_collected_meanwhile(
    world: Observed,
) -> None:
    derived = await derived_from_one(world)
    await derived.run()
    for value in (2, 3):
        await world.put("a", value)
        await collect(world)
    assert await derived.run() == (1, 3)
    async with world.db.transaction() as tx:
        await tx.delete_row(docs, "a")
    await collect(world)
    assert await derived.run() == (3, None)
    await collect(world)
    assert await newest_kind(world, b"a") is None, "nothing is kept once it was seen"


async def test_a_change_between_the_start_of_a_run_and_its_commit_was_not_seen(
    world: Observed,
) -> None:
    derived = Derived(world)
    run = await begun(world, derived.observer)
    await derived.observer(run.transaction, "a")
    await world.put("a", 2)
    await run.commit()
    await world.put("a", 3)
    await collect(world)
    assert await derived.run() == (1, 3)


async def test_a_run_that_failed_has_seen_nothing_even_if_its_change_was_put_aside(
    world: Observed,
) -> None:
    derived = Derived(world, attempts=1)
    async with world.db.run_observers([derived.observer]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        derived.problem = ValueError("not yet")
        await world.put("a", 2)
        await world.until_nothing_waits()
        assert len(await world.dead_letters()) == 1
        await collect(world)
        derived.problem = None
        await DeadLetterBox(world.context).retry(await world.dead_letters())
        await world.until_nothing_waits()
    assert derived.told == [(None, 1), (1, 2)]


async def test_an_observer_that_is_registered_again_remembers_what_it_saw(
    world: Observed,
) -> None:
    derived = await derived_from_one(world)
    await derived.run()
    await remove_observer(world.context, docs.name, "derived")
    await world.put("a", 2)
    await collect(world)
    await register(world.context, [derived.observer])
    await world.put("a", 3)
    assert await derived.run() == (1, 3)


async def test_the_backfill_of_a_cell_that_was_never_handled_finds_nothing_before(
    world: Observed,
) -> None:
    derived = Derived(world)
    await world.put("a", 1)
    await world.put("a", 2)
    async with world.db.run_observers([derived.observer]):
        await world.db.wait_for_observers()
    assert derived.told == [(None, 2)]


async def test_a_run_that_another_has_overtaken_is_refused_what_may_be_gone(
    world: Observed,
) -> None:
    derived = await derived_from_one(world)
    await derived.run()
    await world.put("a", 2)
    work = await world.work_for(derived.observer)
    late = world.run_of(work)
    assert await late.begin()
    await derived.run()
    await collect(world)
    with pytest.raises(SnapshotTooOld):
        await derived.observer(late.transaction, "a")
    late.transaction.rollback()


async def test_it_costs_one_message_only_where_it_is_asked_for(
    world: Observed,
) -> None:
    derived = Derived(world)
    await register(world.context, [derived.observer])
    trips = []
    for value in (1, 2):
        await world.put("a", value)
        run = world.run_of(await world.work_for(derived.observer))
        assert await run.begin()
        before = run.transaction.statistics.round_trips
        await derived.observer(run.transaction, "a")
        await derived.observer(run.transaction, "a")
        trips.append(run.transaction.statistics.round_trips - before)
        await run.commit()
        await forget(world, run)
    assert trips == [0, 1], "nothing was seen before the first run"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"weak": True}, "weak observer 'derived': it does not record its runs"),
        ({"deletes": False}, "'derived', which deletes=False does not tell of deletions"),
    ],
)
async def test_an_observer_that_cannot_know_is_told_so(
    world: Observed, options: dict[str, bool], why: str
) -> None:
    derived = Derived(world, **options)
    await register(world.context, [derived.observer])
    async with world.db.transaction() as tx:
        tx.set("a", source, 1)
        if options.get("weak"):
            tx.notify("a", source)
    run = world.run_of(await world.work_for(derived.observer))
    assert await run.begin()
    with pytest.raises(UsageError, match=why):
        await derived.observer(run.transaction, "a")
    run.transaction.rollback()


async def test_of_other_cells_and_in_other_transactions_nothing_is_known(
    world: Observed,
) -> None:
    run = await begun(world, Derived(world).observer)
    tx: Any = run.transaction
    for row, column in (("b", source), ("a", copy)):
        with pytest.raises(UsageError, match="which this run is not for"):
            await tx.previous(row, column)
    run.transaction.rollback()
    plain = world.db.transaction()
    with pytest.raises(UsageError, match="this transaction is no run of one"):
        await plain.previous("a", source)
    plain.rollback()


Read = Callable[[aio.Transaction, str], Awaitable[list[int | None]]]


async def one_by_one(tx: aio.Transaction, row: str) -> list[int | None]:
    return [await tx.get(row, copy), await tx.get(row, total)]


async def as_cells(tx: aio.Transaction, row: str) -> list[int | None]:
    return await tx.get_many([(row, copy), (row, total)])


async def as_rows(tx: aio.Transaction, row: str) -> list[int | None]:
    (found,) = await tx.get_many(docs, [row], [copy, total])
    return [found.get(copy), found.get(total)]


WAYS = [one_by_one, as_cells, as_rows]


class Run:
    """Runs of an observer that reads twice, with what it saw and how often it asked the cluster."""

    def __init__(self, world: Observed, read: Read) -> None:
        self._world = world
        self._read = read
        self.seen: list[list[int | None]] = []
        self.round_trips = 0

        @observes(source, name="reads")
        async def reads(tx: aio.Transaction, row: str) -> None:
            before = tx.statistics.round_trips
            self.seen = [await self._read(tx, row), await self._read(tx, row)]
            self.round_trips = tx.statistics.round_trips - before

        self._observer = reads

    async def prepare(self) -> None:
        (self._watched,) = await register(self._world.context, [self._observer])

    async def change(self, row: str) -> list[int | None]:
        """Runs for a change of the row; returns what it saw."""
        commit = await self._world.put(row, 1)
        work = self._world.work_of_row(self._watched, row)
        work.timestamps.add(commit)
        run = self._world.run_of(work)
        assert await run.begin()
        await self._observer(run.transaction, row)
        await run.commit()
        assert self.seen[0] == self.seen[1]
        return self.seen[0]


async def put(world: Observed, row: str, **values: int) -> None:
    async with world.db.transaction() as tx:
        for name, value in values.items():
            await tx.set(row, {"copy": copy, "total": total}[name], value)


@pytest.mark.parametrize("read", WAYS)
async def test_the_second_run_asks_for_nothing_that_the_first_has_read(
    world: Observed, read: Read
) -> None:
    run = Run(world, read)
    await run.prepare()
    await put(world, "a", copy=2)
    await put(world, "b", copy=3, total=4)
    assert await run.change("a") == [2, None]
    assert run.round_trips > 0
    assert await run.change("b") == [3, 4]
    assert run.round_trips == 0


@pytest.mark.parametrize("read", WAYS)
async def test_each_run_sees_the_cells_of_its_own_snapshot(world: Observed, read: Read) -> None:
    run = Run(world, read)
    await run.prepare()
    await put(world, "a", copy=2, total=3)
    assert await run.change("a") == [2, 3]
    await put(world, "a", copy=4)
    async with world.db.transaction() as tx:
        await tx.delete("a", total)
    assert await run.change("a") == [4, None]


@pytest.mark.parametrize("read", WAYS)
async def test_a_run_sees_its_own_writes_before_what_is_known_of_the_row(
    read: Read, world: Observed
) -> None:
    async def writes_and_reads(tx: aio.Transaction, row: str) -> list[int | None]:
        await read(tx, row)
        await tx.set(row, copy, 7)
        await tx.delete(row, total)
        return await read(tx, row)

    run = Run(world, writes_and_reads)
    await run.prepare()
    await put(world, "a", copy=2, total=3)
    for _ in range(2):
        assert await run.change("a") == [7, None]


@pytest.mark.parametrize("read", WAYS)
async def test_cells_of_other_rows_are_not_taken_for_those_of_the_change(
    read: Read, world: Observed
) -> None:
    async def reads_another(tx: aio.Transaction, row: str) -> list[int | None]:
        await read(tx, row)
        return await read(tx, "other")

    run = Run(world, reads_another)
    await run.prepare()
    await put(world, "a", copy=2, total=3)
    await put(world, "other", copy=5, total=6)
    for _ in range(2):
        assert await run.change("a") == [5, 6]


async def test_columns_that_are_no_longer_read_are_no_longer_fetched(world: Observed) -> None:
    reading = True

    async def reads_while_told(tx: Any, row: str) -> list[int | None]:
        return await one_by_one(tx, row) if reading else []

    run = Run(world, reads_while_told)
    await run.prepare()
    await run.change("a")
    assert list(run._watched.columns_read) == [copy.name, total.name]
    reading = False
    await run.change("a")
    assert not run._watched.columns_read


def _look_up() -> None:
    try:
        int("tea")
    except ValueError as error:
        raise LookupError("no such product") from error


def _caught() -> BaseException:
    with pytest.raises(LookupError, match="product") as caught:
        _look_up()
    return caught.value


def test_the_cause_comes_first_and_each_error_has_its_lines() -> None:
    lines = [line.strip() for line in traceback_of(_caught()).splitlines()]
    shown = [line for line in lines if not line.startswith("File")]
    assert shown[:2] == ['int("tea")', "ValueError: invalid literal for int() with base 10: 'tea'"]
    assert shown[-2:] == [
        'raise LookupError("no such product") from error',
        "LookupError: no such product",
    ]


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = _caught()
    assert error.__cause__ is not None
    error.__cause__.__cause__ = error
    assert traceback_of(error).count("LookupError: no such product") == 1


def test_an_error_without_a_message_is_named() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("nothing to say")

    assert traceback_of(Silent()).endswith("Silent: (it has no message)")


def test_the_notes_of_an_error_follow_its_message() -> None:
    error = _caught()
    error.add_note("while reading the price list")
    error.add_note("line 7")
    lines = traceback_of(error).splitlines()
    assert lines[-3:] == [
        "LookupError: no such product",
        "while reading the price list",
        "line 7",
    ]


@pytest.mark.parametrize("notes", [None, 5, "one", [b"raw", "\ud800"]])
def test_notes_that_are_none_do_not_hide_the_error(notes: object) -> None:
    error = LookupError("no such product")
    error.__notes__ = notes  # type: ignore[assignment]  # any program can do that
    shown = traceback_of(error)
    assert "LookupError: no such product" in shown
    shown.encode()


async def _grouped() -> ExceptionGroup[Exception]:
    async def fail(text: str) -> None:
        int(text)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail("tea"))
            tasks.create_task(fail("cup"))
    except ExceptionGroup as errors:
        return errors
    raise AssertionError("nothing has failed")


async def test_the_errors_of_a_group_come_before_it_each_with_its_lines() -> None:
    shown = [line.strip() for line in traceback_of(await _grouped()).splitlines()]
    errors = [line for line in shown if "Error: " in line or "Group: " in line]
    assert errors == [
        "ValueError: invalid literal for int() with base 10: 'tea'",
        "ValueError: invalid literal for int() with base 10: 'cup'",
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)",
    ]
    assert shown.count("int(text)") == 2


async def test_one_line_about_a_group_says_what_its_first_error_is() -> None:
    nested = ExceptionGroup("both", [await _grouped(), KeyError("later")])
    assert summary_of(nested) == (
        "ExceptionGroup: both (2 sub-exceptions): "
        "ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): "
        "ValueError: invalid literal for int() with base 10: 'tea'"
    )
    assert summary_of(KeyError("later")) == "KeyError: 'later'"


def test_very_deep_groups_have_a_bounded_traceback_and_summary() -> None:
    error: Exception = ValueError("the first")
    for _ in range(5_000):
        error = ExceptionGroup("again", [error])
    assert traceback_of(error).count("again") == 10
    assert summary_of(error).count("again") == 10


# A deletion that was put aside can be retried, however long ago it was.


async def collect(world: Observed) -> None:
    """Collects as if everything stored by now were older than the retention."""
    below = await world.db.timestamp()
    for tablet in world.cluster.tablets.values():
        await tablet.raise_safe_points(SafePoints(below, below))
        await tablet.collect(below)


async def newest_kind(world: Observed, row: bytes) -> RecordKind | None:
    """The kind of the newest stored record of the source; None if there is none."""
    info = await world.db.internal.engine.table(docs, world.context.env.deadline())
    cells = stored_cells(world.db, info, [Space.SPACE_WRITE], row, row + b"\0")
    found = [cell async for cell in cells if cell.column == source.name]
    return WriteRecord.decode(found[0].value).kind if found else None


async def test_a_deletion_that_was_put_aside_can_be_retried_after_collection(
    world: Observed,
) -> None:
    broken = True

    @observes(source, name="careful", attempts=1)
    async def careful(tx: Transaction, row: str) -> None:
        if await tx.get(row, source) is not None:
            await tx.set(row, copy, 1)
        elif broken:
            raise ValueError("deletions are not understood yet")
        else:
            await tx.delete(row, copy)

    async with world.db.run_observers([careful]):
        await world.put_and_copy("a", 1)
        await world.delete("a")

        async def is_put_aside() -> bool:
            return len(await world.dead_letters()) == 1

        await world.until(is_put_aside)
        await world.until_nothing_waits()
        await collect(world)
        assert await world.get("a") == 1
        assert await newest_kind(world, b"a") is RecordKind.DELETE
        broken = False
        await DeadLetterBox(world.context).retry(await world.dead_letters())
        await world.until_copied("a", None)
        assert await world.dead_letters() == []
        await collect(world)
        assert await newest_kind(world, b"a") is None


other = docs.column("other", source.codec)


@observes(source, other, name="both", attempts=1)
async def failing(tx: Any, row: str) -> None:
    raise ValueError("not yet")


@observes(source, name="both")
async def narrower(tx: Any, row: str) -> None:
    await tx.set(row, copy, 1)


async def two_letters(world: Observed) -> None:
    """Has the changes of two columns put aside."""
    async with world.db.run_observers([failing]), world.db.transaction() as tx:
        await tx.set("a", {source: 1, other: 1})
    async with world.db.run_observers([failing]):
        await world.until_nothing_waits()
    await remove_observer(world.context, docs.name, "both")


async def test_the_change_of_a_column_that_is_no_longer_watched_is_not_retried(
    world: Observed,
) -> None:
    """Its notification would wait forever, and so would everyone who waits for observers. Another
    change of the same row is retried: commands choose letters by row, and could not retry it."""
    await two_letters(world)
    async with world.db.run_observers([narrower]):
        letters = await world.dead_letters()
        expected = "'both' no longer watches row 'a', column 'other' of table 'docs'"
        with pytest.raises(SchemaError, match=f"^1 of 2 dead letters .*{expected}"):
            await DeadLetterBox(world.context).retry(letters)
        await world.until_copied("a", 1)
        (left,) = await world.dead_letters()
        assert left.column == other.name
        assert await world.waiting() == []
        with pytest.raises(SchemaError, match=f"^observer {expected}"):
            await DeadLetterBox(world.context).retry([left])


async def test_the_change_of_a_removed_observer_is_not_retried(world: Observed) -> None:
    await two_letters(world)
    expected = "^2 of 2 dead letters .*'docs' no longer has an observer 'both'"
    with pytest.raises(SchemaError, match=expected):
        await DeadLetterBox(world.context).retry(await world.dead_letters())
    assert await world.waiting() == []
