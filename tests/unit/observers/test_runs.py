"""One run: what it acknowledges, what it deletes, and that it never handles a change twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator import ConflictError, UsageError, observes
from percolator.errors import CellAddress
from percolator.formats.records import acknowledgement_column
from percolator.observers.registration import register
from percolator.observers.runs import Deletions
from percolator.observers.watched_cell import Acknowledgement
from percolator.protocol import steps
from percolator.routing.cells import CellMutation

from .observed_cluster import Observed, copy, observed, source


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
    deletions = Deletions(world.context)
    deletions.add(work, [one for one in work.timestamps if one <= run.start])
    await deletions.done()


async def test_only_one_of_two_runs_for_a_change_commits_and_a_later_one_has_nothing_to_do() -> (
    None
):
    async with observed() as world:
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


async def test_the_acknowledgement_commits_together_with_the_writes() -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 1)
        work = await world.work_for(first)
        run = world.run_of(work)
        await run.begin()
        await first(run.transaction, "a")
        hidden = CellAddress(
            work.watched.table_id, b"a", acknowledgement_column(b"first", b"source")
        )
        assert set(run.transaction.internal.writes.cells) == {
            hidden,
            CellAddress(work.watched.table_id, b"a", b"copy"),
        }
        _, stored = run.transaction.internal.writes.cells[hidden]
        assert Acknowledgement.decode(stored) == Acknowledgement(run.start)
        run.transaction.rollback()


async def test_many_changes_collapse_into_one_run() -> None:
    async with observed() as world:
        await register(world.context, [first])
        for value in range(5):
            await world.put("a", value)
        await answer(world)
        assert await world.get("a") == 4
        assert await world.waiting() == []


async def test_a_change_above_the_snapshot_keeps_its_notification() -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 1)
        work = await world.work_for(first)
        run = world.run_of(work)
        await run.begin()
        later = await world.put("a", 2)
        work.timestamps.add(later)
        await first(run.transaction, "a")
        await run.commit()
        deletions = Deletions(world.context)
        deletions.add(work, [one for one in work.timestamps if one <= run.start])
        await deletions.done()
        (left,) = await world.waiting()
        assert left.timestamps == (later,)
        await answer(world)
        assert await world.get("a") == 2


async def test_a_deletion_is_a_change() -> None:
    async with observed() as world:
        await register(world.context, [second])
        await world.put("a", 1)
        await answer(world, second)
        await world.delete("a")
        await answer(world, second)
        assert await world.waiting() == []


async def test_a_lock_alone_is_not_a_change() -> None:
    async with observed() as world:
        await register(world.context, [first])
        async with world.db.transaction() as tx:
            await tx.lock("a", source)
        assert await world.waiting() == []


async def test_two_observers_of_a_column_each_have_their_own_notifications() -> None:
    async with observed() as world:
        await register(world.context, [first, second])
        await world.put("a", 1)
        await answer(world, first)
        assert [one.observer for one in await world.waiting()] == [b"second"]
        await answer(world, second)
        assert await world.waiting() == []


async def test_a_run_for_one_column_says_nothing_about_another() -> None:
    @observes(source, copy, name="both")
    async def both(tx: Any, row: str, column: Any) -> None: ...

    async with observed() as world:
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


async def test_an_observer_may_write_its_own_trigger() -> None:
    @observes(source, name="count-down")
    async def count_down(tx: Any, row: str) -> None:
        left = await tx.get(row, source)
        if left:
            await tx.set(row, source, left - 1)

    async with observed() as world, world.db.run_observers([count_down]):
        await world.put("a", 5)

        async def is_zero() -> bool:
            return await world.get("a", source) == 0

        await world.until(is_zero)
        await world.until_nothing_waits()


async def test_an_observer_that_rolls_its_own_transaction_back_has_failed() -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 1)
        run = world.run_of(await world.work_for(first))
        await run.begin()
        run.transaction.rollback()
        with pytest.raises(UsageError, match="ended its own transaction"):
            await run.commit()


async def test_reading_the_trigger_in_the_function_needs_no_round_trip() -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 7)
        run = world.run_of(await world.work_for(first))
        await run.begin()
        before = run.transaction.statistics.round_trips
        await first(run.transaction, "a")
        assert run.transaction.statistics.round_trips == before
        run.transaction.rollback()


async def test_acknowledgements_are_hidden_from_readers() -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 1)
        await answer(world)
        async with world.db.snapshot() as snapshot:
            rows = [row async for row in snapshot.scan(source.table)]
        assert [sorted(row) for row in rows] == [[b"copy", b"source"]]


async def test_a_weak_observer_runs_whenever_it_is_notified() -> None:
    seen: list[str] = []

    @observes(copy, name="weak", weak=True)
    async def weak(tx: Any, row: str) -> None:
        seen.append(row)

    async with observed() as world:
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


async def test_a_deletion_that_was_put_aside_is_handled_even_after_it_was_collected() -> None:
    async with observed() as world, world.db.run_observers([second]) as worker:
        (watched,) = await register(world.context, [second])
        async with world.db.transaction() as tx:
            noted = Acknowledgement(0, has_dead_letter=True)
            tx.internal.writes.put(watched.acknowledgement(b"a", b"source"), noted.encode())
        for _ in range(2):
            now = await world.db.timestamp()
            step = CellMutation(watched.table_id, steps.notify(b"a", b"source", now, (b"second",)))
            await world.context.env.cells.mutate([step], world.context.deadline())
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
async def test_a_call_that_an_observer_does_not_await_fails_the_run(call: Any, name: str) -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 1)
        run = world.run_of(await world.work_for(first))
        assert await run.begin()
        run.transaction.set("b", copy, 3)  # type: ignore[attr-defined]  # the observer's
        call(run.transaction)
        with pytest.raises(UsageError, match=rf"tx\.{name}\(.*was called without await"):
            await run.commit()
        again = world.run_of(await world.work_for(first))
        assert await again.begin()  # the change does not count as handled
        again.transaction.rollback()
        assert await world.get("b") is None


async def test_calls_that_are_awaited_later_are_no_failure() -> None:
    async with observed() as world:
        await register(world.context, [first])
        await world.put("a", 1)
        run = world.run_of(await world.work_for(first))
        assert await run.begin()
        transaction: Any = run.transaction
        transaction.set("a", copy, 1)
        await asyncio.gather(*[transaction.set(row, copy, 1) for row in "bc"])
        later = transaction.increment("b", copy)
        await transaction.get("a", source)
        assert await later == 2
        await run.commit()
        assert await world.get("b") == 2
