"""A cluster, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload

from percolator import aio
from percolator.aio import Outcome
from percolator.aio.changes import Following
from percolator.aio.database import DRAIN_SECONDS
from percolator.aio.set_many import source_of
from percolator.aio.shared import Ticket
from percolator.arguments import finished, listed_tables, require_drain_seconds, require_function
from percolator.blocking import loop_thread
from percolator.blocking.changes import Changes
from percolator.blocking.loop_thread import LoopThread
from percolator.blocking.pin import Pin
from percolator.blocking.shared import Share, SharedTransaction
from percolator.blocking.snapshot import Snapshot
from percolator.blocking.transaction import Transaction
from percolator.blocking.worker import Worker
from percolator.codecs.keys import SplitPoint
from percolator.errors import OutcomeUnknown, PercolatorError, not_picklable
from percolator.limits import Limits
from percolator.observers import worker as asynchronous
from percolator.observers.definition import Observer
from percolator.observers.quiet import Quiet
from percolator.observers.worker import WorkerLimits
from percolator.retries import RetryPolicy
from percolator.schema import Column, Readable, Table
from percolator.timestamps import Timestamp
from percolator.wire.tls import Tls

ROWS_PER_PORTION = 4_096
"""The number of rows that `set_many` takes from its source at a time."""

R = TypeVar("R")
K = TypeVar("K")
T = TypeVar("T")
D = TypeVar("D")


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
    this process is, for instance when it holds a lock. `tls` and `token` identify it to a cluster
    that requires them; the defaults come from PERCOLATOR_TLS_CA, PERCOLATOR_TLS_CERTIFICATE,
    PERCOLATOR_TLS_KEY and PERCOLATOR_TOKEN_FILE.

    >>> with percolator.connect("localhost:7100") as db: ...
    """
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


