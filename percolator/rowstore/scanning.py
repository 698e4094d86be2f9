"""Scans of a range at a timestamp, page by page.

A page ends when it has enough rows or bytes. The next one has what the last call of the store has
found besides, or a new call begins behind it. If a call breaks off, the page ends where the call
has come to: what it shows does not change, since it is a snapshot. So a scan goes on even where a
call finds nothing in all of its time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from percolator.errors import ExecutionUnknown, PercolatorError, UsageError
from percolator.limits import Limits
from percolator.routing.cells import RangePage, RangeRequest
from percolator.rowstore.layout import row_key, row_of
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore
from percolator.rowstore.reading import RowReads, cells_by_row
from percolator.rowstore.selecting import Seen, Wanted, seen
from percolator.rowstore.times import Times
from percolator.world import World


class RowScan:
    """One scan."""

    def __init__(
        self,
        request: RangeRequest,
        timeout_seconds: float,
        store: RowStore,
        reads: RowReads,
        times: Times,
        world: World,
        limits: Limits,
    ) -> None:
        if request.reverse and not store.scans_backwards:
            raise UsageError(
                "this row store cannot scan backwards; scan forwards, and reverse the rows"
            )
        self._request = request
        self._timeout_seconds = timeout_seconds
        self._store = store
        self._reads = reads
        self._times = times
        self._world = world
        self._limits = limits
        self._wanted = Wanted(
            request.timestamp, request.columns, request.report_deletes, request.prefixes
        )
        self._start, self._end = request.start, request.end
        """What is left of the range."""
        self._rows_left = request.row_limit
        self._asked_seconds = 0.0
        """The pause that the store has asked for where the last page broke off."""
        self._left: _Part | None = None
        """What was found, and is not in a page yet."""

    async def pages(self) -> AsyncGenerator[RangePage, None]:
        """Pages without gaps, from one end of the range to the other."""
        while not self._end or self._start < self._end:
            deadline = self._world.clock.monotonic_seconds() + self._timeout_seconds
            patience = Patience(self._world, self._limits, deadline)
            rows, boundary = await self._completed(
                self._left or await self._page(patience), patience
            )
            start, end = self._start, self._end
            is_last = boundary is None
            if boundary is not None:
                if self._request.reverse:
                    start = self._end = boundary
                    is_last = start <= self._start  # an empty end would mean the last row of all
                else:
                    end = self._start = boundary
            self._rows_left = max(self._rows_left - len(rows), 0)
            locks = [lock for _, result in rows for lock in result.locks]
            yield RangePage(cells_by_row(rows), locks, start, end)
            if is_last:
                return

    async def _completed(self, part: _Part, patience: Patience) -> _Part:
        """As many rows of a part as a page may have, with the values that lie apart. How long these
        are is only known now. The other rows are for the next pages."""
        size, self._left = 0, None
        for number, (row, result) in enumerate(part.rows, 1):
            await self._reads.complete(self._request.table_id, row, result, self._wanted, patience)
            size += result.size_bytes + len(row)
            if size >= self._limits.page_bytes_max and number < len(part.rows):
                self._left = _Part(part.rows[number:], part.boundary)
                boundary = row if self._request.reverse else row + b"\0"
                return _Part(part.rows[:number], boundary)
        return part

    async def _page(self, patience: Patience) -> _Part:
        """The next part of the range."""
        asked, self._asked_seconds = self._asked_seconds, 0.0
        await patience.keep_pause(asked)
        while True:
            try:
                return await self._attempt(patience.attempt_seconds)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)

    async def _attempt(self, seconds: float) -> _Part:
        selections = self._wanted.selections(self._times, self._store.check_bytes_max)
        rows_max = self._limits.page_rows_max
        if self._rows_left:
            rows_max = min(rows_max, self._rows_left)
        found: list[tuple[bytes, Seen]] = []
        if not selections:
            return _Part(found, None)
        size = 0
        boundary: bytes | None = None
        stream = self._store.scan(
            self._request.table_id,
            row_key(self._start) if self._start else b"",
            row_key(self._end) if self._end else b"",
            selections,
            rows_max=rows_max,
            reverse=self._request.reverse,
            timeout_seconds=seconds,
            marks=True,
        )
        passing = frozenset(self._request.passing)
        try:
            async with aclosing(stream) as rows:
                async for key, cells in rows:
                    row = row_of(key)
                    if not cells:
                        boundary = row + b"\0" if self._request.reverse else row
                        continue
                    boundary = row if self._request.reverse else row + b"\0"
                    result = seen(row, cells, self._wanted, passing, self._times)
                    found.append((row, result))
                    size += result.size_bytes + len(row)
                    if len(found) >= rows_max or size >= self._limits.page_bytes_max:
                        return _Part(found, boundary)
        except ExecutionUnknown as error:  # through a gateway, it does not say what has happened
            if boundary in (None, self._end if self._request.reverse else self._start):
                raise  # it has not come further
            self._asked_seconds = error.retry_after_seconds
            return _Part(found, boundary)
        return _Part(found, None)


class _Part(NamedTuple):
    """A part of the range, from the end of it where the scan is."""

    rows: list[tuple[bytes, Seen]]
    """Those in which anything was found."""
    boundary: bytes | None
    """Where it ends, and the rest begins; None at the other end of the range."""
