"""The locks of a table, found by scanning it."""

from __future__ import annotations

from contextlib import aclosing

from percolator.limits import Limits
from percolator.rowstore.layout import LOCKS, column_of, row_of
from percolator.rowstore.port import RowStore, Selection
from percolator.rowstore.steady_scan import steady_scan
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell
from percolator.world import World


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
