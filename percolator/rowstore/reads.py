"""Reads of rows at a timestamp: those that want the same columns share a call.

Reads of single rows share it also if they belong to different transactions (`Gathering`).
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncGenerator, Container, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple

from percolator.codecs.readable import quoted
from percolator.codecs.values import after_prefix
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvariantViolation,
    PercolatorError,
    UsageError,
)
from percolator.formats.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    LOCK_HEADER,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
    acknowledged_start,
    too_old,
)
from percolator.limits import Limits
from percolator.routing.cells import (
    FoundCell,
    RangePage,
    RangeRequest,
    ReadSize,
    RowRequest,
    RowResult,
    wants,
)
from percolator.routing.lanes import CellAnswer
from percolator.rowstore.layout import (
    ALL_COLUMNS,
    COLLECTED,
    DATA,
    EVERY_COLUMN,
    LOCKS,
    WRITES,
    Times,
    column_bounds,
    column_of,
    newest_note,
    reads_collected_above,
    row_key,
    row_of,
    stored_column,
    written_by_others,
)
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import (
    TIME_UNIT,
    RowStore,
    Selection,
    StoredCell,
    StoredRow,
    can_be_named,
    in_calls,
)
from percolator.v1.cells_pb2 import SPACE_LOCK, Cell
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.world import World

# A read of rows that others join before it is sent: one leads, and makes the call for all.
#
# All of them want the same columns, each at a timestamp of its own. The call selects what the
# latest of them has to see: the locks that began by then, and the newest versions by then. Whatever
# of that is later than another's timestamp is nothing to that one. Only a later *version* is in its
# way: it hides the one below, which is then read by itself. Notes of collection are asked for from
# the earliest timestamp on.
#
# All have their timestamps before the call is sent, so each row is read at a time that is good for
# all of them. The deadline is that of the read that leads: only reads join that have as much time
# or more. If the call fails, each reads for itself: the reason may be another's row.

ROWS_MAX: Final = 32
"""Larger calls would hardly save more, and everybody waits for the slowest row."""

Cells = dict[bytes, list[StoredCell]]
"""Cells that were found, by the key of their row."""


class Gathering:
    """The keys of one call that is not sent yet."""

    def __init__(self, key: bytes, timestamp: int, deadline: float) -> None:
        self.keys: dict[bytes, None] = {key: None}
        self.earliest = self.latest = timestamp
        self._deadline = deadline
        self._answer: asyncio.Future[Cells | None] | None = None
        """Only if somebody follows: many calls are made by one for itself."""

    def admits(self, deadline: float) -> bool:
        return self._deadline <= deadline and len(self.keys) < ROWS_MAX

    async def follow(self, key: bytes, timestamp: int) -> Cells | None:
        """The answer of the call, which also asks for this key; None if it failed, or whoever led
        was cancelled."""
        self.keys[key] = None
        self.earliest = min(self.earliest, timestamp)
        self.latest = max(self.latest, timestamp)
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await asyncio.wait([answer])  # a caller that is cancelled does not cancel the others
        return answer.result()

    def end(self, cells: Cells | None) -> None:
        if self._answer is not None:
            self._answer.set_result(cells)


# What a read at a timestamp needs of a row, and what it makes of that.
#
# One reading of a row returns its locks that began by then, and of each column the newest put or
# deletion by then, all read at once: a commit removes the lock and stores its record in one
# change, so a reading shows the one or the other. Which of the locks are in the way is judged here,
# from their records.


@dataclass(frozen=True)
class Wanted:
    """Which cells are wanted, and as of when. Equal ones can be read with one call."""

    timestamp: int
    columns: tuple[bytes, ...] | None
    """None for all that are not hidden."""
    report_deletes: bool = False
    prefixes: tuple[bytes, ...] = ()
    """Columns that begin with one of these are wanted, too."""
    acknowledgement: bytes = b""
    """The acknowledgement of the column, if that is read as of an observer's last run. As long as
    this is the last one, collection leaves what it has seen."""

    def selections(
        self, times: Times, bytes_max: int, *, earliest: int | None = None
    ) -> tuple[Selection, ...]:
        """Selections of the read. More columns than a call can name are selected with all others.
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
        return (*found, *self.proofs(times, since)) if found else ()

    def proofs(self, times: Times, since: int = 0) -> tuple[Selection, ...]:
        """Selections of what says whether anything that should be seen may have been collected."""
        note = reads_collected_above(since or self.timestamp, times)
        if not self.acknowledgement:
            return (note,)
        bounds = column_bounds(self.acknowledgement)
        return note, Selection(WRITES, *bounds, newest=True)

    def wants(self, column: bytes) -> bool:
        """True if the column is wanted, by its stored name."""
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
    """One row as a read sees it."""

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
    """Row as a read sees it, from the cells that its selections have found. Raises `SnapshotTooOld`
    if something that it should see may have been collected."""
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
    """True if a reading for a later timestamp has found a version above this one: which version is
    the newest at or below it, is not known then."""
    until = times.at_or_above(timestamp + 1)
    return any(cell.family == WRITES and cell.time >= until for cell in cells)


