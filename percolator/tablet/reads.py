"""Reads of rows, each at its own timestamp, a batch at a time.

First a slice waits until no commit in one round is about to write its cells (held_cells.py). Then
the mirror is asked for locks in the way, then one cursor is created, then every cell costs one seek
(memory.py says why in this order). A cell costs a second seek if lock-only records
are above its newest change and memory does not know where that change is (memory.py). A slice
of the batch runs without yielding to the event loop, unless it has to step over many records; the
next slice creates its own cursor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from percolator.errors import InvalidArgument, InvariantViolation, NotExecuted, PercolatorError
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    LOCK_HEADER,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    last_change,
    too_old,
)
from percolator.tablet import keys
from percolator.tablet.held_cells import Holder
from percolator.tablet.keys import (
    RESERVED,
    TIMESTAMP_MAX,
    ColumnEncoder,
    L,
    W,
    after_component,
    column_prefix,
    component,
    inverted,
    timestamp_of,
)
from percolator.tablet.memory import LockMirror
from percolator.tablet.state import FOREVER, Lifetimes, TabletLimits, TabletState, closed
from percolator.tablet.visible_cells import VisibleCells, Walked, value_in_data
from percolator.timestamps import NEWEST
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from percolator.world import Cursor, Storage

# Reads of single cells that come as parallel lists: each stands for a `RowRead` of one column.


class CellRead:
    """A read of one cell. Plain attributes: reading a field of a message takes longer."""

    __slots__ = ("columns", "row", "timestamp")

    all_columns = False
    column_prefixes = ()
    report_deletes = False
    passing = ()

    def __init__(self, row: bytes, column: bytes, timestamp: int) -> None:
        self.row = row
        self.columns = (column,)
        self.timestamp = timestamp


AskedRead = pb.RowRead | CellRead


def asked_reads(batch: pb.ReadBatch) -> Sequence[AskedRead]:
    """The reads of a batch: rows first, then single cells. Raises `InvalidArgument`."""
    if not batch.HasField("cells"):
        return batch.reads
    cells = batch.cells
    rows, columns, timestamps = cells.rows, cells.columns, cells.timestamps
    if not len(rows) == len(columns) == len(timestamps):
        raise InvalidArgument("cells", "rows, columns and timestamps differ in number")
    return [*batch.reads, *map(CellRead, rows, columns, timestamps)]


# Which locks keep a read from seeing what it should.
#
# The mirror says which cells to look at; the lock record in the storage decides: since the mirror
# was updated, the lock may have been pushed, or be gone, and then the storage is right. The caller
# must create its cursor afterwards.


def blocks_read(header: bytes, timestamp: int, passed: Container[int]) -> bool:
    """Whether a lock is in the way of a read at `timestamp`.

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
    """`keys.cell_prefix` of each."""
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
        bounds = keys.cell_bounds(start, end)
        for cell, header in self._mirror.between(*bounds, reverse=reverse):
            looked_at += 1
            if not cell.startswith(row_prefix):
                row, at = keys.split_component(cell, 0)
                if rows >= rows_max or size >= bytes_max or looked_at > looked_at_max:
                    found.beyond = row
                    break
                row_prefix, row_counted = cell[:at], False
            column = cell[len(row_prefix) :]
            if column.startswith(keys.RESERVED) if wanted is None else column not in wanted:
                continue
            if not blocks_read(header, self._timestamp, self._passed):
                continue
            record = self.on_cell(cell)
            if record is not None:
                found.records.append((row, keys.unescaped(column[:-2]), record))
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
    read: AskedRead | pb.ScanRequest,
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
            raise InvalidArgument(f"{field}all_columns", "beside columns or prefixes")
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


_Wanted = tuple[int, bytes, bytes, bytes]
"""Index of the read, column, the cell's key in W without its timestamp, and the inverted timestamp
to look at: that of the read, or an older one if the cell is known not to have changed since."""


_FULL = NotExecuted("the response is full; request the rest again")


class AnswerRoom:
    """What the batches of one call share: each for itself, those to a hundred tablets would make an
    answer of hundreds of MiB."""

    __slots__ = ("taken_bytes", "walking")

    def __init__(self) -> None:
        self.taken_bytes = 0
        self.walking = asyncio.Lock()
        """Held while one of them walks over a row, in slices: how much that takes is not known
        before, so all of them at once would find room."""


