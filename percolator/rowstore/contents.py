"""Everything that a table of a row store holds, as the transaction layer knows it: for audits."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from percolator.errors import InvariantViolation
from percolator.rowstore.layout import (
    DATA,
    FAMILIES,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    column_of,
    row_of,
)
from percolator.rowstore.port import RowStore, Selection, StoredCell
from percolator.rowstore.times import Times
from percolator.v1 import cells_pb2

_SPACES: Final = {
    LOCKS: cells_pb2.SPACE_LOCK,
    WRITES: cells_pb2.SPACE_WRITE,
    LOCK_ONLY: cells_pb2.SPACE_WRITE,
    DATA: cells_pb2.SPACE_DATA,
    ROLLBACKS: cells_pb2.SPACE_ROLLBACK,
}


async def stored_cells(
    store: RowStore, table_id: int, times: Times, timeout_seconds: float
) -> AsyncGenerator[cells_pb2.Cell, None]:
    """All cells of a table, row by row."""
    everything = tuple(map(Selection, FAMILIES))
    rows = store.scan(
        table_id,
        b"",
        b"",
        everything,
        rows_max=0,
        reverse=False,
        timeout_seconds=timeout_seconds,
    )
    async with aclosing(rows):
        async for key, cells in rows:
            for cell in cells:
                yield _decoded(row_of(key), cell, times)


def _decoded(row: bytes, cell: StoredCell, times: Times) -> cells_pb2.Cell:
    timestamp = times.timestamp(cell.time)
    space = _SPACES[cell.family]
    if cell.family == LOCKS:
        if cell.value[:8] != timestamp.to_bytes(8, "big"):
            raise InvariantViolation(f"row {row!r} has a lock that is not at its start timestamp")
        timestamp = 0
    return cells_pb2.Cell(
        space=space,
        row=row,
        column=column_of(cell.column),
        timestamp=timestamp,
        value=cell.value,
    )
