"""Threads that wait for the disk: results, errors, equal shares, and an orderly end."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from operator import floordiv

import pytest

from percolator.services.chassis import files
from percolator.services.chassis.files import DiskThreads

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


async def test_a_cancelled_caller_does_not_harm_others() -> None:
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


async def test_a_stuck_call_holds_up_no_other_where_shares_are_single_calls() -> None:
    gate = threading.Event()
    with DiskThreads(2, "test", share_max=1) as threads:
        stuck = threads.run(lambda: gate.wait(10))
        assert await asyncio.gather(*(threads.run(partial(int, n)) for n in range(20)))
        assert not stuck.done()
        gate.set()
        assert await stuck


async def test_another_thread_takes_the_place_of_those_that_are_all_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "STUCK_SECONDS", 0.01)
    gate = threading.Event()
    with DiskThreads(1, "test", threads_max=3, share_max=1) as threads:
        stuck = [threads.run(lambda: gate.wait(10)) for _ in range(2)]
        assert await threads.run(lambda: 7) == 7
        gate.set()
        assert await asyncio.gather(*stuck) == [True, True]


async def test_a_stuck_thread_is_left_behind_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CLOSE_SECONDS", 0.01)
    gate = threading.Event()
    threads = DiskThreads(1, "test")
    stuck = threads.run(gate.wait)
    await asyncio.sleep(0)
    threads.close()
    assert not stuck.done()
    gate.set()
    assert await stuck