class Database:
    """A connection to a cluster, for all threads of the process.

    >>> with percolator.connect("localhost:7100") as db:
    ...     with db.transaction() as tx:
    ...         tx.set("bob", balance, 10)
    """

    def __init__(self, thread: LoopThread, database: aio.Database) -> None:
        self._loop_thread = thread
        self._database = database
        thread.close_at_exit(self, database.close)

    @classmethod
    def over(cls, start: Callable[[], Awaitable[aio.Database]]) -> Database:
        """The database that `start` opens in the shared event loop."""
        thread = loop_thread.shared()
        return cls(thread, thread.open(start))

    def call_inside(
        self,
        body: Callable[..., Awaitable[R]],
        *arguments: Any,  # noqa: ANN401 - the body's
        **keywords: Any,  # noqa: ANN401 - the body's
    ) -> R:
        """Runs a coroutine function with the asynchronous namesake of this, in one trip to the
        loop. For other parts of the library: the body must not block."""
        return self._loop_thread.call(partial(body, self._database, *arguments, **keywords))

    def __reduce__(self) -> NoReturn:
        raise not_picklable("a database")

    # ------------------------------------------------------------------ tables

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
        value of a column is visible. With `exist_ok`, a table that exists stays as it is. It is
        refused if it lacks the `change_feed`, since what was committed so far would be missing, or
        if a `retention` or `ttl` is given and it has another one. Only admins may create tables.

        >>> db.create_table(sessions, ttl={token: timedelta(hours=12)})
        """
        call = partial(
            self._database.create_table,
            table,
            splits,
            exist_ok=exist_ok,
            retention=retention,
            change_feed=change_feed,
            ttl=ttl,
            timeout=timeout,
        )
        self._loop_thread.call(call)

    def create_tables(
        self,
        tables: Iterable[Table[Any]],
        *,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Creates several tables in order; after an error, the remaining ones do not exist.

        `create_table` has the choices that a single table has. The time-out is for all of them.

        >>> db.create_tables([accounts, orders], exist_ok=True)
        """
        wanted = listed_tables(tables)  # in this thread: a generator may call the database itself
        call = partial(self._database.create_tables, wanted, exist_ok=exist_ok, timeout=timeout)
        self._loop_thread.call(call)

    def tables(self, *, timeout: float | None = None) -> list[str]:
        """The names of all tables, sorted."""
        return self._loop_thread.call(partial(self._database.tables, timeout=timeout))

    def drop_table(
        self, table: Table[Any], *, missing_ok: bool = False, timeout: float | None = None
    ) -> None:
        """Deletes a table with everything in it.

        Once this returns, nobody can read the table or commit into it. After `DeadlineExceeded`,
        it may be dropped with some servers still using it: the error says so. To wait for them,
        drop it again.
        """
        call = partial(self._database.drop_table, table, missing_ok=missing_ok, timeout=timeout)
        self._loop_thread.call(call)

    # ------------------------------------------------------------------ changes

    def set_change_feed(self, table: Table[Any], *, on: bool, timeout: float | None = None) -> None:
        """Gives an existing table a change feed, or takes it away.

        Once this returns, all commits are in the feed. Those before may not be, and `changes`
        refuses to begin below them.
        """
        call = partial(self._database.set_change_feed, table, on=on, timeout=timeout)
        self._loop_thread.call(call)

    def set_ttl(
        self, column: Column[Any], ttl: timedelta | None, *, timeout: float | None = None
    ) -> None:
        """Makes the values of a column expire this long after their commits; None: never.

        Once this returns, it applies to all reads, including those of existing values. What has
        been deleted because it had expired does not come back.
        """
        self._loop_thread.call(partial(self._database.set_ttl, column, ttl, timeout=timeout))

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
        the cluster. A moment older than the history or the feed is refused (`SnapshotTooOld`).

        History is kept until the block ends, or the changes do.

        >>> with db.changes(accounts, after=position) as changes:
        ...     for change in changes:
        ...         print(change.key, change.column, change.kind)
        """

        async def begin() -> Following[K]:
            following = self._database.internal.following(
                table, after, until, before=before, timeout=timeout
            )
            await following.open()
            return following

        return Changes(self._loop_thread, self._loop_thread.call(begin))

    def newest_change(
        self, table: Table[Any], *, after: Timestamp | datetime, timeout: float | None = None
    ) -> Timestamp | None:
        """The commit timestamp of the newest change above `after`, or None if nothing has changed.

        Nothing at or below it will change again. This is cheap: no changes are read. Changes
        that are held up by a transaction under way or a bulk load are not counted.
        """
        call = partial(self._database.newest_change, table, after=after, timeout=timeout)
        return self._loop_thread.call(call)

    # ------------------------------------------------------------------ transactions

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """One attempt at a transaction. It reads the store as of its first read, not as of entering
        its block. Leaving the block commits.

        The time-out applies to each call in it, and to its commit.

        >>> with db.transaction() as tx:
        ...     tx.set("bob", balance, 10)
        """
        self._loop_thread.require_usable()
        return Transaction(self._loop_thread, self._database.internal.transaction(timeout))

    def snapshot(
        self, at: Timestamp | datetime | None = None, *, timeout: float | None = None
    ) -> Snapshot:
        """Reads at one timestamp: that of its first read, not of entering its block; or one of the
        past, as far back as history is kept.

        A datetime shows what was committed before its millisecond.

        >>> with db.snapshot(at=yesterday) as snapshot:
        ...     print(snapshot.get("bob", balance))
        """
        self._loop_thread.require_usable()
        return Snapshot(self._loop_thread, self._database.internal.snapshot(at, timeout))

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
        call = partial(self._database.get, row, column, default, timeout=timeout)
        return self._loop_thread.call(call)

    def pin(
        self,
        at: Timestamp | datetime | None = None,
        *,
        tables: Sequence[Table[Any]] = (),
        description: str = "",
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Pin:
        """Keeps history from a moment on, until its block ends, or this process dies.

        A moment older than the history of one of the `tables` is refused; if none are named, of any
        table. In other tables whose history does not go back that far, nothing more is collected
        meanwhile. `ttl` is how many seconds the pin outlives this process: 60, or the most that the
        lock service allows, if it is not given.

        >>> with db.pin(at=yesterday) as pin: ...
        """
        self._loop_thread.require_usable()
        pin = self._database.internal.pin(at, tables, description, ttl, timeout)
        return Pin(self._loop_thread, pin)

    def run(
        self,
        function: Callable[..., R],
        *arguments: object,
        retry: RetryPolicy | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> R:
        """Runs `function(transaction, *arguments)` in a transaction, and again after conflicts.

        `@transactional` does this when its function is called with a database. The function runs in
        the calling thread.
        """
        self._loop_thread.require_usable()
        require_function(function, keywords=keywords)
        attempts = self._database.internal.attempts(retry, function)
        retries = 0
        try:
            while True:
                attempt = self._database.internal.attempt(attempts, retries)
                transaction = Transaction(self._loop_thread, attempt)
                try:
                    with attempts.inside(), transaction:
                        return finished(function(transaction, *arguments, **(keywords or {})))
                except PercolatorError as error:
                    if not self._loop_thread.call(partial(attempts.again, error)):
                        final = attempts.exhausted(error)
                        if final is None:
                            raise
                        raise final from error
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

        >>> with db.shared_transaction() as whole:
        ...     whole.commit([write(whole.ticket, n) for n in range(10)])
        """
        self._loop_thread.require_usable()
        whole = self._database.internal.shared_transaction(unchanged_since, ttl, timeout)
        return SharedTransaction(self._loop_thread, whole)

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
        self._loop_thread.require_usable()
        share = self._database.internal.share(ticket, task, generation, timeout)
        return Share(self._loop_thread, share)

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
        self._loop_thread.require_usable()
        if progress is not None:
            require_function(progress, "progress")
        source = source_of(rows)  # consumed in the calling thread, where it may do anything
        written = 0
        portion = list(islice(source, ROWS_PER_PORTION))
        while portion:
            call = partial(self._database.set_many, portion, in_flight_max=in_flight_max)
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
        committed by now, this makes sure that it never will.
        """
        return self._loop_thread.call(partial(self._database.resolve, error, timeout=timeout))

    def timestamp(self, *, timeout: float | None = None) -> Timestamp:
        """A fresh timestamp, above everything committed so far."""
        return self._loop_thread.call(partial(self._database.timestamp, timeout=timeout))

    # ------------------------------------------------------------------ observers

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

        async def new() -> asynchronous.Worker:
            return self._database.run_observers(
                observers, limits=limits, drain_seconds=drain_seconds
            )

        return Worker(self._loop_thread, self._loop_thread.call(new))

    def register_observers(self, observers: Sequence[Observer]) -> None:
        """Registers observers: once this returns, every commit notifies them.

        A worker does this when it starts. Observers that are already registered stay as they are; a
        different observer with the same name is refused.
        """
        self._loop_thread.call(partial(self._database.register_observers, observers))

    def wait_for_observers(self, *, timeout: float | None = None) -> Quiet:
        """Returns when no observer of any table has anything left to do.

        Without a time-out, it waits indefinitely. It waits neither for paused observers nor for
        changes put aside as dead letters; the result reports both.
        """
        return self._loop_thread.call(partial(self._database.wait_for_observers, timeout=timeout))

    def backfill(self, observer: Observer, *, again: bool = False) -> int:
        """Notifies an observer of all cells that were written before it was registered.

        It does not run again for cells that it has handled, unless `again` is true. Returns the
        number of cells. A worker or `register_observers` must have registered the observer.

        >>> db.backfill(index)
        """
        return self._loop_thread.call(partial(self._database.backfill, observer, again=again))

    # ------------------------------------------------------------------ the end

    def close(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Finishes observers' runs and background work, within `drain_seconds` together, and
        disconnects. Nothing is lost if that is too short. Closing twice is harmless."""
        require_drain_seconds(drain_seconds)
        self._loop_thread.closed(self)
        self._loop_thread.call(partial(self._database.close, drain_seconds=drain_seconds))

    def __enter__(self) -> Database:
        self._loop_thread.require_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
