"""A cluster as a program sees it: tables, transactions, snapshots."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Set,
)
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, TypeVar, overload
from weakref import WeakKeyDictionary

from percolator.aio.changes import Changes, Following
from percolator.aio.engine import Engine
from percolator.aio.find import declared_index, require_same_index
from percolator.aio.index_build import IndexBuild
from percolator.aio.observing import new_worker, stop_all, worker_context
from percolator.aio.pin import Pin
from percolator.aio.reader import Reader
from percolator.aio.set_many import BulkWriter
from percolator.aio.shared import (
    REPLACE_AFTER_SECONDS,
    Share,
    SharedTransaction,
    Ticket,
    checked_ttl,
    new_ticket,
)
from percolator.aio.snapshot import Snapshot
from percolator.aio.transaction import Outcome, Transaction
from percolator.arguments import (
    as_option,
    column_ttl,
    column_ttls,
    listed,
    listed_tables,
    require_bool,
    require_function,
    require_no_internal_name,
    require_seconds,
    require_table,
    require_text,
    retention_milliseconds,
)
from percolator.codecs.values import SplitPoint, name_of
from percolator.errors import (
    InvalidArgument,
    OutcomeUnknown,
    PercolatorError,
    SchemaError,
    UsageError,
    not_picklable,
)
from percolator.observers.backfill import backfill
from percolator.observers.definition import Observer, checked
from percolator.observers.quiet import Quiet, wait_until_quiet
from percolator.observers.registration import register
from percolator.observers.worker import Worker, WorkerLimits
from percolator.protocol.commit import settled
from percolator.protocol.indexes import DROPPED
from percolator.retries import (
    Attempts,
    RetryPolicy,
    awaited,
    is_repeatable,
    require_policy,
    require_runnable,
)
from percolator.routing.catalog import TableInfo
from percolator.schema import Column, Index, Readable, Table, encoded_key
from percolator.timestamps import Timestamp
from percolator.v1.master_pb2 import Codecs, RemovedIndex, TableOptions
from percolator.wire.table_indexes import ENTRIES_PREFIX

# What the rest of the library needs from a database, and programs do not: `Database.internal`.

K = TypeVar("K")


class DatabaseInternals:
    """The inner side of `Database`. Unlike the methods of that class, most work in any thread."""

    def __init__(self, engine: Engine, retry: RetryPolicy) -> None:
        self.engine = engine
        self._retry = retry

    def transaction(self, timeout: float | None, *, serializable: bool = False) -> Transaction:
        """As `Database.transaction`."""
        self.check_timeout(timeout)
        return Transaction(self.engine, timeout, serializable=serializable)

    def snapshot(self, at: Timestamp | datetime | None, timeout: float | None) -> Snapshot:
        """As `Database.snapshot`."""
        self.check_timeout(timeout)
        return Snapshot(self.engine, at, timeout)

    def following(
        self,
        table: Table[K],
        after: Timestamp | datetime | None,
        until: Timestamp | datetime | None,
        *,
        before: bool,
        timeout: float | None,
    ) -> Following[K]:
        """The changes that `Database.changes` reads. In the event loop only."""
        return Following(self.engine, table, after, until, before=before, timeout=timeout)

    def pin(
        self,
        at: Timestamp | datetime | None,
        tables: Sequence[Table[Any]],
        description: str,
        ttl: float | None,
        timeout: float | None,
    ) -> Pin:
        """As `Database.pin`."""
        self.check_timeout(timeout)
        seconds = timeout or self.engine.limits.call_seconds
        return Pin(self.engine, at, tables, description or "a pin", ttl, seconds)

    def shared_transaction(
        self,
        unchanged_since: Timestamp | datetime | None,
        ttl: float | None,
        timeout: float | None,
        ticket: Ticket | None = None,
    ) -> SharedTransaction:
        """As `Database.shared_transaction`; with a ticket, one that another process has begun."""
        self.check_timeout(timeout)
        seconds = timeout or self.engine.limits.call_seconds
        return SharedTransaction(self.engine, unchanged_since, ttl, seconds, ticket)

    async def shared_ticket(self, ttl: float, timeout: float) -> Ticket:
        """The ticket of a new shared transaction, on which another process is to decide."""
        self.check_timeout(timeout)
        return await new_ticket(self.engine, 0, checked_ttl(self.engine, ttl), timeout)

    def share(
        self,
        ticket: Ticket,
        task: str,
        generation: int,
        timeout: float | None,
        replace_after_seconds: float = REPLACE_AFTER_SECONDS,
        chosen: Set[int] = frozenset(),
        *,
        only_changes: bool = False,
    ) -> Share:
        """As `Database.share`. `chosen`: start timestamps of parts whose cells it leaves alone.
        `only_changes`: cells that have their values already are locked, but not written."""
        self.check_timeout(timeout)
        return Share(
            self.engine,
            ticket,
            task,
            generation,
            timeout or self.engine.limits.call_seconds,
            replace_after_seconds,
            chosen,
            only_changes,
        )

    def attempts(
        self, retry: RetryPolicy | None, function: Callable[..., object] | None = None
    ) -> Attempts:
        """The attempts at `function` that `Database.run` makes. Call `end` after the last one."""
        require_policy(retry)
        policy = retry or self._retry
        # Here already: thousands may be refused in a second, and that has to cost little.
        self.engine.admission.require(self.engine.now() + policy.deadline_seconds)
        return Attempts(policy, self.engine.env, _code(function))

    def attempt(
        self, attempts: Attempts, retries: int, *, serializable: bool = False
    ) -> Transaction:
        """The transaction of the next attempt."""
        seconds = min(attempts.seconds_left(), self.engine.limits.call_seconds)
        transaction = Transaction(self.engine, seconds, attempts, serializable=serializable)
        transaction.statistics.retries = retries
        return transaction

    def deadline(self, timeout: float | None) -> float:
        """When a call that starts now times out, by the monotonic clock. Checks the call, too."""
        self.engine.require_usable()
        self.check_timeout(timeout)
        return self.engine.now() + (timeout or self.engine.limits.call_seconds)

    def check_timeout(self, timeout: float | None) -> None:
        """Raises `UsageError` after the database was closed, and for a bad time-out."""
        if self.engine.closed:
            raise UsageError("the database is closed")
        if timeout is not None:
            require_seconds(timeout)


def _code(function: Callable[..., object] | None) -> object:
    """The code of a function: it stays the same if the function is defined again for each call.

    A wrapper's code is shared by all functions that it wraps: functions that only read would wait
    with the others.
    """
    if function is None:
        return None
    while isinstance(unwrapped := inspect.unwrap(function), partial):
        function = unwrapped.func
    return getattr(unwrapped, "__code__", type(unwrapped))


R = TypeVar("R")
T = TypeVar("T")
D = TypeVar("D")

DRAIN_SECONDS = 10.0

SPLITS_MAX = 100_000
"""The most tablets that a cluster has, unless its master is configured differently."""


class Database:
    """A connection to a cluster, for all tasks of one event loop.

    >>> async with percolator.aio.connect("localhost:7100") as db:
    ...     async with db.transaction() as tx:
    ...         tx.set("bob", balance, 10)
    """

    def __init__(self, engine: Engine, retry: RetryPolicy) -> None:
        self._engine = engine
        self.internal = DatabaseInternals(engine, retry)
        """For other parts of the library: programs do not need it, and it may change any time."""
        self._workers: WeakKeyDictionary[Worker, None] = WeakKeyDictionary()

    def __reduce__(self) -> NoReturn:
        raise not_picklable("a database")

    # ------------------------------------------------------------------ tables

    async def create_table(
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

        >>> await db.create_table(sessions, ttl={token: timedelta(hours=12)})
        """
        deadline = self.internal.deadline(timeout)
        require_table(table)
        require_no_internal_name(table.name)
        require_bool(exist_ok, "exist_ok")
        require_bool(change_feed, "change_feed")
        rows = [
            key.row if isinstance(key, SplitPoint) else encoded_key(table, key, field="split")
            for key in listed(splits, "splits", SPLITS_MAX)
        ]
        if len(rows) > SPLITS_MAX:
            raise InvalidArgument("splits", f"expected at most {SPLITS_MAX}")
        if any(not row for row in rows) or any(
            first >= second for first, second in itertools.pairwise(rows)
        ):
            raise InvalidArgument("splits", "expected ascending row keys, none of them empty")
        options = TableOptions(change_feed=change_feed, ttls=column_ttls(table, ttl))
        if options.ttls:
            self._engine.require_ttls_possible()
        if retention is not None:
            options.retention_milliseconds = retention_milliseconds(retention)
        try:
            await self._engine.catalog.create(
                table.name,
                rows,
                options,
                exist_ok=exist_ok,
                deadline=deadline,
                codecs=Codecs(key=name_of(table.key)),
                indexes=[one.definition() for one in table.indexes.values()],
            )
        except InvalidArgument as error:
            raise as_option(error, table) from error

    async def create_tables(
        self,
        tables: Iterable[Table[Any]],
        *,
        exist_ok: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Creates several tables in order; after an error, the remaining ones do not exist.

        `create_table` has the choices that a single table has. The time-out is for all of them.

        >>> await db.create_tables([accounts, orders], exist_ok=True)
        """
        deadline = self.internal.deadline(timeout)
        for table in listed_tables(tables):
            left = max(deadline - self._engine.now(), 0.001)
            await self.create_table(table, exist_ok=exist_ok, timeout=left)

    async def tables(self, *, timeout: float | None = None) -> list[str]:
        """The names of all tables, sorted, without those that have the entries of indexes."""
        found = await self._engine.catalog.tables(self.internal.deadline(timeout))
        return sorted(one.name for one in found if not one.name.startswith(ENTRIES_PREFIX))

    async def drop_table(
        self, table: Table[Any], *, missing_ok: bool = False, timeout: float | None = None
    ) -> None:
        """Deletes a table with everything in it.

        Once this returns, nobody can read the table or commit into it. After `DeadlineExceeded`,
        it may be dropped with some servers still using it: the error says so. To wait for them,
        drop it again.
        """
        deadline = self.internal.deadline(timeout)
        require_table(table)
        require_no_internal_name(table.name)
        require_bool(missing_ok, "missing_ok")
        await self._engine.catalog.delete(table.name, missing_ok=missing_ok, deadline=deadline)

    # ------------------------------------------------------------------ changes

    async def set_change_feed(
        self, table: Table[Any], *, on: bool, timeout: float | None = None
    ) -> None:
        """Gives an existing table a change feed, or takes it away.

        Once this returns, all commits are in the feed. Those before may not be, and `changes`
        refuses to begin below them.
        """
        deadline = self.internal.deadline(timeout)
        require_table(table)
        require_bool(on, "on")
        await self._engine.catalog.set_change_feed(table.name, on=on, deadline=deadline)

    async def set_ttl(
        self, column: Column[Any], ttl: timedelta | None, *, timeout: float | None = None
    ) -> None:
        """Makes the values of a column expire this long after their commits; None: never.

        Once this returns, it applies to all reads, including those of existing values. What has
        been deleted because it had expired does not come back.
        """
        deadline = self.internal.deadline(timeout)
        change = column_ttl(column, ttl)
        require_no_internal_name(column.table.name)
        self._engine.require_ttls_possible()
        await self._engine.catalog.set_ttls(column.table.name, [change], deadline)

    async def create_index(
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

        >>> await db.create_index(by_city)
        """
        deadline = self.internal.deadline(timeout)
        if progress is not None:
            require_function(progress, "progress")
        declared = declared_index(index)
        require_no_internal_name(declared.table.name)
        info = await self._engine.catalog.change_indexes(
            declared.table.name, add=[declared.definition()], deadline=deadline
        )
        return await self._index(info, declared.name, timeout).build(progress)

    async def drop_index(
        self, table: Table[Any], name: str, *, timeout: float | None = None
    ) -> None:
        """Removes an index of a table, with its entries. Once this returns, no commit keeps it.

        >>> await db.drop_index(customers, "by city")
        """
        deadline = self.internal.deadline(timeout)
        require_table(table)
        require_no_internal_name(table.name)
        require_text(name, "name")
        catalog = self._engine.catalog
        await catalog.describe(table.name, deadline)
        info = await catalog.table(table.name, deadline)
        known = {one.name: one.table_id for one in info.schema.indexes}
        if name in known:
            # Before any commit leaves its entries out.
            await self._index(info, name, timeout).mark(DROPPED)
        removed = RemovedIndex(name=name, table_id=known.get(name, 0))
        await catalog.change_indexes(table.name, remove=[removed], deadline=deadline)

    async def check_index(
        self, index: Index[Any] | Column[Any], *, timeout: float | None = None
    ) -> list[str]:
        """Compares an index with its table, and returns the differences: none, unless something is
        wrong. The time-out applies to each page. Raises `SchemaError` if the cluster has another
        index of that name.

        >>> assert await db.check_index(by_city) == []
        """
        deadline = self.internal.deadline(timeout)
        declared = declared_index(index)
        await self._engine.catalog.describe(declared.table.name, deadline)
        info = await self._engine.catalog.table(declared.table.name, deadline)
        build = self._index(info, declared.name, timeout)
        # A column that is not declared as indexed does not say whether its index is unique.
        says_all = isinstance(index, Index) or declared.name in declared.table.indexes
        require_same_index(info.name, build.index, declared, says_all=says_all)
        return await build.problems()

    def _index(self, info: TableInfo, name: str, timeout: float | None) -> IndexBuild:
        seconds = timeout or self._engine.limits.call_seconds
        for one in info.schema.indexes:
            if one.name == name:
                return IndexBuild(self, self._engine, info.table_id, one, seconds)
        raise SchemaError(f"table {info.name!r} has no index {name!r}", table=info.name)

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
        the cluster. What only the cluster knows is checked on entering the block, or where the
        first change is awaited. A time older than the history or the feed is refused
        (`SnapshotTooOld`).

        History is kept until the block ends, or the changes do.

        >>> async with db.changes(accounts, after=position) as changes:
        ...     async for change in changes:
        ...         print(change.key, change.column, change.kind)
        """
        return Changes(self.internal.following(table, after, until, before=before, timeout=timeout))

    async def newest_change(
        self, table: Table[Any], *, after: Timestamp | datetime, timeout: float | None = None
    ) -> Timestamp | None:
        """The commit timestamp of the newest change above `after`, or None if nothing has changed.

        Nothing at or below it will change again. This is cheap: no changes are read. Changes
        that are held up by a transaction under way or a bulk load are not counted.
        """
        following = self.internal.following(table, after, None, before=False, timeout=timeout)
        return await following.newest()

    # ------------------------------------------------------------------ transactions

    def transaction(
        self, *, serializable: bool = False, timeout: float | None = None
    ) -> Transaction:
        """One attempt at a transaction. It reads the store as of its first read, not as of entering
        its block. Leaving the block commits.

        If it is `serializable`, its commit locks the cells that it has read: then it is as if it
        had run alone, at the time of its commit, among others that are serializable. It reads only
        by key, and columns by name. The time-out applies to each call in it, and to its commit.

        >>> async with db.transaction() as tx:
        ...     tx.set("bob", balance, 10)
        """
        self._engine.require_usable()
        return self.internal.transaction(timeout, serializable=serializable)

    def snapshot(
        self, at: Timestamp | datetime | None = None, *, timeout: float | None = None
    ) -> Snapshot:
        """Reads at one timestamp: that of its first read, not of entering its block; or one of the
        past, as far back as history is kept.

        A datetime shows what was committed before its millisecond.

        >>> async with db.snapshot(at=yesterday) as snapshot:
        ...     print(await snapshot.get("bob", balance))
        """
        self._engine.require_usable()
        return self.internal.snapshot(at, timeout)

    @overload
    async def get(
        self, row: K, column: Readable[T, K], *, timeout: float | None = None
    ) -> T | None: ...
    @overload
    async def get(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    async def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell now, or `default` if it has none.

        It shows everything that was committed before the call. Two calls may show different
        moments: to read several cells together, use a `snapshot`, which takes one more round trip.

        >>> await db.get("bob", balance, default=0)
        """
        began = self._engine.now()
        try:
            return await self._get(row, column, default, timeout)
        except SchemaError as error:
            if not error.was_dropped:
                raise
        # Another one may have its name.
        left = (timeout or self._engine.limits.call_seconds) - (self._engine.now() - began)
        return await self._get(row, column, default, max(left, 0.001))

    async def _get(
        self, row: object, column: Readable[Any], default: object, timeout: float | None
    ) -> Any:  # noqa: ANN401 - the column's values
        reader = Reader(self._engine, timeout, "snapshot")
        try:
            return await reader.get_now(row, column, default, timeout)
        finally:
            reader.finish("is closed")

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

        >>> async with db.pin(at=yesterday) as pin: ...
        """
        self._engine.require_usable()
        return self.internal.pin(at, tables, description, ttl, timeout)

    async def run(
        self,
        function: Callable[..., Awaitable[R]],
        *arguments: object,
        retry: RetryPolicy | None = None,
        serializable: bool = False,
        keywords: Mapping[str, Any] | None = None,
    ) -> R:
        """Runs `function(transaction, *arguments)` in a transaction, and again after conflicts.

        `@transactional` does this when its function is called with a database.
        """
        require_runnable(function, keywords)
        attempts = self.internal.attempts(retry, function)
        retries = 0
        try:
            while True:
                transaction = self.internal.attempt(attempts, retries, serializable=serializable)
                try:
                    with attempts.inside():
                        async with transaction:
                            return await awaited(
                                function(transaction, *arguments, **(keywords or {}))
                            )
                except PercolatorError as error:
                    if transaction.outcome is not Outcome.ABORTED:
                        raise  # the function has committed before it failed
                    if not await attempts.again(error):
                        if not is_repeatable(error):
                            raise
                        raise attempts.exhausted(error) from error
                retries = transaction.statistics.retries + 1
        finally:
            attempts.end()

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

        >>> async with db.shared_transaction() as shared:
        ...     await shared.commit([await write(shared.ticket, n) for n in range(10)])
        """
        return self.internal.shared_transaction(unchanged_since, ttl, timeout)

    def share(
        self, ticket: Ticket, *, task: str, generation: int = 0, timeout: float | None = None
    ) -> Share:
        """One attempt at one task of a shared transaction, in any process.

        A later attempt at the same task replaces an earlier one. `generation` counts how often all
        tasks have been run from the beginning, if a task may then have other rows. A cell may be
        written once in a shared transaction. The time-out applies to each call. A later attempt
        waits 10 s more before it replaces one that has finished.

        >>> async with db.share(ticket, task="7") as share:
        ...     await share.set("bob", balance, 10)
        ...     receipt = await share.finish()
        """
        return self.internal.share(ticket, task, generation, timeout)

    async def set_many(
        self,
        rows: Iterable[tuple[Any, Mapping[Any, Any]]]
        | AsyncIterable[tuple[Any, Mapping[Any, Any]]],
        *,
        in_flight_max: int = 512,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Writes many rows, each in its own small transaction, many at a time.

        This is much faster than one after another, but not atomic: after an error, some rows are
        written and others are not. Setting them again does no harm. `progress` is called with the
        number of rows written so far. Returns that number.

        >>> await db.set_many((name, {balance: 10}) for name in names)
        """
        self.internal.deadline(None)
        return await BulkWriter(self, in_flight_max, progress).write(rows)

    async def resolve(self, error: OutcomeUnknown, *, timeout: float | None = None) -> Outcome:
        """Finds out whether a transaction whose commit was not answered has committed.

        Any process may ask, even one that only received the error. If the transaction has not
        committed by now, this makes sure that it never will. Once it is older than the history of
        the table, the answer is gone: `OutcomeLost`.
        """
        deadline = self.internal.deadline(timeout)
        if not isinstance(error, OutcomeUnknown):
            raise UsageError(f"expected an OutcomeUnknown, got {type(error).__name__}")
        if error.primary is None or not error.start_timestamp:
            raise UsageError("the error does not name the transaction whose outcome is unknown")
        env = self._engine.env
        commit_ts = await settled(env, error.start_timestamp, error.primary, deadline)
        return Outcome.COMMITTED if commit_ts else Outcome.ABORTED

    async def timestamp(self, *, timeout: float | None = None) -> Timestamp:
        """A fresh timestamp, above everything committed so far."""
        deadline = self.internal.deadline(timeout)
        left = deadline - self._engine.now()
        return Timestamp(await self._engine.fresh_timestamp(left))

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

        >>> async with db.run_observers([index]) as worker:
        ...     await worker.wait()
        """
        self._engine.require_usable()
        worker = new_worker(self._engine, observers, limits, drain_seconds)
        self._workers[worker] = None
        self._engine.activity.workers.add(worker)
        return worker

    async def register_observers(self, observers: Sequence[Observer]) -> None:
        """Registers observers: once this returns, every commit notifies them.

        A worker does this when it starts. Observers that are already registered stay as they are; a
        different observer with the same name is refused.
        """
        self.internal.deadline(None)
        await register(worker_context(self._engine), checked(observers))

    async def wait_for_observers(self, *, timeout: float | None = None) -> Quiet:
        """Returns when no observer of any table has anything left to do.

        Without a time-out, it waits indefinitely. It waits neither for paused observers nor for
        changes put aside as dead letters; the result reports both.
        """
        self.internal.deadline(timeout)
        return await wait_until_quiet(worker_context(self._engine), timeout)

    async def backfill(self, observer: Observer, *, again: bool = False) -> int:
        """Notifies an observer of all cells that were written before it was registered.

        It does not run again for cells that it has handled, unless `again` is true. Returns the
        number of cells. A worker or `register_observers` must have registered the observer.

        >>> await db.backfill(index)
        """
        self.internal.deadline(None)
        if not isinstance(observer, Observer):
            raise InvalidArgument("observer", f"expected an Observer, got {observer!r:.80}")
        require_bool(again, "again")
        context = worker_context(self._engine)
        done = await backfill(context, observer.table.name, observer.name, again=again)
        return done.cells

    # ------------------------------------------------------------------ the end

    async def close(self, *, drain_seconds: float = DRAIN_SECONDS) -> None:
        """Finishes observers' runs and background work, within `drain_seconds` together, and
        disconnects. Nothing is lost if that is too short. Closing twice is harmless."""
        if asyncio.get_running_loop() is not self._engine.loop:
            raise UsageError(
                "a database must be closed in the event loop in which it was connected"
            )
        await self._engine.close(await stop_all(list(self._workers), drain_seconds))

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
