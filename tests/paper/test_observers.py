"""Section 2.4: "Percolator applications are structured as a series of observers." """

from __future__ import annotations

from typing import Any

import pytest

from percolator import ConflictError, observes
from percolator.observers.registry.registration import register
from percolator.observers.running.acknowledgement import Acknowledgement
from percolator.observers.running.watched_cell import look
from tests.unit.observers.observed_cluster import Observed, copy, observed, source, total


@observes(source, name="document-processor")
async def process(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


async def acknowledged(world: Observed, row: str) -> Acknowledgement:
    """The content of the acknowledgement column, which only observers see."""
    (watched,) = await register(world.context, [process])
    work = world.work_of_row(watched, row)
    transaction = world.context.begin(None)
    start = await transaction.timestamp()
    return (await look(world.context, work, transaction, start)).acknowledged


async def test_each_observer_creates_more_work_for_downstream_observers() -> None:
    # "each observer completes a task and creates more work for "downstream" observers by writing
    # to the table."
    @observes(copy, name="downstream")
    async def downstream(tx: Any, row: str) -> None:
        await tx.set(row, total, await tx.get(row, copy))

    async with observed() as world, world.db.run_observers([process, downstream]):
        await world.put("a", 5)

        async def is_done() -> bool:
            return await world.get("a", total) == 5

        await world.until(is_done)


async def test_at_most_one_observers_transaction_commits_for_each_change() -> None:
    # "at most one observer's transaction will commit for each change of an observed column."
    # "if Percolator accidentally starts two transactions concurrently for a particular
    # notification, they will both see the dirty notification and run the observer, but one will
    # abort because they will conflict on the acknowledgment column."
    async with observed() as world:
        await register(world.context, [process])
        await world.put("a", 1)
        work = await world.work_for(process)
        first, second = world.run_of(work), world.run_of(work)
        assert await first.begin()
        assert await second.begin()
        await first.commit()
        with pytest.raises(ConflictError) as lost:
            await second.commit()
        assert lost.value.cell == work.watched.acknowledgement(b"a", b"source")


async def test_multiple_writes_may_cause_an_observer_to_be_invoked_only_once() -> None:
    # "multiple writes to an observed column may cause the corresponding observer to be invoked
    # only once. We call this feature message collapsing"
    async with observed() as world:
        await register(world.context, [process])
        for value in range(10):
            await world.put("a", value)
        async with world.db.run_observers([process]) as worker:
            await world.until_copied("a", 9)
            await world.until_nothing_waits()
            assert worker.counters["docs", "document-processor"].runs == 1


async def test_the_acknowledgment_column_holds_the_latest_start_timestamp_of_the_observer() -> None:
    # "each observed column has an accompanying "acknowledgment" column for each observer,
    # containing the latest start timestamp at which the observer ran."
    async with observed() as world:
        await register(world.context, [process])
        changed = await world.put("a", 1)
        assert await acknowledged(world, "a") == Acknowledgement(0)
        async with world.db.run_observers([process]):
            await world.until_copied("a", 1)
        async with world.db.snapshot() as snapshot:
            now = await snapshot.timestamp()
        assert changed < (await acknowledged(world, "a")).start < now


async def test_the_notify_cell_is_set_with_the_write_and_removed_after_the_observer() -> None:
    # "When a transaction writes an observed cell, it also sets the corresponding notify cell."
    # "After the observer is triggered and the transaction commits, we remove the notify cell."
    async with observed() as world:
        await register(world.context, [process])
        changed = await world.put("a", 1)
        (waiting,) = await world.waiting()
        assert (waiting.row, waiting.column) == (b"a", b"source")
        assert waiting.observer == b"document-processor"
        assert waiting.timestamps == (changed,)
        async with world.db.run_observers([process]):
            await world.until_copied("a", 1)
            await world.until_nothing_waits()


async def test_a_weak_notification_needs_no_write() -> None:
    # A weak notification triggers an observer without a write to the observed column, and without
    # conflicts among transactions that trigger the same one.
    ran: list[str] = []

    @observes(copy, name="cleaner", weak=True)
    async def clean(tx: Any, row: str) -> None:
        ran.append(row)

    async with observed() as world, world.db.run_observers([clean]):
        first, second = world.db.transaction(), world.db.transaction()
        for tx in (first, second):
            await tx.timestamp()
            await tx.notify("a", copy)
        await first.commit()
        await second.commit()
        await world.until_nothing_waits()
        assert set(ran) == {"a"}
