"""Runs that have lost at a cell take turns there, and so do those that would lose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from percolator import observes
from percolator.aio.connecting import connect_to
from percolator.aio.observing import new_worker
from percolator.limits import Limits
from percolator.observers.definition import Observer
from percolator.observers.worker import Worker
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS
from tests.unit.observers.observed_cluster import Observed, copy, observed, source, total

DOCUMENTS = 200
TOTAL_ROW = "~total"
COLD_SECONDS = 1.0
RUNS_LOST = 12
SLOW_EVERY = 10
SLOW_SECONDS = 0.4
"""Longer than the turn of a run that has not lost yet."""


async def bump(tx: Any, row: str) -> None:
    await tx.set(TOTAL_ROW, total, await tx.get(TOTAL_ROW, total, default=0) + 1)


@observes(source, name="counting")
async def counting(tx: Any, row: str) -> None:
    await bump(tx, row)


async def put_documents(world: Observed, observer: Observer) -> None:
    await world.db.register_observers([observer])
    for number in range(DOCUMENTS):
        await world.put(f"{number:04}", number)


@asynccontextmanager
async def working(world: Observed, observer: Observer) -> AsyncIterator[Worker]:
    async with new_worker(world.db.internal.engine, [observer], None, 10.0) as worker:
        yield worker
    assert len(world.context.env.hot_cells) == 0


async def until_counted(world: Observed) -> None:
    async def is_counted() -> bool:
        return await world.get(TOTAL_ROW, total) == DOCUMENTS

    await world.until(is_counted)
    await world.until_nothing_waits()


async def test_documents_that_bump_one_counter_cost_little_more_than_a_run_each() -> None:
    async with observed() as world:
        await put_documents(world, counting)
        async with working(world, counting) as worker:
            await until_counted(world)
            counters = worker.counters["docs", "counting"]
        assert counters.commits == DOCUMENTS
        # Those that began at the same time, before it was known that they would lose.
        assert counters.conflicts <= counting.concurrency


async def test_a_run_that_takes_long_now_and_then_does_not_make_all_others_lose() -> None:
    """On a busy machine, any run may be stopped for a while."""

    @observes(source, name="counting", concurrency=10)
    async def sometimes_slow(tx: Any, row: str) -> None:
        found = await tx.get(TOTAL_ROW, total, default=0)
        if int(row) % SLOW_EVERY == 0:
            await asyncio.sleep(SLOW_SECONDS)
        await tx.set(TOTAL_ROW, total, found + 1)

    async with observed() as world:
        await put_documents(world, sometimes_slow)
        async with working(world, sometimes_slow) as worker:
            await until_counted(world)
            counters = worker.counters["docs", "counting"]
        assert counters.commits == DOCUMENTS
        # Those that began at the same time, and those that were slow.
        assert counters.conflicts <= sometimes_slow.concurrency + 2 * DOCUMENTS // SLOW_EVERY


async def test_a_worker_that_is_stopped_leaves_its_lines() -> None:
    @observes(source, name="counting")
    async def slowly(tx: Any, row: str) -> None:
        await bump(tx, row)
        await asyncio.sleep(0.01)

    async with observed() as world:
        await put_documents(world, slowly)
        async with working(world, slowly) as worker:

            async def is_hot() -> bool:
                return len(world.context.env.hot_cells) == 1

            await world.until(is_hot)
            await worker.stop(drain_seconds=0.1)
        async with working(world, slowly):
            await until_counted(world)


async def test_runs_of_other_cells_do_not_stand_in_line() -> None:
    """One document of eight bumps the counter; the others take long, and all at the same time."""

    @observes(source, name="counting")
    async def now_and_then(tx: Any, row: str) -> None:
        if int(row) % 8 == 0:
            await bump(tx, row)
        else:
            await asyncio.sleep(COLD_SECONDS)
            await tx.set(row, copy, 1)

    async with observed() as world:
        await put_documents(world, now_and_then)
        began = world.context.now()
        async with working(world, now_and_then) as worker:
            await world.until_nothing_waits()
            assert worker.counters["docs", "counting"].commits == DOCUMENTS
        at_best = COLD_SECONDS * DOCUMENTS / now_and_then.concurrency
        assert world.context.now() - began < 3 * at_best


async def test_a_failing_run_lets_the_next_in_line_go() -> None:
    failed: set[str] = set()

    @observes(source, name="counting")
    async def failing_once(tx: Any, row: str) -> None:
        await bump(tx, row)
        if row not in failed:
            failed.add(row)
            raise ValueError("the first run of every document")

    async with observed() as world:
        await put_documents(world, failing_once)
        async with working(world, failing_once) as worker:
            await until_counted(world)
            assert worker.counters["docs", "counting"].failures == DOCUMENTS


async def test_a_run_that_always_loses_to_what_it_starts_itself_pauses() -> None:
    """And what it starts does not wait for the end of its turn."""
    runs = 0

    async with observed() as world:

        async def inner(tx: Any) -> None:
            await bump(tx, "")

        @observes(source, name="counting")
        async def outer(tx: Any, row: str) -> None:
            nonlocal runs
            runs += 1
            await tx.get(TOTAL_ROW, total)
            if runs < RUNS_LOST:
                began = world.context.now()
                await world.db.run(inner)
                assert world.context.now() == began
            await bump(tx, row)

        await world.db.register_observers([outer])
        await world.put("doc", 1)
        async with working(world, outer):
            began = world.context.now()
            await world.until_nothing_waits()
        assert runs == RUNS_LOST
        assert world.context.now() - began > 1.0
        assert await world.get(TOTAL_ROW, total) == RUNS_LOST


async def test_two_workers_pause_after_they_have_lost_to_each_other() -> None:
    async with observed() as world:
        await put_documents(world, counting)
        async with await connect_to(world.context.world, [ADDRESS], Limits(), RetryPolicy()) as db:
            other = new_worker(db.internal.engine, [counting], None, 10.0)
            async with working(world, counting) as worker, other:
                await until_counted(world)
                both = [one.counters["docs", "counting"] for one in (worker, other)]
        assert sum(one.commits for one in both) == DOCUMENTS
        assert sum(one.runs for one in both) <= 3 * DOCUMENTS
