"""One page of a scan: rows of a range at one timestamp, with the locks in their way.

Locks of the page's range are gathered first, then one cursor is created for the whole page
(lock_mirror.py says why). The page ends between two rows: at its limit of rows or bytes, where
the gathering of locks stopped, or after it has looked at very many entries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass

from percolator.tablet.keys import W, after_component, component, space_bounds, split_component
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading.joined_cells import join_cells
from percolator.tablet.reading.locks_in_the_way import LockReader, lock_cell
from percolator.tablet.reading.visible_cells import Walked
from percolator.tablet.reading.visible_runs import VisibleRuns
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

LOCKS_LOOKED_AT_MAX = 4096
"""The limit before each page: about 2 ms."""


@dataclass(frozen=True)
class ScanPlan:
    """The parameters of a scan."""

    timestamp: int
    passed: frozenset[int]
    wanted: Container[bytes] | None
    """Encoded columns; None for all but reserved ones."""
    reverse: bool
    report_deletes: bool
    joined: bool
    """Whether pages may have their cells joined."""
    rows_max: int
    """The limit of one page."""
    bytes_max: int
    """The limit of one page; the row that exceeds it is still part of the page."""


class ScanPage:
    """The first page of the rows in [start, end), or the last page if the scan is reversed."""

    def __init__(
        self, state: TabletState, plan: ScanPlan, start: bytes, end: bytes, rows_max: int
    ) -> None:
        self._state = state
        self._plan = plan
        self._start = start
        self._end = end
        self.rows_max = rows_max
        self.bytes_max = plan.bytes_max
        self.rows = 0
        """Rows with a cell or a lock in the way."""
        self.rest: tuple[bytes, bytes] | None = None
        """The range that remains after the page."""
        self._locks = LockReader(state.storage, state.mirror, plan.timestamp, plan.passed).in_rows(
            start,
            end,
            wanted=plan.wanted,
            reverse=plan.reverse,
            rows_max=rows_max,
            looked_at_max=LOCKS_LOOKED_AT_MAX,
            bytes_max=plan.bytes_max,
        )
        self._lock_rows = list(dict.fromkeys(row for row, _, _ in self._locks.records))
        self._locks_counted = 0
        self._full_before = b""
        # The mirror comes first, and there must be no await between it and the cursor.
        self._cursor = state.storage.cursor()
        self.lifetimes = state.lifetimes
        self._cells = VisibleRuns(
            self._cursor,
            state.storage.get,
            plan.timestamp,
            wanted=plan.wanted,
            hidden=self._locks.cells,
            report_deletes=plan.report_deletes,
            lifetimes=self.lifetimes,
        )

    async def read(self) -> pb.ScanResponse:
        """Reads the page. Call it only once."""
        start, end, beyond = self._start, self._end, self._locks.beyond
        if beyond is not None:
            self.rest = self._from(beyond)
            start, end = (self.rest[1], end) if self._plan.reverse else (start, self.rest[0])
        first, stop = space_bounds(W, start, end)
        try:
            await (self._backwards if self._plan.reverse else self._forwards)(first, stop)
        finally:
            self._cursor.close()
        self._count_locks()
        return self._response()

    async def _forwards(self, first: bytes, stop: bytes) -> None:
        cells, limits = self._cells, self._state.limits
        cells.seek(first)
        while (walked := self._walk(stop)) is Walked.SLICE:
            await self._pause()
            if cells.looked_at >= limits.page_entries_max:
                # From now on, the walk stops after this row. This may run again, since slices need
                # not add up to the limit; the row is then still the same.
                stop = W + after_component(component(cells.row))
                self.rest = self._after(cells.row)
        if walked is Walked.FULL:
            self.rest = self._from(self._full_before)

    def _walk(self, stop: bytes) -> Walked:
        entries = self._state.limits.slice_entries
        if self._lock_rows:
            return self._cells.walk(stop, entries, self.admit)
        return self._cells.walk_in_runs(stop, entries, self)

    async def _backwards(self, first: bytes, stop: bytes) -> None:
        """Reads rows from the last one on: as runs, or one row after the other."""
        cells, limits = self._cells, self._state.limits
        rows, pause_at = 0, limits.slice_entries
        while True:
            begin = None if self._lock_rows else cells.take_before(first, stop, self)
            if begin is None:
                begin = await self._row_before(first, stop)
                if begin is None:
                    return
                rows += 1
            stop = begin
            if cells.looked_at >= limits.page_entries_max:
                self.rest = self._after(split_component(stop, 1)[0])
                return
            if rows == limits.slice_rows or cells.looked_at >= pause_at:
                rows, pause_at = 0, cells.looked_at + limits.slice_entries
                await self._pause()

    async def _row_before(self, first: bytes, stop: bytes) -> bytes | None:
        """Reads the last row below `stop`, forwards. Returns the key where it begins; None if there
        is no row, or no room."""
        cells, cursor, entries = self._cells, self._cursor, self._state.limits.slice_entries
        cursor.seek(stop)
        cursor.prev()
        key = cursor.key()
        if key < first:
            return None
        _, at = split_component(key, 1)
        begin = key[:at]
        cells.seek(begin)
        while (walked := cells.walk(after_component(begin), entries, self.admit)) is Walked.SLICE:
            await self._pause()
        if walked is Walked.FULL:
            self.rest = self._from(self._full_before)
            return None
        return begin

    async def _pause(self) -> None:
        await asyncio.sleep(0)
        self._state.require_open()

    def admit(self, row: bytes) -> bool:
        """Whether there is room for a row with visible cells, after the locked rows before it."""
        if self._lock_rows and not self._admit_locked_before(row):
            return False
        if self.rows >= self.rows_max or self._cells.bytes >= self.bytes_max:
            self._full_before = row
            return False
        self.rows += 1
        if self._lock_rows and self._is_next_lock(row):
            self._locks_counted += 1
        return True

    def _is_next_lock(self, row: bytes) -> bool:
        return self._lock_rows[self._locks_counted : self._locks_counted + 1] == [row]

    def _admit_locked_before(self, row: bytes) -> bool:
        """Whether there is room for the locked rows before this row."""
        lock_rows, reverse = self._lock_rows, self._plan.reverse
        while self._locks_counted < len(lock_rows):
            lock_row = lock_rows[self._locks_counted]
            if lock_row == row or (lock_row > row) is not reverse:
                break
            if self.rows >= self.rows_max:
                self._full_before = lock_row
                return False
            self.rows += 1
            self._locks_counted += 1
        return True

    def _count_locks(self) -> None:
        """Counts the locked rows after the last row with visible cells, as far as there is room."""
        for lock_row in self._lock_rows[self._locks_counted :]:
            if self.rest is not None and _contains(self.rest, lock_row):
                return
            if self.rows >= self.rows_max:
                self.rest = self._from(lock_row)
                return
            self.rows += 1

    def _from(self, row: bytes) -> tuple[bytes, bytes]:
        """The remaining range if `row` is the first row that is not in the page."""
        return (self._start, row + b"\0") if self._plan.reverse else (row, self._end)

    def _after(self, row: bytes) -> tuple[bytes, bytes] | None:
        """The remaining range if `row` is the last row in the page."""
        if not self._plan.reverse:
            return row + b"\0", self._end
        # Before the empty row there is none: as an end, it would mean all rows.
        return (self._start, row) if row else None

    def _response(self) -> pb.ScanResponse:
        if self.rest is not None and self.rest[1] and self.rest[0] >= self.rest[1]:
            self.rest = None
        response = pb.ScanResponse()
        cells = self._cells
        # Joined cells say nothing about locks and deletions.
        is_plain = self._plan.joined and not self._lock_rows and not cells.deletes
        if not is_plain or not join_cells(cells.rows, cells.columns, cells.values, response.joined):
            found = response.found
            found.rows.extend(cells.rows)
            found.columns.extend(cells.columns)
            found.commit_timestamps.extend(cells.commit_timestamps)
            found.values.extend(cells.values)
            found.deletes.extend(cells.deletes)
        for row, column, record in self._locks.records:
            if self.rest is None or not _contains(self.rest, row):
                response.locks.add(lock=lock_cell(row, column, record, self.lifetimes))
        if self.rest is not None:
            response.rest.CopyFrom(cells_pb2.RowRange(start=self.rest[0], end=self.rest[1]))
        counters = self._state.counters
        counters.rows_scanned += self.rows
        counters.read_rate.add(self.rows)
        counters.versions_skipped += cells.skipped
        return response


def _contains(rows: tuple[bytes, bytes], row: bytes) -> bool:
    start, end = rows
    return start <= row and (not end or row < end)
