"""The blocking API: for each class of the asyncio API, one that calls it from other threads.

Generated from percolator/aio by tools/blocking_api.py: run `make blocking`. Only bodies that begin
with "By hand" are edited here, and members that asyncio's classes lack.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar, overload

from percolator import aio
from percolator.aio import Outcome
from percolator.aio import changes as asynchronous_changes
from percolator.aio.database import DRAIN_SECONDS
from percolator.aio.find import Search
from percolator.aio.set_many import source_of
from percolator.aio.shared import Receipt, Ticket
from percolator.aio.transaction import DONE, Written
from percolator.arguments import (
    listed,
    listed_cells,
    listed_tables,
    require_drain_seconds,
    require_function,
    require_table,
)
from percolator.blocking import loop_thread
from percolator.blocking.loop_thread import LoopCalls, LoopThread, Wrapper
from percolator.changes import Change, ChangePage
from percolator.codecs.values import SplitPoint
from percolator.conditions import Condition
from percolator.errors import OutcomeUnknown, PercolatorError, UsageError, not_picklable
from percolator.limits import Limits
from percolator.observers import worker as asynchronous_worker
from percolator.observers.definition import Observer
from percolator.observers.quiet import Quiet
from percolator.observers.watched import Counters
from percolator.observers.worker import WorkerLimits
from percolator.protocol.environment import Statistics
from percolator.retries import RetryPolicy, finished, is_repeatable, require_runnable
from percolator.schema import Column, Columns, Index, Readable, Row, Table, decoded_value
from percolator.timestamps import Timestamp
from percolator.wire.tls import Tls

ROWS_PER_PORTION = 4_096
"""The number of rows that `set_many` takes from its source at a time."""

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K")
R = TypeVar("R")
S = TypeVar("S", bound=aio.Snapshot | aio.Transaction)


def connect(
    address: str | None = None,
    *,
    limits: Limits | None = None,
    retry: RetryPolicy | None = None,
    description: str = "",
    timeout: float = 10.0,
    tls: Tls | None = None,
    token: str | None = None,
) -> Database:
    """Connects to a cluster by the `host:port` of any master or gateway (or several, with commas).

    The default address is $PERCOLATOR_ADDRESS, or localhost:7100. `description` tells others what
    this process is, for instance when it holds a lock; by default, program, host and process id.
    `tls` and `token` identify it to a cluster that requires them; the defaults come from
    PERCOLATOR_TLS_CA, PERCOLATOR_TLS_CERTIFICATE, PERCOLATOR_TLS_KEY and PERCOLATOR_TOKEN_FILE.

    >>> with percolator.connect("localhost:7100") as db: ...
    >>> db = percolator.connect("localhost:7100")
    """
    # By hand: the database is opened in the event loop that all databases share.
    connecting = partial(
        aio.connect,
        address,
        limits=limits,
        retry=retry,
        description=description,
        timeout=timeout,
        tls=tls,
        token=token,
    )

    async def start() -> aio.Database:
        return await connecting()

    try:
        return Database.over(start)
    except PercolatorError as error:
        # Twelve frames of the library between the caller and the error would hide both.
        raise error.with_traceback(None) from None


class Reads(Wrapper[S]):
    """The reads of snapshots and transactions."""

    _prefetches = True
    """The next page of a scan is fetched while this one is used."""

    def __reduce__(self) -> NoReturn:
        raise not_picklable("a snapshot or transaction")

    def _check(self) -> None:
        self._loop_thread.require_usable()
        self._asynchronous.require_not_ended()

    @property
    def statistics(self) -> Statistics:
        """The cost so far: round trips, retries, and the locks waited for, with their owners."""
        return self._asynchronous.statistics

    def timestamp(self) -> Timestamp:
        """The timestamp at which it reads. It is fetched now if nothing was read yet."""
        return self._call(self._asynchronous.timestamp)

    @overload
    def get(self, row: K, column: Readable[T, K], *, timeout: float | None = None) -> T | None: ...
    @overload
    def get(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell, or `default` if it has none.

        >>> tx.get("bob", balance, default=0)
        """
        # By hand: what is at hand needs no trip to the event loop.
        self._check()
        found = self._asynchronous._reader.at_hand(row, column) if timeout is None else None
        if found is not None:
            return default if found.value is None else decoded_value(column, row, found.value)
        return self._call(partial(self._asynchronous.get, row, column, default, timeout=timeout))

    @overload
    def get_many(
        self, table: Iterable[tuple[object, Readable[T]]], /, *, timeout: float | None = None
    ) -> list[T | None]: ...
    @overload
    def get_many(
        self, table: Iterable[tuple[object, Readable[Any]]], /, *, timeout: float | None = None
    ) -> list[Any]: ...
    @overload
    def get_many(
        self,
        table: Table[K],
        rows: Iterable[K],
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Row[K]]: ...
    def get_many(
        self,
        table: Table[Any] | Iterable[tuple[object, Readable[Any]]],
        rows: Iterable[Any] | None = None,
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Reads many rows of a table in one round trip: one `Row` for each key, in the same order.

        Without `columns`, it reads all columns; a row that does not exist is empty, and false. With
        an empty list, it reads none, and all rows are empty. Given pairs of a row and a column
        instead, of any tables, it returns their values, in the same order; None if there is none.

        >>> bob, joe = tx.get_many(accounts, ["bob", "joe"], [balance])
        >>> left, state = tx.get_many([("bob", balance), (17, order_state)])
        """
        # By hand: a generator is consumed in the calling thread, since it may call the database.
        self._check()
        most = self._asynchronous._reader.cells_max
        if rows is None and columns is None and not isinstance(table, Table):
            cells = listed_cells(table, most)
            return self._call(partial(self._asynchronous.get_many, cells, timeout=timeout))
        require_table(table)
        keys = listed(rows, "rows", most)
        call = partial(self._asynchronous.get_many, table, keys, columns, timeout=timeout)
        return self._call(call)

    def scan(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        columns: Columns | None = None,
        where: Condition | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[Row[K]]:
        """Yields the rows from `start` (inclusive) to `end` (exclusive), in order or in reverse.

        With a `prefix`, only rows whose keys begin with it: `start` says where to continue in them.
        The time-out applies to each page. Rows without a value in `columns` are left out. `where`
        keeps the rows that match a condition; tablet servers do not send the others.

        >>> for row in snapshot.scan(accounts, prefix="b", columns=[balance]):
        ...     print(row.key, row[balance])
        >>> rich = snapshot.scan(accounts, where=(balance >= 1000) & owner.startswith("B"))
        """
        # By hand: pages are asked for in the event loop, and rows are yielded in this thread.
        self._check()
        pages = self._asynchronous.scan_pages(
            table,
            start=start,
            end=end,
            prefix=prefix,
            columns=columns,
            where=where,
            reverse=reverse,
            limit=limit,
            timeout=timeout,
        )
        found = self._loop_thread.iterate(pages, ahead=self._prefetches, check=self._check)
        with closing(found):
            for page in found:
                for row in page:
                    # Rows that were read ahead must not be used after the end.
                    self._asynchronous.require_not_ended()
                    yield row

    def find(
        self,
        index: Index[K] | Column[Any, K],
        *values: object,
        start: object = None,
        end: object = None,
        prefix: object = None,
        columns: Columns | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[Row[K]]:
        """Yields the rows with these values in the first columns of an index, in its order.

        A column stands for the index of that column alone. `start` (inclusive), `end` (exclusive)
        and `prefix` are about the column after those whose values are given. Without any of them,
        it yields all rows that have a value in every column of the index. The time-out applies to
        each page. The transaction's own writes show.

        >>> for row in snapshot.find(city, "Rome", columns=[name]):
        ...     print(row.key, row[name])
        >>> italians = snapshot.find(by_place, "IT", prefix="R")
        """
        # By hand: pages are asked for in the event loop, and rows are yielded in this thread.
        self._check()
        search = Search(index, values, start, end, prefix, reverse, limit)
        pages = self._asynchronous.find_pages(search, columns, timeout)
        found = self._loop_thread.iterate(pages, ahead=self._prefetches, check=self._check)
        with closing(found):
            for page in found:
                for row in page:
                    # Rows that were read ahead must not be used after the end.
                    self._asynchronous.require_not_ended()
                    yield row

    def count(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        where: Condition | None = None,
        timeout: float | None = None,
    ) -> int:
        """The number of rows that `scan` would yield. Tablet servers count them.

        >>> tx.count(accounts, where=balance >= 1000)
        """
        return self._call(
            partial(
                self._asynchronous.count,
                table,
                start=start,
                end=end,
                prefix=prefix,
                where=where,
                timeout=timeout,
            )
        )


class Snapshot(Reads[aio.Snapshot]):
    """Shows the store as it was at one timestamp, whatever is written meanwhile: that of its first
    read, or the one it was given. Entering the block reads nothing; `timestamp` counts as a read.

    >>> with db.snapshot() as snapshot:
    ...     print(snapshot.get("bob", balance))
    """

    def close(self) -> None:
        """Ends the snapshot: from now on, the history that it needed may be collected."""
        # By hand: it may have ended before.
        self._loop_thread.call(self._asynchronous.close)


class Transaction(Reads[aio.Transaction]):
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
    _prefetches = False
    """A page must show what the transaction writes before that page is requested."""

    def __init__(self, loop_thread: LoopCalls, transaction: aio.Transaction) -> None:
        super().__init__(loop_thread, transaction)
        self._buffer = transaction.internal.buffer
        self._thread = threading.get_ident()

    def _check(self) -> None:
        self._check_thread()
        super()._check()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise UsageError("a transaction belongs to the thread that began it")

    def _finish(self, written: Written) -> None:
        """Goes to the event loop only with a write that has to wait for the cluster's answer."""
        if written is not DONE:
            self._loop_thread.call(lambda: written)

    @property
    def outcome(self) -> Outcome:
        """Open, committed, aborted or unknown."""
        return self._asynchronous.outcome

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """Set by a commit that wrote something."""
        return self._asynchronous.commit_timestamp

    @property
    def start_timestamp(self) -> Timestamp | None:
        """The timestamp of the snapshot that it reads; None before the first read.

        If it has read nothing, it has one from its commit on.
        """
        return self._asynchronous.start_timestamp

    @property
    def serializable(self) -> bool:
        """True if it locks the cells that it reads."""
        return self._asynchronous.serializable

    @overload
    def get(
        self,
        row: K,
        column: Readable[T, K],
        *,
        for_update: bool = False,
        timeout: float | None = None,
    ) -> T | None: ...
    @overload
    def get(
        self,
        row: K,
        column: Readable[T, K],
        default: D,
        *,
        for_update: bool = False,
        timeout: float | None = None,
    ) -> T | D: ...
    def get(
        self,
        row: K,
        column: Readable[T, K],
        default: Any = None,
        *,
        for_update: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The value of one cell, or `default` if it has none.

        With `for_update`, it takes the cell's lock when it commits, as `lock` does, and waits in a
        queue until the transactions that came before have ended: first come, first served. If it
        has read before, and the cell was written since, that is a conflict; `db.run` then runs it
        again, with its place kept.

        >>> tx.get("bob", balance, default=0)
        >>> tx.get("total", visits, for_update=True)
        """
        # By hand: what is at hand needs no trip to the event loop.
        if for_update is False:
            return super().get(row, column, default, timeout=timeout)
        return self._call(
            partial(
                self._asynchronous.get, row, column, default, for_update=for_update, timeout=timeout
            )
        )

    @overload
    def previous(
        self, row: K, column: Readable[T, K], *, timeout: float | None = None
    ) -> T | None: ...
    @overload
    def previous(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    def previous(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value that the cell of this run had when the observer last ran for it, or `default`
        if it had none, or if the observer has not run for it before.

        Only in an observer: `get` returns the value that is there now, and this the one that the
        last run has seen, however many there were in between. A run that did not commit does not
        count. A value that has expired since may be gone. Neither `delete_row` nor collection takes
        it away: it is kept while the change waits for this run.

        >>> was, now = tx.previous(row, city), tx.get(row, city)
        """
        return self._call(
            partial(self._asynchronous.previous, row, column, default, timeout=timeout)
        )

    @overload
    def set(self, row: K, column: Mapping[Column[Any, K], Any]) -> None: ...
    @overload
    def set(self, row: K, column: Column[T, K], value: T) -> None: ...
    def set(self, row: object, column: Any, value: Any = ...) -> None:
        """Writes a value, or all values of a mapping from columns. A value may be empty."""
        # By hand: it is written in the calling thread.
        self._check()
        self._finish(self._buffer.set(row, column, value))

    def delete(self, row: K, column: Column[Any, K]) -> None:
        """Deletes the cell, if it exists."""
        # By hand: as `set`.
        self._check()
        self._finish(self._buffer.delete(row, column))

    def lock(self, row: K, column: Column[Any, K], *, shared: bool = False) -> None:
        """Conflicts with every other writer of the cell, without changing it.

        Snapshots allow *write skew*: two transactions that each read what the other writes may both
        commit. Locking the cells that a decision is based on rules it out. With `shared`, it is a
        read lock: any number of transactions may hold one on the same cell.

        The commit takes the lock.
        """
        # By hand: as `set`.
        self._check()
        self._finish(self._buffer.lock(row, column, shared=shared))

    def delete_row(self, table: Table[K], row: K, *, timeout: float | None = None) -> None:
        """Deletes all cells that the row has in this snapshot, or that the transaction has set.

        A column that another transaction sets at the same time may stay: only cells conflict. To
        rule it out, have both write or lock one cell of the row.

        >>> tx.delete_row(accounts, "bob")
        """
        self._call(partial(self._asynchronous.delete_row, table, row, timeout=timeout))

    def increment(
        self, row: K, column: Column[int, K], by: int = 1, *, timeout: float | None = None
    ) -> int:
        """Adds to the number in a cell, and returns the sum. A cell without a value counts as 0.

        It reads and writes the cell, so it can conflict on either account. Where many transactions
        add to one cell, use `percolator.recipes.CombineQueue` or `ShardedCounter`.

        >>> tx.increment("bob", visits)
        """
        return self._call(partial(self._asynchronous.increment, row, column, by, timeout=timeout))

    def notify(self, row: K, column: Column[Any, K]) -> None:
        """Notifies the column's weak observers of the row, once this transaction has committed."""
        # By hand: as `set`.
        self._check()
        self._finish(self._buffer.notify(row, column))

    def commit(self, *, timeout: float | None = None) -> Timestamp | None:
        """Makes all writes visible at once. Returns when they are durable.

        Returns the commit timestamp, or None if there was nothing to write: then nothing is sent.
        Raises `ConflictError` if another transaction was first, and `OutcomeUnknown` if it cannot
        find out whether it committed.
        """
        return self._call(partial(self._asynchronous.commit, timeout=timeout))

    def rollback(self) -> None:
        """Discards the writes. None of them has left the program yet. It is refused after a commit,
        since it could not change the outcome."""
        # By hand: it may have ended before.
        self._check_thread()
        self._asynchronous.rollback()

    def resolve(self, *, timeout: float | None = None) -> Outcome:
        """Finds out the outcome after `OutcomeUnknown`, by sending exactly the same commit again.

        Returns COMMITTED or ABORTED; raises `OutcomeUnknown` if there is still no answer, and
        `OutcomeLost` if there can never be one again.
        """
        # By hand: it has ended before.
        self._check_thread()
        return self._loop_thread.call(partial(self._asynchronous.resolve, timeout=timeout))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._asynchronous.ended:
            return  # or a commit was interrupted: `outcome` says what became of it
        if kind is None:
            self.commit()
        else:
            self.rollback()


class Pin(Wrapper[aio.Pin]):
    """Keeps history for the duration of its block: what is readable at its timestamp stays so.

    >>> with db.pin(at=yesterday) as pin, db.snapshot(at=pin.at) as snapshot: ...
    """

    @property
    def at(self) -> Timestamp:
        """The timestamp that is pinned: everything readable there stays readable."""
        return self._asynchronous.at

    @property
    def is_lost(self) -> bool:
        """True if it was released by someone else, became too old, or was not renewed in time."""
        return self._asynchronous.is_lost

    def check(self) -> None:
        """Raises `SessionExpired` if it was released by someone else, became older than the cluster
        allows, or was not renewed in time.

        After that, history may be gone; if so, reads raise `SnapshotTooOld`.
        """
        self._asynchronous.check()

    def close(self) -> None:
        """Releases the pin. Closing twice is harmless."""
        # By hand: closed even if the caller is interrupted.
        self._loop_thread.call(self._asynchronous.close, self._asynchronous.close)

    def __enter__(self) -> Pin:
        # Closed if the caller is interrupted.
        self._loop_thread.call(self._asynchronous.set, self._asynchronous.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class SharedTransaction(Wrapper[aio.SharedTransaction]):
    """The driver's side of a shared transaction. Leaving its block without a commit aborts it.

    >>> with db.shared_transaction() as shared:
    ...     receipts = [write(shared.ticket, n) for n in range(10)]
    ...     shared.commit(receipts)
    """

    def __enter__(self) -> SharedTransaction:
        # Left if the caller is interrupted. Not `abort`: without an answer, that keeps it alive, to
        # be repeated.
        leave = partial(self._asynchronous.__aexit__, None, None, None)
        self._loop_thread.call(self._asynchronous.begin, leave)
        return self

    @property
    def commit_timestamp(self) -> Timestamp | None:
        """Set by a commit that wrote something."""
        return self._asynchronous.commit_timestamp

    @property
    def ticket(self) -> Ticket:
        """Pass it to the processes that take part."""
        return self._asynchronous.ticket

    def commit(
        self, receipts: Sequence[Receipt], *, timeout: float | None = None
    ) -> Timestamp | None:
        """Makes everything that these attempts wrote visible at once; nothing else ever will be.

        Returns the commit timestamp, or None if nothing was written. Raises `ConflictError` if a
        participant was rolled back (then nothing is committed, and the tasks have to run again),
        `OtherDriverCommitted` if another driver has committed it without some of these attempts,
        and `OutcomeUnknown` if it cannot find out: then the same call may be repeated. After any
        other error it is rolled back, which may take a few seconds more than the time-out. Entries
        of indexes that tasks cannot keep are added first: then the time-out applies to each page of
        them, and it may raise `UniqueViolation`.
        """
        return self._call(partial(self._asynchronous.commit, receipts, timeout=timeout))

    def abort(self, *, timeout: float | None = None) -> Timestamp | None:
        """Rolls everything back. If the transaction turns out to be committed, nothing is undone,
        and its commit timestamp is returned. Raises `OtherDriverCommitted` if another driver has
        committed it without some of the attempts that were passed to `commit` here."""
        return self._call(partial(self._asynchronous.abort, timeout=timeout))


class Share(Wrapper[aio.Share]):
    """Writes of one attempt at one task. Leaving its block without `finish` rolls it back.

    >>> with db.share(ticket, task="7") as share:
    ...     share.set("bob", balance, 10)
    ...     receipt = share.finish()
    """

    def __enter__(self) -> Share:
        # Abandoned if the caller is interrupted.
        self._loop_thread.call(self._asynchronous.begin, self._asynchronous.abandon)
        return self

    def set(self, row: K, column: Column[T, K], value: T) -> None:
        """Writes a value. It is locked now or later, and visible when the driver has committed.

        As much as a transaction can write may wait; more is refused with `TransactionTooLarge`.
        """
        self._call(partial(self._asynchronous.set, row, column, value))

    def delete(self, row: K, column: Column[Any, K]) -> None:
        """Deletes the cell, if it exists."""
        self._call(partial(self._asynchronous.delete, row, column))

    def finish(self) -> Receipt:
        """Locks what is left, and returns what the driver needs to commit it. Nothing can be
        written afterwards. Raises `ConflictError` if another attempt has replaced this one."""
        return self._call(self._asynchronous.finish)

    def abandon(self) -> None:
        """Rolls back what it has locked."""
        self._call(self._asynchronous.abandon)


class ChangePages(Generic[K]):
    """The iterator over pages that `Changes.pages` returns. It ends when it is closed."""

    def __init__(self, loop_thread: LoopCalls, pages: asynchronous_changes.ChangePages[K]) -> None:
        self._loop_thread = loop_thread
        self._pages = pages
        self._in_use = threading.Lock()

    def exclusively(self, work: Callable[[], R]) -> R:
        """Refuses other threads meanwhile."""
        if not self._in_use.acquire(blocking=False):
            raise UsageError(asynchronous_changes.WAITS)
        try:
            return work()
        finally:
            self._in_use.release()

    def __iter__(self) -> ChangePages[K]:
        return self

    def __next__(self) -> ChangePage[K]:
        self._pages.require_whole()
        # Nothing is read ahead: what the program has not asked for must stay in the history.
        page = self.exclusively(partial(self._loop_thread.call, self._pages.next))
        if page is None:
            raise StopIteration
        return page


class Changes(Wrapper[aio.Changes[K]], Generic[K]):
    """The changes of a table, in the order of their commits: what `Database.changes` returns.

    History from its position on is kept until the block ends, it is closed, or it reaches `until`.
    After an error it cannot continue: call `changes` again, with the last handled position as
    `after`. One thread at a time may wait for the next change. Another one may close it meanwhile:
    then the iteration ends.

    >>> with db.changes(accounts, after=position) as changes:
    ...     for change in changes:
    ...         print(change.key, change.column, change.kind)
    """

    def __init__(self, loop_thread: LoopCalls, changes: aio.Changes[K]) -> None:
        super().__init__(loop_thread, changes)
        self._pages = ChangePages(loop_thread, changes._pages)

    def _next(self) -> Change[K] | None:
        changes = self._asynchronous
        if changes._following.has_ended():
            return None
        change = changes._next_of_page()
        return self._loop_thread.call(changes._next) if change is None else change

    @property
    def reached(self) -> Timestamp:
        """How far the program has come: it has asked for more after all changes up to here.

        To continue later, even if nothing has changed, pass it as `after`. It moves about once a
        second while nothing changes. Another task or thread may read it, too.
        """
        return self._asynchronous.reached

    def pages(self) -> ChangePages[K]:
        """Yields pages instead of single changes; while nothing changes, an empty one about once a
        second. Each says in `reached` from where to continue after it.

        >>> for page in changes.pages():
        ...     for change in page.changes: ...
        ...     position = page.reached
        """
        # By hand: one thread at a time.
        self._asynchronous.pages()
        return self._pages

    def close(self) -> None:
        """Ends it: from now on, the history that it needed may be collected.

        A thread that waits for the next change is told that there are no more, and so is every
        later call. Closing it again does nothing.
        """
        # By hand: does not wait for the event loop.
        self._asynchronous._following.close()
        self._loop_thread.start_and_forget(self._asynchronous.close)

    def __iter__(self) -> Changes[K]:
        return self

    def __next__(self) -> Change[K]:
        self._asynchronous._pages.is_read_singly = True
        change = self._pages.exclusively(self._next)
        if change is None:
            raise StopIteration
        return change

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Worker(Wrapper[asynchronous_worker.Worker]):
    """Runs observers in the background. As a block, it ends with `stop`.

    >>> with db.run_observers([index, count]) as worker: ...
    """

    def start(self) -> None:
        """Registers the observers, and returns when they are running."""
        # By hand: stopped if the caller is interrupted.
        self._loop_thread.call(self._asynchronous.start, self._asynchronous.stop)

    @property
    def is_running(self) -> bool:
        """It was started, and neither stopped nor ended by an error."""
        return self._asynchronous.is_running

    @property
    def counters(self) -> Mapping[tuple[str, str], Counters]:
        """The counters of the observers, by table and observer."""
        return self._asynchronous.counters

    @property
    def backlog(self) -> Mapping[tuple[str, str], int]:
        """The number of cells known to be queued or running here, by table and observer."""
        return self._asynchronous.backlog

    def stop(self, *, drain_seconds: float | None = None) -> bool:
        """Starts no more runs, lets those in progress finish, and gives up after `drain_seconds`.

        Returns whether all have finished. Nothing is lost either way: another worker, or the next
        one, finds what was not finished.
        """
        return self._call(partial(self._asynchronous.stop, drain_seconds=drain_seconds))

    def wait(self) -> None:
        """Returns when the worker was stopped. Raises the error if a task of it has failed."""
        self._call(self._asynchronous.wait)

    def __enter__(self) -> Worker:
        self.start()
        return self


class Database(Wrapper[aio.Database]):
    """A connection to a cluster, for all threads of the process.

    >>> with percolator.connect("localhost:7100") as db:
    ...     with db.transaction() as tx:
    ...         tx.set("bob", balance, 10)
    """

    _loop_thread: LoopThread

    def __init__(self, thread: LoopThread, database: aio.Database) -> None:
        super().__init__(thread, database)
        thread.close_at_exit(self, database.close)

    @classmethod
    def over(cls, start: Callable[[], Awaitable[aio.Database]]) -> Database:
        """The database that `start` opens in the shared event loop."""
        thread = loop_thread.shared()
        return cls(thread, thread.open(start))

    def __reduce__(self) -> NoReturn:
        raise not_picklable("a database")

    def create_table(
        self,
        table: Table[K],
        splits: Sequence[K | SplitPoint] = (),
        *,
        exist_ok: bool = False,
        retention: timedelta | None = None,
        change_feed: bool = False,
        ttl: Mapping[Column[Any], timedelta] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Creates a table, split into tablets at the row keys in `splits`.

        `retention` is how long old versions are kept; by default, as long as the cluster says. With
        a `change_feed`, `changes` can follow the table. `ttl` says how long after its commit a
        value of a column is visible. The table has the indexes that were declared for it. With
        `exist_ok`, a table that exists stays as it is. It is refused if it lacks the `change_feed`
        or an index, since what was committed so far would be missing, or if a `retention` or `ttl`
        is given and it has another one. Only admins may create tables.

        >>> db.create_table(sessions, ttl={token: timedelta(hours=12)})
        """
        self._call(
            partial(
                self._asynchronous.create_table,
                table,
                splits,
                exist_ok=exist_ok,
                retention=retention,
                change_feed=change_feed,
                ttl=ttl,
                timeout=timeout,
            )
        )

    def create_tables(
        self, tables: Iterable[Table[Any]], *, exist_ok: bool = False, timeout: float | None = None
    ) -> None:
        """Creates several tables in order; after an error, the remaining ones do not exist.

        `create_table` has the choices that a single table has. The time-out is for all of them.

        >>> db.create_tables([accounts, orders], exist_ok=True)
        """
        # By hand: a generator is consumed in the calling thread, since it may call the database.
        wanted = listed_tables(tables)
        call = partial(self._asynchronous.create_tables, wanted, exist_ok=exist_ok, timeout=timeout)
        self._call(call)

    def tables(self, *, timeout: float | None = None) -> list[str]:
        """The names of all tables, sorted, without those that have the entries of indexes."""
        return self._call(partial(self._asynchronous.tables, timeout=timeout))

    def drop_table(
        self, table: Table[Any], *, missing_ok: bool = False, timeout: float | None = None
    ) -> None:
        """Deletes a table with everything in it.

        Once this returns, nobody can read the table or commit into it. After `DeadlineExceeded`, it
        may be dropped with some servers still using it: the error says so. To wait for them, drop
        it again.
        """
        self._call(
            partial(self._asynchronous.drop_table, table, missing_ok=missing_ok, timeout=timeout)
        )

    def set_change_feed(self, table: Table[Any], *, on: bool, timeout: float | None = None) -> None:
        """Gives an existing table a change feed, or takes it away.

        Once this returns, all commits are in the feed. Those before may not be, and `changes`
        refuses to begin below them.
        """
        self._call(partial(self._asynchronous.set_change_feed, table, on=on, timeout=timeout))

    def set_ttl(
        self, column: Column[Any], ttl: timedelta | None, *, timeout: float | None = None
    ) -> None:
        """Makes the values of a column expire this long after their commits; None: never.

        Once this returns, it applies to all reads, including those of existing values. What has
        been deleted because it had expired does not come back.
        """
        self._call(partial(self._asynchronous.set_ttl, column, ttl, timeout=timeout))

    def create_index(
        self,
        index: Index[Any] | Column[Any],
        *,
        progress: Callable[[int], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Adds an index to a table that exists, and returns the number of rows once each is in it.

        Writers may go on meanwhile: from the moment when the table has the index, all commits keep
        it. Nothing is found by it before this returns. If it fails half-way, call it again.
        `progress` is called with how many rows were read so far. The time-out is for adding the
        index, and for each page of the table and each lock of others.

        >>> db.create_index(by_city)
        """
        return self._call(
            partial(self._asynchronous.create_index, index, progress=progress, timeout=timeout)
        )

    def drop_index(self, table: Table[Any], name: str, *, timeout: float | None = None) -> None:
        """Removes an index of a table, with its entries. Once this returns, no commit keeps it.

        >>> db.drop_index(customers, "by city")
        """
        self._call(partial(self._asynchronous.drop_index, table, name, timeout=timeout))

    def check_index(
        self, index: Index[Any] | Column[Any], *, timeout: float | None = None
    ) -> list[str]:
        """Compares an index with its table, and returns the differences: none, unless something is
        wrong. The time-out applies to each page. Raises `SchemaError` if the cluster has another
        index of that name.

        >>> assert db.check_index(by_city) == []
        """
        return self._call(partial(self._asynchronous.check_index, index, timeout=timeout))

    def changes(
        self,
        table: Table[K],
        *,
        after: Timestamp | datetime | None = None,
        until: Timestamp | datetime | None = None,
        before: bool = False,
        timeout: float | None = None,
    ) -> Changes[K]:
        """The changes of a table with a change feed, in the order of their commits.

        They begin above `after`, by default at this call, and end at `until`; without it they never
        end. The changes of a commit follow each other, and the last one says that it is the last.
        `before` also returns the values before the changes. The time-out applies to each answer of
        the cluster. A time older than the history or the feed is refused (`SnapshotTooOld`).

        History is kept until the block ends, or the changes do.

        >>> with db.changes(accounts, after=position) as changes:
        ...     for change in changes:
        ...         print(change.key, change.column, change.kind)
        """
        # By hand: the block is entered at once.

        async def begin() -> aio.Changes[K]:
            changes = self._asynchronous.changes(
                table, after=after, until=until, before=before, timeout=timeout
            )
            return await changes.__aenter__()

        return Changes(self._loop_thread, self._call(begin))

    def newest_change(
        self, table: Table[Any], *, after: Timestamp | datetime, timeout: float | None = None
    ) -> Timestamp | None:
        """The commit timestamp of the newest change above `after`, or None if nothing has changed.

        Nothing at or below it will change again. This is cheap: no changes are read. Changes that
        are held up by a transaction under way or a bulk load are not counted.
        """
        return self._call(
            partial(self._asynchronous.newest_change, table, after=after, timeout=timeout)
        )

    def transaction(
        self, *, serializable: bool = False, timeout: float | None = None
    ) -> Transaction:
        """One attempt at a transaction. It reads the store as of its first read, not as of entering
        its block. Leaving the block commits.

        If it is `serializable`, its commit locks the cells that it has read: then it is as if it
        had run alone, at the time of its commit, among others that are serializable. It reads only
        by key, and columns by name. The time-out applies to each call in it, and to its commit.

        >>> with db.transaction() as tx:
        ...     tx.set("bob", balance, 10)
        """
        self._check()
        return Transaction(
            self._loop_thread,
            self._asynchronous.internal.transaction(timeout, serializable=serializable),
        )

    def snapshot(
        self, at: Timestamp | datetime | None = None, *, timeout: float | None = None
    ) -> Snapshot:
        """Reads at one timestamp: that of its first read, not of entering its block; or one of the
        past, as far back as history is kept.

        A datetime shows what was committed before its millisecond.

        >>> with db.snapshot(at=yesterday) as snapshot:
        ...     print(snapshot.get("bob", balance))
        """
        self._check()
        return Snapshot(self._loop_thread, self._asynchronous.internal.snapshot(at, timeout))

    @overload
    def get(self, row: K, column: Readable[T, K], *, timeout: float | None = None) -> T | None: ...
    @overload
    def get(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell now, or `default` if it has none.

        It shows everything that was committed before the call. Two calls may show different
        moments: to read several cells together, use a `snapshot`, which takes one more round trip.

        >>> db.get("bob", balance, default=0)
        """
        return self._call(partial(self._asynchronous.get, row, column, default, timeout=timeout))

    def pin(
        self,
        at: Timestamp | datetime | None = None,
        *,
        tables: Sequence[Table[Any]] = (),
        description: str = "",
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Pin:
        """Keeps history from a time on, until its block ends, or this process dies.

        A time older than the history of one of the `tables` is refused; if none are named, of any
        table. In other tables whose history does not go back that far, nothing more is collected
        meanwhile. `ttl` is how many seconds the pin outlives this process: 60, or the most that the
        lock service allows, if it is not given.

        >>> with db.pin(at=yesterday) as pin: ...
        """
        self._check()
        return Pin(
            self._loop_thread,
            self._asynchronous.internal.pin(at, tables, description, ttl, timeout),
        )

    def run(
        self,
        function: Callable[..., R],
        *arguments: object,
        retry: RetryPolicy | None = None,
        serializable: bool = False,
        keywords: Mapping[str, Any] | None = None,
    ) -> R:
        """Runs `function(transaction, *arguments)` in a transaction, and again after conflicts.

        `@transactional` does this when its function is called with a database. The function runs in
        the calling thread.
        """
        # By hand: the function runs in the calling thread.
        self._check()
        require_runnable(function, keywords)
        internal = self._asynchronous.internal
        attempts = internal.attempts(retry, function)
        retries = 0
        try:
            while True:
                made = internal.attempt(attempts, retries, serializable=serializable)
                transaction = Transaction(self._loop_thread, made)
                try:
                    with attempts.inside(), transaction:
                        return finished(function(transaction, *arguments, **(keywords or {})))
                except PercolatorError as error:
                    if transaction.outcome is not Outcome.ABORTED:
                        raise  # the function has committed before it failed
                    if not self._loop_thread.call(partial(attempts.again, error)):
                        if not is_repeatable(error):
                            raise
                        raise attempts.exhausted(error) from error
                retries = transaction.statistics.retries + 1
        finally:
            if attempts.in_line:  # a commit has ended it already, in the loop's thread
                self._loop_thread.start_and_forget(attempts.ended)

    def shared_transaction(
        self,
        *,
        unchanged_since: Timestamp | datetime | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> SharedTransaction:
        """A transaction in which many processes write, and which this one commits.

        With `unchanged_since`, the timestamp of the snapshot that the writes were computed from, it
        conflicts with every commit since then to the cells that it writes; without it, only with
        those while a cell is being locked. `ttl` is how many seconds, at least 15, its locks
        outlive a driver that has died; readers do not wait for that. The time-out is per call.

        >>> with db.shared_transaction() as shared:
        ...     shared.commit([write(shared.ticket, n) for n in range(10)])
        """
        self._check()
        return SharedTransaction(
            self._loop_thread,
            self._asynchronous.internal.shared_transaction(unchanged_since, ttl, timeout),
        )

    def share(
        self, ticket: Ticket, *, task: str, generation: int = 0, timeout: float | None = None
    ) -> Share:
        """One attempt at one task of a shared transaction, in any process.

        A later attempt at the same task replaces an earlier one. `generation` counts how often all
        tasks have been run from the beginning, if a task may then have other rows. A cell may be
        written once in a shared transaction. The time-out applies to each call. A later attempt
        waits 10 s more before it replaces one that has finished.

        >>> with db.share(ticket, task="7") as share:
        ...     share.set("bob", balance, 10)
        ...     receipt = share.finish()
        """
        self._check()
        return Share(
            self._loop_thread, self._asynchronous.internal.share(ticket, task, generation, timeout)
        )

    def set_many(
        self,
        rows: Iterable[tuple[Any, Mapping[Any, Any]]],
        *,
        in_flight_max: int = 512,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes many rows, each in its own small transaction, many at a time.

        This is much faster than one after another, but not atomic: after an error, some rows are
        written and others are not. Setting them again does no harm. `progress` is called with the
        number of rows written so far. Returns that number.

        >>> db.set_many((name, {balance: 10}) for name in names)
        """
        # By hand: the rows are consumed in the calling thread, where they may do anything.
        self._check()
        if progress is not None:
            require_function(progress, "progress")
        source = source_of(rows)
        written = 0
        portion = list(islice(source, ROWS_PER_PORTION))
        while portion:
            call = partial(self._asynchronous.set_many, portion, in_flight_max=in_flight_max)
            writing = self._loop_thread.start(call)
            try:
                portion = list(islice(source, ROWS_PER_PORTION))
            except BaseException:
                writing.abandon()  # so that nothing is written once the caller has the error
                raise
            written += writing.wait()
            if progress is not None:
                progress(written)
        return written

    def resolve(self, error: OutcomeUnknown, *, timeout: float | None = None) -> Outcome:
        """Finds out whether a transaction whose commit was not answered has committed.

        Any process may ask, even one that only received the error. If the transaction has not
        committed by now, this makes sure that it never will. Once it is older than the history of
        the table, the answer is gone: `OutcomeLost`.
        """
        return self._call(partial(self._asynchronous.resolve, error, timeout=timeout))

    def timestamp(self, *, timeout: float | None = None) -> Timestamp:
        """A fresh timestamp, above everything committed so far."""
        return self._call(partial(self._asynchronous.timestamp, timeout=timeout))

    def run_observers(
        self,
        observers: Sequence[Observer],
        *,
        limits: WorkerLimits | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> Worker:
        """A worker that runs these observers for the duration of its block.

        At its end, runs in progress have `drain_seconds` to finish. Nothing is lost if they do not.

        >>> with db.run_observers([index]) as worker:
        ...     worker.wait()
        """
        # By hand: a worker is made in the event loop.

        async def new() -> asynchronous_worker.Worker:
            return self._asynchronous.run_observers(
                observers, limits=limits, drain_seconds=drain_seconds
            )

        return Worker(self._loop_thread, self._call(new))

    def register_observers(self, observers: Sequence[Observer]) -> None:
        """Registers observers: once this returns, every commit notifies them.

        A worker does this when it starts. Observers that are already registered stay as they are; a
        different observer with the same name is refused.
        """
        self._call(partial(self._asynchronous.register_observers, observers))

    def wait_for_observers(self, *, timeout: float | None = None) -> Quiet:
        """Returns when no observer of any table has anything left to do.

        Without a time-out, it waits indefinitely. It waits neither for paused observers nor for
        changes put aside as dead letters; the result reports both.
        """
        return self._call(partial(self._asynchronous.wait_for_observers, timeout=timeout))

    def backfill(self, observer: Observer, *, again: bool = False) -> int:
        """Notifies an observer of all cells that were written before it was registered.

        It does not run again for cells that it has handled, unless `again` is true. Returns the
        number of cells. A worker or `register_observers` must have registered the observer.

        >>> db.backfill(index)
        """
        return self._call(partial(self._asynchronous.backfill, observer, again=again))

    def close(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Finishes observers' runs and background work, within `drain_seconds` together, and
        disconnects. Nothing is lost if that is too short. Closing twice is harmless."""
        # By hand: it need no longer be closed at the end of the program.
        require_drain_seconds(drain_seconds)
        self._loop_thread.closed(self)
        self._call(partial(self._asynchronous.close, drain_seconds=drain_seconds))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
