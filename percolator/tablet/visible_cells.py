"""Walks over write records and collects the version of each cell that is visible at a timestamp.

That is the newest put or delete at or below the timestamp; lock-only records say where it is. A
walk is made in slices: it stops after a number of entries and continues from there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain, compress, repeat
from operator import itemgetter, le, ne
from typing import Any, Protocol

from percolator.errors import InvalidArgument, InvariantViolation
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    LOCK_HEADER,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    last_change,
)
from percolator.tablet.cells import (
    END,
    RESERVED,
    TIMESTAMP_BYTES,
    TIMESTAMP_MAX,
    ColumnEncoder,
    D,
    L,
    LockMirror,
    after_component,
    cell_bounds,
    column_prefix,
    inverted,
    split_component,
    timestamp_of,
    unescaped,
)
from percolator.tablet.state import FOREVER, Lifetimes, TabletLimits
from percolator.v1 import cells_pb2
from percolator.world import Cursor, Storage

# Which locks keep a read from seeing what it should.
#
# The mirror says which cells to look at; the lock record in the storage decides: since the mirror
# was updated, the lock may have been pushed, or be gone, and then the storage is right. The caller
# must create its cursor afterwards.


def blocks_read(header: bytes, timestamp: int, passed: Container[int]) -> bool:
    """True if a lock is in the way of a read at `timestamp`.

    It is if its transaction may commit at or below the timestamp: the transaction began no later,
    writes the cell, has not been pushed above the timestamp, and is not known to be passable.
    """
    start, min_commit, _, kind = LOCK_HEADER.unpack_from(header)
    return (
        start <= timestamp
        and kind != KIND_LOCK_ONLY
        and min_commit <= timestamp
        and start not in passed
    )


@dataclass
class LocksFound:
    """Locks in the way in a range of rows, in the order of the scan."""

    records: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    """Row, column and lock record."""
    cells: set[bytes] = field(default_factory=set)
    """`cell_prefix` of each."""
    beyond: bytes | None = None
    """The first row of the range that was not looked at; None if all of it was."""


class LockReader:
    """Looks for locks in the way of one read or scan."""

    def __init__(
        self, storage: Storage[Any], mirror: LockMirror, timestamp: int, passed: Container[int]
    ) -> None:
        self._get = storage.get
        self._mirror = mirror
        self._timestamp = timestamp
        self._passed = passed

    def on_cell(self, cell: bytes) -> bytes | None:
        """The lock record in the way of reading this cell, or None."""
        header = self._mirror.headers.get(cell)
        if header is None or not blocks_read(header, self._timestamp, self._passed):
            return None
        record = self._get(L + cell)
        if record is None or not blocks_read(record, self._timestamp, self._passed):
            return None
        return record

    def in_rows(
        self,
        start: bytes,
        end: bytes,
        *,
        wanted: Container[bytes] | None,
        reverse: bool = False,
        rows_max: int,
        looked_at_max: int,
        bytes_max: int,
    ) -> LocksFound:
        """The locks in the way of rows in [start, end), on the encoded columns that are `wanted`
        (None: on all but reserved ones). Stops when `rows_max` rows have one, their records hold
        `bytes_max`, or about `looked_at_max` locks were looked at; the scan's page must then end
        before `beyond`."""
        found = LocksFound()
        if not self._mirror.headers:
            return found
        row, row_prefix, row_counted = b"", b"\0\0", False
        rows = looked_at = size = 0
        bounds = cell_bounds(start, end)
        for cell, header in self._mirror.between(*bounds, reverse=reverse):
            looked_at += 1
            if not cell.startswith(row_prefix):
                row, at = split_component(cell, 0)
                if rows >= rows_max or size >= bytes_max or looked_at > looked_at_max:
                    found.beyond = row
                    break
                row_prefix, row_counted = cell[:at], False
            column = cell[len(row_prefix) :]
            if column.startswith(RESERVED) if wanted is None else column not in wanted:
                continue
            if not blocks_read(header, self._timestamp, self._passed):
                continue
            record = self.on_cell(cell)
            if record is not None:
                found.records.append((row, unescaped(column[:-2]), record))
                found.cells.add(cell)
                size += len(record)
                rows += not row_counted
                row_counted = True
        return found


def lock_cell(
    row: bytes, column: bytes, record: bytes, lifetimes: Lifetimes = FOREVER
) -> cells_pb2.Cell:
    """A lock as responses report it. Readers may take the value that is in it, so they have to know
    until when that is visible."""
    cell = cells_pb2.Cell(space=cells_pb2.SPACE_LOCK, row=row, column=column, value=record)
    if lifetimes:
        cell.ttl_milliseconds = lifetimes.by_column.get(column, 0)
    return cell


# Which columns a read wants: all, those that it names, or those that begin with a prefix.


class NamesColumns(Protocol):
    """A request for columns of rows."""

    @property
    def columns(self) -> Sequence[bytes]: ...

    @property
    def column_prefixes(self) -> Sequence[bytes]: ...

    @property
    def all_columns(self) -> bool: ...


class ChosenColumns(Container[bytes]):
    """The encoded columns that a read names, and all that begin with one of its prefixes."""

    def __init__(self, names: frozenset[bytes], prefixes: tuple[bytes, ...]) -> None:
        self._names = names
        self._prefixes = prefixes

    def __contains__(self, column: object) -> bool:
        return isinstance(column, bytes) and (
            column.startswith(self._prefixes) or column in self._names
        )


def chosen_columns(
    field: str,
    read: NamesColumns,
    encoder: ColumnEncoder,
    limits: TabletLimits,
) -> Container[bytes] | None:
    """The encoded columns that a read wants; None for all but reserved ones.

    `field` comes before the names of fields in errors. Raises `InvalidArgument`.
    """
    given = read.column_prefixes
    where = f"{field}column_prefixes"
    if read.all_columns:
        if read.columns or given:
            raise InvalidArgument(
                f"{field}all_columns", "cannot be combined with columns or prefixes"
            )
        return None
    if not given:
        return frozenset(encoder[c] for c in read.columns)
    if len(given) > limits.column_prefixes_max:
        raise InvalidArgument(
            where, f"{len(given)} entries, at most {limits.column_prefixes_max} allowed"
        )
    prefixes = tuple(column_prefix(one) for one in given)
    for one in prefixes:
        if not one or one.startswith(RESERVED):
            raise InvalidArgument(where, "expected prefixes that are not empty or begin with 00")
    return ChosenColumns(frozenset(encoder[c] for c in read.columns), prefixes)


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
        """The current column; None once its visible version was found, or if none is wanted."""
        self._columns_met: dict[bytes, bytes | None] = {}
        """Columns by how they are in keys; None for those that are not wanted."""

    @property
    def commit_timestamps(self) -> list[int]:
        """Commit timestamps of the cells found so far."""
        stored = struct.unpack(f">{len(self._commits)}Q", b"".join(self._commits))
        return [one ^ TIMESTAMP_MAX for one in stored]

    def keep(self, kept: Sequence[bool]) -> None:
        """Forgets all cells found so far but these. None of them is a deletion."""
        self.rows = [*compress(self.rows, kept)]
        self.columns = [*compress(self.columns, kept)]
        self.values = [*compress(self.values, kept)]
        self._commits = [*compress(self._commits, kept)]

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
            if lifetimes and lifetimes.hides_component(
                cell[len(row_prefix) :], timestamp_of(key), self._timestamp
            ):
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
        # Only a slice has made use of the entry that ends a walk.
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


RUN_ENTRIES_MIN = 8
RUN_ENTRIES_MAX = 128
RUN_VALUE_BYTES_MAX = 4096
"""A larger value ends a run. Clients store values apart from 1 KiB on, unless told otherwise."""
ONE_BY_ONE_MAX = 1024
STEPS_FOR_A_CELL = 2
"""The cost of finding a cell without runs, in entries of a run: a walk jumps over old versions."""
STEPS_FOR_A_ROW = 6
"""The cost of finding a row backwards: it takes two seeks to come to its beginning."""

_JUDGED = frozenset((KIND_PUT, KIND_DELETE))
_kind_of = itemgetter(WRITE_KIND_OFFSET)
_ALL = b"\xff" * TIMESTAMP_BYTES
"""The oldest commit of all, as it is in keys."""


class PageBudget(Protocol):
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
    """Visible cells in a range without locks in the way, judged many entries at a time.

    Most entries of most scans are simple: a put or a deletion in a write record that needs no look
    elsewhere. A run of them costs half of what they cost one by one, since no step of Python's is
    spent on a single entry. What is not simple is left to `VisibleCells.walk`, entry by entry, and
    both find the same: lock-only records, values stored apart from their record, and large ones, of
    which a run would hold too many at once.

    A run also looks at old versions that a walk would jump over. So the first runs are short, and
    after one that was not simple or had few visible cells, the next entries are walked one by one,
    and more of them each time.
    """

    _run_entries = RUN_ENTRIES_MIN
    _runs_from = 0
    """How many entries are to be looked at before the next run."""
    _one_by_one_next = RUN_ENTRIES_MAX
    _lasting: dict[bytes, bytes] | None = None
    """By encoded column, without its end: the oldest commit whose value is not expired."""

    def walk_in_runs(self, stop: bytes, entries_max: int, budget: PageBudget) -> Walked:
        """Does the same as `walk`."""
        looked_at_stop, bytes_stop = (
            self.looked_at + entries_max,
            self.bytes + SLICE_BYTES,
        )
        while (left := looked_at_stop - self.looked_at) > 0 and self.bytes < bytes_stop:
            entries = min(left, self._run_entries, budget.rows_max - budget.rows)
            one_by_one = self._runs_from - self.looked_at
            if not entries or one_by_one > 0:
                walked = self.walk(stop, min(left, one_by_one) if entries else left, budget.admit)
                if walked is not Walked.SLICE:
                    return walked
                continue
            keys, values = self._fetched(stop, entries)
            if not keys:
                if self._cursor.key() >= stop:
                    return Walked.TO_THE_END
                self._pause()
            elif not self._took(keys, values, budget, STEPS_FOR_A_CELL):
                self._cursor.seek(keys[0])
                self._pause()
        return Walked.SLICE

    def take(self, keys: list[bytes], values: list[bytes], budget: PageBudget) -> bool:
        """Takes whole rows, whose entries are given, as a run. Returns False, and does nothing, if
        they have to be walked, since they are not simple or may not fit."""
        if len(keys) > budget.rows_max - budget.rows:
            return False
        self._cell, self._row_admitted = NOWHERE, False
        return self._took(keys, values, budget, STEPS_FOR_A_ROW)

    def take_before(self, first: bytes, stop: bytes, budget: PageBudget) -> bytes | None:
        """Takes the last rows below the key `stop`, which is between two rows, as a run. Returns
        the key where they begin; None if the last row has to be walked, since it is not simple or
        may not fit."""
        entries = min(self._run_entries, budget.rows_max - budget.rows)
        if not entries or self.looked_at < self._runs_from:
            return None
        keys, values = self._fetched_before(first, stop, entries)
        self._cell, self._row_admitted = NOWHERE, False
        found = len(self.rows)
        if not keys or not self._took(keys, values, budget, STEPS_FOR_A_ROW):
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

    def _took(self, keys: list[bytes], values: list[bytes], budget: PageBudget, worth: int) -> bool:
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
        if self.bytes + size >= budget.bytes_max:
            return False
        if b"\0" in b"".join(rows):
            rows = [unescaped(row) for row in rows]
        before = self.row if self._row_admitted else None
        budget.rows += sum(map(ne, rows, chain((before,), rows)))
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
