"""Rows of a table after each commit that has changed them, made from changes of their cells.

The feed has the cells that a commit has written. What else is in the row, and whether there was a
row before, is read from a snapshot just below the first commit of a page of changes, for all rows
of the page together; the changes are then applied in their order. Every image is what a snapshot at
its commit shows, so it does not depend on where pages begin.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from percolator.routing.cells import FoundCell, StoredChange
from percolator.spark.choosing.row_ranges import RowRanges
from percolator.timestamps import is_expired

INSERT, UPDATE, DELETE = "insert", "update", "delete"

Values = tuple[bytes | None, ...]
"""The values of a row in the columns of the stream; None where it has no cell."""

Cells = tuple[FoundCell | None, ...]
"""The same, with the commits of the values."""

BaseReader = Callable[[int, Sequence[bytes]], Awaitable[dict[bytes, Cells]]]
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

    def __init__(
        self,
        rows: RowRanges,
        columns: Sequence[bytes],
        read: BaseReader,
        ttls: Mapping[bytes, int],
    ) -> None:
        """`ttls` has the times to live of columns, in milliseconds: what was there at the beginning
        of a page may have expired at a later commit of it."""
        self._rows = rows
        self._places = {column: place for place, column in enumerate(columns)}
        self._ttls = [ttls.get(column) for column in columns]
        self._expires = any(self._ttls)
        self._nothing: Values = (None,) * len(columns)
        self._no_cells: Cells = (None,) * len(columns)
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
            after = list(known.get(row, self._no_cells))
            existed = self._values(after, commit - 1) != self._nothing
            for one in cells:
                cell = None if one.value is None else FoundCell(commit, one.value)
                after[self._places[one.column]] = cell
            known[row] = tuple(after)
            values = self._values(after, commit)
            exists = values != self._nothing
            if exists:
                found.append(RowImage(commit, row, UPDATE if existed else INSERT, values))
            elif existed:
                found.append(RowImage(commit, row, DELETE, values))
        return found

    def _values(self, cells: Sequence[FoundCell | None], at: int) -> Values:
        """What a snapshot at this timestamp sees, given the newest cells below it."""
        if not self._expires:
            return tuple([None if cell is None else cell.value for cell in cells])
        return tuple(
            None if cell is None or (ttl and is_expired(cell.commit_timestamp, at, ttl))
            else cell.value
            for cell, ttl in zip(cells, self._ttls, strict=True)
        )  # fmt: skip

    async def _before(self, changes: list[StoredChange]) -> dict[bytes, Cells]:
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
