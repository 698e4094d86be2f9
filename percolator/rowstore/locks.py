"""The locks of a table, found by scanning it."""

from __future__ import annotations

from contextlib import aclosing

from percolator.rowstore.layout import LOCKS, column_of, row_of
from percolator.rowstore.port import RowStore, Selection
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell


async def stored_locks(
    store: RowStore,
    table_id: int,
    times: Times,
    *,
    below: int = 0,
    limit: int = 0,
    timeout_seconds: float,
) -> list[Cell]:
    """Locks of transactions that began below `below` (0: all), of at least `limit` cells if there
    are as many (0: without a limit)."""
    selection = Selection(LOCKS, until_time=times.at_or_above(below) if below else 0)
    stream = store.scan(
        table_id,
        b"",
        b"",
        (selection,),
        rows_max=limit,
        reverse=False,
        timeout_seconds=timeout_seconds,
    )
    async with aclosing(stream) as rows:
        return [
            Cell(space=SPACE_LOCK, row=row_of(key), column=column_of(one.column), value=one.value)
            async for key, cells in rows
            for one in cells
        ]
