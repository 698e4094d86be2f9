"""Threads that wait for the disk: results, errors, equal shares, and an orderly end."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from operator import floordiv

import pytest

from services.tabletserver.disk_threads import DiskThreads

pytestmark = pytest.mark.real_time


async def test_every_job_has_its_own_result_or_error() -> None:
    with DiskThreads(2, "test") as threads:
        results = await asyncio.gather(
            *(threads.run(partial(floordiv, 10, n)) for n in (5, 0, 2)), return_exceptions=True
        )
    assert results[0] == 2
    assert isinstance(results[1], ZeroDivisionError)
    assert results[2] == 5


async def test_what_one_round_asks_for_is_dealt_out_to_all_threads_in_order() -> None:
    done: dict[str, list[int]] = {}
    both = threading.Barrier(2)

    def job(number: int) -> None:
        name = threading.current_thread().name
        if name not in done:
            both.wait(10)
        done.setdefault(name, []).append(number)

    with DiskThreads(2, "test") as threads:
        await asyncio.gather(*(threads.run(partial(job, n)) for n in range(8)))
    assert sorted(done.values()) == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_what_is_asked_for_while_all_are_busy_is_done_afterwards() -> None:
    gate = threading.Event()
    with DiskThreads(1, "test") as threads:
        first = threads.run(lambda: gate.wait(10))
        await asyncio.sleep(0)
        rest = [threads.run(partial(int, n)) for n in range(3)]
        await asyncio.sleep(0)
        assert not any(future.done() for future in rest)
        gate.set()
        assert await first
        assert await asyncio.gather(*rest) == [0, 1, 2]


async def test_a_caller_that_went_away_harms_nobody() -> None:
    gate = threading.Event()
    with DiskThreads(1, "test") as threads:
        abandoned = threads.run(lambda: gate.wait(10))
        await asyncio.sleep(0)
        abandoned.cancel()
        gate.set()
        assert await threads.run(lambda: 7) == 7


async def test_closing_waits_for_what_was_given_out() -> None:
    finished = []
    with DiskThreads(1, "test") as threads:
        future = threads.run(lambda: finished.append(1))
        await asyncio.sleep(0)
    assert finished == [1]
    await future
