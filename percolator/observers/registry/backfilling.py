"""Notifying an observer of cells that were written before it was registered.

The snapshot that selects the cells is taken once every tablet judges commits under a schema that
includes the observer, so whatever is committed later notifies it anyway. Each cell gets a
notification at a timestamp above the snapshot, as if it had just been written. Writing one twice
does no harm, so an interrupted backfill can be resumed from any row up to where it stopped.

An observer handles each change once: it does not run again for cells that it has handled, unless
`again` makes it forget that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from percolator.errors import (
    CellAddress,
    InvalidArgument,
    PercolatorError,
    Retry,
    SchemaChanged,
    SchemaError,
)
from percolator.formats.hidden_cells import acknowledgement_column
from percolator.observers.context import WorkerContext
from percolator.observers.running.acknowledgement import Acknowledgement
from percolator.protocol import steps
from percolator.protocol.read import read_rows
from percolator.protocol.scan import FoundRow, scan_pages
from percolator.protocol.statistics import Statistics
from percolator.retries import Attempts, RetryPolicy
from percolator.routing.cells import CellMutation, RangeRequest, RowRequest
from percolator.v1 import master_pb2
from percolator.v1.tabletserver_pb2 import RowRead

_FORGOTTEN_AT_ONCE_MAX = 256
"""The most acknowledgements in one transaction: with more, a conflict with a run is too likely."""

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
    work = _Backfill(context, table, observer, again=again)
    return await work.run(start, end, on_progress)


class _Backfill:
    def __init__(self, context: WorkerContext, table: str, observer: str, *, again: bool) -> None:
        self._context = context
        self._table = table
        self._observer = observer
        self._id = observer.encode()
        self._again = again
        self._table_id = 0
        self._version = 0
        self._columns: tuple[bytes, ...] = ()

    async def run(
        self, start: bytes, end: bytes, on_progress: Callable[[Backfilled], None]
    ) -> Backfilled:
        await self._learn_schema()
        env = self._context.env
        seconds = env.limits.call_seconds
        # Only now: whatever commits above this timestamp notifies the observer anyway.
        snapshot = await env.timestamps.get(timeout_seconds=seconds)
        wanted = self._columns
        if self._again:
            wanted += tuple(acknowledgement_column(self._id, column) for column in wanted)
        request = RangeRequest(self._table_id, start, end, wanted, snapshot)
        progress = Backfilled(0, start)
        pages = scan_pages(env, self._context.cleanup, request, None, seconds, Statistics())
        async with aclosing(pages):
            async for page in pages:
                cells = self._cells(page)
                if self._again:
                    await self._forget_acknowledgements(page)
                await self._notify(cells)
                if page:
                    progress = Backfilled(progress.cells + len(cells), page[-1][0] + b"\0")
                    on_progress(progress)
        return progress

    async def _learn_schema(self) -> None:
        """Returns when every tablet judges commits under a schema that includes the observer."""
        context = self._context
        found = _named(await context.describe(self._table), self._observer)
        # It is registered already. Adding it again waits until every tablet knows it, in case the
        # process that registered it did not wait.
        request = master_pb2.ChangeObserversRequest(table=self._table, add=[found])
        table = await context.catalog.change_observers(request, context.deadline())
        self._columns = tuple(_named(table, self._observer).columns)
        self._table_id, self._version = table.table_id, table.schema_version

    def _cells(self, page: Sequence[FoundRow]) -> list[Cell]:
        return [(row, column) for row, found in page for column in self._columns if column in found]

    # ------------------------------------------------------------------ notifications

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
            answers = await context.env.cells.mutate(sent, context.deadline())
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
        _named(table, self._observer)
        self._version = table.schema_version

    # ------------------------------------------------------------------ acknowledgements

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
                context.deadline(),
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
