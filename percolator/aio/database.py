"""A cluster, as a program sees it: tables, transactions, snapshots."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from percolator.aio.bulk import BulkWriter
from percolator.aio.engine import Engine
from percolator.aio.observing import new_worker, observers_client
from percolator.aio.pin import PIN_TTL_SECONDS, Pin
from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import Outcome, Transaction
from percolator.arguments import (
    awaited,
    listed,
    require_seconds,
    require_table,
    retention_milliseconds,
)
from percolator.errors import (
    InvalidArgument,
    OutcomeUnknown,
    PercolatorError,
    UsageError,
)
from percolator.observers.backfilling import backfill
from percolator.observers.definition import Observer, checked
from percolator.observers.registration import register
from percolator.observers.waiting import Quiet, wait_until_quiet
from percolator.observers.worker import Worker, WorkerLimits
from percolator.protocol import aftermath
from percolator.protocol.records import KIND_LOCK_ONLY
from percolator.protocol.write_steps import WriteSteps
from percolator.retries import Attempts, RetryPolicy
from percolator.schema import Table
from percolator.timestamps import Timestamp
from percolator.v1.master_pb2 import TableOptions

R = TypeVar("R")
K = TypeVar("K")

DRAIN_SECONDS = 10.0

SPLITS_MAX = 100_000
"""As many tablets as a cluster has at most, unless its master is told otherwise."""


class Database:
    """A connection to a cluster, for all tasks of one event loop.

    >>> async with percolator.aio.connect("localhost:7100") as db:
    ...     async with db.transaction() as tx:
    ...         await tx.set("bob", balance, 10)
    """

    def __init__(self, engine: Engine, retry: RetryPolicy) -> None:
        self._engine = engine
        self._retry = retry
        self._workers: WeakKeyDictionary[Worker, None] = WeakKeyDictionary()

    @property
    def engine(self) -> Engine:
        """What it stands on: for parts of the library that need more than programs do."""
        return self._engine

    # ------------------------------------------------------------------ tables

    async def create_table(
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
        deadline = self._deadline(timeout)
        require_table(table)
        rows = [table.key.encode(key) for key in listed(splits, "splits", SPLITS_MAX)]
        if len(rows) > SPLITS_MAX:
            raise InvalidArgument("splits", f"expected at most {SPLITS_MAX}")
        if any(not row for row in rows) or any(
            first >= second for first, second in itertools.pairwise(rows)
        ):
            raise InvalidArgument("splits", "expected ascending row keys, none of them empty")
        options = TableOptions()
        if retention is not None:
            options.retention_milliseconds = retention_milliseconds(retention)
        await self._engine.catalog.create(
            table.name, rows, options, exist_ok=exist_ok, deadline=deadline
        )

    async def tables(self, *, timeout: float | None = None) -> list[str]:
        """The names of all tables, sorted."""
        found = await self._engine.catalog.tables(self._deadline(timeout))
        return sorted(info.name for info in found)

    async def drop_table(
        self, table: Table[Any], *, missing_ok: bool = False, timeout: float | None = None
    ) -> None:
        """Deletes a table with everything in it."""
        deadline = self._deadline(timeout)
        require_table(table)
        await self._engine.catalog.delete(table.name, missing_ok=missing_ok, deadline=deadline)

    # ------------------------------------------------------------------ transactions

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """One attempt at a transaction; leaving its block commits.

        The time-out is that of each call in it, and of its commit.

        >>> async with db.transaction() as tx:
        ...     await tx.set("bob", balance, 10)
        """
        self._engine.require_usable()
        if timeout is not None:
            require_seconds(timeout)
        return Transaction(self._engine, timeout)

    def new_transaction(self, timeout: float | None) -> Transaction:
        """As `transaction`, for whoever is not in the event loop itself."""
        self._check_timeout(timeout)
        return Transaction(self._engine, timeout)

    def snapshot(
        self, at: Timestamp | datetime | None = None, *, timeout: float | None = None
    ) -> Snapshot:
        """Reads only, at one timestamp: now, or in the past as far as history is kept.

        >>> async with db.snapshot(at=yesterday) as snapshot:
        ...     print(await snapshot.get("bob", balance))
        """
        self._engine.require_usable()
        if timeout is not None:
            require_seconds(timeout)
        return Snapshot(self._engine, at, timeout)

    def new_snapshot(self, at: Timestamp | datetime | None, timeout: float | None) -> Snapshot:
        """As `snapshot`, for whoever is not in the event loop itself."""
        self._check_timeout(timeout)
        return Snapshot(self._engine, at, timeout)

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

        >>> async with db.pin(at=yesterday) as pin: ...
        """
        self._engine.require_usable()
        return self.new_pin(at, tables, description, ttl, timeout)

    def new_pin(
        self,
        at: Timestamp | datetime | None,
        tables: Sequence[Table[Any]],
        description: str,
        ttl: float,
        timeout: float | None,
    ) -> Pin:
        """As `pin`, for whoever is not in the event loop itself."""
        self._check_timeout(timeout)
        seconds = timeout or self._engine.limits.call_seconds
        return Pin(self._engine, at, tables, description or "a pin", ttl, seconds)

    async def run(
        self,
        function: Callable[..., Awaitable[R]],
        *arguments: object,
        retry: RetryPolicy | None = None,
        keywords: Mapping[str, Any] | None = None,
    ) -> R:
        """Runs `function(transaction, *arguments)` in a transaction, again after conflicts.

        What `@transactional` does with a function called with a database.
        """
        attempts = self.attempts(retry)
        retries = 0
        while True:
            transaction = self.attempt(attempts, retries)
            try:
                async with transaction:
                    return await awaited(function(transaction, *arguments, **(keywords or {})))
            except PercolatorError as error:
                if not await attempts.again(error):
                    raise
            retries = transaction.statistics.retries + 1

    def attempts(self, retry: RetryPolicy | None) -> Attempts:
        """How often `run` tries."""
        world = self._engine.world
        return Attempts(retry or self._retry, world.clock, world.random)

    def attempt(self, attempts: Attempts, retries: int) -> Transaction:
        """The transaction of the next attempt."""
        seconds = min(attempts.seconds_left(), self._engine.limits.call_seconds)
        transaction = Transaction(self._engine, seconds)
        transaction.statistics.retries = retries
        return transaction

    async def set_many(
        self,
        rows: Iterable[tuple[Any, Mapping[Any, Any]]]
        | AsyncIterable[tuple[Any, Mapping[Any, Any]]],
        *,
        in_flight_max: int = 512,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes many rows, each in a small transaction of its own, many at a time.

        Much faster than one after the other, and not atomic: after an error, some rows are written
        and others not. Setting them again does no harm. `progress` is called with the number of
        rows written so far. Returns that number.

        >>> await db.set_many((name, {balance: 10}) for name in names)
        """
        self._deadline(None)
        return await BulkWriter(self, in_flight_max, progress).write(rows)

    async def resolve(self, error: OutcomeUnknown, *, timeout: float | None = None) -> Outcome:
        """Finds out what became of a transaction whose commit was not answered.

        Any process may ask, also one that only received the error. A transaction that has not
        committed by now never will.
        """
        deadline = self._deadline(timeout)
        if not isinstance(error, OutcomeUnknown):
            raise UsageError(f"expected an OutcomeUnknown, got {type(error).__name__}")
        if error.primary is None or not error.start_timestamp:
            raise UsageError("the error does not say whose outcome is unknown")
        write = WriteSteps(error.start_timestamp, {error.primary: (KIND_LOCK_ONLY, b"")}, b"", 0)
        try:
            commit = await aftermath.mark_primary(self._engine.around, write, deadline)
        except PercolatorError as problem:
            raise OutcomeUnknown(
                f"still unknown: {problem}",
                start_timestamp=error.start_timestamp,
                primary=error.primary,
            ) from problem
        return Outcome.COMMITTED if commit else Outcome.ABORTED

    async def timestamp(self, *, timeout: float | None = None) -> Timestamp:
        """A fresh timestamp: everything committed until now lies below it."""
        deadline = self._deadline(timeout)
        left = deadline - self._engine.now()
        return Timestamp(await self._engine.around.timestamps.get(timeout_seconds=left))

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

        >>> async with db.run_observers([index]):
        ...     await asyncio.Event().wait()
        """
        self._engine.require_usable()
        worker = new_worker(self._engine, observers, limits, drain_seconds)
        self._workers[worker] = None
        return worker

    async def register_observers(self, observers: Sequence[Observer]) -> None:
        """Makes observers known: from its return on, every commit notifies them.

        A worker does this when it starts. What is there already is left as it is; another observer
        of the same name is refused.
        """
        self._deadline(None)
        await register(observers_client(self._engine), checked(observers))

    async def wait_for_observers(self, *, timeout: float | None = None) -> Quiet:
        """Returns when no observer of any table has anything left to do.

        Without a time-out, it waits as long as that takes. Observers that are paused are not waited
        for, nor is what was put aside as a dead letter: the answer tells of both.
        """
        self._deadline(timeout)
        return await wait_until_quiet(observers_client(self._engine), timeout)

    async def backfill(self, observer: Observer, *, again: bool = False) -> int:
        """Notifies the observer of all cells that were written before it was registered.

        It does not run again for what it has answered already, unless `again`. Returns how many
        cells there were. It has to be registered, by a worker or by `register_observers`.

        >>> await db.backfill(index)
        """
        self._deadline(None)
        client = observers_client(self._engine)
        done = await backfill(client, observer.table.name, observer.name, again=again)
        return done.cells

    # ------------------------------------------------------------------ the end

    async def close(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Finishes what goes on in the background, and disconnects. Closing twice is harmless."""
        if asyncio.get_running_loop() is not self._engine.loop:
            raise UsageError("a database is closed in the event loop in which it was connected")
        for worker in list(self._workers):
            await worker.stop(drain_seconds=drain_seconds)
        await self._engine.close(drain_seconds)

    async def __aenter__(self) -> Database:
        self._engine.require_usable()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _deadline(self, timeout: float | None) -> float:
        self._engine.require_usable()
        self._check_timeout(timeout)
        return self._engine.now() + (timeout or self._engine.limits.call_seconds)

    def _check_timeout(self, timeout: float | None) -> None:
        if self._engine.closed:
            raise UsageError("the database is closed")
        if timeout is not None:
            require_seconds(timeout)