def _is_in_the_way(record: bytes, timestamp: int, passing: Container[int]) -> bool:
    """True if the lock's transaction may commit, at or below the timestamp, what the read has to
    see: it writes, has not been pushed above, and is not known to be passable."""
    start, min_commit, _, kind = LOCK_HEADER.unpack_from(record)
    is_early = start <= timestamp and min_commit <= timestamp
    return is_early and kind != KIND_LOCK_ONLY and start not in passing


def _note(result: Seen, column: bytes, cell: StoredCell, wanted: Wanted, times: Times) -> None:
    start, kind = WRITE_HEADER.unpack_from(cell.value)
    commit_ts = times.timestamp(cell.time)
    if kind == KIND_PUT:
        result.found[column] = FoundCell(commit_ts, cell.value[WRITE_HEADER_BYTES:])
    elif kind == KIND_PUT_IN_DATA:
        result.in_data[column] = commit_ts, start
    elif kind != KIND_DELETE:
        raise InvariantViolation(f"a record of kind {kind} is among puts and deletions")
    elif wanted.report_deletes:
        result.found[column] = FoundCell(commit_ts, None)


def _require_kept(cells: Iterable[StoredCell], wanted: Wanted, times: Times) -> None:
    note = newest_note(cells, times)
    if note > wanted.timestamp and not _was_last_seen(cells, wanted):
        raise too_old(wanted.timestamp, note)


def _was_last_seen(cells: Iterable[StoredCell], wanted: Wanted) -> bool:
    """True if the read is at the start of the last run of an observer: then collection has left
    what it sees."""
    if not wanted.acknowledgement:
        return False
    hidden = stored_column(wanted.acknowledgement)
    starts = [
        acknowledged_start(cell.value[WRITE_HEADER_BYTES:])
        for cell in cells
        if cell.family == WRITES and cell.column == hidden
    ]
    return starts == [wanted.timestamp]


def data_selections(
    result: Seen, wanted: Wanted, times: Times, bytes_max: int
) -> Iterator[tuple[Selection, ...]]:
    """Where the values lie that are apart from their records, in as many calls as that takes. They
    may be collected before, which is why each of these asks for the note, too."""
    proofs = wanted.proofs(times)
    apart = []
    for column, (_, start) in result.in_data.items():
        time = times.time(start)
        apart.append((column, (Selection(DATA, *column_bounds(column), time, time + TIME_UNIT),)))
    size = sum(one.size_bytes for one in proofs)
    for _, selections in in_calls(apart, bytes_max - size):
        yield (*proofs, *selections)