class PointReads:
    """One batch of reads, and its answer."""

    def __init__(
        self,
        state: TabletState,
        reads: Sequence[AskedRead],
        columns: ColumnEncoder,
        room: AnswerRoom,
    ) -> None:
        self._state = state
        self._asked = reads
        self._encoded = columns
        self._result = pb.ReadBatchResult()
        self._oldest = TIMESTAMP_MAX
        self._reads: list[int] = []
        self._columns: list[bytes] = []
        self._commits: list[int] = []
        self._values: list[bytes] = []
        self._deletes: list[int] = []
        self._bytes = 0
        self._room = room
        self._taken = 0
        """How many of them are known to the other batches of the call."""
        self._bytes_max = state.limits.answer_bytes_max
        """What the other batches leave of the answer. Below 0 if they have exceeded it."""
        self._admitted = -1
        """The index of the last read that found room: it is answered completely."""
        self._began = 0
        """The size of the answer before that read."""
        self._skipped = 0
        self._published = 0
        """How many commits had been published when the cursor was created."""
        self._lifetimes = state.lifetimes
        """As of the cursor in use."""
        self._refused: dict[int, PercolatorError] = {}
        self._chosen: dict[int, Container[bytes] | None] = {}
        """What each read wants that walks over its whole row."""

    async def answer(self) -> pb.ReadBatchResult:
        """Raises `InvalidArgument`."""
        asked, slice_rows = self._asked, self._state.limits.slice_rows
        for first in range(0, len(asked), slice_rows):
            if first:
                await asyncio.sleep(0)
                self._state.require_open()
            stop = min(first + slice_rows, len(asked))
            await self._held_cells_let_go(first, stop)
            self._share_room()
            whole_rows = await self._answer_cells(first, stop)
            self._share_room()
            for index in whole_rows:
                async with self._room.walking:
                    self._state.require_open()
                    await self._answer_row(index, asked[index])
                    self._share_room()
        # Check after reading, since versions may have been collected while the batch was read.
        if self._oldest < self._state.safe_points.reads:
            self._refuse_too_old()
        if self._refused:
            self._drop_refused()
        for index, error in self._refused.items():
            self._result.refused.add(read=index, error=to_detail(error))
        found = self._result.found
        found.reads.extend(self._reads)
        found.columns.extend(self._columns)
        found.commit_timestamps.extend(self._commits)
        found.values.extend(self._values)
        found.deletes.extend(self._deletes)
        counters = self._state.counters
        counters.reads += len(asked)
        counters.read_rate.add(len(asked))
        counters.versions_skipped += self._skipped
        return self._result

    def give_up(self) -> None:
        """Gives back the room of an answer that is not sent."""
        self._bytes = 0
        self._share_room()

    def _share_room(self) -> None:
        self._room.taken_bytes += self._bytes - self._taken
        self._taken = self._bytes
        others = self._room.taken_bytes - self._taken
        self._bytes_max = self._state.limits.answer_bytes_max - others

    async def _held_cells_let_go(self, first: int, stop: int) -> None:
        """Returns when no commit in the way of these reads is about to land. There must be no await
        between this and the look at mirror and storage."""
        held = self._state.held
        if held.holders:
            await held.let_pass(lambda: self._in_the_way(first, stop))
            self._state.require_open()

    def _in_the_way(self, first: int, stop: int) -> list[Holder]:
        held, encoded = self._state.held, self._encoded
        found: dict[Holder, None] = {}
        for read in islice(self._asked, first, stop):
            row, timestamp = read.row, read.timestamp
            if read.all_columns or read.column_prefixes:
                found |= dict.fromkeys(held.in_the_way_in_rows(row, row + b"\0", timestamp))
                continue
            prefix = component(row)
            for column in read.columns:
                holder = held.in_the_way(prefix + encoded[column], timestamp)
                if holder is not None:
                    found[holder] = None
        return list(found)

    async def _answer_cells(self, first: int, stop: int) -> list[int]:
        """Answers a slice, except for reads that walk over a whole row; returns their indexes."""
        identity, guard = self._state.identity, self._state.guard
        start, end = identity.start, identity.end
        headers, encoded = self._state.mirror.headers, self._encoded
        last_changes = self._state.last_changes.inverted
        fences = self._state.load_fences
        self._lifetimes = self._state.lifetimes
        lifetimes = self._lifetimes or None  # a test of None is no call
        columns_max = self._state.limits.columns_max
        known, known_inverted = 0, b""
        wanted: list[_Wanted] = []
        whole_rows: list[int] = []
        for index, read in enumerate(islice(self._asked, first, stop), first):
            row, timestamp = read.row, read.timestamp
            if row < start or (end and row >= end):
                raise InvalidArgument(f"reads[{index}].row", "not in this tablet")
            if timestamp != known or not timestamp:
                if timestamp != NEWEST:
                    guard.check_read(timestamp, "reads[%d].timestamp", index)
                known, known_inverted = timestamp, inverted(timestamp)
                if timestamp < self._oldest:
                    self._oldest = timestamp
            fence = fences.over(row) if fences else None
            if fence is not None:
                self._refused[index] = closed(fence)
                continue
            columns = read.columns
            if len(columns) > columns_max:
                raise InvalidArgument(
                    f"reads[{index}].columns",
                    f"{len(columns)} entries, at most {columns_max} allowed",
                )
            if lifetimes and timestamp == NEWEST and self._may_expire(read):
                self._refused[index] = InvalidArgument(
                    f"reads[{index}].timestamp",
                    "values of the column expire, and only a timestamp decides which have",
                )
                continue
            if read.all_columns or read.column_prefixes:
                field, limits = f"reads[{index}].", self._state.limits
                self._chosen[index] = chosen_columns(field, read, encoded, limits)
                whole_rows.append(index)
                continue
            row_prefix = component(row)
            for column in columns:
                cell = row_prefix + encoded[column]
                if cell in headers:
                    record = self._locks(read).on_cell(cell)
                    if record is not None:
                        if self._has_room(index):
                            self._report(index, row, column, record)
                        continue
                look_at = known_inverted
                if last_changes and cell in last_changes:
                    # Inverted timestamps: the greater one is the older one.
                    look_at = max(look_at, last_changes[cell])
                wanted.append((index, column, W + cell, look_at))
        if wanted:
            cursor = self._state.storage.cursor()
            try:
                self._published = self._state.last_changes.published
                await self._read_cells(cursor, wanted)
            finally:
                cursor.close()
            if self._bytes > self._bytes_max and self._admitted >= 0:
                # Its last cell has not been counted yet: it may be as large as a value can be.
                self._has_room(self._admitted)
        return whole_rows

    async def _read_cells(self, cursor: Cursor, wanted: list[_Wanted]) -> None:
        seek, item = cursor.seek, cursor.item
        lifetimes, asked = self._lifetimes or None, self._asked
        reads, columns, commits, values = self._reads, self._columns, self._commits, self._values
        size, size_max = self._bytes, self._bytes_max
        current, began = self._admitted, self._began
        for index, column, prefix, suffix in wanted:
            if size > size_max:
                self._bytes, self._admitted, self._began = size, current, began
                if not self._has_room(index):
                    continue
            elif index != current:
                # What `_has_room` does, without the call.
                current, began = index, size
            seek(prefix + suffix)
            key, value = item()
            if not key.startswith(prefix):
                continue
            kind = value[WRITE_KIND_OFFSET]
            if kind == KIND_LOCK_ONLY:
                key, value = await self._under_locks(cursor, prefix, asked[index].timestamp)
                if not key:
                    continue
                kind = value[WRITE_KIND_OFFSET]
            if lifetimes and lifetimes.hides(column, timestamp_of(key), asked[index].timestamp):
                kind = KIND_DELETE
            if kind == KIND_PUT:
                values.append(value[WRITE_HEADER_BYTES:])
            elif kind == KIND_DELETE:
                if not asked[index].report_deletes:
                    continue
                self._deletes.append(len(values))
                values.append(b"")
            else:
                try:
                    apart = value_in_data(self._state.storage.get, prefix[1:], value)
                except InvariantViolation:
                    if not self._is_gone(index):
                        raise
                    continue
                values.append(apart)
                size += len(apart)
            size += len(value) + len(column)
            reads.append(index)
            columns.append(column)
            commits.append(int.from_bytes(key[-8:], "big") ^ TIMESTAMP_MAX)
        self._bytes, self._admitted, self._began = size, current, began

    async def _under_locks(
        self, cursor: Cursor, prefix: bytes, timestamp: int
    ) -> tuple[bytes, bytes]:
        """The newest put or deletion below the lock-only record at the cursor; empty if there is
        none."""
        state = self._state
        key, record = cursor.item()
        while key.startswith(prefix) and record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY:
            self._skipped += 1
            named = last_change(record)
            if named is None:
                cursor.next()
                if self._skipped % state.limits.slice_entries == 0:
                    # The cursor keeps its view, and the mirror was asked before, so this is safe.
                    await asyncio.sleep(0)
                    state.require_open()
            else:
                cursor.seek(prefix + inverted(named))
            key, record = cursor.item()
        found = key.startswith(prefix)
        is_newest = state.recent.bound(prefix[1:]) <= timestamp
        if is_newest and state.last_changes.published == self._published:
            state.last_changes.learn(prefix[1:], timestamp_of(key) if found else 0)
        return (key, record) if found else (b"", b"")

    def _has_room(self, index: int) -> bool:
        """Whether this read may add more to the answer. Refuses the read if not."""
        limits, size = self._state.limits, self._bytes
        if index != self._admitted:
            if size > self._bytes_max:
                self._refused.setdefault(index, _FULL)
                return False
            self._admitted, self._began = index, size
        others = self._room.taken_bytes - self._taken + self._began
        if others + size - self._began > limits.read_bytes_max:
            self._refused[index] = (
                _FULL
                if others
                else InvalidArgument(
                    f"reads[{index}]",
                    f"its answer exceeds {limits.read_bytes_max} bytes; read fewer columns",
                )
            )
            return False
        return True

    async def _answer_row(self, index: int, read: AskedRead) -> None:
        """Reads the chosen columns of a row, in slices."""
        await self._held_cells_let_go(index, index + 1)
        fence = self._state.load_fences.over(read.row)
        if fence is not None:  # raised since the rest of its slice was answered
            self._refused[index] = closed(fence)
            return
        self._share_room()
        if not self._has_room(index):
            return
        row, slice_entries = read.row, self._state.limits.slice_entries
        wanted = self._chosen[index]
        locks = self._locks(read).in_rows(
            row, row + b"\0", wanted=wanted, rows_max=1, looked_at_max=1, bytes_max=1
        )
        for _, column, record in locks.records:
            self._report(index, row, column, record)
        storage, before = self._state.storage, self._bytes
        cursor = storage.cursor()
        self._lifetimes = self._state.lifetimes
        try:
            cells = VisibleCells(
                cursor,
                storage.get,
                read.timestamp,
                wanted=wanted,
                hidden=locks.cells,
                report_deletes=read.report_deletes,
                lifetimes=self._lifetimes,
            )
            start = W + component(row)
            cells.seek(start)
            while cells.walk(after_component(start), slice_entries) is not Walked.TO_THE_END:
                self._bytes = before + cells.bytes
                if not self._has_room(index):
                    self._bytes = before
                    return
                await asyncio.sleep(0)
                self._state.require_open()
            self._bytes = before + cells.bytes
            if not self._has_room(index):
                self._bytes = before
                return
        except InvariantViolation:
            if not self._is_gone(index):
                raise
            self._bytes = before
            return
        finally:
            cursor.close()
        offset = len(self._values)
        self._reads.extend([index] * len(cells.values))
        self._columns.extend(cells.columns)
        self._commits.extend(cells.commit_timestamps)
        self._values.extend(cells.values)
        self._deletes.extend(offset + at for at in cells.deletes)
        self._skipped += cells.skipped

    def _may_expire(self, read: AskedRead) -> bool:
        """True if the read may find values that expire."""
        if read.all_columns or read.column_prefixes:
            return True
        return any(column in self._lifetimes.by_column for column in read.columns)

    def _locks(self, read: AskedRead) -> LockReader:
        passed = frozenset(read.passing)
        return LockReader(self._state.storage, self._state.mirror, read.timestamp, passed)

    def _report(self, index: int, row: bytes, column: bytes, record: bytes) -> None:
        lock = lock_cell(row, column, record, self._lifetimes)
        self._result.locks.add(read=index, lock=lock)
        self._bytes += len(record)

    def _is_gone(self, index: int) -> bool:
        """Whether what this read has not found may have been collected since its cursor was
        created: values that lie apart are read as they are now. It is refused at the end. Raises
        `SchemaChanged` if it may have expired under times to live that are newer than the cursor.
        """
        if self._asked[index].timestamp < self._state.safe_points.reads:
            return True
        self._state.require_lifetimes(self._lifetimes)
        return False

    def _refuse_too_old(self) -> None:
        safe_point = self._state.safe_points.reads
        for index, read in enumerate(self._asked):
            if read.timestamp < safe_point:
                self._refused[index] = too_old(read.timestamp, safe_point)

    def _drop_refused(self) -> None:
        """Removes what was found for reads before they were refused."""
        kept = [at for at, index in enumerate(self._reads) if index not in self._refused]
        deleted = set(self._deletes)
        self._deletes = [new for new, at in enumerate(kept) if at in deleted]
        self._reads = [self._reads[at] for at in kept]
        self._columns = [self._columns[at] for at in kept]
        self._commits = [self._commits[at] for at in kept]
        self._values = [self._values[at] for at in kept]
