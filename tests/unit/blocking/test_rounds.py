"""Calls of threads that are woken together are started together, and none waits for long."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any

import pytest

import percolator.testing
from percolator import Database, Table, Transaction, aio, codecs, observes, transactional
from percolator.aio import shared
from percolator.blocking import loop_thread
from percolator.blocking.loop_thread import Caller, LoopCalls, Pending, Rounds
from percolator.observers.worker import Worker
from percolator.protocol.contention import GRANT_SECONDS, HotCells
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
        for _ in range(loop_thread.TRUSTED_AFTER):
            assert not self.is_waited_for(caller)
            self.rounds.back(caller)
        return caller

    def callers(self, count: int) -> list[Caller]:
        return [self.caller() for _ in range(count)]

    def is_waited_for(self, caller: Caller) -> bool:
        """True if the loop waits for a thread that is woken now, while a call waits."""
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
        assert it.started == [loop_thread.ROUND_SECONDS + 10 * loop_thread.ROUND_SECONDS_PER_THREAD]
        assert not it.rounds.missing

    _virtually(work)


def test_a_thread_woken_during_a_round_prolongs_it_only_by_its_own_turn() -> None:
    """Otherwise threads that are woken one after another would keep the first waiting forever."""

    async def work(it: _Rounds) -> None:
        it.rounds.begin(it.callers(2), 0)
        for caller in it.callers(3):
            await asyncio.sleep(loop_thread.ROUND_SECONDS / 4)
            it.rounds.begin([caller], 0)
        await asyncio.sleep(LONG)
        expected = loop_thread.ROUND_SECONDS + 5 * loop_thread.ROUND_SECONDS_PER_THREAD
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
        await asyncio.sleep(loop_thread.ROUND_SECONDS / 2)
        it.rounds.begin(callers[:2], 0)
        await asyncio.sleep(LONG)
        expected = 1.5 * loop_thread.ROUND_SECONDS + 2 * loop_thread.ROUND_SECONDS_PER_THREAD
        assert it.started == [pytest.approx(expected)]

    _virtually(work)


def test_the_loop_waits_for_a_late_thread_again_after_several_calls_in_time() -> None:
    async def work(it: _Rounds) -> None:
        caller = it.caller()
        assert it.is_waited_for(caller)
        await asyncio.sleep(LONG)
        it.rounds.back(caller)
        for _ in range(loop_thread.TRUSTED_AFTER):
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
            for _ in range(loop_thread.TRUSTED_AFTER + 1):
                self._calls.call(_nothing)
        self._all_trusted.wait(30.0)
        self._calls.call(self._gate.pass_through)


async def _nothing() -> None:
    pass


def test_threads_woken_in_one_turn_have_their_next_calls_started_in_one_turn(
    loop: asyncio.AbstractEventLoop, calls: LoopCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_thread, "ROUND_SECONDS", 60.0)
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


# Threads that fight over one cell take turns there.

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)

THREADS = 20
INCREMENTS = 200
_SECONDS = 5.0


def hot_cells(db: Database) -> HotCells:
    return db._asynchronous.internal.engine.env.hot_cells


def until_none_is_hot(db: Database) -> None:
    """Waits until the loop's thread has ended the last turn."""
    deadline = time.monotonic() + _SECONDS
    while len(hot_cells(db)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(hot_cells(db)) == 0


def test_a_storm_of_increments_costs_few_attempts(percolator_db: Database) -> None:
    db, attempts = percolator_db, list[str]()
    db.create_table(accounts)

    @transactional
    def increment(tx: Transaction, row: str) -> None:
        attempts.append(row)
        tx.set(row, balance, tx.get(row, balance, default=0) + 1)

    rows = [str(number % 5) for number in range(INCREMENTS)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda row: increment(db, row), rows))
    assert sum(row[balance] for row in db.snapshot().scan(accounts)) == INCREMENTS
    assert len(attempts) <= 2 * INCREMENTS
    until_none_is_hot(db)


