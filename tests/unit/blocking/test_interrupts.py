"""What has just begun when an interrupt comes is ended: nobody else could do that."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import percolator.testing
from percolator import Database, Table, aio, codecs, observes
from percolator.aio import shared
from percolator.blocking import loop_thread
from percolator.blocking.loop_thread import Pending
from percolator.blocking.rounds import Caller
from percolator.observers.worker import Worker

balance = Table("accounts").column("balance", codecs.integer)
TICKET = percolator.Ticket(1, b"row", 0, 15.0, 1)


@observes(balance)
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
    percolator_db.create_table(balance.table)
    tx = percolator_db.transaction()
    tx.set("bob", balance, 10)
    with _interrupted_once_sent(percolator_db, monkeypatch), pytest.raises(KeyboardInterrupt):
        tx.commit()
    assert tx.outcome is percolator.Outcome.ABORTED
    assert percolator_db.get("bob", balance) is None


def test_rows_of_a_bulk_write_that_is_interrupted_before_it_waits_are_not_written_later(
    percolator_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call of the program woke the loop, which found these rows, too."""
    percolator_db.create_table(balance.table)

    class InterruptedOnce(deque[Pending[Any]]):
        is_over = False

        def append(self, pending: Pending[Any]) -> None:
            super().append(pending)
            if not self.is_over:
                self.is_over = True
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(percolator_db._loop_thread, "_calls", InterruptedOnce())
    with pytest.raises(KeyboardInterrupt):
        percolator_db.set_many([("bob", {balance: 10})])
    assert percolator_db.get("bob", balance) is None


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
    """Nobody has it: its session would be renewed for as long as the program runs."""
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
    rounds = database._loop_thread._rounds

    def interrupted(caller: Caller) -> None:
        patch.undo()
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "back", interrupted)
        yield


async def _interrupted() -> None:
    """Interrupts the main thread, and never returns."""
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    await asyncio.get_running_loop().create_future()