def add_data(
    row: bytes, result: Seen, cells: Sequence[StoredCell], wanted: Wanted, times: Times
) -> None:
    """Adds these values. Raises `SnapshotTooOld` if history was collected meanwhile, and
    `InvariantViolation` if a value is missing without that."""
    _require_kept(cells, wanted, times)
    values = {(cell.column, cell.time): cell.value for cell in cells if cell.family == DATA}
    for column, (commit_ts, start) in result.in_data.items():
        value = values.get((stored_column(column), times.time(start)))
        if value is None:
            raise InvariantViolation(
                f"row {quoted(row)} has a commit at {commit_ts} in column {quoted(column)} "
                "without its value"
            )
        result.found[column] = FoundCell(commit_ts, value)
    result.in_data = {}


class RowReads:
    """Reads rows of a row store."""

    def __init__(self, store: RowStore, times: Times, world: World, limits: Limits) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._gathering: dict[tuple[object, ...], Gathering] = {}
        """The calls that others can still join, by table and by what they want."""

    async def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> list[RowResult]:
        """Answers in the order of the requests. Raises if one of them failed, and `InvalidArgument`
        as soon as they have more than `bytes_max` bytes; 0 means any number."""
        size = ReadSize(bytes_max) if bytes_max else None
        if len(requests) == 1:
            table_id, read = requests[0]
            wanted, passing = _wanted(read), frozenset(read.passing)
            one = await self._read_one(table_id, read.row, wanted, passing, deadline)
            return [RowResult() if one is None else _result(one, size)]
        patience = Patience(self._world, self._limits, deadline)
        results = [RowResult() for _ in requests]
        alike: defaultdict[tuple[int, Wanted], list[int]] = defaultdict(list)
        for place, (table_id, read) in enumerate(requests):
            alike[table_id, _wanted(read)].append(place)
        calls = [
            self._read_alike(table_id, wanted, part, requests, results, size, patience)
            for (table_id, wanted), places in alike.items()
            for part in self._parts(places, requests)
        ]
        if len(calls) == 1:
            await calls[0]
            return results
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        except PercolatorError:
            for task in tasks:
                task.cancel()  # nothing that they read is of use
            raise
        return results

    def _parts(
        self, places: Sequence[int], requests: Sequence[RowRequest]
    ) -> Iterator[Sequence[int]]:
        """Divides reads that are alike among calls."""
        part: list[int] = []
        size = 0
        for place in places:
            added = len(requests[place].read.row)
            is_full = len(part) >= self._limits.batch_rows_max
            if part and (is_full or size + added > self._store.keys_bytes_max):
                yield part
                part, size = [], 0
            part.append(place)
            size += added
        yield part

    async def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> CellAnswer:
        """Reads one cell: the most frequent kind of read."""
        wanted = Wanted(timestamp, (column,))
        result = await self._read_one(table_id, row, wanted, (), deadline)
        if result is None:
            return None
        return _result(result) if result.locks else result.found.get(column)

    async def _read_one(
        self,
        table_id: int,
        row: bytes,
        wanted: Wanted,
        passing: Container[int],
        deadline: float,
    ) -> Seen | None:
        """Reads one row; None if it has nothing that is wanted. Those that begin at the same time,
        and want the same columns, share a call."""
        key, cells = row_key(row), None
        if not wanted.acknowledgement:  # at a time of its own
            cells = await self._together(table_id, key, wanted, deadline)
        if cells is None or hides_earlier(cells, wanted.timestamp, self._times):
            patience = Patience(self._world, self._limits, deadline)
            rows = await self._rows(table_id, [key], wanted, patience)
            cells = rows[0].cells if rows else []
        if not cells:
            return None
        result = seen(row, cells, wanted, passing, self._times)
        if result.in_data:
            patience = Patience(self._world, self._limits, deadline)
            await self.complete(table_id, row, result, wanted, patience)
        return result

    async def complete(
        self, table_id: int, row: bytes, result: Seen, wanted: Wanted, patience: Patience
    ) -> None:
        """Fetches the values that lie apart from their records. Nothing but collection changes
        these."""
        if not result.in_data:
            return
        cells: list[StoredCell] = []
        bytes_max = self._store.check_bytes_max
        for selections in data_selections(result, wanted, self._times, bytes_max):
            read = partial(self._store.read, table_id, [row_key(row)], selections)
            rows = await patience.repeated(read)
            cells += rows[0].cells if rows else []
        add_data(row, result, cells, wanted, self._times)

    async def _together(
        self, table_id: int, key: bytes, wanted: Wanted, deadline: float
    ) -> list[StoredCell] | None:
        """The cells of one row, as of some timestamp at or above the wanted one; None if the row
        has to be read by itself."""
        timestamp = wanted.timestamp
        about = table_id, wanted.columns, wanted.report_deletes, wanted.prefixes
        gathering = self._gathering.get(about)
        if gathering is not None and gathering.admits(deadline):
            found = await gathering.follow(key, timestamp)
            return None if found is None else found.get(key, [])
        gathering = self._gathering[about] = Gathering(key, timestamp, deadline)
        cells: dict[bytes, list[StoredCell]] | None = None
        try:
            try:
                await asyncio.sleep(0)  # whoever is ready to read, reads
            finally:
                if self._gathering.get(about) is gathering:
                    del self._gathering[about]
            wanted = replace(wanted, timestamp=gathering.latest)
            patience = Patience(self._world, self._limits, deadline)
            rows = await self._rows(
                table_id, list(gathering.keys), wanted, patience, earliest=gathering.earliest
            )
            cells = {row.key: row.cells for row in rows}
        except DeadlineExceeded:
            raise
        except PercolatorError:
            if len(gathering.keys) == 1:
                raise
            return None  # the reason may be another's row
        finally:
            gathering.end(cells)
        return cells.get(key, [])

    async def _read_alike(
        self,
        table_id: int,
        wanted: Wanted,
        places: Sequence[int],
        requests: Sequence[RowRequest],
        results: list[RowResult],
        size: ReadSize | None,
        patience: Patience,
    ) -> None:
        keys = dict.fromkeys(row_key(requests[place].read.row) for place in places)
        rows = await self._rows(table_id, list(keys), wanted, patience)
        cells = {row.key: row.cells for row in rows}
        for place in places:
            read = requests[place].read
            found = cells.get(row_key(read.row))
            if found is not None:
                result = seen(read.row, found, wanted, frozenset(read.passing), self._times)
                await self.complete(table_id, read.row, result, wanted, patience)
                results[place] = _result(result, size)

    async def _rows(
        self,
        table_id: int,
        keys: Sequence[bytes],
        wanted: Wanted,
        patience: Patience,
        *,
        earliest: int | None = None,
    ) -> list[StoredRow]:
        bytes_max = self._store.check_bytes_max
        selections = wanted.selections(self._times, bytes_max, earliest=earliest)
        if not selections:
            return []
        return await patience.repeated(partial(self._store.read, table_id, keys, selections))


