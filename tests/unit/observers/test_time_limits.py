"""One timer interrupts every function whose time is over, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from percolator.observers.time_limits import (
    LATE_PARTS_MAX,
    TICK_SECONDS,
    RunTime,
    TimeLimit,
    TimeLimits,
    TookTooLong,
)
from tests.simulation.virtual_time import VirtualTimeLoop


def nothing() -> float:
    return 0.0


async def limited(
    limits: TimeLimits, seconds: float, own: float, waited: Callable[[], float] = nothing
) -> float:
    """Sleeps for `own` seconds. Returns when it ended, or raises."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    with TimeLimit(limits, RunTime(seconds, waited), task):
        await asyncio.sleep(own)
    return loop.time()


async def ended(task: asyncio.Task[float], began: float) -> float:
    """When the task was interrupted, in seconds."""
    with pytest.raises(TookTooLong):
        await task
    return asyncio.get_running_loop().time() - began


async def test_each_is_interrupted_at_its_own_time_whatever_the_order_in_which_they_began() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    began = loop.time()
    tasks = [
        asyncio.create_task(limited(limits, seconds, 1_000.0)) for seconds in (5.0, 2.0, 30.0, 2.0)
    ]
    done, _ = await asyncio.wait(tasks, timeout=2.0 + 0.001)
    assert done == {tasks[1], tasks[3]}
    assert all(isinstance(task.exception(), TookTooLong) for task in done)
    assert await ended(tasks[0], began) == pytest.approx(5.0)
    assert await ended(tasks[2], began) == pytest.approx(30.0)


async def test_who_ends_in_time_is_left_alone_and_the_next_one_is_still_interrupted() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    began = loop.time()
    quick = asyncio.create_task(limited(limits, 1.0, 0.5))
    slow = asyncio.create_task(limited(limits, 3.0, 1_000.0))
    assert await quick == pytest.approx(began + 0.5)
    assert await ended(slow, began) == pytest.approx(3.0)
    assert await limited(limits, 1.0, 0.9) == pytest.approx(began + 3.9)


async def test_seconds_that_turn_out_not_to_count_are_added() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.create_task(limited(limits, 1.0, 1_000.0, lambda: 4.0))
    assert await ended(task, began) == pytest.approx(5.0)


async def test_other_cancellations_pass_through() -> None:
    limits = TimeLimits()
    task = asyncio.create_task(limited(limits, 1.0, 1_000.0))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(2.0)  # the timer that was set for it interrupts nothing


async def test_a_cancellation_that_comes_with_the_interruption_is_not_swallowed() -> None:
    limits = TimeLimits()
    task = asyncio.create_task(limited(limits, 1.0, 1_000.0))
    asyncio.get_running_loop().call_later(1.0, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_function_that_swallows_the_interruption_is_not_interrupted_again() -> None:
    limits = TimeLimits()

    async def stubborn() -> str:
        task = asyncio.current_task()
        assert task is not None
        with TimeLimit(limits, RunTime(1.0, nothing), task):
            try:
                await asyncio.sleep(1_000.0)
            except asyncio.CancelledError:
                await asyncio.sleep(5.0)
        assert not task.cancelling()
        return "returned"

    assert await asyncio.create_task(stubborn()) == "returned"


def compute(seconds: float) -> None:
    """Keeps the event loop busy: nothing else happens in this time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.now += seconds


async def test_time_in_which_others_compute_does_not_count() -> None:
    """Each of many runs computes for a part of its time, and all of them for many times that."""
    limits = TimeLimits()

    async def run() -> str:
        task = asyncio.current_task()
        assert task is not None
        with TimeLimit(limits, RunTime(0.5, nothing), task):
            for _ in range(4):
                await asyncio.sleep(0.01)
                compute(0.005)
            await asyncio.sleep(0.01)
        return "returned"

    assert await asyncio.gather(*(run() for _ in range(128))) == ["returned"] * 128


async def test_a_run_that_waits_too_long_is_interrupted_soon_after_others_have_computed() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    began = loop.time()
    waiting = asyncio.create_task(limited(limits, 1.0, 1_000.0))
    await asyncio.sleep(0.5)
    compute(3.0)
    assert await ended(waiting, began) == pytest.approx(4.0, abs=TICK_SECONDS + 0.01)


async def test_a_loop_that_is_always_late_does_not_let_a_run_go_on_forever() -> None:
    limits, loop = TimeLimits(), asyncio.get_running_loop()
    began = loop.time()

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        with TimeLimit(limits, RunTime(1.0, nothing), task):
            while True:
                compute(0.5)
                await asyncio.sleep(0)

    with pytest.raises(TookTooLong):
        await asyncio.create_task(run())
    assert loop.time() - began == pytest.approx(1.0 + LATE_PARTS_MAX, abs=1.0)


async def test_no_timer_is_left_when_nothing_runs() -> None:
    limits = TimeLimits()
    await limited(limits, 1.0, 0.5)
    await asyncio.sleep(1.0)
    assert limits._ticking is None
