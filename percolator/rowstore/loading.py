"""Bulk loading: committed cells, written into a table that nobody else can see yet.

Rows are written many at a time, and without conditions: a store has no cheaper way. So a call that
is late, or was given up, may write at any time, even after the table was published, and what it
writes again was perhaps deleted and collected since. Two rules make that harmless:

* All calls of a run write the same cells at the same timestamps. What is still there is replaced by
  itself. What comes back under a newer version is out of everybody's reach, and collected again.
* Each loaded row has a note that says so, in the same change. Collection leaves deletions in such
  rows: these hide what comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from percolator.errors import InvalidArgument
from percolator.formats.records import KIND_PUT, KIND_PUT_IN_DATA, WRITE_HEADER
from percolator.limits import Limits
from percolator.rowstore.layout import (
    COLLECTED,
    DATA,
    KEY_BYTES_MAX,
    LOADED,
    WRITES,
    Times,
    row_key,
    stored_column,
)
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import Change, RowChange, RowStore, SetCell
from percolator.world import World

CALLS_IN_FLIGHT: Final = 4
_CALL_BYTES_MAX: Final = 1 << 20
_CALL_CHANGES_MAX: Final = 10_000
"""Bigtable accepts ten times as many changes in a call."""

Cell = tuple[bytes, bytes, bytes]
"""A row, a column and a value."""


class RowLoader:
    """Loads cells at one timestamp into one table."""

    def __init__(self, store: RowStore, times: Times, world: World, limits: Limits) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._calls = asyncio.Semaphore(CALLS_IN_FLIGHT)

    async def load(
        self, table_id: int, cells: Sequence[Cell], start: int, commit_ts: int, seconds: float
    ) -> None:
        """Writes cells, which must be in the order of their rows. Each call is tried for so many
        seconds. To be repeated, with the same cells, if it raises something."""
        for cell in cells:
            _require_storable(cell, self._limits)
        try:
            async with asyncio.TaskGroup() as group:
                for rows in self._calls_of(cells, start, commit_ts):
                    await self._calls.acquire()
                    call = group.create_task(self._call(table_id, rows, seconds))
                    # Not in the call itself: cancelled before it has begun, it would stay in
                    # flight.
                    call.add_done_callback(lambda _: self._calls.release())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _call(self, table_id: int, rows: Sequence[RowChange], seconds: float) -> None:
        deadline = self._world.clock.monotonic_seconds() + seconds
        patience = Patience(self._world, self._limits, deadline)
        # What was written is written again, and is the same.
        await patience.repeated(partial(self._store.write, table_id, rows))

    def _calls_of(
        self, cells: Sequence[Cell], start: int, commit_ts: int
    ) -> Iterator[list[RowChange]]:
        """The rows of each call."""
        note = SetCell(COLLECTED, LOADED, self._times.time(commit_ts), b"")
        rows: list[RowChange] = []
        changes: list[Change] = []
        before: bytes | None = None
        size = count = 0
        for row, column, value in cells:
            if rows and (size >= _CALL_BYTES_MAX or count >= _CALL_CHANGES_MAX):
                yield rows
                rows, size, count, before = [], 0, 0, None
            if row != before:
                changes, before = [note], row
                rows.append(RowChange(row_key(row), changes))
                count += 1
            added = self._changes(column, value, start, commit_ts)
            changes += added
            size += len(row) + len(column) + len(value)
            count += len(added)
        if rows:
            yield rows

    def _changes(self, column: bytes, value: bytes, start: int, commit_ts: int) -> list[Change]:
        stored, time = stored_column(column), self._times.time(commit_ts)
        if len(value) <= self._limits.value_inline_bytes_max:
            record = WRITE_HEADER.pack(start, KIND_PUT) + value
            return [SetCell(WRITES, stored, time, record)]
        return [
            SetCell(WRITES, stored, time, WRITE_HEADER.pack(start, KIND_PUT_IN_DATA)),
            SetCell(DATA, stored, self._times.time(start), value),
        ]


def _require_storable(cell: Cell, limits: Limits) -> None:
    row, column, value = cell
    row_bytes_max = min(limits.row_bytes_max, KEY_BYTES_MAX)
    if len(row_key(row)) > row_bytes_max or len(value) > limits.value_bytes_max:
        raise InvalidArgument("rows", f"row {row[:80]!r} or its value is too long")
    if not 1 <= len(column) <= limits.column_bytes_max:
        raise InvalidArgument("columns", f"row {row[:80]!r}: a column is empty or too long")
