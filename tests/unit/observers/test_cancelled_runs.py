"""Observers that cancel the task in which they run fail like any others, and lose no change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from percolator import observes
from percolator.observers.definition import Observer

from .observed_cluster import copy, observed, source

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
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "percolator")
    observer = cancelling(and_wait)
    async with observed() as world, world.db.run_observers([observer]) as worker:
        await world.put("bad", BAD)
        await world.put("good", 1)
        await world.until_copied("good", 1)
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
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise the cancellation would strike while the change is put aside, again and again."""
    caplog.set_level(logging.CRITICAL, "percolator")
    observer = cancelling(and_raise)
    async with observed() as world, world.db.run_observers([observer]) as worker:
        await world.put("bad", BAD)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert letter.error == "ValueError: and that is all"
        assert worker.counters["docs", "cancelling"].failures == 3


@pytest.mark.parametrize("cancel", [and_return, and_swallow_the_first, during_the_commit])
async def test_one_that_returns_nevertheless_is_not_run_forever(
    cancel: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its commit is cancelled. If that came too late, the next run finds the acknowledgement."""
    caplog.set_level(logging.CRITICAL, "percolator")
    observer = cancelling(cancel)
    async with observed() as world, world.db.run_observers([observer]) as worker:
        await world.put("bad", BAD)
        await world.until_nothing_waits()
        assert await world.get("bad") == 1 or await world.dead_letters()
        assert worker.counters["docs", "cancelling"].runs <= 3
        await world.put("bad", 1)
        await world.until_copied("bad", 1)


async def test_a_loop_that_cancels_all_of_its_tasks_at_its_end_is_not_kept_from_ending() -> None:
    """As `asyncio.run` does when a program has not stopped its worker."""

    @observes(source, name="waiting", concurrency=2)
    async def waiting(tx: Any, row: str) -> None:
        await asyncio.sleep(3600.0)

    async with observed() as world:
        worker = world.db.run_observers([waiting], drain_seconds=0.1)
        await worker.start()
        for number in range(5):
            await world.put(f"{number}", number)
        await asyncio.sleep(1.0)
        assert worker._parts is not None
        running = list(worker._parts.pool._runs._tasks)
        assert len(running) == 2
        for task in running:
            task.cancel()
        async with asyncio.timeout(1.0):
            await asyncio.gather(*running, return_exceptions=True)
        await worker.stop()


async def test_what_such_a_loop_interrupts_has_not_failed() -> None:
    """Nobody would run a dead letter again, and the observer has done nothing wrong."""

    @observes(source, name="waiting", attempts=1)
    async def waiting(tx: Any, row: str) -> None:
        await asyncio.sleep(3600.0)

    async with observed() as world:
        worker = world.db.run_observers([waiting], drain_seconds=0.1)
        await worker.start()
        await world.put("a", 1)
        await asyncio.sleep(1.0)
        assert worker._parts is not None
        running = [*worker._tasks._tasks, *worker._parts.pool._runs._tasks]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert worker.counters["docs", "waiting"].failures == 0
        assert await world.dead_letters() == []
        assert len(await world.waiting()) == 1
        await worker.stop()
