"""The locks of a table, found by scanning it: all old ones, or those of some transactions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import aclosing
from typing import Final

from percolator.errors import CellAddress
from percolator.formats.records import KIND_LOCK_ONLY, LOCK_HEADER
from percolator.limits import Limits
from percolator.rowstore.layout import EVERY_COLUMN, LOCKS, column_bounds, column_of, row_of
from percolator.rowstore.parts import scanned_part
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import TIME_UNIT, RowStore, Selection, can_be_named
from percolator.rowstore.steady_scan import steady_scan
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell
from percolator.world import World

_ROWS_PER_PAGE: Final = 1_000

Locked = list[tuple[int, CellAddress]]
"""Cells with the start timestamps of the transactions that have locked them."""


async def stored_locks(
    store: RowStore,
    table_id: int,
    times: Times,
    world: World,
    limits: Limits,
    *,
    below: int = 0,
    limit: int = 0,
) -> list[Cell]:
    """Locks of transactions that began below `below` (0: all), of at least `limit` cells if there
    are as many (0: without a limit)."""
    selection = Selection(LOCKS, until_time=times.at_or_above(below) if below else 0)
    stream = steady_scan(store, table_id, (selection,), world, limits, rows_max=limit)
    async with aclosing(stream) as rows:
        return [
            Cell(space=SPACE_LOCK, row=row_of(key), column=column_of(one.column), value=one.value)
            async for key, cells in rows
            for one in cells
        ]


async def cells_locked_by(
    store: RowStore,
    times: Times,
    table_id: int,
    columns: Iterable[bytes],
    starts: Collection[int],
    patience: Patience,
) -> AsyncGenerator[Locked, None]:
    """The cells of these columns that the transactions that began then have locked to change them,
    page by page. A lock that is there from beginning to end is found."""
    between = times.time(min(starts)), times.time(max(starts)) + TIME_UNIT
    wanted = frozenset(columns)
    selections = [Selection(LOCKS, *column_bounds(one), *between) for one in sorted(wanted)]
    if not can_be_named(selections, store.check_bytes_max):
        selections = [Selection(LOCKS, *EVERY_COLUMN, *between)]
    at = b""
    while True:
        rows, at = await scanned_part(
            store, table_id, at, b"", selections, _ROWS_PER_PAGE, patience
        )
        yield [
            (start, CellAddress(table_id, row_of(key), column_of(cell.column)))
            for key, cells in rows
            for cell in cells
            if (start := times.timestamp(cell.time)) in starts
            and column_of(cell.column) in wanted
            and _changes(cell.value)
        ]
        if not at:
            return


def _changes(lock: bytes) -> bool:
    *_, kind = LOCK_HEADER.unpack_from(lock)
    return bool(kind != KIND_LOCK_ONLY)
