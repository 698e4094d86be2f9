"""Walks over write records and collects the version of each cell that is visible at a timestamp.

That is the newest put or delete at or below the timestamp; lock-only records say where it is. A
walk is made in slices: it stops after a number of entries and continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from enum import Enum, auto

from percolator.errors import InvariantViolation
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    last_change,
)
from percolator.tablet.keys import (
    RESERVED,
    TIMESTAMP_MAX,
    D,
    after_component,
    inverted,
    split_component,
    timestamp_of,
    unescaped,
)
from percolator.tablet.lifetimes import FOREVER, Lifetimes
from percolator.world import Cursor

SLICE_BYTES = 4 << 20
"""A slice also ends after this many bytes: a few hundred entries may hold gigabytes."""

STEPS_BEFORE_SEEK = 8
"""A seek costs as much as about six steps."""
LOCKS_BEFORE_SEEK = 2
"""The change is nearly always right below one or two lock-only records."""

Get = Callable[[bytes], bytes | None]
Admit = Callable[[bytes], bool]


def everything(row: bytes) -> bool:
    """Admits every row."""
    return True


class Walked(Enum):
    """Why a walk stopped."""

    TO_THE_END = auto()
    SLICE = auto()
    """The slice has ended; continue with another one."""
    FULL = auto()
    """The page is full before `VisibleCells.row`."""


class VisibleCells:
    """The visible cells found so far, as parallel lists, and the position of the walk."""

    def __init__(
        self,
        cursor: Cursor,
        get: Get,
        timestamp: int,
        *,
        wanted: Container[bytes] | None,
        hidden: Collection[bytes] = (),
        report_deletes: bool = False,
        lifetimes: Lifetimes = FOREVER,
    ) -> None:
        """`wanted` are the encoded columns; None means all but reserved ones. `hidden` are cells
        (`cell_prefix`) that have a lock in the way. `lifetimes` are those at the time when the
        cursor was created."""
        self._timestamp = timestamp
        self._lifetimes = lifetimes
        self._cursor = cursor
        self._get = get
        self._inverted = inverted(timestamp)
        self._wanted = wanted
        self._hidden = hidden
        self._report_deletes = report_deletes
        self.rows: list[bytes] = []
        self.columns: list[bytes] = []
        self.commit_timestamps: list[int] = []
        self.values: list[bytes] = []
        self.deletes: list[int] = []
        self.bytes = 0
        self.skipped = 0
        """How many versions were stepped over."""
        self.looked_at = 0
        """How many entries were looked at, in all walks together."""
        self.row = b""
        """The current row of the walk."""
        self._row_prefix = self._cell = _NOWHERE
        self._row_admitted = self._decided = False

    def seek(self, key: bytes) -> None:
        """Begins a walk at this key of W, which is between two rows."""
        self._cursor.seek(key)
        self._row_prefix = self._cell = _NOWHERE

    def walk(self, stop: bytes, entries_max: int, admit: Admit = everything) -> Walked:
        """Continues up to the key `stop`, or until it has looked at `entries_max` entries.

        `admit` is called once for each row with a visible cell, before the cell is taken; False
        ends the walk. `admit` is not stored: its owner refers to this object, and the reference
        cycle would keep a page of values alive until the garbage collector runs.
        """
        cursor = self._cursor
        item, step = cursor.item, cursor.next
        wanted, hidden, newest = self._wanted, self._hidden, self._inverted
        lifetimes, bytes_stop = self._lifetimes or None, self.bytes + SLICE_BYTES
        row, row_prefix, admitted = self.row, self._row_prefix, self._row_admitted
        cell, decided = self._cell, self._decided
        steps = skipped = 0
        for looked_at in range(entries_max):
            key, value = item()
            if not key.startswith(cell):
                if key >= stop:
                    self.looked_at += looked_at
                    self.skipped += skipped
                    return Walked.TO_THE_END
                cell = key[:-8]
                if not cell.startswith(row_prefix):
                    row, end = split_component(key, 1)
                    row_prefix = key[:end]
                    admitted = False
                steps = 0
                column = cell[len(row_prefix) :]
                decided = column.startswith(RESERVED) if wanted is None else column not in wanted
                if hidden and cell[1:] in hidden:
                    decided = True
            if decided or key[-8:] < newest:
                skipped += 1
                steps += 1
                if steps <= STEPS_BEFORE_SEEK:
                    step()
                else:
                    cursor.seek(after_component(cell) if decided else cell + newest)
                continue
            kind = value[WRITE_KIND_OFFSET]
            if kind == KIND_LOCK_ONLY:
                skipped += 1
                steps += 1
                named = last_change(value) if steps > LOCKS_BEFORE_SEEK else None
                if named is None:
                    step()
                else:
                    cursor.seek(cell + inverted(named))
                continue
            decided = True
            if lifetimes and self._has_expired(key, cell[len(row_prefix) :]):
                kind = KIND_DELETE
            if kind != KIND_DELETE or self._report_deletes:
                if not admitted:
                    if not admit(row):
                        self.row = row
                        self.looked_at += looked_at
                        self.skipped += skipped
                        return Walked.FULL
                    admitted = True
                self._take(key, value, kind, row, cell[len(row_prefix) : -2])
                if self.bytes >= bytes_stop:
                    step()
                    break
            step()
        self.row, self._row_prefix, self._row_admitted = row, row_prefix, admitted
        self._cell, self._decided = cell, decided
        self.looked_at += looked_at + 1  # fewer than entries_max when the slice ended by its bytes
        self.skipped += skipped
        return Walked.SLICE

    def _has_expired(self, key: bytes, column: bytes) -> bool:
        return self._lifetimes.hides_component(column, timestamp_of(key), self._timestamp)

    def _take(self, key: bytes, value: bytes, kind: int, row: bytes, column: bytes) -> None:
        if kind == KIND_PUT:
            self.values.append(value[WRITE_HEADER_BYTES:])
        elif kind == KIND_DELETE:
            self.deletes.append(len(self.values))
            self.values.append(b"")
        else:
            self.values.append(value_in_data(self._get, key[1:-8], value))
        self.bytes += len(key) + len(self.values[-1])
        self.rows.append(row)
        self.columns.append(unescaped(column))
        self.commit_timestamps.append(int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX)


def value_in_data(get: Get, cell: bytes, write_record: bytes) -> bytes:
    """The value of a write record whose value is stored apart from it."""
    start = int.from_bytes(write_record[:START_TIMESTAMP_BYTES], "big")
    value = get(D + cell + inverted(start))
    if value is None:
        raise InvariantViolation(f"the value of a write record of transaction {start} is missing")
    return value


_NOWHERE = b"\0"
"""A prefix of no key."""
