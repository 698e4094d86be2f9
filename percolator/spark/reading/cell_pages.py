"""The cells of any row ranges, in pages. Single rows are asked for together, not scanned."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby
from operator import attrgetter
from typing import Any

from percolator.aio.snapshot import Snapshot
from percolator.routing.cells import CellPage
from percolator.schema import Table
from percolator.spark.choosing.row_ranges import RowsBetween

KEYS_PER_PAGE = 512


async def cell_pages(
    snapshot: Snapshot,
    table: Table[Any],
    ranges: Sequence[RowsBetween],
    columns: tuple[bytes, ...] | None,
) -> AsyncGenerator[CellPage, None]:
    """Yields the cells of all ranges in turn; no row is in two pages."""
    for single, some in groupby(ranges, attrgetter("is_one_row")):
        if single:
            keys = [one.start for one in some]
            for first in range(0, len(keys), KEYS_PER_PAGE):
                page_keys = keys[first : first + KEYS_PER_PAGE]
                yield await snapshot.get_cells(table, page_keys, columns=columns)
            continue
        for one in some:
            cells = snapshot.scan_cells(table, start=one.start, end=one.end, columns=columns)
            async with aclosing(cells):
                async for page in cells:
                    yield page
