"""Notifying an observer of cells that were written before it was registered.

The cells are those that a snapshot shows which was taken after every tablet had begun to judge
under the observer's schema: whatever is committed later notifies by itself. Each gets a
notification at a timestamp above the snapshot, as if it had been written just now. Writing one
twice does no harm, so that a backfill that broke off goes on from any row before that.

An observer answers each change once: cells that it has answered already are not answered again,
unless it is told to forget that it has.
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
from percolator.observers.acknowledgement import Acknowledgement
from percolator.observers.client import Client
from percolator.protocol import steps
from percolator.protocol.hidden_cells import acknowledgement_column
from percolator.protocol.read import read_rows
from percolator.protocol.scan import FoundRow, scan_pages
from percolator.protocol.surroundings import Statistics
from percolator.retries import Attempts, RetryPolicy
from percolator.v1 import master_pb2
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.questions import RangeQuestion, RowQuestion, Step

_FORGOTTEN_AT_ONCE_MAX = 256
"""Acknowledgements in one transaction: few enough that hardly one of them is just being written."""

Cell = tuple[bytes, bytes]
"""Row and column."""


@dataclass(frozen=True)
class Backfilled:
    """How far a backfill has come."""

    cells: int
    """Notified so far."""
    row: bytes
    """Everything before this row is done: whoever goes on begins here."""


async def backfill(
    client: Client,
    table: str,
    observer: str,
    *,
    start: bytes = b"",
    end: bytes = b"",
    again: bool = False,
    on_progress: Callable[[Backfilled], None] = lambda _: None,
) -> Backfilled:
    """Notifies of all cells in the rows of [start, end); an empty end means to the last row.

    `again` also has those cells answered again that were answered before. Raises `SchemaError` when
    there is no such observer, or it is removed meanwhile.
    """
    if end and start >= end:
        raise InvalidArgument("end", "is not above the start")
    work = _Backfill(client, table, observer, again=again)
    return await work.run(start, end, on_progress)


class _Backfill:
    def __init__(self, client: Client, table: str, observer: str, *, again: bool) -> None:
        self._client = client
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
        around = self._client.around
        seconds = around.limits.call_seconds
        # Only now: whatever commits above it notifies by itself.
        snapshot = await around.timestamps.get(timeout_seconds=seconds)
        wanted = self._columns
        if self._again:
            wanted += tuple(acknowledgement_column(self._id, column) for column in wanted)
        question = RangeQuestion(self._table_id, start, end, wanted, snapshot)
        progress = Backfilled(0, start)
        pages = scan_pages(around, self._client.cleanup, question, None, seconds, Statistics())
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
        """Returns when every tablet judges under a schema that has the observer."""
        client = self._client
        found = _named(await client.describe(self._table), self._observer)
        # It is there already: this waits for whoever has registered it and did not wait himself.
        request = master_pb2.ChangeObserversRequest(table=self._table, add=[found])
        table = await client.catalog.change_observers(request, client.deadline())
        self._columns = tuple(_named(table, self._observer).columns)
        self._table_id, self._version = table.table_id, table.schema_version

    def _cells(self, page: Sequence[FoundRow]) -> list[Cell]:
        return [(row, column) for row, found in page for column in self._columns if column in found]

    # ------------------------------------------------------------------ notifications

    async def _notify(self, cells: Sequence[Cell]) -> None:
        """Until all of them are durable."""
        client = self._client
        attempts = Attempts(RetryPolicy(), client.world.clock, client.world.random)
        left = list(cells)
        while left:
            seconds = client.around.limits.call_seconds
            now = await client.around.timestamps.get(timeout_seconds=seconds)
            sent = [
                Step(self._table_id, steps.notify(*cell, now, (self._id,)), self._version)
                for cell in left
            ]
            answers = await client.around.cells.mutate(sent, client.deadline())
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
                # A notification of an observer that is gone would stay for ever.
                await self._still_registered()
            elif error.retry is Retry.USELESS or not await attempts.again(_repeatable(error)):
                raise error

    async def _still_registered(self) -> None:
        table = await self._client.describe(self._table)
        _named(table, self._observer)
        self._version = table.schema_version

    # ------------------------------------------------------------------ acknowledgements

    async def _forget_acknowledgements(self, page: Sequence[FoundRow]) -> None:
        answered = [
            (row, hidden)
            for row, found in page
            for column in self._columns
            if column in found and (hidden := acknowledgement_column(self._id, column)) in found
        ]
        for at in range(0, len(answered), _FORGOTTEN_AT_ONCE_MAX):
            await self._forget(answered[at : at + _FORGOTTEN_AT_ONCE_MAX])

    async def _forget(self, cells: Sequence[Cell]) -> None:
        """In one transaction, again when a run of the observer was quicker."""
        world = self._client.world
        attempts = Attempts(RetryPolicy(), world.clock, world.random)
        while True:
            try:
                await self._forget_once(cells)
            except PercolatorError as error:
                if not await attempts.again(error):
                    raise
            else:
                return

    async def _forget_once(self, cells: Sequence[Cell]) -> None:
        client = self._client
        transaction = client.begin(None)
        try:
            now = await transaction.timestamp()
            questions = [
                RowQuestion(self._table_id, RowRead(row=row, columns=(hidden,), timestamp=now))
                for row, hidden in cells
            ]
            answers = await read_rows(
                client.around,
                client.cleanup,
                questions,
                now,
                client.deadline(),
                transaction.statistics,
            )
            for (row, hidden), answer in zip(cells, answers, strict=True):
                stored = answer.found.get(hidden)
                if stored is not None and stored.value is not None:
                    # Its dead letter stays known: the next run has to clear it away.
                    kept = Acknowledgement.decode(stored.value).has_dead_letter
                    forgotten = Acknowledgement(0, kept).encode()
                    transaction.writes.put(CellAddress(self._table_id, row, hidden), forgotten)
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
    """Putting a notification again is safe, whether or not the first attempt was executed."""
    error.retry = Retry.SAFE
    return error
