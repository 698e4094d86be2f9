"""Notifying an observer of cells that were written before it was registered.

The snapshot that selects the cells is taken once every tablet judges commits under a schema that
includes the observer, so whatever is committed later notifies it anyway. Each cell gets a
notification at a timestamp above the snapshot, as if it had just been written. Writing one twice
does no harm, so an interrupted backfill can be resumed from any row up to where it stopped.

An observer handles each change once: it does not run again for cells that it has handled, unless
`again` makes it forget that it has.

The first registration of an observer owes it a backfill, unless its declaration says otherwise. The
schema says so until everything is notified, so that `percolator.observers.quiet` counts it, and
that any worker that runs the observer can go on where another one has died. An advisory lock keeps
two workers off the same backfill. The worker writes no more notifications while many are unhandled:
a million at once would keep the observer's live changes waiting behind them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from percolator.codecs.readable import counted
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    PercolatorError,
    Retry,
    SchemaChanged,
    SchemaError,
    SnapshotTooOld,
)
from percolator.formats.records import acknowledgement_column
from percolator.observers.context import WorkerContext, WorkRequest
from percolator.observers.scanner import RowLocks
from percolator.observers.watched import Watched
from percolator.observers.watched_cell import Acknowledgement
from percolator.protocol import steps
from percolator.protocol.environment import Statistics
from percolator.protocol.read import FoundRow, read_rows, scan_pages
from percolator.retries import Attempts, RetryPolicy
from percolator.routing.cells import CellMutation, RangeRequest, RowRequest
from percolator.v1 import master_pb2
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.advisory_locks import row_name
from percolator.wire.backoff import Backoff

_log = logging.getLogger(__name__)

_FORGOTTEN_AT_ONCE_MAX = 256
"""The most acknowledgements in one transaction: with more, a conflict with a run is too likely."""

_ROWS_AT_ONCE = 500
"""The most rows between two steps."""
_REPORT_SECONDS = 1.0
"""The interval at which the masters are told how far an owed backfill has come."""
_LOG_SECONDS = 10.0
_AGAIN_SECONDS = 2.0
"""The pause after an owed backfill could not be worked on: because another worker does it, or
because the cluster does not answer."""
_LOOK_SECONDS_MIN = 0.02
_LOOK_SECONDS_MAX = 1.0

Cell = tuple[bytes, bytes]
"""Row and column."""


@dataclass(frozen=True)
class Backfilled:
    """How far a backfill has come."""

    cells: int
    """Cells of which the observer has been notified so far."""
    row: bytes
    """Everything before this row is done: to resume, start here."""


async def backfill(
    context: WorkerContext,
    table: str,
    observer: str,
    *,
    start: bytes = b"",
    end: bytes = b"",
    again: bool = False,
    on_progress: Callable[[Backfilled], None] = lambda _: None,
) -> Backfilled:
    """Notifies an observer of all cells in the rows [start, end); an empty end means no limit.

    With `again`, it also runs again for cells that it has handled before. Raises `SchemaError` if
    there is no such observer, or if it is removed meanwhile.
    """
    if end and start >= end:
        raise InvalidArgument("end", f"{end!r} is not above the start, {start!r}")

    async def go_on(progress: Backfilled) -> bool:
        on_progress(progress)
        return True

    work = _Backfill(context, table, observer, again=again)
    await work.learn_schema()
    return await work.cover(Backfilled(0, start), end, go_on)


async def backfill_owed(
    context: WorkerContext,
    watched: Watched,
    *,
    rows_at_once: int = _ROWS_AT_ONCE,
    go_on: Callable[[Backfilled], Awaitable[bool]] | None = None,
) -> None:
    """Does the rest of the backfill that is owed to an observer, if any is.

    `go_on` is asked after each step of `rows_at_once`; it ends the work by returning False. Raises
    `SchemaError` if the table is gone, or if the observer is removed meanwhile.
    """
    owed = watched.owed
    if owed is None:
        return
    table, observer = watched.observer.table.name, watched.observer.name
    request = master_pb2.ReportBackfillRequest(
        table_id=watched.table_id, observer=observer, version=owed.version
    )

    async def report() -> master_pb2.Table:
        return await context.catalog.report_backfill(request, context.env.deadline())

    # Only then a snapshot shows all cells that did not notify the observer.
    described = await report()
    watched.owed = owed_by(described, observer)
    if watched.owed is None or watched.owed.version != owed.version:
        return
    work = _Backfill(context, table, observer, again=False, rows_at_once=rows_at_once)
    work.take_schema(described, watched.owed.columns)
    reported = logged = context.env.now()

    async def after(progress: Backfilled) -> bool:
        nonlocal reported, logged
        request.row, request.cells = progress.row, progress.cells
        if context.env.now() >= reported + _REPORT_SECONDS:
            watched.owed = owed_by(await report(), observer)
            reported = context.env.now()
            if watched.owed is None or watched.owed.version != request.version:
                return False  # the lock was lost, and another worker has done the rest
        if context.env.now() >= logged + _LOG_SECONDS:
            _log.info(
                "observer %s of table %s: backfill has notified it of %s so far",
                observer,
                table,
                counted(progress.cells, "cell"),
            )
            logged = context.env.now()
        return go_on is None or await go_on(progress)

    began = Backfilled(watched.owed.cells, watched.owed.row)
    done = await work.cover(began, b"", after)
    if not work.is_complete:
        return
    request.row, request.cells, request.done = done.row, done.cells, True
    watched.owed = owed_by(await report(), observer)
    _log.info(
        "observer %s of table %s: backfill is complete, it was notified of %s",
        observer,
        table,
        counted(done.cells, "cell"),
    )


def owed_by(table: master_pb2.Table, observer: str) -> master_pb2.OwedBackfill | None:
    """The backfill that is owed to an observer of the table."""
    named = (one for one in table.observers if one.name == observer)
    return next((one.owed for one in named if one.HasField("owed")), None)


class OwedBackfills:
    """Works off the backfills that are owed to the observers of one worker."""

    def __init__(
        self,
        context: WorkerContext,
        locks: RowLocks,
        start: Callable[[Coroutine[Any, Any, None]], object],
        *,
        unhandled_max: int,
    ) -> None:
        """`start` starts a task that ends with the worker. Each backfill waits while more than
        `unhandled_max` of its cells are unhandled."""
        self._context = context
        self._locks = locks
        self._start = start
        self._unhandled_max = unhandled_max
        self._begun: dict[Watched, None] = {}

    def begin(self, watched: Sequence[Watched]) -> None:
        """Begins the owed backfills that are not being worked on."""
        for one in watched:
            if one.owed is not None and one.is_active and one not in self._begun:
                self._begun[one] = None
                self._start(self._until_nothing_is_owed(one))

    async def _until_nothing_is_owed(self, watched: Watched) -> None:
        try:
            while watched.owed is not None and watched.is_active:
                try:
                    await self._alone(watched)
                except SchemaError as error:
                    # The table or the observer is gone: the worker is about to learn it.
                    _log.debug("a backfill ends: %s", error)
                except PercolatorError as error:
                    _log.warning(
                        "observer %s of table %s: backfill was interrupted; it goes on in %g s: %s",
                        watched.observer.name,
                        watched.observer.table.name,
                        _AGAIN_SECONDS,
                        error,
                    )
                if watched.owed is not None:
                    await self._context.world.clock.sleep(_AGAIN_SECONDS)
        finally:
            del self._begun[watched]

    async def _alone(self, watched: Watched) -> None:
        """Works on it, unless another worker does."""
        # No observer's name begins with a zero byte: this is not the lock of a row.
        name = row_name(watched.table_id, b"\0backfill\0" + watched.id)
        if not (await self._locks.take([name]))[0]:
            return
        try:
            pace = _Pace(self._context, self._locks, watched, name, self._unhandled_max)
            await backfill_owed(
                self._context,
                watched,
                rows_at_once=min(_ROWS_AT_ONCE, max(self._unhandled_max // 4, 1)),
                go_on=pace.go_on,
            )
        finally:
            self._locks.release_names([name])


class _Pace:
    """Holds a backfill back while many of its notifications are unhandled."""

    def __init__(
        self,
        context: WorkerContext,
        locks: RowLocks,
        watched: Watched,
        lock: bytes,
        unhandled_max: int,
    ) -> None:
        self._context = context
        self._locks = locks
        self._watched = watched
        self._lock = lock
        self._unhandled_max = unhandled_max
        self._handled_to: bytes | None = None
        """All cells before this row that were notified are handled."""

    async def go_on(self, progress: Backfilled) -> bool:
        """Returns True when few enough notifications are unhandled, and False if the backfill is to
        end here: the observer is not run any more, or another worker has the lock."""
        world = self._context.world
        backoff = Backoff(world.clock, world.random, _LOOK_SECONDS_MIN, _LOOK_SECONDS_MAX)
        owed = self._watched.owed
        if self._handled_to is None:
            self._handled_to = b"" if owed is None else owed.row
        while self._watched.is_active and (await self._locks.extend([self._lock]))[0]:
            if await self._may_go_on(progress.row):
                return True
            await world.clock.sleep(backoff.next_seconds())
        return False

    async def _may_go_on(self, end: bytes) -> bool:
        start = self._handled_to or b""
        if start >= end:
            return True
        request = WorkRequest(self._watched.table_id, start, end, observers=(self._watched.id,))
        left: list[bytes] = []
        survey = self._context.notifications.survey(request, self._context.env.deadline())
        async with aclosing(survey) as answers:
            async for answer in answers:
                left += [waiting.row for waiting in answer.waiting]
                if len(left) > self._unhandled_max:
                    return False
        self._handled_to = min(left, default=end)
        return True


class _Backfill:
    def __init__(
        self,
        context: WorkerContext,
        table: str,
        observer: str,
        *,
        again: bool,
        rows_at_once: int = _ROWS_AT_ONCE,
    ) -> None:
        self._context = context
        self._table = table
        self._observer = observer
        self._id = observer.encode()
        self._again = again
        self._rows_at_once = rows_at_once
        self._table_id = 0
        self._version = 0
        self._columns: tuple[bytes, ...] = ()
        self.is_complete = False
        """True when all rows are done."""

    async def cover(
        self, progress: Backfilled, end: bytes, go_on: Callable[[Backfilled], Awaitable[bool]]
    ) -> Backfilled:
        """Notifies the observer of what is left up to the row `end`. `go_on` is asked between two
        steps whether to continue."""
        while True:
            begun_at = progress.row
            try:
                async with aclosing(self._steps(progress, end)) as steps:
                    async for progress in steps:
                        if not await go_on(progress):
                            return progress
            except SnapshotTooOld:
                # The rows took longer than history is kept. A later snapshot serves as well.
                if progress.row == begun_at:
                    raise
            else:
                self.is_complete = True
                return progress

    async def _steps(self, progress: Backfilled, end: bytes) -> AsyncGenerator[Backfilled, None]:
        """Yields how far it has come, whenever some cells are notified."""
        env = self._context.env
        seconds = env.limits.call_seconds
        snapshot = await self._snapshot()
        wanted = self._columns
        if self._again:
            wanted += tuple(acknowledgement_column(self._id, column) for column in wanted)
        request = RangeRequest(self._table_id, progress.row, end, wanted, snapshot)
        pages = scan_pages(env, self._context.cleanup, request, None, seconds, Statistics())
        async with aclosing(pages):
            async for page in pages:
                for at in range(0, len(page), self._rows_at_once):
                    rows = page[at : at + self._rows_at_once]
                    cells = [
                        (row, column)
                        for row, found in rows
                        for column in self._columns
                        if column in found
                    ]
                    if self._again:
                        await self._forget_acknowledgements(rows)
                    await self._notify(cells)
                    progress = Backfilled(progress.cells + len(cells), rows[-1][0] + b"\0")
                    yield progress

    async def _snapshot(self) -> int:
        """A timestamp from now, when every tablet judges by the schema: whatever commits above it
        notifies the observer anyway."""
        return await self._context.env.timestamps.get(
            timeout_seconds=self._context.env.limits.call_seconds
        )

    def take_schema(self, table: master_pb2.Table, columns: Sequence[bytes]) -> None:
        """The table as a master described it when every tablet judged under its schema."""
        self._columns = tuple(columns)
        self._table_id, self._version = table.table_id, table.schema_version

    async def learn_schema(self) -> None:
        """Returns when every tablet judges commits under a schema that includes the observer."""
        context = self._context
        found = _named(await context.describe(self._table), self._observer)
        # It is registered already. Adding it again waits until every tablet knows it, in case the
        # process that registered it did not wait.
        request = master_pb2.ChangeObserversRequest(table=self._table, add=[found])
        table = await context.catalog.change_observers(request, context.env.deadline())
        self.take_schema(table, _named(table, self._observer).columns)

    async def _notify(self, cells: Sequence[Cell]) -> None:
        """Writes notifications of these cells. Returns when all of them are durable."""
        context = self._context
        attempts = Attempts(RetryPolicy(), context.env)
        left = list(cells)
        while left:
            seconds = context.env.limits.call_seconds
            now = await context.env.timestamps.get(timeout_seconds=seconds)
            sent = [
                CellMutation(self._table_id, steps.notify(*cell, now, (self._id,)), self._version)
                for cell in left
            ]
            answers = await context.env.cells.mutate(sent, context.env.deadline())
            failed = [
                (cell, answer)
                for cell, answer in zip(left, answers, strict=True)
                if isinstance(answer, PercolatorError)
            ]
            left = [cell for cell, _ in failed]
            if not failed:
                return
            error = failed[0][1]
            if isinstance(error, SchemaChanged):
                # A notification for a removed observer would stay forever.
                await self._still_registered()
            # A pause also then: the tablet may hear of the newer schema a little later.
            if error.retry is Retry.USELESS or not await attempts.again(_repeatable(error)):
                raise error

    async def _still_registered(self) -> None:
        table = await self._context.describe(self._table)
        if table.table_id != self._table_id:
            raise SchemaError(f"table {self._table!r} was dropped", table=self._table)
        _named(table, self._observer)
        self._version = table.schema_version

    async def _forget_acknowledgements(self, page: Sequence[FoundRow]) -> None:
        handled = [
            (row, hidden)
            for row, found in page
            for column in self._columns
            if column in found and (hidden := acknowledgement_column(self._id, column)) in found
        ]
        for at in range(0, len(handled), _FORGOTTEN_AT_ONCE_MAX):
            await self._forget(handled[at : at + _FORGOTTEN_AT_ONCE_MAX])

    async def _forget(self, cells: Sequence[Cell]) -> None:
        """Forgets them in one transaction, retried if it conflicts with a run of the observer."""
        attempts = Attempts(RetryPolicy(), self._context.env)
        try:
            while True:
                try:
                    return await self._forget_once(cells)
                except PercolatorError as error:
                    if not await attempts.again(error):
                        raise
        finally:
            attempts.end()

    async def _forget_once(self, cells: Sequence[Cell]) -> None:
        context = self._context
        transaction = context.begin(None)
        try:
            now = await transaction.timestamp()
            requests = [
                RowRequest(self._table_id, RowRead(row=row, columns=(hidden,), timestamp=now))
                for row, hidden in cells
            ]
            answers = await read_rows(
                context.env,
                context.cleanup,
                requests,
                context.env.deadline(),
                transaction.statistics,
            )
            for (row, hidden), answer in zip(cells, answers, strict=True):
                stored = answer.found.get(hidden)
                if stored is not None and stored.value is not None:
                    # Keep the note of a dead letter: the next run has to delete it.
                    kept = Acknowledgement.decode(stored.value).has_dead_letter
                    forgotten = Acknowledgement(0, kept).encode()
                    transaction.internal.writes.put(
                        CellAddress(self._table_id, row, hidden), forgotten
                    )
            await transaction.commit()
        finally:
            if not transaction.ended:
                transaction.rollback()


def _named(table: master_pb2.Table, name: str) -> master_pb2.Observer:
    for one in table.observers:
        if one.name == name:
            return one
    raise SchemaError(f"table {table.name!r} has no observer {name!r}", table=table.name)


def _repeatable(error: PercolatorError) -> PercolatorError:
    """Marks the error as safe to retry: writing a notification twice does no harm."""
    error.retry = Retry.SAFE
    return error
