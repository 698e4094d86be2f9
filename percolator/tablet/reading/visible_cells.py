"""Walks over write records and collects the version of each cell that is visible at a timestamp.

That is the newest put or delete at or below the timestamp; lock-only records say where it is. A
walk is made in slices: it stops after a number of entries and continues from there.
"""

from __future__ import annotations

import struct
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
    END,
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

COLUMNS_MET_MAX = 1_024
"""How many columns a walk remembers. A row may have millions of them."""

Get = Callable[[bytes], bytes | None]
Admit = Callable[[bytes], bool]
"""Is asked once about each row with a visible cell, before the cell is taken; False ends a walk."""


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
        self.values: list[bytes] = []
        self.deletes: list[int] = []
        self._commits: list[bytes] = []
        """As they are in keys: decoding all of them at once takes half the time."""
        self.bytes = 0
        self.skipped = 0
        """How many versions were stepped over."""
        self.looked_at = 0
        """How many entries were looked at, in all walks together."""
        self.row = b""
        """The current row of the walk."""
        self._row_prefix = self._cell = NOWHERE
        self._row_admitted = False
        self._column: bytes | None = None
        """Of the current cell; None once its visible version was found, or if none is wanted."""
        self._columns_met: dict[bytes, bytes | None] = {}
        """Columns by how they are in keys; None for those that are not wanted."""

    @property
    def commit_timestamps(self) -> list[int]:
        """Those of the cells found so far."""
        stored = struct.unpack(f">{len(self._commits)}Q", b"".join(self._commits))
        return [one ^ TIMESTAMP_MAX for one in stored]

    def seek(self, key: bytes) -> None:
        """Begins a walk at this key of W, which is between two rows."""
        self._cursor.seek(key)
        self._row_prefix = self._cell = NOWHERE

    def walk(self, stop: bytes, entries_max: int, admit: Admit = everything) -> Walked:
        """Continues up to the key `stop`, or until it has looked at `entries_max` entries."""
        # `admit` is not stored: its owner refers to this object, and the reference cycle would keep
        # a page of values alive until the garbage collector runs.
        cursor, columns_met = self._cursor, self._columns_met
        item, step = cursor.item, cursor.next
        hidden, newest, lifetimes = self._hidden, self._inverted, self._lifetimes or None
        row, row_prefix, admitted = self.row, self._row_prefix, self._row_admitted
        cell, column = self._cell, self._column
        bytes_stop, walked, steps = self.bytes + SLICE_BYTES, Walked.SLICE, 0
        for looked_at in range(entries_max):  # noqa: B007 - counted below
            key, value = item()
            if not key.startswith(cell):
                if key >= stop:
                    walked = Walked.TO_THE_END
                    break
                cell = key[:-8]
                if not cell.startswith(row_prefix):
                    end = key.find(0, 1)
                    if key.startswith(END, end):  # as in nearly every row: it has no 00
                        row, row_prefix = key[1:end], key[: end + 2]
                    else:
                        row, end = split_component(key, 1)
                        row_prefix = key[:end]
                    admitted = False
                steps = 0
                encoded = cell[len(row_prefix) :]
                column = columns_met[encoded] if encoded in columns_met else self._meet(encoded)
                if hidden and cell[1:] in hidden:
                    column = None
            commit = key[-8:]
            if column is None or commit < newest:
                steps += 1
                if steps <= STEPS_BEFORE_SEEK:
                    step()
                else:
                    cursor.seek(after_component(cell) if column is None else cell + newest)
                self.skipped += 1
                continue
            kind = value[WRITE_KIND_OFFSET]
            if kind == KIND_LOCK_ONLY:
                steps += 1
                self._step_over_lock_only(cell, value, steps)
                continue
            if lifetimes and self._has_expired(key, cell[len(row_prefix) :]):
                kind = KIND_DELETE
            if kind != KIND_DELETE or self._report_deletes:
                if not admitted:
                    if not admit(row):
                        walked = Walked.FULL
                        break
                    admitted = True
                if kind == KIND_PUT:
                    found = value[WRITE_HEADER_BYTES:]
                else:
                    found = self._other_value(key, value, kind)
                self.rows.append(row)
                self.columns.append(column)
                self._commits.append(commit)
                self.values.append(found)
                self.bytes += len(key) + len(found)
            column = None
            step()
            if self.bytes >= bytes_stop:
                break
        self.row, self._row_prefix, self._row_admitted = row, row_prefix, admitted
        self._cell, self._column = cell, column
        # Of the entry that ends a walk, only a slice has made use.
        self.looked_at += looked_at + (walked is Walked.SLICE)
        return walked

    def _step_over_lock_only(self, cell: bytes, record: bytes, steps: int) -> None:
        self.skipped += 1
        named = last_change(record) if steps > LOCKS_BEFORE_SEEK else None
        if named is None:
            self._cursor.next()
        else:
            self._cursor.seek(cell + inverted(named))

    def _meet(self, encoded: bytes) -> bytes | None:
        """The column that is encoded like this, or None if it is not wanted."""
        wanted = self._wanted
        is_left_out = encoded.startswith(RESERVED) if wanted is None else encoded not in wanted
        column = None if is_left_out else unescaped(encoded[:-2])
        if len(self._columns_met) < COLUMNS_MET_MAX:
            self._columns_met[encoded] = column
        return column

    def _has_expired(self, key: bytes, column: bytes) -> bool:
        return self._lifetimes.hides_component(column, timestamp_of(key), self._timestamp)

    def _other_value(self, key: bytes, record: bytes, kind: int) -> bytes:
        """The value of a cell whose record does not hold it."""
        if kind == KIND_DELETE:
            self.deletes.append(len(self.values))
            return b""
        return value_in_data(self._get, key[1:-8], record)


def value_in_data(get: Get, cell: bytes, write_record: bytes) -> bytes:
    """The value of a write record whose value is stored apart from it."""
    start = int.from_bytes(write_record[:START_TIMESTAMP_BYTES], "big")
    value = get(D + cell + inverted(start))
    if value is None:
        raise InvariantViolation(f"the value of a write record of transaction {start} is missing")
    return value


NOWHERE = b"\0"
"""A prefix of no key."""