@pytest.mark.filterwarnings("ignore:a transaction is run inside of another one")
def test_a_function_that_calls_itself_in_its_turn_does_not_wait_behind_itself(
    percolator_db: Database,
) -> None:
    db, inner_calls = percolator_db, list[int]()
    db.create_table(accounts)

    @transactional
    def recursive(tx: Transaction, *, is_inner: bool) -> None:
        value = tx.get("bob", balance, default=0)
        if not is_inner and len(inner_calls) < 2:
            inner_calls.append(len(hot_cells(db)))
            began = time.monotonic()
            recursive(db, is_inner=True)
            assert time.monotonic() - began < GRANT_SECONDS / 2
        tx.set("bob", balance, value + 1)

    recursive(db, is_inner=False)
    assert inner_calls == [0, 1]
    until_none_is_hot(db)


def test_a_function_that_fails_in_its_turn_lets_the_next_go(percolator_db: Database) -> None:
    db, attempts = percolator_db, list[int]()
    db.create_table(accounts)

    def fail_at_last(tx: Transaction) -> None:
        value = tx.get("bob", balance, default=0)
        attempts.append(value)
        if len(attempts) == 1:
            with db.transaction() as other:
                other.set("bob", balance, value + 10)
        else:
            assert len(hot_cells(db)) == 1
            raise ValueError("a mistake of the program")
        tx.set("bob", balance, value + 1)

    with pytest.raises(ValueError, match="a mistake"):
        db.run(fail_at_last)
    assert attempts == [0, 10]
    until_none_is_hot(db)


# What has just begun when an interrupt comes is ended: nobody else could do that.

account_balance = Table("accounts").column("balance", codecs.integer)
TICKET = percolator.Ticket(1, b"row", 0, 15.0, 1)


@observes(account_balance)
async def nothing(tx: aio.Transaction, row: str) -> None:
    """An observer."""


@pytest.mark.parametrize(
    ("kind", "begin", "end", "block"),
    [
        (aio.Pin, "set", "close", lambda db: db.pin()),
        (aio.SharedTransaction, "begin", "abort", lambda db: db.shared_transaction()),
        (aio.Share, "begin", "abandon", lambda db: db.share(TICKET, task="1")),
        (Worker, "start", "stop", lambda db: db.run_observers([nothing])),
    ],
)
def test_an_interrupt_on_entering_a_block_ends_what_has_just_begun(
    percolator_db: Database,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    begin: str,
    end: str,
    block: Any,
) -> None:
    ended = threading.Event()

    async def begun_at_that_moment(_: object) -> None:
        with suppress(asyncio.CancelledError):
            await _interrupted()

    async def ends(_: object, **_more: object) -> float:
        ended.set()
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(kind, begin, begun_at_that_moment)
        patch.setattr(kind, end, ends)
        with pytest.raises(KeyboardInterrupt), block(percolator_db):
            pass
        assert ended.wait(5.0)


