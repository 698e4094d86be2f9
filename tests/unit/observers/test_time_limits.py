"""One timer interrupts every function whose time is over, and no other."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from percolator import Limits, codecs, observes
from percolator.errors import Unavailable
from percolator.observers.registration import register
from percolator.observers.runs import Deletions
from percolator.observers.time_limits import (
    LATE_PARTS_MAX,
    TICK_SECONDS,
    ClusterWaits,
    RunTime,
    TimeLimit,
    TimeLimits,
    TookTooLong,
)
from percolator.observers.worker import WorkerLimits
from percolator.recipes import CombineQueue
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.unit.observers.observed_cluster import Observed, copy, observed, source, total


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


LIMITS = Limits(call_seconds=100.0, attempt_seconds_max=50.0)


class Slow:
    """Reads of a cluster that take long from the time on that an observer says so."""

    def __init__(self, world: Observed, seconds: float) -> None:
        self._read = world.cluster.read
        self._seconds = seconds
        self.is_slow = False
        world.cluster.read = self.read  # type: ignore[method-assign]

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        if self.is_slow:
            await asyncio.sleep(self._seconds)
        return await self._read(request)


async def run(own: float, unanswered: float, reads: int = 1, limits: Limits = LIMITS) -> list[str]:
    """Runs an observer that spends `own` seconds before and after these reads. Returns the errors
    of its dead letters."""

    @observes(source, name="slow", deadline=2.0, attempts=1)
    async def slow(tx: Any, row: str) -> None:
        cluster.is_slow = True
        await asyncio.sleep(own)
        for _ in range(reads):
            await tx.get(row, total)
        await asyncio.sleep(own)
        cluster.is_slow = False
        await tx.set(row, copy, 1)

    async with observed(limits=limits) as world:
        cluster = Slow(world, unanswered)
        async with world.db.run_observers([slow]):
            await world.put("a", 1)
            async with asyncio.timeout(1_000.0):
                while await world.waiting():
                    cluster.is_slow = False
                    await asyncio.sleep(10.0)
            return [letter.error for letter in await world.dead_letters()]


async def test_waiting_for_a_cluster_that_does_not_answer_is_no_time_of_the_observer() -> None:
    assert await run(0.5, 9.0) == []


async def test_nor_is_waiting_inside_a_recipe() -> None:
    sums = CombineQueue("sums", key=codecs.text, value=codecs.integer, combine=sum)

    @observes(source, name="adding", deadline=2.0, attempts=1)
    async def adding(tx: Any, row: str) -> None:
        await sums.add(tx, row, 1)

    async with observed(limits=LIMITS) as world:
        await sums.create(world.db)
        declare = world.cluster.declare_codecs

        async def declare_late(request: Any) -> Any:
            await asyncio.sleep(9.0)
            return await declare(request)

        async with world.db.run_observers([adding]):
            await world.put("a", 1)
            world.cluster.declare_codecs = declare_late  # type: ignore[method-assign]
            await world.until_nothing_waits()
        assert await world.dead_letters() == []
        assert await sums.get(world.db.snapshot(), "a") == 1


async def test_its_own_time_still_counts_before_and_after() -> None:
    assert await run(1.5, 9.0) == ["TookTooLong: it did not return within 2 s"]


async def test_a_cluster_that_answers_slowly_is_no_excuse() -> None:
    assert await run(0.0, 0.2, reads=1_000) == ["TookTooLong: it did not return within 2 s"]


async def test_a_call_that_fails_for_lack_of_an_answer_is_no_failure_whatever_it_becomes(
    world: Observed,
) -> None:
    attempts = 0

    @observes(source, name="wrapping", attempts=1)
    async def wrapping(tx: Any, row: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ExceptionGroup("of a group of tasks", [Unavailable("gone"), Unavailable("gone")])
        if attempts == 2:
            raise ValueError("its own error") from Unavailable("gone")
        raise ExceptionGroup("of a group of tasks", [Unavailable("gone"), ValueError("a bug")])

    async with world.db.run_observers([wrapping]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert (attempts, letter.attempts) == (3, 1)
        assert letter.error.startswith("ExceptionGroup")


def test_waits_that_overlap_count_once_and_short_ones_not_at_all() -> None:
    now = 100.0
    waits = ClusterWaits(lambda: now, 1.0)
    first, second = waits.call(), waits.call()
    first.__enter__()
    now += 0.5
    assert waits.seconds() == 0.5  # it may become a long one
    second.__enter__()
    now += 0.4
    second.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(0.9)
    now += 3.1
    first.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(4.0)
    with waits.call():
        now += 0.9
    assert waits.seconds() == pytest.approx(4.0)
    first, second = waits.call(), waits.call()
    first.__enter__()
    now += 2.0
    second.__enter__()
    now += 0.5
    second.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(6.5)
    now += 1.0
    first.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(7.5)


async def test_a_slow_run_is_logged_with_its_observer_and_cell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @observes(source, name="slow")
    async def slow(tx: Any, row: str) -> None:
        await tx.set(row, copy, 1)
        await asyncio.sleep(1.5)

    async with observed() as world, world.db.run_observers([slow]):
        with caplog.at_level(logging.WARNING, "percolator.transactions"):
            await world.put_and_copy("a", 1)
    (line,) = caplog.messages
    assert "slow transaction: committed after 1.5" in line
    assert "2 cells, observer 'slow' for row 'a', column 'source' of table 'docs', " in line


@observes(source, name="copying")
async def copying(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


@observes(source, name="hanging", deadline=3600.0, concurrency=1)
async def hanging(tx: Any, row: str) -> None:
    await asyncio.Event().wait()


async def test_an_observer_with_more_work_than_there_is_room_for_holds_up_no_other(
    world: Observed,
) -> None:
    await register(world.context, [hanging, copying])
    for number in range(30):
        await world.put(f"{number}", number)
    limits = WorkerLimits(queue_rows_max=10)
    async with world.db.run_observers([hanging, copying], limits=limits, drain_seconds=0.1):
        for number in range(30):
            await world.until_copied(f"{number}", number)


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("not even that")


def cancelled() -> None:
    raise asyncio.CancelledError


def silent() -> None:
    raise Silent


class Panic(BaseException):
    """As extensions in Rust raise it, which is no `Exception`."""


def panic() -> None:
    raise Panic("index out of bounds")


def several() -> None:
    raise BaseExceptionGroup("both", [ValueError("one"), Panic("other")])


def caused_by_itself() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__ = second
    raise second from first


def not_text() -> None:
    raise FileNotFoundError("caf\udce9.txt")


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (sys.exit, "RuntimeError: the observer tried to exit the process: "),
        (cancelled, "RuntimeError: something that the observer awaited was cancelled"),
        (silent, "Silent: (it has no message)"),
        (panic, "RuntimeError: the observer raised Panic: index out of bounds"),
        (
            several,
            "RuntimeError: the observer raised BaseExceptionGroup: both (2 sub-exceptions): "
            "ValueError: one",
        ),
        (caused_by_itself, "ValueError: second"),
        (not_text, "FileNotFoundError: caf\\udce9.txt"),
    ],
)
async def test_whatever_ends_an_observer_is_its_own_failure_and_the_worker_continues(
    fail: Callable[[], None], said: str, caplog: pytest.LogCaptureFixture, world: Observed
) -> None:
    # A process of tests cannot tell the others of a log with half a surrogate pair, and ends.
    caplog.set_level(logging.CRITICAL, "percolator")

    @observes(source, name="failing", attempts=2, concurrency=1)
    async def failing(tx: Any, row: str) -> None:
        if await tx.get(row, source) == 13:
            fail()
        await tx.set(row, copy, 1)

    async with world.db.run_observers([failing]):
        await world.put("bad", 13)
        await world.put_and_copy("good", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert (letter.row, letter.error) == (b"bad", said)


async def test_the_log_line_of_the_last_failed_attempt_names_the_dead_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @observes(source, name="failing", attempts=2)
    async def failing(tx: Any, row: str) -> None:
        raise ValueError("no")

    async with observed() as world, world.db.run_observers([failing]):
        await world.put("bad", 13)
        await world.until_nothing_waits()
    said = [one.getMessage() for one in caplog.records]
    first, last = [line for line in said if line.startswith("observer failing failed")]
    assert first.endswith("attempt 1 of 2: ValueError: no")
    assert last.endswith("attempt 2 of 2, and the change becomes a dead letter: ValueError: no")


async def test_a_worker_stops_even_if_an_observer_ignores_cancellation(world: Observed) -> None:
    may_end = asyncio.Event()

    @observes(source, name="deaf")
    async def deaf(tx: Any, row: str) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    worker = world.db.run_observers([deaf])
    await worker.start()
    await world.put("a", 1)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10.0):
        assert not await worker.stop(drain_seconds=0.5)
    may_end.set()
    await asyncio.sleep(0.1)


async def test_deletions_are_gathered_while_there_is_more_work(world: Observed) -> None:
    await register(world.context, [copying])
    await world.put("a", 1)
    work = await world.work_for(copying)
    batches: list[int] = []

    class Counting:
        async def forget(self, handled: Any, deadline: float) -> None:
            batches.append(len(handled))

    counting: Any = Counting()
    more = True
    context = replace(world.context, notifications=counting)
    deletions = Deletions(context, more_to_come=lambda: more)
    for _ in range(50):
        deletions.add(work, [1])
        await asyncio.sleep(0.01)
    assert 4 <= len(batches) <= 5
    for _ in range(5_000):
        deletions.add(work, [1])
    await asyncio.sleep(0.05)
    assert max(batches) == 1_024, "full batches do not wait"
    more = False
    await deletions.done(0.05)
    assert sum(batches) == 5_050


async def test_deletions_that_are_not_answered_do_not_hold_up_stopping(world: Observed) -> None:
    await register(world.context, [copying])
    await world.put("a", 1)
    work = await world.work_for(copying)
    background = world.context.env.background

    class NoAnswer:
        async def forget(self, handled: Any, deadline: float) -> None:
            await asyncio.sleep(10.0)

    silent: Any = NoAnswer()
    deletions = Deletions(replace(world.context, notifications=silent))
    for _ in range(5_000):
        deletions.add(work, sorted(work.timestamps))
    async with asyncio.timeout(2.0):
        await deletions.done(1.0)
    await background.drain(11.0)
    assert deletions._sending is None
