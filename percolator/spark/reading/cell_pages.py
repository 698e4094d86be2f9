"""The cells of any row ranges, in pages. Single rows are asked for together, not scanned."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby
from operator import attrgetter
from typing import Any, cast

from percolator.aio.snapshot import Snapshot
from percolator.routing.cells import CellPage
from percolator.routing.joined_page import SentPage
from percolator.schema import Table
from percolator.spark.choosing.row_ranges import RowsBetween

KEYS_PER_PAGE = 512


def cell_pages(
    snapshot: Snapshot,
    table: Table[Any],
    ranges: Sequence[RowsBetween],
    columns: tuple[bytes, ...] | None,
) -> AsyncGenerator[CellPage, None]:
    """As `sent_pages`, but all of them are lists."""
    pages = sent_pages(snapshot, table, ranges, columns, joined=False)
    return cast(AsyncGenerator[CellPage, None], pages)


async def sent_pages(
    snapshot: Snapshot,
    table: Table[Any],
    ranges: Sequence[RowsBetween],
    columns: tuple[bytes, ...] | None,
    *,
    joined: bool,
) -> AsyncGenerator[SentPage, None]:
    """Yields the cells of all ranges in turn; no row is in two pages. `joined` says whether pages
    may be blocks of memory."""
    scan = snapshot.scan_joined if joined else snapshot.scan_cells
    for single, some in groupby(ranges, attrgetter("is_one_row")):
        if single:
            keys = [one.start for one in some]
            for first in range(0, len(keys), KEYS_PER_PAGE):
                page_keys = keys[first : first + KEYS_PER_PAGE]
                yield await snapshot.get_cells(table, page_keys, columns=columns)
            continue
        for one in some:
            pages = scan(table, start=one.start, end=one.end, columns=columns)
            async with aclosing(pages):
                async for page in pages:
                    yield page
