"""Ranges to divide work by, from samples of row keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from percolator.errors import PercolatorError
from percolator.limits import Limits
from percolator.routing.ranges import TableRange
from percolator.rowstore.layout import row_of
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Sample
from percolator.world import World

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
        while True:
            try:
                return await self._store.sample(table_id, patience.attempt_seconds)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)


def _borders(samples: Sequence[Sample], part_bytes: int, before: int = 0) -> Iterator[bytes]:
    """Rows that have about this much between them."""
    last = b""
    for key, size in samples:
        row = row_of(key) if key else b""
        if row > last and size - before >= part_bytes:
            yield row
            last, before = row, size