def _wanted(read: RowRead) -> Wanted:
    columns = None if read.all_columns else tuple(read.columns)
    return Wanted(
        read.timestamp,
        columns,
        read.report_deletes,
        tuple(read.column_prefixes),
        read.acknowledgement,
    )


def _result(read: Seen, size: ReadSize | None = None) -> RowResult:
    result = RowResult()
    result.found, result.locks = read.found, read.locks
    if size is not None:
        size.add(result)
    return result


# Scans of a range at a timestamp, page by page.
#
# A page ends when it has enough rows or bytes. The next one has what the last call of the store has
# found besides, or a new call begins behind it. If a call breaks off, the page ends where the call
# has come to: what it shows does not change, since it is a snapshot. So a scan goes on even where a
# call finds nothing in all of its time.


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
        """Rest of the range."""
        self._rows_left = request.row_limit
        self._asked_seconds = 0.0
        """The pause that the store has asked for where the last page broke off."""
        self._left: _Part | None = None
        """Rows that were found and are in no page yet."""

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
            found = {row: result.found for row, result in rows if result.found}
            yield RangePage(found, locks, start, end)
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
        return await patience.repeated(self._attempt)

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
    """Rows in which anything was found."""
    boundary: bytes | None
    """Where it ends, and the rest begins; None at the other end of the range."""
