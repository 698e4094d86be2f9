"""Visible cells, judged many entries at a time.

Most entries of most scans are simple: a put or a deletion in a write record that needs no look
elsewhere. A run of them costs half of what they cost one by one, since no step of Python's is spent
on a single entry. What is not simple is left to `VisibleCells.walk`, entry by entry, and both find
the same: lock-only records, values stored apart from their record, and large ones, of which a run
would hold too many at once.

A run also looks at old versions that a walk would jump over. So the first runs are short, and after
one that was not simple or had few visible cells, the next entries are walked one by one, and more
of them each time.
"""

from __future__ import annotations

from itertools import chain, compress, repeat
from operator import itemgetter, le, ne
from typing import Protocol

from percolator.formats.records import (
    KIND_DELETE,
    KIND_PUT,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.tablet.keys import END, TIMESTAMP_BYTES, inverted, split_component, unescaped
from percolator.tablet.reading import visible_cells
from percolator.tablet.reading.visible_cells import NOWHERE, VisibleCells, Walked

RUN_ENTRIES_MIN = 8
RUN_ENTRIES_MAX = 128
RUN_VALUE_BYTES_MAX = 4096
"""A larger value ends a run. Clients store values apart from 1 KiB on, unless told otherwise."""
ONE_BY_ONE_MAX = 1024
STEPS_FOR_A_CELL = 2
"""What finding a cell costs without runs, in entries of a run: a walk jumps over old versions."""
STEPS_FOR_A_ROW = 6
"""The same of a row, backwards: it takes two seeks to come to its beginning."""

_JUDGED = frozenset((KIND_PUT, KIND_DELETE))
_kind_of = itemgetter(WRITE_KIND_OFFSET)
_ALL = b"\xff" * TIMESTAMP_BYTES
"""The oldest commit of all, as it is in keys."""


class Room(Protocol):
    """The page that is filled."""

    rows: int

    @property
    def rows_max(self) -> int: ...

    @property
    def bytes_max(self) -> int:
        """A row is admitted as long as the cells have fewer bytes."""
        ...

    def admit(self, row: bytes) -> bool: ...


class VisibleRuns(VisibleCells):
    """Visible cells in a range without locks in the way."""

    _run_entries = RUN_ENTRIES_MIN
    _runs_from = 0
    """How many entries are to be looked at before the next run."""
    _one_by_one_next = RUN_ENTRIES_MAX
    _lasting: dict[bytes, bytes] | None = None
    """By encoded column, without its end: the oldest commit whose value is not expired."""

    def walk_in_runs(self, stop: bytes, entries_max: int, room: Room) -> Walked:
        """Does the same as `walk`."""
        looked_at_stop, bytes_stop = (
            self.looked_at + entries_max,
            self.bytes + visible_cells.SLICE_BYTES,
        )
        while (left := looked_at_stop - self.looked_at) > 0 and self.bytes < bytes_stop:
            entries = min(left, self._run_entries, room.rows_max - room.rows)
            one_by_one = self._runs_from - self.looked_at
            if not entries or one_by_one > 0:
                walked = self.walk(stop, min(left, one_by_one) if entries else left, room.admit)
                if walked is not Walked.SLICE:
                    return walked
                continue
            keys, values = self._fetched(stop, entries)
            if not keys:
                if self._cursor.key() >= stop:
                    return Walked.TO_THE_END
                self._pause()
            elif not self._took(keys, values, room, STEPS_FOR_A_CELL):
                self._cursor.seek(keys[0])
                self._pause()
        return Walked.SLICE

    def take_before(self, first: bytes, stop: bytes, room: Room) -> bytes | None:
        """Takes the last rows below the key `stop`, which is between two rows, as a run. Returns
        the key where they begin; None if the last row has to be walked, since it is not simple or
        may not fit."""
        entries = min(self._run_entries, room.rows_max - room.rows)
        if not entries or self.looked_at < self._runs_from:
            return None
        keys, values = self._fetched_before(first, stop, entries)
        self._cell, self._row_admitted = NOWHERE, False
        found = len(self.rows)
        if not keys or not self._took(keys, values, room, STEPS_FOR_A_ROW):
            self._pause()
            return None
        self._turn_around(found)
        _, at = split_component(keys[0], 1)
        return keys[0][:at]

    def _pause(self) -> None:
        self._run_entries = RUN_ENTRIES_MIN
        self._runs_from = self.looked_at + self._one_by_one_next
        self._one_by_one_next = min(2 * self._one_by_one_next, ONE_BY_ONE_MAX)

    def _fetched(self, stop: bytes, entries: int) -> tuple[list[bytes], list[bytes]]:
        """The next entries; none if the first one is at the end, or has a large value."""
        item, step = self._cursor.item, self._cursor.next
        keys: list[bytes] = []
        values: list[bytes] = []
        for _ in range(entries):
            key, value = item()
            if key >= stop or len(value) > RUN_VALUE_BYTES_MAX:
                break
            keys.append(key)
            values.append(value)
            step()
        return keys, values

    def _fetched_before(
        self, first: bytes, stop: bytes, entries: int
    ) -> tuple[list[bytes], list[bytes]]:
        """The last entries below `stop`, up to one that is not simple, without those of a row that
        is not among them as a whole."""
        item, back = self._cursor.item, self._cursor.prev
        keys: list[bytes] = []
        values: list[bytes] = []
        self._cursor.seek(stop)
        back()
        while True:
            key, value = item()
            if key < first:
                break
            is_simple = _kind_of(value) in _JUDGED and len(value) <= RUN_VALUE_BYTES_MAX
            if len(keys) == entries or not is_simple:
                _, at = split_component(key, 1)
                row = key[:at]
                while keys and keys[-1].startswith(row):
                    del keys[-1], values[-1]
                break
            keys.append(key)
            values.append(value)
            back()
        keys.reverse()
        values.reverse()
        return keys, values

    def _turn_around(self, found: int) -> None:
        """Puts the rows found last in descending order, each with its cells as they are."""
        rows = self.rows[found:]
        order = sorted(range(len(rows)), key=rows.__getitem__, reverse=True)
        for cells in (self.rows, self.columns, self._commits, self.values):
            part = cells[found:]
            cells[found:] = [part[at] for at in order]

    def _took(self, keys: list[bytes], values: list[bytes], room: Room, worth: int) -> bool:
        """Takes what is visible of a run of entries. Returns False if they are not simple, or if
        not all of it may fit into the page: then nothing has changed. `worth`: another run follows
        if at least one of so many entries was visible."""
        kinds = {*map(_kind_of, values)}
        if not kinds <= _JUDGED or (KIND_DELETE in kinds and self._report_deletes):
            return False
        cells = [key[1:-TIMESTAMP_BYTES] for key in keys]
        commits = [key[-TIMESTAMP_BYTES:] for key in keys]
        newest = self._inverted
        if min(commits) < newest:
            # A cell's newer versions come first: what is left of it begins with the visible one.
            old = [commit >= newest for commit in commits]
            cells, commits, values = _only(old, cells, commits, values)
        # The visible one of the first cell may have been found before this run.
        found = self._cell[1:] if self._column is None else None
        firsts = [*map(ne, cells, chain((found,), cells))]
        if not all(firsts):
            cells, commits, values = _only(firsts, cells, commits, values)
        parts = b"".join(cells).split(END)
        if len(parts) != 2 * len(cells) + 1:
            return False  # damage
        rows, columns = parts[0:-1:2], parts[1::2]
        met = {column: self._name(column + END) for column in {*columns}}
        names = {column: name for column, name in met.items() if name is not None}
        if len(names) < len(met):
            wanted = [column in names for column in columns]
            cells, commits, values, rows, columns = _only(
                wanted, cells, commits, values, rows, columns
            )
        skipped = len(keys) - len(cells)
        if KIND_DELETE in kinds:
            puts = [kind == KIND_PUT for kind in map(_kind_of, values)]
            cells, commits, values, rows, columns = _only(
                puts, cells, commits, values, rows, columns
            )
        if self._lifetimes:
            lasting = [*map(le, commits, map(self._lasts().get, columns, repeat(_ALL)))]
            if not all(lasting):
                if self._report_deletes:
                    return False
                cells, commits, values, rows, columns = _only(
                    lasting, cells, commits, values, rows, columns
                )
        size = sum(map(len, cells)) + sum(map(len, values))
        if self.bytes + size >= room.bytes_max:
            return False
        if b"\0" in b"".join(rows):
            rows = [unescaped(row) for row in rows]
        before = self.row if self._row_admitted else None
        room.rows += sum(map(ne, rows, chain((before,), rows)))
        self._stand_behind(keys[-1], rows)
        self.rows += rows
        self.columns += map(names.__getitem__, columns)
        self._commits += commits
        self.values += [value[WRITE_HEADER_BYTES:] for value in values]
        self.bytes += size
        self.skipped += skipped
        self.looked_at += len(keys)
        if worth * len(rows) < len(keys):
            self._pause()
        else:
            self._run_entries = min(2 * self._run_entries, RUN_ENTRIES_MAX)
            self._one_by_one_next = RUN_ENTRIES_MAX
        return True

    def _lasts(self) -> dict[bytes, bytes]:
        if self._lasting is None:
            oldest = self._lifetimes.lasting(self._timestamp)
            self._lasting = {
                column.removesuffix(END): inverted(commit) for column, commit in oldest.items()
            }
        return self._lasting

    def _stand_behind(self, key: bytes, rows: list[bytes]) -> None:
        """Leaves the walk as if it had come to the end of a run, whose rows with a visible cell are
        these, one by one."""
        row, at = split_component(key, 1)
        was_admitted = self._row_admitted and row == self.row
        self._row_admitted = was_admitted or rows[-1:] == [row]
        self.row, self._row_prefix = row, key[:at]
        self._cell = key[:-TIMESTAMP_BYTES]
        is_open = key[-TIMESTAMP_BYTES:] < self._inverted
        self._column = self._name(self._cell[at:]) if is_open else None

    def _name(self, encoded: bytes) -> bytes | None:
        met = self._columns_met
        return met[encoded] if encoded in met else self._meet(encoded)


def _only(present: list[bool], *lists: list[bytes]) -> list[list[bytes]]:
    return [[*compress(one, present)] for one in lists]
