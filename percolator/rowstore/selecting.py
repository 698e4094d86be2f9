"""What a read at a timestamp needs of a row, and what it makes of that.

One reading of a row returns its locks that began by then, and of each column the newest put or
deletion by then, all as of one moment: a commit removes the lock and stores its record in one
change, so a reading shows the one or the other. Which of the locks are in the way is judged here,
from their records.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from percolator.errors import InvariantViolation
from percolator.formats.reach import too_old
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    LOCK_HEADER,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
)
from percolator.routing.cells import FoundCell, wants
from percolator.row_text import quoted
from percolator.rowstore.collected import newest_note, reads_collected_above
from percolator.rowstore.layout import (
    ALL_COLUMNS,
    COLLECTED,
    DATA,
    EVERY_COLUMN,
    LOCKS,
    WRITES,
    after_prefix,
    column_bounds,
    column_of,
    stored_column,
    written_by_others,
)
from percolator.rowstore.port import TIME_UNIT, Selection, StoredCell, can_be_named, in_calls
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell


@dataclass(frozen=True)
class Wanted:
    """Which cells are wanted, and as of when. Equal ones can be read with one call."""

    timestamp: int
    columns: tuple[bytes, ...] | None
    """None for all that are not hidden."""
    report_deletes: bool = False
    prefixes: tuple[bytes, ...] = ()
    """Columns that begin with one of these are wanted, too."""

    def selections(
        self, times: Times, bytes_max: int, *, earliest: int | None = None
    ) -> tuple[Selection, ...]:
        """What to select. More columns than a call can name are selected with all others.
        `earliest` is the earliest timestamp of all who share the reading."""
        until = times.at_or_above(self.timestamp + 1)
        if self.columns is None:
            bounds = [ALL_COLUMNS]
        else:
            bounds = [column_bounds(column) for column in dict.fromkeys(self.columns)]
            for prefix in map(stored_column, self.prefixes):
                bounds.append((prefix, after_prefix(prefix)))
        found = _selections(bounds, until)
        if not can_be_named(found, bytes_max):
            found = _selections([EVERY_COLUMN], until)
        since = self.timestamp if earliest is None else earliest
        return (*found, reads_collected_above(since, times)) if found else ()

    def wants(self, column: bytes) -> bool:
        """Whether the column is wanted, by its stored name."""
        if self.columns is None:
            return ALL_COLUMNS[0] <= column < ALL_COLUMNS[1]
        return wants(column_of(column), self.columns, self.prefixes)


def _selections(bounds: Iterable[tuple[bytes, bytes]], until: int) -> tuple[Selection, ...]:
    return tuple(
        one
        for first, end in bounds
        for one in (
            Selection(LOCKS, first, end, until_time=until),
            Selection(WRITES, first, end, until_time=until, newest=True),
        )
    )


@dataclass
class Seen:
    """What a read sees of one row."""

    found: dict[bytes, FoundCell] = field(default_factory=dict)
    locks: list[Cell] = field(default_factory=list)
    in_data: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Columns whose values lie apart: the commit and start timestamp of each."""

    @property
    def size_bytes(self) -> int:
        values = sum(len(cell.value or b"") + len(name) for name, cell in self.found.items())
        return values + sum(len(lock.value) for lock in self.locks)


def seen(
    row: bytes,
    cells: Iterable[StoredCell],
    wanted: Wanted,
    passing: Container[int],
    times: Times,
) -> Seen:
    """What a read sees in the cells that its selections have found. Raises `SnapshotTooOld` if
    something that it should see may have been collected."""
    result = Seen()
    found = sorted(dict.fromkeys(cells))
    _require_kept(found, wanted, times)
    try:
        for cell in found:
            if cell.family == COLLECTED or not wanted.wants(cell.column):
                continue
            column = column_of(cell.column)
            if cell.family == LOCKS:
                if _is_in_the_way(cell.value, wanted.timestamp, passing):
                    lock = Cell(space=SPACE_LOCK, row=row, column=column, value=cell.value)
                    result.locks.append(lock)
            elif cell.family == WRITES:
                _note(result, column, cell, wanted, times)
    except struct.error as error:
        raise written_by_others(row, error) from error
    for lock in result.locks:
        result.found.pop(lock.column, None)
        result.in_data.pop(lock.column, None)
    return result


def hides_earlier(cells: Iterable[StoredCell], timestamp: int, times: Times) -> bool:
    """Whether a reading for a later timestamp has found a version above this one: which version is
    the newest at or below it, is not known then."""
    until = times.at_or_above(timestamp + 1)
    return any(cell.family == WRITES and cell.time >= until for cell in cells)


def _is_in_the_way(record: bytes, timestamp: int, passing: Container[int]) -> bool:
    """Whether the lock's transaction may commit, at or below the timestamp, what the read has to
    see: it writes, has not been pushed above, and is not known to be passable."""
    start, min_commit, _, kind = LOCK_HEADER.unpack_from(record)
    is_early = start <= timestamp and min_commit <= timestamp
    return is_early and kind != KIND_LOCK_ONLY and start not in passing


def _note(result: Seen, column: bytes, cell: StoredCell, wanted: Wanted, times: Times) -> None:
    start, kind = WRITE_HEADER.unpack_from(cell.value)
    commit = times.timestamp(cell.time)
    if kind == KIND_PUT:
        result.found[column] = FoundCell(commit, cell.value[WRITE_HEADER_BYTES:])
    elif kind == KIND_PUT_IN_DATA:
        result.in_data[column] = commit, start
    elif kind != KIND_DELETE:
        raise InvariantViolation(f"a record of kind {kind} is among puts and deletions")
    elif wanted.report_deletes:
        result.found[column] = FoundCell(commit, None)


def _require_kept(cells: Iterable[StoredCell], wanted: Wanted, times: Times) -> None:
    note = newest_note(cells, times)
    if note > wanted.timestamp:
        raise too_old(wanted.timestamp, note)


def data_selections(
    result: Seen, wanted: Wanted, times: Times, bytes_max: int
) -> Iterator[tuple[Selection, ...]]:
    """Where the values lie that are apart from their records, in as many calls as that takes. They
    may be collected before, which is why each of these asks for the note, too."""
    note = reads_collected_above(wanted.timestamp, times)
    apart = []
    for column, (_, start) in result.in_data.items():
        time = times.time(start)
        apart.append((column, (Selection(DATA, *column_bounds(column), time, time + TIME_UNIT),)))
    for _, selections in in_calls(apart, bytes_max - note.size_bytes):
        yield note, *selections


def add_data(
    row: bytes, result: Seen, cells: Sequence[StoredCell], wanted: Wanted, times: Times
) -> None:
    """Adds these values. Raises `SnapshotTooOld` if history was collected meanwhile, and
    `InvariantViolation` if a value is missing without that."""
    _require_kept(cells, wanted, times)
    values = {(cell.column, cell.time): cell.value for cell in cells if cell.family == DATA}
    for column, (commit, start) in result.in_data.items():
        value = values.get((stored_column(column), times.time(start)))
        if value is None:
            raise InvariantViolation(
                f"row {quoted(row)} has a commit at {commit} in column {quoted(column)} "
                "without its value"
            )
        result.found[column] = FoundCell(commit, value)
    result.in_data = {}
