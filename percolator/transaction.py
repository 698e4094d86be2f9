"""A transaction, for programs without asyncio."""

from __future__ import annotations

import threading
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from percolator import aio
from percolator.aio import Outcome
from percolator.errors import UsageError
from percolator.loop_thread import LoopCalls
from percolator.schema import Column
from percolator.snapshot import BlockingReads
from percolator.timestamps import Timestamp

T = TypeVar("T")


class Transaction(BlockingReads):
    """Reads and writes that appear to happen at one instant.

    Writes are kept in the program until `commit`; leaving the block commits, an exception rolls
    back. It is one attempt: a `ConflictError` leaves the block. Use `@transactional` for functions
    that are run again. A transaction belongs to the thread that began it.

    >>> with db.transaction() as tx:
    ...     left = tx.get("bob", balance, default=0)
    ...     tx.set("bob", balance, left - 7)
    """

    joins_transactions = True
    """A `@transactional` function called with it joins it."""

    def __init__(self, loop_thread: LoopCalls, transaction: aio.Transaction) -> None:
        super().__init__(loop_thread, transaction)
        self._transaction = transaction
        self._thread = threading.get_ident()

    @property
    def outcome(self) -> Outcome:
        """Open, committed, aborted or unknown."""
        return self._transaction.outcome

    @property
    def start_timestamp(self) -> Timestamp | None:
        """The snapshot that it reads; None before the first read."""
        return self._transaction.start_timestamp

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """Set by a commit that wrote something."""
        return self._transaction.commit_timestamp

    def set(self, row: object, column: Column[T], value: T) -> None:
        """Writes a value. A value of no bytes is a value."""
        self._check()
        address = self._transaction.known_address(row, column)
        if address is None:
            self._loop_thread.call(partial(self._transaction.set, row, column, value))
        else:
            self._transaction.put(address, column, value)

    def delete(self, row: object, column: Column[Any]) -> None:
        """Removes the cell, if it is there."""
        self._check()
        address = self._transaction.known_address(row, column)
        if address is None:
            self._loop_thread.call(partial(self._transaction.delete, row, column))
        else:
            self._transaction.writes.delete(address)

    def lock(self, row: object, column: Column[Any]) -> None:
        """Conflicts with every other writer of the cell, without changing it.

        Snapshots allow *write skew*: two transactions that each read what the other one writes both
        commit. Locking what was read, and what the decision rests on, rules it out.
        """
        self._check()
        address = self._transaction.known_address(row, column)
        if address is None:
            self._loop_thread.call(partial(self._transaction.lock, row, column))
        else:
            self._transaction.writes.lock(address)

    def notify(self, row: object, column: Column[Any]) -> None:
        """Asks the column's weak observers to look at the row, once this is committed."""
        self._check()
        self._loop_thread.call(partial(self._transaction.notify, row, column))

    def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """Makes all writes visible at once; returns when that is durable.

        Returns the commit timestamp, or None when there was nothing to write: then nothing is sent.
        Raises `ConflictError` when another transaction was first, and `OutcomeUnknown` when it
        cannot tell.
        """
        self._check()
        return self._loop_thread.call(partial(self._transaction.commit, timeout=timeout))

    def rollback(self) -> None:
        """Forgets the writes. Nothing of them has left the program."""
        self._check_thread()
        self._transaction.rollback()

    def resolve(self, *, timeout: float | None = None) -> Outcome:
        """After `OutcomeUnknown`: finds out, by sending the very same commit again.

        Returns COMMITTED or ABORTED; raises `OutcomeUnknown` when still nobody answers.
        """
        self._check_thread()
        return self._loop_thread.call(partial(self._transaction.resolve, timeout=timeout))

    def __enter__(self) -> Transaction:
        self._check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._transaction.ended:
            return  # or a commit was begun and interrupted: `outcome` tells what became of it
        if kind is None:
            self.commit()
        else:
            self.rollback()

    def _check(self) -> None:
        self._check_thread()
        super()._check()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise UsageError("a transaction belongs to the thread that began it")

    def _prefetches(self) -> bool:
        """What is written between two pages is seen in the second."""
        return False
