"""Which tablet holds a row, and which server serves it, as far as this process knows.

The map may be out of date: every request names tablet and epoch, and a server that does not own the
tablet executes nothing and says what it knows. So a wrong map costs a round trip, never a wrong
result.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from percolator.errors import (
    ExecutionUnknown,
    NotExecuted,
    SchemaError,
    TabletLocation,
    Unavailable,
)
from percolator.row_text import quoted
from percolator.tasks import Tasks, outlasting

Finder = Callable[[int, bytes], Awaitable[Sequence[TabletLocation]]]
"""Asks a master where a row of a table is served. The answer may cover more of the table than that
row. Raises `SchemaError` for a table that does not exist."""


class Searched(NamedTuple):
    """The rows that an answer of a master was about; an empty end is that of the table."""

    start: bytes
    end: bytes

    def has(self, row: bytes) -> bool:
        return self.start <= row and (not self.end or row < self.end)


EVERYTHING = Searched(b"", b"")


class _Table:
    """The known tablets of one table, by their first rows. There may be gaps, but no overlaps."""

    __slots__ = ("locations", "starts")

    def __init__(self) -> None:
        self.starts: list[bytes] = []
        self.locations: list[TabletLocation] = []

    def overlapping(self, location: TabletLocation) -> slice:
        """Where the tablets are that have rows of this one. There may be thousands of others."""
        starts = self.starts
        first = bisect_right(starts, location.start) - 1
        if first < 0 or self._ends_before(first, location.start):
            first += 1
        end = location.end
        return slice(first, max(first, bisect_left(starts, end) if end else len(starts)))

    def _ends_before(self, index: int, row: bytes) -> bool:
        end = self.locations[index].end
        return bool(end) and end <= row


class TabletMap:
    """The known tablets of all tables."""

    def __init__(self, find: Finder | None = None) -> None:
        self._find = find
        self._tables: dict[int, _Table] = {}
        self._searches: dict[int, asyncio.Task[Searched]] = {}
        self._tasks = Tasks()

    def locate(self, table_id: int, row: bytes) -> TabletLocation | None:
        """The tablet that holds the row; None when that is not known."""
        table = self._tables.get(table_id)
        if table is None:
            return None
        index = bisect_right(table.starts, row) - 1
        if index < 0:
            return None
        location = table.locations[index]
        return location if not location.end or row < location.end else None

    def locate_below(self, table_id: int, end: bytes) -> TabletLocation | None:
        """The tablet that holds the last rows below `end` (empty: the last rows of the table)."""
        table = self._tables.get(table_id)
        if table is None or not table.starts:
            return None
        index = (bisect_left(table.starts, end) if end else len(table.starts)) - 1
        if index < 0:
            return None
        location = table.locations[index]
        if not location.end:
            return location
        return location if end and end <= location.end else None

    def tablets(self, table_id: int) -> list[TabletLocation]:
        """All known tablets of the table, in row order."""
        table = self._tables.get(table_id)
        return [] if table is None else list(table.locations)

    def learn(self, locations: Iterable[TabletLocation]) -> None:
        """Takes over locations that a response mentioned; they replace only older ones."""
        for location in locations:
            table = self._tables.setdefault(location.table_id, _Table())
            replaced = table.overlapping(location)
            # Tablet ids and epochs only grow: a split has new ids, a move a new epoch.
            if all(_age(old) <= _age(location) for old in table.locations[replaced]):
                # Without an address, no server serves it at the moment.
                found = [location] if location.address else []
                table.locations[replaced] = found
                table.starts[replaced] = [one.start for one in found]

    def replace(self, table_id: int, locations: Iterable[TabletLocation]) -> None:
        """Takes over a master's answer about a whole table."""
        self.forget(table_id)
        self.learn(locations)

    def doubt(self, location: TabletLocation) -> None:
        """Drops a location that led nowhere, so that the next request asks a master."""
        table = self._tables.get(location.table_id)
        if table is not None and location in table.locations:
            index = table.locations.index(location)
            del table.locations[index], table.starts[index]

    def forget(self, table_id: int) -> None:
        """Drops everything about a table that was deleted."""
        self._tables.pop(table_id, None)

    async def located(self, table_id: int, row: bytes) -> TabletLocation:
        """The tablet that holds a row; asks for it if it is not known. Raises `Unavailable` if
        nobody knows it."""
        location = self.locate(table_id, row)
        if location is None:
            await self.refresh(table_id, row)
            location = self.locate(table_id, row)
        if location is None:
            raise Unavailable(f"no tablet is known to hold row {quoted(row)} of table {table_id}")
        return location

    async def refresh(self, table_id: int, row: bytes) -> Searched:
        """Asks where the row is now; returns for which rows that is known now.

        There is one request at a time for each table. Concurrent callers share its answer if it is
        about their rows: for a large table, it is about a part of it.
        """
        while (search := self._searches.get(table_id)) is not None:
            searched = await outlasting(search)
            if searched.has(row):
                return searched
        search = self._searches[table_id] = self._tasks.start(self._search(table_id, row))
        return await outlasting(search)

    async def try_refresh(self, table_id: int, row: bytes) -> None:
        """As `refresh`. If no master answers, the map stays as it is, since it is all we have."""
        try:
            await self.refresh(table_id, row)
        except (NotExecuted, ExecutionUnknown):
            return

    async def refresh_server(self, address: str) -> None:
        """Asks where the tablets of a server are now that has fallen silent.

        Otherwise, for each of its tablets, some request would have to time out to find that out.
        An answer is about many tablets, but not about all of a large table.
        """
        tables = [
            table_id
            for table_id, table in self._tables.items()
            if any(location.address == address for location in table.locations)
        ]
        await asyncio.gather(*(self._refresh_all(table_id, address) for table_id in tables))

    async def _refresh_all(self, table_id: int, address: str) -> None:
        try:
            row = self._first_at(address, table_id, b"")
            while row is not None:
                searched = await self.refresh(table_id, row)
                row = self._first_at(address, table_id, searched.end) if searched.end else None
        except SchemaError:
            # The caller may want another table. A caller that wants this one searches, and gets
            # the error.
            self.forget(table_id)

    def _first_at(self, address: str, table_id: int, row: bytes) -> bytes | None:
        """The first row of the first tablet of this server that begins at `row` or above."""
        for location in self.tablets(table_id):
            if location.address == address and location.start >= row:
                return location.start
        return None

    async def _search(self, table_id: int, row: bytes) -> Searched:
        try:
            found = [] if self._find is None else await self._find(table_id, row)
        finally:
            # Before the task is done: a caller that asks about other rows would otherwise find a
            # task that is done, await it over and over, and block the event loop.
            del self._searches[table_id]
        self.learn(found)
        return _searched(row, found) if self._find is not None else EVERYTHING


def _age(location: TabletLocation) -> tuple[int, int]:
    return location.tablet_id, location.epoch


def _searched(row: bytes, found: Sequence[TabletLocation]) -> Searched:
    """What this answer to a search for a row was about."""
    start, end = (min(found[0].start, row), found[-1].end) if found else (row, b"")
    return Searched(start, end if row < end else b"")
