"""Transactions of several processes, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from percolator import aio
from percolator.aio.shared import Receipt, Ticket
from percolator.blocking.loop_thread import LoopCalls
from percolator.schema import Column
from percolator.timestamps import Timestamp

K = TypeVar("K")
R = TypeVar("R")
T = TypeVar("T")


class SharedTransaction:
    """The driver's side of a shared transaction. Leaving its block without a commit aborts it.

    >>> with db.shared_transaction() as whole:
    ...     receipts = [write(whole.ticket, n) for n in range(10)]
    ...     whole.commit(receipts)
    """

    def __init__(self, loop_thread: LoopCalls, whole: aio.SharedTransaction) -> None:
        self._loop_thread = loop_thread
        self._whole = whole

    @property
    def ticket(self) -> Ticket:
        """Pass it to the processes that take part."""
        return self._whole.ticket

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """Set by a commit that wrote something."""
        return self._whole.commit_timestamp

    def commit(
        self, receipts: Sequence[Receipt], *, timeout: float | None = None
    ) -> Timestamp | None:
        """Makes everything that these attempts wrote visible at once; nothing else ever will be.

        Returns the commit timestamp, or None if nothing was written. Raises `ConflictError` if a
        part was rolled back (then nothing is committed, and the tasks have to run again), and
        `OutcomeUnknown` if it cannot find out: then the same call may be repeated.
        """
        return self._loop_thread.call(partial(self._whole.commit, receipts, timeout=timeout))

    def call_inside(self, body: Callable[..., Awaitable[R]], *arguments: object) -> R:
        """Runs a coroutine function with the asynchronous namesake of this, in one trip to the
        loop. For other parts of the library: the body must not block."""
        return self._loop_thread.call(partial(body, self._whole, *arguments))

    def abort(self, *, timeout: float | None = None) -> Timestamp | None:
        """Rolls everything back. If the transaction turns out to be committed, nothing is undone,
        and its commit timestamp is returned."""
        return self._loop_thread.call(partial(self._whole.abort, timeout=timeout))

    def __enter__(self) -> SharedTransaction:
        # Not `abort`: without an answer, that keeps it alive, to be repeated.
        self._loop_thread.call(self._whole.begin, partial(self._whole.__aexit__, None, None, None))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop_thread.call(partial(self._whole.__aexit__, kind, error, traceback))


class Share:
    """What one attempt at one task writes. Leaving its block without `finish` rolls it back.

    >>> with db.share(ticket, task="7") as share:
    ...     share.set("bob", balance, 10)
    ...     receipt = share.finish()
    """

    def __init__(self, loop_thread: LoopCalls, share: aio.Share) -> None:
        self._loop_thread = loop_thread
        self._share = share

    def set(self, row: K, column: Column[T, K], value: T) -> None:
        """Writes a value. It is locked now or later, and visible when the driver has committed."""
        self._loop_thread.call(partial(self._share.set, row, column, value))

    def delete(self, row: K, column: Column[Any, K]) -> None:
        """Deletes the cell, if it exists."""
        self._loop_thread.call(partial(self._share.delete, row, column))

    def finish(self) -> Receipt:
        """Locks what is left, and returns what the driver needs to commit it. Nothing can be
        written afterwards. Raises `ConflictError` if another attempt has replaced this one."""
        return self._loop_thread.call(self._share.finish)

    def abandon(self) -> None:
        """Rolls back what it has locked."""
        self._loop_thread.call(self._share.abandon)

    def __enter__(self) -> Share:
        self._loop_thread.call(self._share.begin, self._share.abandon)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop_thread.call(partial(self._share.__aexit__, kind, error, traceback))
