"""Observers that do their worst: nothing else waits for them, and the worker keeps running."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from percolator import observes
from percolator.observers.registration import register
from percolator.observers.runs import Deletions
from percolator.observers.worker import WorkerLimits

from .observed_cluster import copy, observed, source


@observes(source, name="copying")
async def copying(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


@observes(source, name="hanging", deadline=3600.0, concurrency=1)
async def hanging(tx: Any, row: str) -> None:
    await asyncio.Event().wait()


async def test_an_observer_with_more_work_than_there_is_room_for_holds_up_no_other() -> None:
    async with observed() as world:
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
    fail: Callable[[], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    # A process of tests cannot tell the others of a log with half a surrogate pair, and ends.
    caplog.set_level(logging.CRITICAL, "percolator")

    @observes(source, name="failing", attempts=2, concurrency=1)
    async def failing(tx: Any, row: str) -> None:
        if await tx.get(row, source) == 13:
            fail()
        await tx.set(row, copy, 1)

    async with observed() as world, world.db.run_observers([failing]):
        await world.put("bad", 13)
        await world.put("good", 1)
        await world.until_copied("good", 1)
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


async def test_a_worker_stops_even_if_an_observer_ignores_cancellation() -> None:
    may_end = asyncio.Event()

    @observes(source, name="deaf")
    async def deaf(tx: Any, row: str) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with observed() as world:
        worker = world.db.run_observers([deaf])
        await worker.start()
        await world.put("a", 1)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(10.0):
            assert not await worker.stop(drain_seconds=0.5)
        may_end.set()
        await asyncio.sleep(0.1)


async def test_deletions_that_are_not_answered_do_not_hold_up_stopping() -> None:
    async with observed() as world:
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
