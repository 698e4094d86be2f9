"""A transaction, for programs without asyncio."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

from percolator import aio
from percolator.aio import Outcome
from percolator.arguments import require_bool
from percolator.blocking.loop_thread import LoopCalls
from percolator.blocking.snapshot import BlockingReads
from percolator.errors import UsageError
from percolator.schema import Column, Table
from percolator.timestamps import Timestamp

K = TypeVar("K")
T = TypeVar("T")


class Transaction(BlockingReads):
    """Reads from one snapshot, and writes that take effect all at once.

    It reads the store as of its first read, not as of entering the block; `timestamp` counts as a
    read. Writes stay in the program until `commit`; of several to a cell, the last one counts.
    Leaving the block commits; an exception rolls back. This is one attempt: a `ConflictError`
    leaves the block. Use `@transactional` for functions that are run again. A transaction belongs
    to the thread that began it.

    >>> with db.transaction() as tx:
    ...     left = tx.get("bob", balance, default=0)
    ...     tx.set("bob", balance, left - 7)
    """

    joins_transactions = True
    """A `@transactional` function that is called with this transaction joins it."""

    def __init__(self, loop_thread: LoopCalls, transaction: aio.Transaction) -> None:
        super().__init__(loop_thread, transaction)
        self._transaction = transaction
        self._internal = transaction.internal
        self._thread = threading.get_ident()

    @property
    def outcome(self) -> Outcome:
        """Open, committed, aborted or unknown."""
        return self._transaction.outcome

    @property
    def start_timestamp(self) -> Timestamp | None:
        """The timestamp of the snapshot that it reads; None before the first read."""
        return self._transaction.start_timestamp

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """Set by a commit that wrote something."""
        return self._transaction.commit_timestamp

    @overload
    def set(self, row: K, column: Mapping[Column[Any, K], Any]) -> None: ...
    @overload
    def set(self, row: K, column: Column[T, K], value: T) -> None: ...
    def set(self, row: object, column: Any, value: Any = ...) -> None:
        """Writes a value, or all values of a mapping from columns. A value may be empty."""
        self._check()
        if value is ...:
            self._loop_thread.call(partial(self._transaction.set, row, column))
            return
        address = self._internal.known_target(row, column)
        if address is None:
            self._loop_thread.call(partial(self._transaction.set, row, column, value))
        else:
            self._internal.put(address, row, column, value)

    def delete(self, row: K, column: Column[Any, K]) -> None:
        """Deletes the cell, if it exists."""
        self._check()
        address = self._internal.known_address(row, column)
        if address is None:
            self._loop_thread.call(partial(self._transaction.delete, row, column))
        else:
            self._internal.writes.delete(address)

    def delete_row(self, table: Table[K], row: K, *, timeout: float | None = None) -> None:
        """Deletes all cells that the row has in this snapshot, or that the transaction has set.

        A column that another transaction sets at the same time may stay: only cells conflict. To
        rule it out, have both write or lock one cell of the row.

        >>> tx.delete_row(accounts, "bob")
        """
        self._check()
        call = partial(self._transaction.delete_row, table, row, timeout=timeout)
        self._loop_thread.call(call)

    def increment(
        self, row: K, column: Column[int, K], by: int = 1, *, timeout: float | None = None
    ) -> int:
        """Adds to the number in a cell, and returns the sum. A cell without a value counts as 0.

        It reads and writes the cell, so it can conflict on either account. Where many transactions
        add to one cell, use `percolator.recipes.CombineQueue` or `ShardedCounter`.

        >>> tx.increment("bob", visits)
        """
        self._check()
        call = partial(self._transaction.increment, row, column, by, timeout=timeout)
        return self._loop_thread.call(call)

    def lock(self, row: K, column: Column[Any, K], *, shared: bool = False) -> None:
        """Conflicts with every other writer of the cell, without changing it.

        Snapshots allow *write skew*: two transactions that each read what the other writes may both
        commit. Locking the cells that a decision is based on rules it out. With `shared`, it is a
        read lock: any number of transactions may hold one on the same cell.
        """
        self._check()
        require_bool(shared, "shared")
        address = self._internal.known_address(row, column)
        if address is None:
            self._loop_thread.call(partial(self._transaction.lock, row, column, shared=shared))
        elif shared:
            self._internal.writes.read_lock(address)
        else:
            self._internal.writes.lock(address)

    def notify(self, row: K, column: Column[Any, K]) -> None:
        """Notifies the column's weak observers of the row, once this transaction has committed."""
        self._check()
        self._loop_thread.call(partial(self._transaction.notify, row, column))

    def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """Makes all writes visible at once. Returns when they are durable.

        Returns the commit timestamp, or None if there was nothing to write: then nothing is sent.
        Raises `ConflictError` if another transaction was first, and `OutcomeUnknown` if it cannot
        find out whether it committed.
        """
        self._check()
        return self._loop_thread.call(partial(self._transaction.commit, timeout=timeout))

    def rollback(self) -> None:
        """Discards the writes. None of them has left the program yet. It is refused after a commit,
        since it could not change the outcome."""
        self._check_thread()
        self._transaction.rollback()

    def resolve(self, *, timeout: float | None = None) -> Outcome:
        """Finds out the outcome after `OutcomeUnknown`, by sending exactly the same commit again.

        Returns COMMITTED or ABORTED; raises `OutcomeUnknown` if there is still no answer, and
        `OutcomeLost` if there can never be one again.
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
            return  # or a commit was interrupted: `outcome` says what became of it
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
        """No: a page must show what the transaction writes before that page is requested."""
        return False
