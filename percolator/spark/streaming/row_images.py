"""Rows of a table after each commit that has changed them, made from changes of their cells.

The feed has the cells that a commit has written. What else is in the row, and whether there was a
row before, is read from a snapshot just below the first commit of a page of changes, for all rows
of the page together; the changes are then applied in their order. Every image is what a snapshot at
its commit shows, so it does not depend on where pages begin.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from percolator.routing.cells import StoredChange
from percolator.spark.choosing.row_ranges import RowRanges

INSERT, UPDATE, DELETE = "insert", "update", "delete"

Values = tuple[bytes | None, ...]
"""The values of a row in the columns of the stream; None where it has no cell."""

BaseReader = Callable[[int, Sequence[bytes]], Awaitable[dict[bytes, Values]]]
"""Reads rows at a timestamp. Rows that have none of the columns may be missing in the answer."""

_commit_and_row = itemgetter(0, 1)


class RowImage(NamedTuple):
    """A row after a commit."""

    commit_timestamp: int
    row: bytes
    kind: str
    values: Values


class RowImages:
    """Makes images of the rows that a stream wants."""

    def __init__(self, rows: RowRanges, columns: Sequence[bytes], read: BaseReader) -> None:
        self._rows = rows
        self._places = {column: place for place, column in enumerate(columns)}
        self._nothing: Values = (None,) * len(columns)
        self._read = read
        self._last_commit = 0
        """The last commit of which there were images."""

    async def of(
        self, pages: AsyncIterator[list[StoredChange]]
    ) -> AsyncGenerator[list[RowImage], None]:
        """Yields the images, in pages. A row may be cut by the end of a page of changes."""
        held: list[StoredChange] = []
        async for page in pages:
            held += self._wanted(page)
            if not held:
                continue
            last = _commit_and_row(held[-1])
            whole = len(held)
            while whole and _commit_and_row(held[whole - 1]) == last:
                whole -= 1
            if whole:
                yield await self._images(held[:whole])
                held = held[whole:]
        if held:
            yield await self._images(held)

    def _wanted(self, page: list[StoredChange]) -> list[StoredChange]:
        places, contains = self._places, self._rows.contains
        return [one for one in page if one.column in places and contains(one.row)]

    async def _images(self, changes: list[StoredChange]) -> list[RowImage]:
        known = await self._before(changes)
        found = []
        self._last_commit = changes[-1].commit_timestamp
        for (commit, row), cells in groupby(changes, _commit_and_row):
            before = known.get(row, self._nothing)
            after = list(before)
            for one in cells:
                after[self._places[one.column]] = one.value
            values = known[row] = tuple(after)
            existed, exists = before != self._nothing, values != self._nothing
            if exists:
                found.append(RowImage(commit, row, UPDATE if existed else INSERT, values))
            elif existed:
                found.append(RowImage(commit, row, DELETE, values))
        return found

    async def _before(self, changes: list[StoredChange]) -> dict[bytes, Values]:
        """The rows as they were before these changes."""
        first = changes[0].commit_timestamp
        rows = list(dict.fromkeys(one.row for one in changes))
        if first != self._last_commit:
            return await self._read(first - 1, rows)
        # The pages before have rows of the first commit, too, which later commits may change again.
        now = {one.row for one in changes if one.commit_timestamp == first}
        known = await self._read(first - 1, [row for row in rows if row in now])
        if later := [row for row in rows if row not in now]:
            known |= await self._read(first, later)
        return known
