"""Tasks are kept until they end, and end together. Failures that nothing awaits are reported."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import percolator
from percolator.errors import InvariantViolation, Unavailable
from percolator.tasks import NextTurn, Tasks, outlasting


async def fail(error: Exception, seconds: float = 1.0) -> None:
    await asyncio.sleep(seconds)
    raise error


def complaints() -> list[dict[str, Any]]:
    """Collects what is reported to the event loop's exception handler from now on."""
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    return told


async def test_a_task_is_kept_even_if_nothing_else_refers_to_it() -> None:
    """Nothing refers to what it waits for either."""

    async def wait_for_nothing() -> None:
        await asyncio.get_running_loop().create_future()

    tasks = Tasks()
    tasks.start(wait_for_nothing())
    await asyncio.sleep(0)
    gc.collect()
    assert len(tasks) == 1
    await tasks.cancel()
    assert len(tasks) == 0


async def test_tasks_are_cancelled_in_the_order_in_which_they_began() -> None:
    ended = []

    async def wait(number: int) -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append(number)

    for end in (Tasks.cancel, lambda tasks: tasks.drain(1.0)):
        tasks, ended = Tasks(), []
        for number in range(50):
            tasks.start(wait(number))
        await asyncio.sleep(0)
        await end(tasks)
        assert ended == list(range(50))
        assert len(tasks) == 0


async def test_a_drain_waits_for_tasks_started_by_tasks_and_says_whether_all_have_ended() -> None:
    tasks = Tasks()
    ended = []

    async def work(left: int) -> None:
        await asyncio.sleep(1.0)
        ended.append(left)
        if left:
            tasks.start(work(left - 1))

    tasks.start(work(2))
    assert await tasks.drain(10.0)
    assert ended == [2, 1, 0]
    tasks.start(work(2))
    assert not await tasks.drain(1.5)
    assert ended == [2, 1, 0, 2]


async def test_a_drain_stops_waiting_for_a_task_that_ignores_cancellation() -> None:
    async def stubborn() -> None:
        for _ in range(10):
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                continue

    tasks = Tasks()
    task = tasks.start(stubborn())
    await asyncio.sleep(0)
    assert not await tasks.drain(1.0, cancelled_seconds=2.0)
    assert asyncio.get_running_loop().time() == pytest.approx(3.0)
    assert not task.done()


async def test_every_task_that_raises_is_reported_and_a_cancelled_one_is_not() -> None:
    told = []
    tasks = Tasks(lambda task, error: told.append((task.get_name(), str(error))))
    tasks.start(fail(ValueError("a bug")), name="one")
    tasks.start(asyncio.sleep(60.0))
    await asyncio.sleep(2.0)
    await tasks.cancel()
    assert told == [("one", "a bug")]


async def test_work_that_runs_to_the_end_continues_if_its_caller_is_cancelled() -> None:
    ended = []

    async def work() -> str:
        await asyncio.sleep(1.0)
        ended.append("work")
        return "result"

    tasks = Tasks()
    assert await tasks.run_to_the_end(work()) == "result"
    caller = asyncio.create_task(tasks.run_to_the_end(work()))
    await asyncio.sleep(0.5)
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    await asyncio.sleep(1.0)
    assert ended == ["work", "work"]


@pytest.mark.parametrize("leaves_after", [0.5, 1.0])
@pytest.mark.parametrize(
    ("error", "reported"),
    [(Unavailable("cut off"), 0), (InvariantViolation("broken"), 1), (ValueError("a bug"), 1)],
)
async def test_a_failure_after_the_caller_was_cancelled_is_reported_if_it_is_a_bug(
    error: Exception, reported: int, leaves_after: float
) -> None:
    told = complaints()
    caller = asyncio.create_task(Tasks().run_to_the_end(fail(error)))
    await asyncio.sleep(leaves_after)
    caller.cancel()
    await asyncio.wait([caller])
    del caller
    await asyncio.sleep(2.0)
    gc.collect()
    assert [context["exception"] for context in told] == [error] * reported


async def test_callers_that_still_wait_get_a_failure_that_cancelled_ones_do_not() -> None:
    told = complaints()
    task = Tasks().start(fail(Unavailable("cut off")))
    callers = [asyncio.create_task(outlasting(task)) for _ in range(3)]
    await asyncio.sleep(0.5)
    callers[1].cancel()
    await asyncio.wait(callers)
    del task
    for caller in (callers[0], callers[2]):
        with pytest.raises(Unavailable):
            caller.result()
    assert callers[1].cancelled()
    gc.collect()
    assert told == []


# The call that tunes Python's garbage collector.


@pytest.fixture
def collector() -> Iterator[None]:
    """Leaves the collector as it was."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Cyclic:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("collector")
def test_what_lives_is_excluded_and_what_is_garbage_is_not_kept() -> None:
    garbage = weakref.ref(Cyclic())
    percolator.tune_garbage_collector()
    assert garbage() is None
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == (50_000, 20, 50)


@pytest.mark.usefixtures("collector")
def test_cycles_made_later_are_still_collected() -> None:
    percolator.tune_garbage_collector()
    later = weakref.ref(Cyclic())
    gc.collect()
    assert later() is None


async def test_one_task_does_all_that_is_left_to_it_in_one_turn_of_the_loop() -> None:
    tasks, later, done = Tasks(), NextTurn[int](), list[list[int]]()

    async def work(some: list[int]) -> None:
        await asyncio.sleep(1.0)
        done.append(some)

    first = [later.add(number, tasks, work) for number in (1, 2, 3)]
    assert (len(set(first)), len(tasks), len(later)) == (1, 1, 2)
    await asyncio.sleep(0)
    second = later.add(4, tasks, work)
    assert (len(tasks), len(later)) == (2, 2)
    await asyncio.wait((*first, second))
    assert (done, len(tasks), len(later)) == ([[1, 2, 3], [4]], 0, 0)


async def test_what_was_left_to_a_task_that_was_cancelled_before_it_began_is_done_by_the_next() -> (
    None
):
    tasks, later, done = Tasks(), NextTurn[int](), list[int]()

    async def work(some: list[int]) -> None:
        done.extend(some)

    later.add(1, tasks, work).cancel()
    await asyncio.sleep(0)
    await later.add(2, tasks, work)
    assert (done, len(later)) == ([1, 2], 0)
