"""A cluster, for programs without asyncio."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from percolator import aio, loop_thread
from percolator.aio import Outcome
from percolator.aio.bulk import source_of
from percolator.aio.database import DRAIN_SECONDS
from percolator.aio.pin import PIN_TTL_SECONDS
from percolator.arguments import finished
from percolator.errors import OutcomeUnknown, PercolatorError
from percolator.limits import Limits
from percolator.loop_thread import LoopThread
from percolator.observers import worker as asynchronous
from percolator.observers.definition import Observer
from percolator.observers.waiting import Quiet
from percolator.observers.worker import WorkerLimits
from percolator.pin import Pin
from percolator.retries import RetryPolicy
from percolator.schema import Table
from percolator.snapshot import Snapshot
from percolator.timestamps import Timestamp
from percolator.transaction import Transaction
from percolator.wire.tls import Tls
from percolator.worker import Worker

ROWS_PER_PORTION = 4_096
"""`set_many` takes so many rows at a time from its source."""

R = TypeVar("R")
K = TypeVar("K")


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
    """Connects to a cluster, by the `host:port` of any master or gateway (or several, with commas).

    Without an address, PERCOLATOR_ADDRESS says it, or else it is localhost:7100. `description` is
    what others see of this process, such as who holds a lock. `tls` and `token` say who it is to a
    cluster that asks; without them, PERCOLATOR_TLS_CA, PERCOLATOR_TLS_CERTIFICATE,
    PERCOLATOR_TLS_KEY and PERCOLATOR_TOKEN_FILE do.

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

    return Database.over(start)


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
        """Whatever `start` opens in the shared event loop."""
        thread = loop_thread.shared()
        return cls(thread, thread.call(start))

    # ------------------------------------------------------------------ tables

    def create_table(
        self,
        table: Table[K],
        splits: Sequence[K] = (),
        *,
        exist_ok: bool = False,
        retention: timedelta | None = None,
        timeout: float | None = None,
    ) -> None:
        """Creates a table, cut into tablets at the row keys in `splits`.

        `retention` is how long old versions are kept; the cluster's default if not given.
        """
        call = partial(
            self._database.create_table,
            table,
            splits,
            exist_ok=exist_ok,
            retention=retention,
            timeout=timeout,
        )
        self._loop_thread.call(call)

    def tables(self, *, timeout: float | None = None) -> list[str]:
        """The names of all tables, sorted."""
        return self._loop_thread.call(partial(self._database.tables, timeout=timeout))

    def drop_table(
        self, table: Table[Any], *, missing_ok: bool = False, timeout: float | None = None
    ) -> None:
        """Deletes a table with everything in it."""
        call = partial(self._database.drop_table, table, missing_ok=missing_ok, timeout=timeout)
        self._loop_thread.call(call)

    # ------------------------------------------------------------------ transactions

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """One attempt at a transaction; leaving its block commits.

        The time-out is that of each call in it, and of its commit.

        >>> with db.transaction() as tx:
        ...     tx.set("bob", balance, 10)
        """
        self._loop_thread.require_usable()
        return Transaction(self._loop_thread, self._database.new_transaction(timeout))

    def snapshot(
        self, at: Timestamp | datetime | None = None, *, timeout: float | None = None
    ) -> Snapshot:
        """Reads only, at one timestamp: now, or in the past as far as history is kept.

        >>> with db.snapshot(at=yesterday) as snapshot:
        ...     print(snapshot.get("bob", balance))
        """
        self._loop_thread.require_usable()
        return Snapshot(self._loop_thread, self._database.new_snapshot(at, timeout))

    def pin(
        self,
        at: Timestamp | datetime | None = None,
        *,
        tables: Sequence[Table[Any]] = (),
        description: str = "",
        ttl: float = PIN_TTL_SECONDS,
        timeout: float | None = None,
    ) -> Pin:
        """Keeps history from a moment on, for as long as its block lasts, or this process lives.

        A moment is refused that is older than the history of one of the `tables`, or of any table
        if none are named. In other tables, whose history does not go back so far, nothing is
        collected meanwhile. `ttl` is how many seconds it outlives this process.

        >>> with db.pin(at=yesterday) as pin: ...
        """
        self._loop_thread.require_usable()
        pin = self._database.new_pin(at, tables, description, ttl, timeout)
        return Pin(self._loop_thread, pin)

    def run(
        self,
        function: Callable[..., R],
        *arguments: object,
        retry: RetryPolicy | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> R:
        """Runs `function(transaction, *arguments)` in a transaction, again after conflicts.

        What `@transactional` does with a function called with a database. The function runs in the
        calling thread.
        """
        self._loop_thread.require_usable()
        attempts = self._database.attempts(retry)
        retries = 0
        while True:
            attempt = self._database.attempt(attempts, retries)
            transaction = Transaction(self._loop_thread, attempt)
            try:
                with transaction:
                    return finished(function(transaction, *arguments, **(keywords or {})))
            except PercolatorError as error:
                if not self._loop_thread.call(partial(attempts.again, error)):
                    raise
            retries = transaction.statistics.retries + 1

    def set_many(
        self,
        rows: Iterable[tuple[Any, Mapping[Any, Any]]],
        *,
        in_flight_max: int = 512,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes many rows, each in a small transaction of its own, many at a time.

        Much faster than one after the other, and not atomic: after an error, some rows are written
        and others not. Setting them again does no harm. `progress` is called with the number of
        rows written so far. Returns that number.

        >>> db.set_many((name, {balance: 10}) for name in names)
        """
        self._loop_thread.require_usable()
        source = source_of(rows)  # used in the calling thread, which may do what it likes
        written = 0
        portion = list(islice(source, ROWS_PER_PORTION))
        while portion:
            call = partial(self._database.set_many, portion, in_flight_max=in_flight_max)
            writing = self._loop_thread.start(call)
            try:
                portion = list(islice(source, ROWS_PER_PORTION))
            except BaseException:
                writing.abandon()  # nothing is written any more once the caller knows
                raise
            written += writing.wait()
            if progress is not None:
                progress(written)
        return written

    def resolve(self, error: OutcomeUnknown, *, timeout: float | None = None) -> Outcome:
        """Finds out what became of a transaction whose commit was not answered.

        Any process may ask, also one that only received the error. A transaction that has not
        committed by now never will.
        """
        return self._loop_thread.call(partial(self._database.resolve, error, timeout=timeout))

    def timestamp(self, *, timeout: float | None = None) -> Timestamp:
        """A fresh timestamp: everything committed until now lies below it."""
        return self._loop_thread.call(partial(self._database.timestamp, timeout=timeout))

    # ------------------------------------------------------------------ observers

    def run_observers(
        self,
        observers: Sequence[Observer],
        *,
        limits: WorkerLimits | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> Worker:
        """A worker that runs these observers, from the beginning of its block to its end.

        At the end, what runs has `drain_seconds` to finish. Nothing is lost if it does not.

        >>> with db.run_observers([index]) as worker:
        ...     worker.wait()
        """

        async def new() -> asynchronous.Worker:
            return self._database.run_observers(
                observers, limits=limits, drain_seconds=drain_seconds
            )

        return Worker(self._loop_thread, self._loop_thread.call(new))

    def register_observers(self, observers: Sequence[Observer]) -> None:
        """Makes observers known: from its return on, every commit notifies them.

        A worker does this when it starts. What is there already is left as it is; another observer
        of the same name is refused.
        """
        self._loop_thread.call(partial(self._database.register_observers, observers))

    def wait_for_observers(self, *, timeout: float | None = None) -> Quiet:
        """Returns when no observer of any table has anything left to do.

        Without a time-out, it waits as long as that takes. Observers that are paused are not waited
        for, nor is what was put aside as a dead letter: the answer tells of both.
        """
        return self._loop_thread.call(partial(self._database.wait_for_observers, timeout=timeout))

    def backfill(self, observer: Observer, *, again: bool = False) -> int:
        """Notifies the observer of all cells that were written before it was registered.

        It does not run again for what it has answered already, unless `again`. Returns how many
        cells there were. It has to be registered, by a worker or by `register_observers`.

        >>> db.backfill(index)
        """
        return self._loop_thread.call(partial(self._database.backfill, observer, again=again))

    # ------------------------------------------------------------------ the end

    def close(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Finishes what goes on in the background, and disconnects. Closing twice is harmless."""
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