def test_an_interrupt_before_it_waits_for_a_block_to_begin_ends_that_block_all_the_same(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that begins it has left already: the loop runs it, whoever waits."""
    ended = threading.Event()

    async def ends(_whole: aio.SharedTransaction, *_exception: object) -> None:
        ended.set()

    monkeypatch.setattr(aio.SharedTransaction, "__aexit__", ends)
    whole = percolator_db.shared_transaction()
    with _interrupted_once_sent(percolator_db, monkeypatch), pytest.raises(KeyboardInterrupt):
        whole.__enter__()
    assert ended.wait(5.0)


def test_a_commit_that_is_interrupted_before_it_waits_has_an_outcome_and_does_not_happen_later(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    percolator_db.create_table(account_balance.table)
    tx = percolator_db.transaction()
    tx.set("bob", account_balance, 10)
    with _interrupted_once_sent(percolator_db, monkeypatch), pytest.raises(KeyboardInterrupt):
        tx.commit()
    assert tx.outcome is percolator.Outcome.ABORTED
    assert percolator_db.get("bob", account_balance) is None


def test_rows_of_a_bulk_write_that_is_interrupted_before_it_waits_are_not_written_later(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call of the program woke the loop, which found these rows, too."""
    percolator_db.create_table(account_balance.table)

    class InterruptedOnce(deque[Pending[Any]]):
        is_over = False

        def append(self, pending: Pending[Any]) -> None:
            super().append(pending)
            if not self.is_over:
                self.is_over = True
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(percolator_db._loop_thread, "_calls", InterruptedOnce())
    with pytest.raises(KeyboardInterrupt):
        percolator_db.set_many([("bob", {account_balance: 10})])
    assert percolator_db.get("bob", account_balance) is None


def test_an_interrupt_that_comes_together_with_the_result_is_not_held_up(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(pending: Pending[Any]) -> None:
        pending._done.acquire()
        raise KeyboardInterrupt

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(loop_thread, "GIVE_UP_SECONDS", 20.0)
        patch.setattr(Pending, "wait_for_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            percolator_db.timestamp()
    assert time.monotonic() - began < 10.0


def test_a_database_that_has_just_been_connected_when_an_interrupt_comes_is_closed() -> None:
    """The program never gets it, and its session would be renewed for as long as the program
    runs."""
    opened: list[aio.Database] = []

    async def connected_at_that_moment() -> aio.Database:
        opened.append(await percolator.testing.connect_async())
        with suppress(asyncio.CancelledError):
            await _interrupted()
        return opened[0]

    with pytest.raises(KeyboardInterrupt):
        Database.over(connected_at_that_moment)
    engine = opened[0].internal.engine
    closed = asyncio.run_coroutine_threadsafe(engine._all_is_closed.wait(), engine.loop)
    assert closed.result(timeout=10.0)


def test_a_shared_transaction_that_cannot_be_rolled_back_after_an_interrupt_is_left_to_expire(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept alive, its parts would lock out others for as long as the program runs."""
    begin, wholes, tried = aio.SharedTransaction.begin, list[Any](), threading.Event()

    async def begun_at_that_moment(whole: aio.SharedTransaction) -> None:
        await begin(whole)
        wholes.append(whole)
        with suppress(asyncio.CancelledError):
            await _interrupted()

    async def unreachable(*_: object) -> int:
        tried.set()
        raise percolator.Unavailable("no answer")

    monkeypatch.setattr(aio.SharedTransaction, "begin", begun_at_that_moment)
    monkeypatch.setattr(aio.SharedTransaction, "_abort", unreachable)
    with pytest.raises(KeyboardInterrupt), percolator_db.shared_transaction():
        pass
    assert tried.wait(5.0)
    percolator_db.timestamp()  # whatever the loop had to do for the interrupt is done
    assert [whole._ended for whole in wholes] == ["was left to expire"]


def test_a_shared_transaction_whose_beginning_was_interrupted_can_be_entered_again(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = percolator_db.shared_transaction()

    async def unanswered(*_: object) -> percolator.Ticket:
        await _interrupted()
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(shared, "new_ticket", unanswered)
        with pytest.raises(KeyboardInterrupt):
            whole.__enter__()
    with whole:
        percolator_db.timestamp()  # whatever the loop had to do for the interrupt is done
        assert whole.commit([]) is None


def test_an_interrupt_while_a_pin_is_released_releases_it_all_the_same(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    calls = iter([_interrupted])

    async def close(pin: aio.Pin) -> None:
        for call in calls:
            await call()
        released.set()

    monkeypatch.setattr(aio.Pin, "close", close)
    with pytest.raises(KeyboardInterrupt):
        percolator_db.pin().close()
    assert released.wait(5.0)


@contextmanager
def _interrupted_once_sent(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interrupt comes when the next call has been sent to the loop, and before it waits."""
    loop_thread = database._loop_thread._rounds

    def interrupted(caller: Caller) -> None:
        patch.undo()
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop_thread, "back", interrupted)
        yield


async def _interrupted() -> None:
    """Interrupts the main thread, and never returns."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    await asyncio.get_running_loop().create_future()
