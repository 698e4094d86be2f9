"""Calls of threads that are woken together are started together, and none waits for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

import pytest

from percolator.blocking import rounds
from percolator.blocking.loop_thread import LoopCalls, Pending
from percolator.blocking.rounds import Caller, Rounds
from tests.simulation.virtual_time import run_virtually

LONG = 1.0
"""A time longer than any round."""


class _Rounds:
    """Rounds in virtual time. Records when calls were started because the time was over."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.rounds = Rounds(self._loop, self._note, self._loop.time)
        self.started: list[float] = []

    def _note(self) -> None:
        self.started.append(self._loop.time())

    def caller(self) -> Caller:
        """A thread that has always called again at once."""
        caller = Caller()
        for _ in range(rounds.TRUSTED_AFTER):
            assert not self.is_waited_for(caller)
            self.rounds.back(caller)
        return caller

    def callers(self, count: int) -> list[Caller]:
        return [self.caller() for _ in range(count)]

    def is_waited_for(self, caller: Caller) -> bool:
        """Whether the loop waits for a thread that is woken now, while a call waits."""
        self.rounds.begin([caller], 1)
        return caller in self.rounds.missing


def _virtually(work: Callable[[_Rounds], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(_Rounds())

    run_virtually(main())


def test_a_round_lasts_until_all_threads_woken_before_or_in_it_have_called() -> None:
    async def work(it: _Rounds) -> None:
        first, second, third = it.callers(3)
        it.rounds.begin([first, second], 0)
        it.rounds.back(first)
        it.rounds.begin([third], 1)
        it.rounds.back(second)
        assert it.rounds.missing
        it.rounds.back(third)
        assert not it.rounds.missing

    _virtually(work)


def test_the_loop_does_not_wait_for_a_lone_thread() -> None:
    """Its call could not be sent along with others, and it may be busy for long."""

    async def work(it: _Rounds) -> None:
        it.rounds.begin(it.callers(1), 0)
        assert not it.rounds.missing

    _virtually(work)


def test_calls_are_started_when_the_time_of_the_round_is_over() -> None:
    async def work(it: _Rounds) -> None:
        it.rounds.begin(it.callers(10), 0)
        await asyncio.sleep(LONG)
        assert it.started == [rounds.ROUND_SECONDS + 10 * rounds.ROUND_SECONDS_PER_THREAD]
        assert not it.rounds.missing

    _virtually(work)


def test_a_thread_woken_during_a_round_prolongs_it_only_by_its_own_turn() -> None:
    """Otherwise threads that are woken one after another would keep the first waiting forever."""

    async def work(it: _Rounds) -> None:
        it.rounds.begin(it.callers(2), 0)
        for caller in it.callers(3):
            await asyncio.sleep(rounds.ROUND_SECONDS / 4)
            it.rounds.begin([caller], 0)
        await asyncio.sleep(LONG)
        expected = rounds.ROUND_SECONDS + 5 * rounds.ROUND_SECONDS_PER_THREAD
        assert it.started == [pytest.approx(expected)]

    _virtually(work)


def test_a_complete_round_starts_nothing_when_its_time_would_have_ended() -> None:
    async def work(it: _Rounds) -> None:
        callers = it.callers(2)
        it.rounds.begin(callers, 0)
        for caller in callers:
            it.rounds.back(caller)
        await asyncio.sleep(LONG)
        assert it.started == []

    _virtually(work)


@pytest.mark.parametrize("former", [2, 1_000])
def test_the_time_of_a_round_does_not_depend_on_the_one_before(former: int) -> None:
    async def work(it: _Rounds) -> None:
        callers = it.callers(former)
        it.rounds.begin(callers, 0)
        for caller in callers:
            it.rounds.back(caller)
        await asyncio.sleep(rounds.ROUND_SECONDS / 2)
        it.rounds.begin(callers[:2], 0)
        await asyncio.sleep(LONG)
        expected = 1.5 * rounds.ROUND_SECONDS + 2 * rounds.ROUND_SECONDS_PER_THREAD
        assert it.started == [pytest.approx(expected)]

    _virtually(work)


def test_the_loop_waits_for_a_late_thread_again_after_several_calls_in_time() -> None:
    async def work(it: _Rounds) -> None:
        caller = it.caller()
        assert it.is_waited_for(caller)
        await asyncio.sleep(LONG)
        it.rounds.back(caller)
        for _ in range(rounds.TRUSTED_AFTER):
            assert not it.is_waited_for(caller)
            it.rounds.back(caller)
        assert it.is_waited_for(caller)

    _virtually(work)


def test_a_thread_is_late_even_if_the_time_of_the_loop_stands_still() -> None:
    """As that of uvloop does while the loop waits."""

    async def work(it: _Rounds) -> None:
        now = 0.0
        rounds_of_the_loop = Rounds(asyncio.get_running_loop(), lambda: None, lambda: now)
        caller = it.caller()
        rounds_of_the_loop.begin([caller], 1)
        now = LONG
        rounds_of_the_loop.back(caller)
        assert not it.is_waited_for(caller)

    _virtually(work)


def test_the_loop_never_waits_for_a_thread_that_is_late_after_every_other_call() -> None:
    """Such a thread may, for instance, compute what it writes from what it has read."""

    async def work(it: _Rounds) -> None:
        caller = Caller()
        for _ in range(10):
            assert not it.is_waited_for(caller)
            await asyncio.sleep(LONG)
            it.rounds.back(caller)
            assert not it.is_waited_for(caller)
            it.rounds.back(caller)

    _virtually(work)


def test_the_loop_waits_for_some_threads_while_it_does_not_wait_for_another() -> None:
    async def work(it: _Rounds) -> None:
        trusted, unknown = it.callers(2), Caller()
        it.rounds.begin([unknown, *trusted], 0)
        assert it.rounds.missing == set(trusted)
        it.rounds.back(unknown)
        assert it.rounds.missing == set(trusted)

    _virtually(work)


# ---------------------------------------------------------------------------- with threads


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A separate loop, since threads of other tests may disturb the rounds of the shared one."""
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
    """Lets all through in the same turn of the loop, once a given number have arrived."""

    def __init__(self, threads: int) -> None:
        self._left = threads
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        self._left -= 1
        if not self._left:
            self._open.set()
        await self._open.wait()


class _Turns:
    """Counts the calls started in each turn of the loop that started any."""

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


class _Threads:
    """Threads that the loop waits for, and that pass through a gate in the same turn of it."""

    def __init__(self, calls: LoopCalls, threads: int) -> None:
        self._calls = calls
        self._one_by_one = threading.Lock()
        self._all_trusted = threading.Barrier(threads)
        self._gate = _Gate(threads)

    def are_woken_together(self) -> None:
        """Called in each of the threads."""
        with self._one_by_one:
            for _ in range(rounds.TRUSTED_AFTER + 1):
                self._calls.call(_nothing)
        self._all_trusted.wait(30.0)
        self._calls.call(self._gate.pass_through)


async def _nothing() -> None:
    pass


def test_threads_woken_in_one_turn_have_their_next_calls_started_in_one_turn(
    loop: asyncio.AbstractEventLoop, calls: LoopCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "ROUND_SECONDS", 60.0)
    count = 4
    threads, turns = _Threads(calls, count), _Turns()
    called = [threading.Event() for _ in range(count + 1)]
    called[0].set()

    def work(number: int) -> None:
        threads.are_woken_together()
        called[number].wait(30.0)
        # A loop that does not wait would have started this call long before, alone.
        loop.call_soon_threadsafe(loop.call_later, 0.01, called[number + 1].set)
        calls.call(turns.note)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    assert turns.calls == [count]


def test_a_thread_that_does_not_call_again_holds_up_others_only_briefly(calls: LoopCalls) -> None:
    threads, turns = _Threads(calls, 2), _Turns()
    back = threading.Event()

    def calls_again() -> None:
        threads.are_woken_together()
        calls.call(turns.note)
        back.set()

    def waits_for_the_other() -> bool:
        threads.are_woken_together()
        return back.wait(30.0)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(calls_again)
        assert pool.submit(waits_for_the_other).result()


def test_each_call_runs_in_the_context_of_its_thread_though_others_are_started_with_it(
    loop: asyncio.AbstractEventLoop, calls: LoopCalls
) -> None:
    """Otherwise a transaction of one thread would pass for an inner one of another thread."""
    whose, both_wait = ContextVar("whose", default="nobody's"), threading.Event()
    loop.call_soon_threadsafe(both_wait.wait)

    async def name() -> str:
        return whose.get()

    def work(own: str) -> Pending[str]:
        whose.set(own)
        return calls.start(name)

    pending = [copy_context().run(work, own) for own in ("first", "second")]
    both_wait.set()
    assert [one.wait() for one in pending] == ["first", "second"]
