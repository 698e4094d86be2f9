"""What a table of a row store holds, as transactions know it: for operators and audits."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Final

from percolator.errors import InvariantViolation
from percolator.routing.catalog import TableInfo
from percolator.row_text import quoted
from percolator.rowstore.layout import (
    DATA,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    column_of,
    row_key,
    row_of,
)
from percolator.rowstore.port import RowStore, Selection, StoredCell
from percolator.rowstore.proofs import is_proof
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import (
    SPACE_DATA,
    SPACE_LOCK,
    SPACE_ROLLBACK,
    SPACE_WRITE,
    Cell,
    Space,
)

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
