"""Finding work: the notifications of a range, and old locks on observed columns.

One response is one look, taken without yielding to the event loop, and each look is short: it ends
between two rows, after a limited number of rows, bytes or entries, and says what remains. Locks are
looked at first: a commit turns a lock into a notification, so what has just ceased to be a lock is
found as a notification, and nothing slips through between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LOCK_KIND_OFFSET,
    timestamp_bytes,
)
from percolator.tablet.cells import (
    TIMESTAMP_MAX,
    L,
    N,
    after_component,
    ascending,
    cell_bounds,
    component,
    space_bounds,
    split_component,
    timestamp_of,
    unescaped,
)
from percolator.tablet.scans import clipped
from percolator.tablet.state import TabletState
from percolator.tablet.visible_cells import lock_cell
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb

LOCKS_LOOKED_AT_MAX = 4096
"""The limit for one look: about 1.5 ms. A job may hold a million locks."""
ENTRIES_LOOKED_AT_MAX = 4096
"""The limit for one look: about 2 ms."""
TIMESTAMPS_MAX = 64
"""How many notifications of one cell are returned for one observer. If the observer does not run, a
busy cell accumulates millions."""


class LockVanished(Exception):
    """A lock that memory knows is gone from the store: a batch has just become durable, and memory
    is not updated yet. Look again between two batches."""


class NotificationLook:
    """One look. Create it, call `answer` once, and discard it."""

    def __init__(self, state: TabletState, scan: pb.NotificationScan) -> None:
        """Raises `InvalidArgument`."""
        self._state = state
        self._start, self._end = clipped(state, scan.range)
        limits = state.limits
        named = max(len(scan.observers), len(scan.locked_columns))
        if named > limits.columns_max:
            field = "observers" if named == len(scan.observers) else "locked_columns"
            raise InvalidArgument(field, f"{named} entries, at most {limits.columns_max} allowed")
        self._observers = frozenset(scan.observers)
        self._columns = frozenset(component(column) for column in scan.locked_columns)
        self._locks_before = scan.locks_before
        self._rows_max = min(scan.row_limit or limits.page_rows_default, limits.page_rows_max)
        self._bytes_left = limits.page_bytes_default
        self._beyond: bytes | None = None
        """The first row that the look did not reach."""
        self._result = pb.NotificationScanResult()

    def answer(self) -> pb.NotificationScanResult:
        """Raises `LockVanished`."""
        result = self._result
        result.notifications_written = self._state.counters.notifications_written
        locks = list(self._locks()) if self._columns and self._locks_before else []
        self._look_at_notifications()
        beyond = self._beyond
        result.locks.extend(
            lock_cell(*lock) for lock in locks if beyond is None or lock[0] < beyond
        )
        if beyond is not None:
            result.rest.CopyFrom(cells_pb2.RowRange(start=beyond, end=self._end))
        return result

    # ------------------------------------------------------------------ locks

    def _locks(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yields row, column and record. The mirror says which locks exist, the store what they
        hold."""
        get, columns, before = self._state.storage.get, self._columns, self._locks_before
        endings, too_young = tuple(columns), timestamp_bytes(min(before, TIMESTAMP_MAX))
        last, last_row, rows = b"", b"", 0
        bounds = cell_bounds(self._start, self._end)
        for looked_at, (cell, header) in enumerate(self._state.mirror.between(*bounds)):
            full = rows >= self._rows_max or self._bytes_left <= 0
            if (full or looked_at >= LOCKS_LOOKED_AT_MAX) and not _same_row(last, cell):
                self._beyond = split_component(cell, 0)[0]
                return
            last = cell
            # Most locks are no work; this notices it before taking their keys apart.
            if header >= too_young or not cell.endswith(endings):
                continue
            row, at = split_component(cell, 0)
            if cell[at:] not in columns or header[LOCK_KIND_OFFSET] == KIND_LOCK_ONLY:
                continue
            record = get(L + cell)
            if record is None:
                raise LockVanished
            self._bytes_left -= len(record)
            rows += not rows or row != last_row
            last_row = row
            yield row, unescaped(cell[at:-2]), record

    # ------------------------------------------------------------------ notifications

    def _look_at_notifications(self) -> None:
        """Looks at notifications, up to the row that the look at locks has reached."""
        end = self._end if self._beyond is None else self._beyond
        first, stop = cell_bounds(self._start, end)
        row, row_prefix, rows, counted = b"", b"\0\0", 0, False
        group = b"\0\0"
        """The key prefix of all notifications of one observer about one cell."""
        left = ENTRIES_LOOKED_AT_MAX
        found: pb.Notification | None = None
        passed = 0
        """How many entries of a group that was not requested were stepped over."""
        entries = self._entries(first, stop)
        while (key := next(entries, None)) is not None:
            left -= 1
            if key[:-8] != group:
                if not key.startswith(row_prefix):
                    row, at = split_component(key, 0)
                    if rows >= self._rows_max or self._bytes_left <= 0 or left <= 0:
                        self._beyond = row
                        return
                    row_prefix, counted = key[:at], False
                group = key[:-8]
                found, passed = self._begin(group, row, len(row_prefix)), 0
                if found is not None and not counted:
                    rows, counted = rows + 1, True
            if found is None:
                passed += 1
                if passed == TIMESTAMPS_MAX:  # for a few, stepping is faster than seeking
                    entries = self._entries(after_component(group), stop)
                continue
            if len(found.timestamps) == TIMESTAMPS_MAX:
                self._tell_the_oldest(found, group)
                entries = self._entries(after_component(group), stop)
                continue
            found.timestamps.append(timestamp_of(key))
            self._bytes_left -= 8

    def _begin(self, group: bytes, row: bytes, row_length: int) -> pb.Notification | None:
        """Begins the entry of this observer and cell; None if the observer was not requested."""
        column, at = split_component(group, row_length)
        observer, _ = split_component(group, at)
        if self._observers and observer not in self._observers:
            return None
        if self._state.load_fences.over(row) is not None:
            return None  # it belongs to a bulk load that is not visible yet
        self._bytes_left -= len(group)
        return self._result.notifications.add(row=row, column=column, observer=observer)

    def _entries(self, first: bytes, stop: bytes | None) -> Iterator[bytes]:
        """Keys of existing notifications: from the index as far as it is complete, then from the
        store."""
        index = self._state.index
        missing = index.missing_from
        if missing is None or (stop is not None and stop <= missing):
            yield from index.between(first, stop)
            return
        if first < missing:
            yield from index.between(first, missing)
            first = missing
        behind = space_bounds(N, b"", b"")[1] if stop is None else N + stop
        for key, _ in self._state.storage.iterate(N + first, behind):
            yield key[1:]

    def _tell_the_oldest(self, found: pb.Notification, group: bytes) -> None:
        index, storage = self._state.index, self._state.storage
        stop = after_component(group)
        if index.missing_from is None or stop <= index.missing_from:
            last = index.between(group, stop, reverse=True)
            oldest = [timestamp_of(key) for key in islice(last, TIMESTAMPS_MAX)]
        else:
            cursor = storage.cursor()
            try:
                every = ascending(cursor, N + group, 0, 0)
                oldest = [timestamp for timestamp, _ in islice(every, TIMESTAMPS_MAX)]
            finally:
                cursor.close()
        del found.timestamps[:]
        found.timestamps.extend(reversed(oldest))


def _same_row(cell: bytes, other: bytes) -> bool:
    """True if two cells are in the same row; the first may be empty, meaning none."""
    return bool(cell) and other.startswith(cell[: split_component(cell, 0)[1]])
