"""A cluster, as a program sees it: tables, transactions, snapshots."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, TypeVar

from percolator.aio.bulk import BulkWriter
from percolator.aio.engine import Engine
from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import Outcome, Transaction
from percolator.errors import (
    InvalidArgument,
    OutcomeUnknown,
    PercolatorError,
    UsageError,
)
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


class Database:
    """A connection to a cluster, for all tasks of one event loop.

    >>> async with percolator.aio.connect("localhost:7100") as db:
    ...     async with db.transaction() as tx:
    ...         await tx.set("bob", balance, 10)
    """

    def __init__(self, engine: Engine, retry: RetryPolicy) -> None:
        self._engine = engine
        self._retry = retry

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
        rows = [table.key.encode(key) for key in splits]
        if any(not row for row in rows) or any(
            first >= second for first, second in itertools.pairwise(rows)
        ):
            raise InvalidArgument("splits", "expected ascending row keys, none of them empty")
        options = TableOptions()
        if retention is not None:
            options.retention_milliseconds = retention // timedelta(milliseconds=1)
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
        await self._engine.catalog.delete(table.name, missing_ok=missing_ok, deadline=deadline)

    # ------------------------------------------------------------------ transactions

    def transaction(self, *, timeout: float | None = None) -> Transaction:
        """One attempt at a transaction; leaving its block commits.

        The time-out is that of each call in it, and of its commit.

        >>> async with db.transaction() as tx:
        ...     await tx.set("bob", balance, 10)
        """
        self._engine.require_usable()
        return self.new_transaction(timeout)

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
        return self.new_snapshot(at, timeout)

    def new_snapshot(self, at: Timestamp | datetime | None, timeout: float | None) -> Snapshot:
        """As `snapshot`, for whoever is not in the event loop itself."""
        self._check_timeout(timeout)
        return Snapshot(self._engine, at, timeout)

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
                    return await function(transaction, *arguments, **(keywords or {}))
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

    # ------------------------------------------------------------------ the end

    async def close(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Finishes what goes on in the background, and disconnects. Closing twice is harmless."""
        if asyncio.get_running_loop() is not self._engine.loop:
            raise UsageError("a database is closed in the event loop in which it was connected")
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
        if timeout is not None and timeout <= 0:
            raise InvalidArgument("timeout", f"expected a positive number, got {timeout}")
