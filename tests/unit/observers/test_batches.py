"""Runs for several rows at once: each change is handled as if it had a run of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from percolator import Transaction as BlockingTransaction
from percolator import observes
from percolator.aio import Transaction
from percolator.errors import ConflictError, InvalidArgument
from percolator.observers.context import Waiting
from percolator.observers.dead_letters import DeadLetters
from percolator.observers.definition import Observer
from percolator.observers.registration import register
from percolator.observers.runs import Deletions, ObserverRun
from percolator.observers.work_queue import Work
from percolator.testing import run_observers_async
from tests.unit.observers.observed_cluster import Observed, copy, source, total

ROWS = ["a", "b", "c", "d"]


async def copy_all(tx: Transaction, rows: Sequence[str]) -> None:
    for row in rows:
        tx.set(row, copy, await tx.get(row, source, default=-1))


def in_batches(function: Any, **options: Any) -> Observer:
    """One run at a time: so what waits meanwhile is the next batch."""
    return observes(source, name="batched", **{"batch": 8, "concurrency": 1, **options})(function)


async def put_all(world: Observed, rows: Sequence[str] = ROWS, value: int = 1) -> None:
    for row in rows:
        await world.put(row, value)


async def prepared(world: Observed, function: Any, **options: Any) -> Observer:
    """An observer in batches for which a change waits in each row."""
    observer = in_batches(function, **options)
    await register(world.context, [observer])
    await put_all(world)
    return observer


async def until_all_are_copied(world: Observed, rows: Sequence[str] = ROWS) -> None:
    for row in rows:
        await world.until_copied(row, 1)
    await world.until_nothing_waits()


async def commit_of(world: Observed, row: str) -> int:
    async with world.db.snapshot() as snapshot:
        async for page in snapshot.scan_cells(copy.table, columns=[copy.name]):
            for found, commit in zip(page.rows, page.commit_timestamps, strict=True):
                if found == row.encode():
                    return commit
    raise LookupError(row)


async def run_of(world: Observed, observer: Observer) -> tuple[ObserverRun, dict[str, Work]]:
    """A run for everything that waits."""
    (watched,) = await register(world.context, [observer])
    waiting: list[Waiting] = await world.waiting()
    works = {one.row.decode(): world.work_of(watched, one) for one in waiting}
    letters = DeadLetters(world.context, 0)
    return ObserverRun(world.context, letters, *works.values()), works


async def test_changes_of_one_tablet_that_wait_share_a_transaction(world: Observed) -> None:
    observer = in_batches(copy_all)
    await register(world.context, [observer])
    await put_all(world, ["a", "b", "x", "y"])
    async with world.db.run_observers([observer]) as worker:
        await until_all_are_copied(world, ["a", "b", "x", "y"])
        (counters,) = worker.counters.values()
    commits = {row: await commit_of(world, row) for row in ("a", "b", "x", "y")}
    assert commits["a"] == commits["b"] != commits["x"] == commits["y"]
    assert (counters.runs, counters.commits) == (4, 4)
    assert sum(counters.latencies) == 4


async def test_a_blocking_observer_takes_a_list_too(world: Observed) -> None:
    calls: list[list[str]] = []

    def copy_blocking(tx: BlockingTransaction, rows: list[str]) -> None:
        calls.append(rows)
        for row in rows:
            tx.set(row, copy, tx.get(row, source, default=-1))

    observer = await prepared(world, copy_blocking)
    async with world.db.run_observers([observer]):
        await until_all_are_copied(world)
    assert max(map(len, calls)) > 1
    assert sorted(row for rows in calls for row in rows) == ROWS


@pytest.mark.parametrize("kind", ["raises", "hangs", "is cancelled", "writes too much"])
async def test_a_row_that_fails_holds_up_no_other_and_has_all_its_attempts(
    world: Observed, kind: str
) -> None:
    alone: Counter[str] = Counter()

    async def fail_for_b(tx: Transaction, rows: list[str]) -> None:
        if len(rows) == 1:
            alone[rows[0]] += 1
        await copy_all(tx, rows)
        if "b" in rows:
            if kind == "hangs":
                await asyncio.sleep(3600)
            if kind == "is cancelled":
                own = asyncio.current_task()
                assert own is not None
                own.cancel()
                await asyncio.sleep(0)
            if kind == "writes too much":
                for number in range(200_000):
                    tx.set(f"b{number}", copy, number)
            raise ValueError("b")

    observer = await prepared(world, fail_for_b, attempts=3, deadline=0.5)
    async with world.db.run_observers([observer]) as worker:
        await until_all_are_copied(world, ["a", "c", "d"])
        (counters,) = worker.counters.values()
        assert await world.get("b") is None
    (letter,) = await world.dead_letters()
    assert (letter.row, letter.attempts) == (b"b", 3)
    assert alone == {"a": 1, "b": 3, "c": 1, "d": 1}
    assert (counters.failures, counters.dead_letters, counters.commits) == (3, 1, 3)


@pytest.mark.parametrize("kind", ["def", "async def", "block"])
async def test_a_function_that_commits_by_itself_loses_no_change(
    world: Observed, kind: str
) -> None:
    """The acknowledgements of all rows would be committed with its first row."""

    async def commit_each(tx: Transaction, rows: list[str]) -> None:
        for row in rows:
            await copy_all(tx, [row])
            await tx.commit()

    async def in_a_block(tx: Transaction, rows: list[str]) -> None:
        for row in rows:
            async with tx:
                await copy_all(tx, [row])

    def commit_each_blocking(tx: BlockingTransaction, rows: list[str]) -> None:
        for row in rows:
            tx.set(row, copy, tx.get(row, source, default=-1))
            tx.commit()

    functions = {"def": commit_each_blocking, "async def": commit_each, "block": in_a_block}
    observer = await prepared(world, functions[kind], attempts=1)
    async with world.db.run_observers([observer]):
        await world.until_nothing_waits()
    letters = await world.dead_letters()
    assert sorted(letter.row.decode() for letter in letters) == ROWS
    assert all("do not commit it" in letter.error for letter in letters)
    assert [await world.get(row) for row in ROWS] == [None] * 4


async def test_what_a_batch_loses_is_run_row_by_row_and_later_batches_are_smaller(
    world: Observed,
) -> None:
    sizes: list[int] = []

    async def lose_together(tx: Transaction, rows: list[str]) -> None:
        sizes.append(len(rows))
        await copy_all(tx, rows)
        if len(rows) > 2:
            async with world.db.transaction() as rival:
                rival.set(rows[-1], copy, 7)

    observer = await prepared(world, lose_together)
    async with world.db.run_observers([observer]) as worker:
        await until_all_are_copied(world)
        (counters,) = worker.counters.values()
        assert sizes == [4, 1, 1, 1, 1]
        assert (counters.conflicts, counters.commits, counters.failures) == (4, 4, 0)


async def test_of_two_runs_with_a_change_in_common_one_commits(world: Observed) -> None:
    run, works = await run_of(world, await prepared(world, copy_all))
    other = world.run_of(works["c"])
    assert await run.begin()
    assert await other.begin()
    await other.commit()
    with pytest.raises(ConflictError):
        await run.commit()


async def test_what_was_handled_before_takes_no_part(world: Observed) -> None:
    observer = await prepared(world, copy_all)
    run, works = await run_of(world, observer)
    earlier = world.run_of(works["b"])
    assert await earlier.begin()
    await earlier.commit()
    assert await run.begin()
    assert run.handled == [works["b"]]
    assert run.called == run.open == [works[row] for row in ("a", "c", "d")]
    await copy_all(run.transaction, ["a", "c", "d"])  # type: ignore[arg-type]
    await run.commit()
    (nothing, _) = await run_of(world, observer)
    assert not await nothing.begin()
    assert len(nothing.handled) == len(ROWS)


async def test_the_cells_of_a_batch_are_read_with_its_first_message(world: Observed) -> None:
    run, _ = await run_of(world, await prepared(world, copy_all))
    assert await run.begin()
    before = run.transaction.statistics.round_trips
    await copy_all(run.transaction, ROWS)  # type: ignore[arg-type]
    assert run.transaction.statistics.round_trips == before
    run.transaction.rollback()


async def test_a_deletion_that_does_not_wake_it_deletes_the_dead_letter_with_the_batch(
    world: Observed,
) -> None:
    async def fail_for_b(tx: Transaction, rows: list[str]) -> None:
        if "b" in rows:
            raise ValueError("b")
        await copy_all(tx, rows)

    observer = await prepared(world, fail_for_b, attempts=1, deletes=False)
    async with world.db.run_observers([observer]):
        await world.until_nothing_waits()
    assert [letter.row for letter in await world.dead_letters()] == [b"b"]
    await world.delete("b")
    await put_all(world, ["a", "c"], 2)
    run, works = await run_of(world, observer)
    assert await run.begin()
    assert run.called == [works["a"], works["c"]]
    assert set(run.open) == set(works.values())
    run.transaction.rollback()
    async with world.db.run_observers([observer]):
        await world.until_copied("c", 2)
        await world.until_nothing_waits()
    assert await world.dead_letters() == []


async def test_tests_call_the_function_with_lists(world: Observed) -> None:
    observer = await prepared(world, copy_all)
    assert await run_observers_async(world.db, [observer]) == len(ROWS)
    assert await world.get("d") == 1


async def test_what_its_rows_held_before_is_asked_for_in_one_message(world: Observed) -> None:
    told: dict[str, int | None] = {}

    async def note(tx: Transaction, rows: list[str]) -> None:
        found = await asyncio.gather(*(tx.previous(row, source) for row in rows))
        told.update(zip(rows, found, strict=True))

    observer = in_batches(note)
    await register(world.context, [observer])
    for value in (1, 2):
        await put_all(world, ROWS[value - 1 :], value)
        run, _ = await run_of(world, observer)
        assert await run.begin()
        before = run.transaction.statistics.round_trips
        await observer(run.transaction, ROWS[value - 1 :])
        assert run.transaction.statistics.round_trips == before + value - 1
        await run.commit()
        deletions = Deletions(world.context)
        for work in run.open:
            deletions.add(work, list(work.timestamps))
        await deletions.done()
    assert told == {"a": None, "b": 1, "c": 1, "d": 1}


async def test_rows_of_other_columns_are_not_in_the_batch(world: Observed) -> None:
    calls: list[tuple[set[str], bytes]] = []

    @observes(source, total, name="batched", batch=8, concurrency=1)
    async def note(tx: Transaction, rows: list[str], column: Any) -> None:
        calls.append((set(rows), column.name))

    await register(world.context, [note])
    for row in ROWS:
        async with world.db.transaction() as tx:
            tx.set(row, source, 1)
            tx.set(row, total, 1)
    async with world.db.run_observers([note]):
        await world.until_nothing_waits()
    for column in (source.name, total.name):
        assert set[str]().union(*(rows for rows, one in calls if one == column)) == set(ROWS)
    assert len(calls) < 2 * len(ROWS)


def test_the_size_of_a_batch_is_checked_and_limits_how_many_run_at_a_time() -> None:
    for wrong in (0, -1, 1.5, True, 1_001):
        with pytest.raises(InvalidArgument, match="batch"):
            observes(source, batch=wrong)  # type: ignore[arg-type]
    assert observes(source, batch=32)(copy_all).concurrency == 4
    assert observes(source, batch=1_000)(copy_all).concurrency == 1
    assert observes(source, batch=32, concurrency=7)(copy_all).concurrency == 7
    assert observes(source)(copy_all).batch is None
