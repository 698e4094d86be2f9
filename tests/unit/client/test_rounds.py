"""Threads that are woken together are heard together; and nobody waits for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from percolator import rounds
from percolator.loop_thread import LoopCalls
from percolator.rounds import Rounds
from percolator.testing.virtual_time import run_virtually

LONG = 1.0
"""Longer than any round."""


class _Rounds:
    """Rounds on virtual time, and when calls were started because the time was over."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.rounds = Rounds(self._loop, self._note)
        self.started: list[float] = []

    def _note(self) -> None:
        self.started.append(self._loop.time())

    async def in_vain(self) -> None:
        """A round that nobody completes."""
        self.rounds.begin(2, 0)
        assert self.rounds.awaited
        await asyncio.sleep(LONG)

    def wakes_without_a_round(self) -> int:
        """How many, until one begins a round again. Completes that."""
        wakes = 0
        self.rounds.begin(2, 0)
        while not self.rounds.awaited:
            wakes += 1
            self.rounds.begin(2, 0)
        self.rounds.complete()
        return wakes


def _virtually(work: Callable[[_Rounds], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(_Rounds())

    run_virtually(main())


def test_a_round_awaits_those_that_are_woken_and_those_that_wait_already() -> None:
    async def work(it: _Rounds) -> None:
        it.rounds.begin(5, 2)
        assert it.rounds.awaited == 7
        it.rounds.begin(3, 4)  # the four are some of the seven
        assert it.rounds.awaited == 10
        it.rounds.complete()
        assert it.rounds.awaited == 0

    _virtually(work)


def test_a_lone_thread_begins_no_round() -> None:
    """It may be away for long; others that call meanwhile need not wait for it."""

    async def work(it: _Rounds) -> None:
        it.rounds.begin(1, 0)
        assert it.rounds.awaited == 0

    _virtually(work)


def test_calls_are_started_when_the_time_of_the_round_is_over() -> None:
    async def work(it: _Rounds) -> None:
        it.rounds.begin(9, 1)
        await asyncio.sleep(LONG)
        assert it.started == [rounds.ROUND_SECONDS + 10 * rounds.ROUND_SECONDS_PER_THREAD]
        assert it.rounds.awaited == 0

    _virtually(work)


def test_whoever_is_woken_during_a_round_prolongs_it_only_by_a_turn_of_its_own() -> None:
    """Else threads that are woken one after the other would keep the first waiting for ever."""

    async def work(it: _Rounds) -> None:
        it.rounds.begin(2, 0)
        for _ in range(3):
            await asyncio.sleep(rounds.ROUND_SECONDS / 4)
            it.rounds.begin(1, 0)
        await asyncio.sleep(LONG)
        expected = rounds.ROUND_SECONDS + 5 * rounds.ROUND_SECONDS_PER_THREAD
        assert it.started == [pytest.approx(expected)]

    _virtually(work)


def test_a_complete_round_starts_nothing_when_its_time_would_have_been_over() -> None:
    async def work(it: _Rounds) -> None:
        it.rounds.begin(2, 0)
        it.rounds.complete()
        await asyncio.sleep(LONG)
        assert it.started == []

    _virtually(work)


@pytest.mark.parametrize("former", [2, 1_000])
def test_a_round_has_its_own_time_whatever_the_one_before_was_given(former: int) -> None:
    async def work(it: _Rounds) -> None:
        it.rounds.begin(former, 0)
        it.rounds.complete()
        await asyncio.sleep(rounds.ROUND_SECONDS / 2)
        it.rounds.begin(2, 0)
        await asyncio.sleep(LONG)
        expected = 1.5 * rounds.ROUND_SECONDS + 2 * rounds.ROUND_SECONDS_PER_THREAD
        assert it.started == [pytest.approx(expected)]

    _virtually(work)


def test_threads_that_do_not_come_back_are_waited_for_more_and_more_seldom() -> None:
    async def work(it: _Rounds) -> None:
        for expected in (1, 2, 4, 8, 16, 32, 64, 64):
            await it.in_vain()
            for _ in range(expected):
                it.rounds.begin(2, 0)
                assert it.rounds.awaited == 0

    _virtually(work)


def test_a_complete_round_restores_the_trust() -> None:
    async def work(it: _Rounds) -> None:
        await it.in_vain()
        it.wakes_without_a_round()
        await it.in_vain()
        assert it.wakes_without_a_round() == 1

    _virtually(work)


# ---------------------------------------------------------------------------- with threads


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of its own, since the shared one's rounds may be in vain."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def calls(loop: asyncio.AbstractEventLoop) -> LoopCalls:
    return LoopCalls(loop, None)


class _Gate:
    """Lets everybody through in the same turn of the loop, once so many have come."""

    def __init__(self, threads: int) -> None:
        self._left = threads
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        self._left -= 1
        if not self._left:
            self._open.set()
        await self._open.wait()


class _Turns:
    """How many calls were started in each turn of the loop that started any."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self._current = 0

    async def note(self) -> None:
        if not self._current:
            asyncio.get_running_loop().call_soon(self._end)
        self._current += 1

    def _end(self) -> None:
        self.calls.append(self._current)
        self._current = 0


def test_threads_woken_in_one_turn_have_their_next_calls_started_in_one_turn(
    loop: asyncio.AbstractEventLoop, calls: LoopCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 60.0)
    threads, gate, turns = 4, _Gate(4), _Turns()
    in_turn = threading.Lock()

    def work(_: int) -> None:
        calls.call(gate.pass_through)
        with in_turn:
            noted = calls.start(turns.note)
            looked = threading.Event()
            loop.call_soon_threadsafe(looked.set)  # after whatever the call has woken it for
            looked.wait(30.0)
        noted.wait()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert turns.calls == [threads]


def test_a_thread_that_does_not_call_again_holds_up_nobody_for_good(calls: LoopCalls) -> None:
    gate, turns = _Gate(2), _Turns()
    back = threading.Event()

    def calls_again() -> None:
        calls.call(gate.pass_through)
        calls.call(turns.note)
        back.set()

    def waits_for_the_other() -> bool:
        calls.call(gate.pass_through)
        return back.wait(30.0)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(calls_again)
        assert pool.submit(waits_for_the_other).result()


def test_what_nobody_waits_for_is_not_counted_as_a_thread_that_will_call(
    calls: LoopCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a page that was fetched ahead: whoever uses it is busy with the one before."""
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 60.0)
    gate, turns = _Gate(3), _Turns()
    ahead = [calls.start(gate.pass_through) for _ in range(2)]
    calls.call(gate.pass_through)
    calls.call(turns.note)  # a round of three would have to be waited for
    for page in ahead:
        page.wait()
