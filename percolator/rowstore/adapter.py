"""A row store in the place of tablets: what the rest of the library asks of either.

RowStoreCells  reads, writes and scans: `percolator.routing.cells.Cells`
RowContents    what a table holds, for operators and audits
DroppedTables  tables whose cells decide nothing any more
SampledRanges  ranges of rows to divide work by
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from percolator.codecs.readable import quoted
from percolator.errors import InvariantViolation, PercolatorError
from percolator.limits import Limits
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import (
    Answer,
    CellMutation,
    CellPage,
    CommitAnswer,
    NotInOneRound,
    OneRoundCommit,
    RangePage,
    RangeRequest,
    RowRequest,
    RowResult,
)
from percolator.routing.lanes import CellAnswer
from percolator.routing.ranges import TableRange
from percolator.rowstore.intents import Intents
from percolator.rowstore.layout import (
    DATA,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    Times,
    column_of,
    is_proof,
    row_key,
    row_of,
)
from percolator.rowstore.mutations import RowMutations
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Sample, Selection, StoredCell
from percolator.rowstore.reads import RowReads, RowScan
from percolator.v1.cells_pb2 import (
    SPACE_DATA,
    SPACE_LOCK,
    SPACE_ROLLBACK,
    SPACE_WRITE,
    Cell,
    Space,
)
from percolator.world import World


class RowStoreCells:
    """All cells of all tables, in a row store. Belongs to one event loop."""

    def __init__(
        self, store: RowStore, intents: Intents, times: Times, world: World, limits: Limits
    ) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._mutations = RowMutations(store, intents, times, world, limits)
        self._reads = RowReads(store, times, world, limits)

    def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> Awaitable[list[Answer]]:
        return self._mutations.mutate(mutations, deadline)

    def commit(self, commit: OneRoundCommit, deadline: float) -> Awaitable[CommitAnswer]:
        """A row store has no timestamps to give, and holds no cells meanwhile."""
        future: asyncio.Future[CommitAnswer] = asyncio.get_running_loop().create_future()
        future.set_result(
            NotInOneRound("in a row store, every transaction is committed in two phases")
        )
        return future

    def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> Awaitable[list[RowResult]]:
        return self._reads.read(requests, deadline, bytes_max=bytes_max)

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]:
        return self._reads.read_cell(table_id, row, column, timestamp, deadline)

    def scan(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[RangePage, None]:
        return RowScan(
            request,
            timeout_seconds,
            self._store,
            self._reads,
            self._times,
            self._world,
            self._limits,
        ).pages()

    async def boundaries(self, table_id: int, start: bytes, end: bytes) -> list[bytes]:
        return []  # no server judges conditions: there is nothing to wait for

    async def scan_cells(
        self, request: RangeRequest, timeout_seconds: float
    ) -> AsyncGenerator[CellPage, None]:
        """Like `scan`, in the form for callers that move many cells."""
        async with aclosing(self.scan(request, timeout_seconds)) as pages:
            async for page in pages:
                yield _as_lists(page)


def _as_lists(page: RangePage) -> CellPage:
    # Values that lie apart were found after all others of their row.
    entries = [
        (row, column, found)
        for row, cells in page.rows.items()
        for column, found in sorted(cells.items())
    ]
    return CellPage(
        [row for row, _, _ in entries],
        [column for _, column, _ in entries],
        [found.commit_timestamp for _, _, found in entries],
        [found.value or b"" for _, _, found in entries],
        [at for at, (_, _, found) in enumerate(entries) if found.value is None],
        page.locks,
        page.start,
        page.end,
    )


# What a table of a row store holds, as transactions know it: for operators and audits.

_SPACES: Final[dict[str, Space]] = {
    LOCKS: SPACE_LOCK,
    WRITES: SPACE_WRITE,
    LOCK_ONLY: SPACE_WRITE,
    DATA: SPACE_DATA,
    ROLLBACKS: SPACE_ROLLBACK,
}


async def stored_cells(
    store: RowStore,
    table_id: int,
    times: Times,
    timeout_seconds: float,
    *,
    spaces: Collection[Space] = tuple(_SPACES.values()),
    start: bytes = b"",
    end: bytes = b"",
) -> AsyncGenerator[Cell, None]:
    """The cells of some spaces (all), row by row, in the rows from start to end (all)."""
    selections = tuple(Selection(family) for family, space in _SPACES.items() if space in spaces)
    if not selections:
        return
    rows = store.scan(
        table_id,
        row_key(start) if start else b"",
        row_key(end) if end else b"",
        selections,
        rows_max=0,
        reverse=False,
        timeout_seconds=timeout_seconds,
    )
    async with aclosing(rows):
        async for key, cells in rows:
            row = row_of(key)
            decoded = [_decoded(row, cell, times) for cell in cells if not is_proof(cell)]
            for one in sorted(decoded, key=lambda one: (one.space, one.column, -one.timestamp)):
                yield one


class RowContents:
    """`percolator.routing.contents.Contents` of a row store."""

    def __init__(self, store: RowStore, times: Times) -> None:
        self._store = store
        self._times = times

    def cells(
        self,
        table: TableInfo,
        space: Space,
        start: bytes,
        end: bytes,
        timeout_seconds: float,
    ) -> AsyncGenerator[Cell, None]:
        return stored_cells(
            self._store,
            table.table_id,
            self._times,
            timeout_seconds,
            spaces=(space,),
            start=start,
            end=end,
        )


def _decoded(row: bytes, cell: StoredCell, times: Times) -> Cell:
    timestamp = times.timestamp(cell.time)
    space = _SPACES[cell.family]
    if cell.family == LOCKS:
        if cell.value[:8] != timestamp.to_bytes(8, "big"):
            raise InvariantViolation(
                f"row {quoted(row)} has a lock that is not at its start timestamp"
            )
        timestamp = 0
    return Cell(
        space=space,
        row=row,
        column=column_of(cell.column),
        timestamp=timestamp,
        value=cell.value,
    )


# Cells whose table the store does not have: they decide nothing, if the table was dropped.


class DroppedTables:
    """`percolator.routing.cells.Mutations` of tables that the store does not have.

    Answers `SchemaError` when the table was dropped for good, which only the catalogue can say: the
    store's table goes once no lock is left whose transaction has committed a cell of it. A table
    that somebody has deleted in the store itself decides nothing, as long as the catalogue has it:
    it may be restored there, and then have commits.
    """

    def __init__(self, look_up: Callable[[int, float], Awaitable[object]]) -> None:
        """`look_up` raises `SchemaError` if the catalogue does not have a table of that id."""
        self._look_up = look_up

    async def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        table_ids = {one.table_id for one in mutations}
        answers = await asyncio.gather(*(self._answer(one, deadline) for one in table_ids))
        by_table = dict(zip(table_ids, answers, strict=True))
        return [by_table[one.table_id] for one in mutations]

    async def _answer(self, table_id: int, deadline: float) -> PercolatorError:
        try:
            await self._look_up(table_id, deadline)
        except PercolatorError as error:
            return error
        return InvariantViolation(
            f"table {table_id} decides about a lock, and somebody has deleted it in the store "
            "itself: restore it there, or `percolator tables delete` it here, too"
        )


# Ranges to divide work by, from samples of row keys.

RANGE_BYTES: Final = 256 * 1024 * 1024
"""About the size of a range of a table: as large as a tablet when it is split."""


class SampledRanges:
    """`percolator.routing.ranges.Ranges` of a row store."""

    def __init__(self, store: RowStore, world: World, limits: Limits) -> None:
        self._store = store
        self._world = world
        self._limits = limits

    async def of_table(self, table_id: int, deadline: float) -> list[TableRange]:
        samples = await self._samples(table_id, deadline)
        starts = [b"", *_borders(samples, RANGE_BYTES)]
        ends = [*starts[1:], b""]
        return [TableRange(table_id, *bounds) for bounds in zip(starts, ends, strict=True)]

    async def cut(self, rows: TableRange, part_bytes: int, timeout_seconds: float) -> list[bytes]:
        deadline = self._world.clock.monotonic_seconds() + timeout_seconds
        samples = await self._samples(rows.table_id, deadline)
        inside = [one for one in samples if rows.start < one.key and one.key]
        if rows.end:
            inside = [one for one in inside if one.key < rows.end]
        before = [one.bytes_before for one in samples if one.key and one.key <= rows.start]
        return list(_borders(inside, part_bytes, before[-1] if before else 0))

    async def _samples(self, table_id: int, deadline: float) -> Sequence[Sample]:
        patience = Patience(self._world, self._limits, deadline)
        return await patience.repeated(partial(self._store.sample, table_id))


def _borders(samples: Sequence[Sample], part_bytes: int, before: int = 0) -> Iterator[bytes]:
    """Rows that have about this much between them."""
    last = b""
    for key, size in samples:
        row = row_of(key) if key else b""
        if row > last and size - before >= part_bytes:
            yield row
            last, before = row, size
