"""Scans: rows of a range as a timestamp sees them, page by page."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Container,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice, repeat
from operator import gt, or_
from typing import Any

from percolator.codecs.readable import quoted
from percolator.conditions import Predicate
from percolator.errors import InvalidArgument, InvariantViolation
from percolator.formats.records import (
    START_TIMESTAMP_BYTES,
    too_old,
)
from percolator.tablet.cells import (
    LOCK,
    NOTIFY,
    PREFIX_OF_SPACE,
    CellKey,
    ColumnEncoder,
    D,
    L,
    N,
    W,
    after_component,
    component,
    decode,
    space_bounds,
    split_component,
)
from percolator.tablet.opening import fill_index
from percolator.tablet.sieve import Sieve, add_entries, row_prefix, rows_around
from percolator.tablet.state import (
    TabletState,
    closed,
)
from percolator.tablet.visible_cells import (
    LockReader,
    VisibleCells,
    VisibleRuns,
    Walked,
    chosen_columns,
    lock_cell,
)
from percolator.timestamps import NEWEST
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Storage


def join_cells(
    rows: list[bytes],
    columns: list[bytes],
    values: list[bytes],
    found: pb.JoinedCells,
) -> bool:
    """Fills in the cells of a page, given row by row, column by column, joined to blocks of memory.
    Returns False, and does nothing, if not all rows have the same columns.

    For readers that make blocks of them anyway, this costs either side a fraction of lists: neither
    has to make or read a field of a message for each value.
    """
    width = _width(rows, columns)
    if not width:
        return False
    _join(rows[::width], found.rows)
    for at, name in enumerate(columns[:width]):
        _join(values[at::width], found.columns.add(name=name).values)
    return True


def _width(rows: list[bytes], columns: list[bytes]) -> int:
    """How many columns each row has, if all have the same ones; else 0."""
    if not rows:
        return 0
    width = next((at for at, row in enumerate(rows) if row != rows[0]), len(rows))
    distinct = rows[::width]
    if columns != columns[:width] * len(distinct):
        return 0
    return width if all(rows[at::width] == distinct for at in range(1, width)) else 0


def _join(values: list[bytes], found: pb.JoinedBytes) -> None:
    offsets = array("i", accumulate(map(len, values), initial=0))
    if sys.byteorder == "big":
        offsets.byteswap()
    found.block = b"".join(values)
    found.offsets = offsets.tobytes()


SIFTED_MIN = 8
"""Sifting goes on while at most one of so many entries may match."""


def _columns_of(
    predicate: Predicate, distinct: list[bytes], width: int, cells: VisibleCells
) -> dict[bytes, Sequence[bytes | None]]:
    """The values that a condition asks about, of each of these rows. `width`: as `_width` says."""
    if width:
        names, nothing = cells.columns[:width], [None] * len(distinct)
        return {
            name: cells.values[names.index(name) :: width] if name in names else nothing
            for name in predicate.columns
        }
    place = {row: at for at, row in enumerate(distinct)}
    found: dict[bytes, list[bytes | None]] = {
        name: [None] * len(distinct) for name in predicate.columns
    }
    for row, column, value in zip(cells.rows, cells.columns, cells.values, strict=True):
        if column in found:
            found[column][place[row]] = value
    return {**found}


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
    """True if pages may have their cells joined."""
    rows_max: int
    """The limit of one page."""
    bytes_max: int
    """The limit of one page; the row that exceeds it is still part of the page."""
    predicate: Predicate | None = None
    """Rows that it does not keep are left out of pages that are complete otherwise."""
    counts: bool = False
    """Rows are counted instead of returned."""
    sieve: Sieve | None = None
    """Finds rows that `predicate` may keep; None if it cannot."""


class ScanPage:
    """One page of a scan: the first rows in [start, end) at one timestamp, with the locks in their
    way, or the last ones if the scan is reversed.

    Locks of the page's range are gathered first, then one cursor is created for the whole page
    (cells.py says why). The page ends between two rows: at its limit of rows or bytes, where the
    gathering of locks stopped, or after it has looked at very many entries.
    """

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
        """Rows with a cell or a lock in the way: once the page is read, those that it returns."""
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
        self._sifted = 0
        """Entries that were looked at besides those of rows that were read."""
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
        if self._plan.sieve is not None and not self._lock_rows:
            after = await self._sift(self._plan.sieve, first, stop)
            if after is None:
                return
            first = after
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

    async def _sift(self, sieve: Sieve, first: bytes, stop: bytes) -> bytes | None:
        """Looks at the values of all entries first, and reads only rows in which one may match.
        Returns where to go on, since many do; None at the end of the page.

        What was committed after the page's view was made is looked at, too, and is in none of its
        rows: it is above the timestamp, or there would be a lock in the way.
        """
        limits, iterate = self._state.limits, self._state.storage.iterate
        stream, keys, values = iterate(first, stop), list[bytes](), list[bytes]()
        while True:
            has_more = add_entries(stream, limits.slice_entries, keys, values)
            if not keys:
                return None
            last, whole = row_prefix(keys[-1]), len(keys)
            while has_more and whole and keys[whole - 1].startswith(last):
                whole -= 1  # the rest of its row may come next
            self._sifted += whole or len(keys)
            if whole:
                found = sieve.may_match(keys[:whole], values[:whole])
                if len(found) * SIFTED_MIN > whole:
                    return row_prefix(keys[0])
                if not await self._read_rows_of(keys[:whole], values[:whole], found):
                    return None
                del keys[:whole], values[:whole]
            elif await self._read_row(last):
                stream, keys, values = iterate(after_component(last), stop), [], []
            else:
                return None
            if not has_more:
                return None
            if self._sifted >= limits.page_entries_max:
                row, _ = split_component(last, 1)
                self.rest = self._from(row) if whole else self._after(row)
                return None
            await self._pause()

    async def _read_rows_of(
        self, keys: list[bytes], values: list[bytes], places: list[int]
    ) -> bool:
        """Reads the rows of these entries. Returns False if one does not fit."""
        found = rows_around(keys, places)
        keys = [keys[at] for at in found]
        if not keys or self._cells.take(keys, [values[at] for at in found], self):
            return True
        for begin in dict.fromkeys(map(row_prefix, keys)):
            if not await self._read_row(begin):
                return False
        return True

    async def _read_row(self, begin: bytes) -> bool:
        """Reads the row whose keys begin like this. Returns False if it does not fit."""
        cells, entries = self._cells, self._state.limits.slice_entries
        stop = after_component(begin)
        cells.seek(begin)
        while (walked := cells.walk(stop, entries, self.admit)) is Walked.SLICE:
            await self._pause()
        if walked is Walked.FULL:
            self.rest = self._from(self._full_before)
        return walked is not Walked.FULL

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
        is no row, or it does not fit."""
        cursor = self._cursor
        cursor.seek(stop)
        cursor.prev()
        key = cursor.key()
        if key < first:
            return None
        begin = row_prefix(key)
        return begin if await self._read_row(begin) else None

    async def _pause(self) -> None:
        await asyncio.sleep(0)
        self._state.require_open()

    def admit(self, row: bytes) -> bool:
        """True if a row with visible cells fits, after the locked rows before it."""
        if self._lock_rows and not self._admit_locked_before(row):
            return False
        if self.rows >= self.rows_max or self._cells.bytes >= self.bytes_max:
            self._full_before = row
            return False
        self.rows += 1
        if self._lock_rows[self._locks_counted : self._locks_counted + 1] == [row]:
            self._locks_counted += 1
        return True

    def _admit_locked_before(self, row: bytes) -> bool:
        """True if the locked rows before this row fit."""
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
        """Counts the locked rows after the last row with visible cells, as far as they fit."""
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
        cells, looked_at = self._cells, self.rows + self._sifted
        if self._plan.predicate is not None or self._plan.counts:
            response.counted = self._filter_rows()
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
        counters.rows_scanned += looked_at
        counters.read_rate.add(looked_at)
        counters.versions_skipped += cells.skipped
        return response

    def _filter_rows(self) -> int:
        """Leaves out rows that do not match. Returns how many others are counted, not sent.

        A lock in the way may hide what decides, and a value that cannot be read is an error only
        where the scan comes to its row: such rows stay, and the client reports them.
        """
        cells, predicate = self._cells, self._plan.predicate
        width = _width(cells.rows, cells.columns)
        counts = None if width else Counter(cells.rows)
        distinct = cells.rows[::width] if counts is None else [*counts]
        kept, unreadable = [True] * len(distinct), set[int]()
        if predicate is not None:
            columns = _columns_of(predicate, distinct, width, cells)
            kept, unreadable = predicate.evaluate(columns, len(distinct))
        locked = {*self._lock_rows}
        left_open = [False] * len(distinct)
        if locked or unreadable:
            left_open = [row in locked or at in unreadable for at, row in enumerate(distinct)]
        counted = 0
        if self._plan.counts:
            counted, kept = sum(map(gt, kept, left_open)), left_open
        else:
            kept = [*map(or_, kept, left_open)]
        lengths = repeat(width) if counts is None else counts.values()
        cells.keep([*chain.from_iterable(map(repeat, kept, lengths))])
        self.rows = sum(kept) + len(locked.difference(cells.rows))
        return counted


def _contains(rows: tuple[bytes, bytes], row: bytes) -> bool:
    start, end = rows
    return start <= row and (not end or row < end)


_NO_LIMIT = 2**63

Entry = tuple[bytes, bytes | None]
"""A key and its value, which is None if it has been deleted meanwhile."""


async def stored_pages(
    state: TabletState, request: pb.ScanCellsRequest
) -> AsyncIterator[pb.ScanCellsResponse]:
    """Yields raw stored cells of one space, page by page: for audits, for finding work, for
    clean-up. Raises `InvalidArgument` before the first one.

    Locks come from the mirror, and notifications from the index if it is complete: where cells are
    deleted soon after they are written, an iterator would walk over the deleted ones. A page is
    read without yielding to the event loop, and the next one continues after its last key.
    """
    if request.space not in PREFIX_OF_SPACE:
        raise InvalidArgument("space", f"{request.space} is not a space")
    if request.until_timestamp and request.until_timestamp <= request.from_timestamp:
        raise InvalidArgument("until_timestamp", "not above from_timestamp: inverted")
    start, end = clipped(state, request.range)
    if request.space == NOTIFY and state.index.worth_filling:
        await fill_index(state)
    until = request.until_timestamp
    if request.space == LOCK and until and not state.mirror.has_older(until):
        state.require_open()
        await state.require_ownership()
        return
    first: bytes | None
    first, stop = space_bounds(PREFIX_OF_SPACE[request.space], start, end)
    cells_left = request.cell_limit or _NO_LIMIT
    while first is not None and cells_left:
        state.require_open()
        response, first = _page(request, _entries(state, request, first, stop), cells_left, state)
        if first is not None:
            row, _ = split_component(first, 1)
            response.rest.CopyFrom(cells_pb2.RowRange(start=row, end=end))
        await state.require_ownership()
        yield response
        cells_left -= len(response.cells)


def _page(
    request: pb.ScanCellsRequest, entries: Iterator[Entry], cells_max: int, state: TabletState
) -> tuple[pb.ScanCellsResponse, bytes | None]:
    """A page with as many entries as fit, and the key at which the next page begins."""
    limits = state.limits
    rows_max = min(request.page_rows_max or limits.page_rows_default, limits.page_rows_max)
    response = pb.ScanCellsResponse()
    row_prefix = b"\0"
    rows = size = 0
    for at, (key, value) in enumerate(entries):
        full = at == limits.slice_entries or len(response.cells) == cells_max
        if full or size >= limits.page_bytes_default:
            return response, key
        if value is None:
            continue
        cell = decode(key)
        if not key.startswith(row_prefix):
            if rows == rows_max:
                return response, key
            rows += 1
            row_prefix = key[:1] + component(cell.row)
        if not _in_time(request, cell, value):
            continue
        size += len(key) + len(value)
        response.cells.add(
            space=request.space,
            row=cell.row,
            column=cell.column,
            timestamp=cell.timestamp,
            value=value,
            qualifier=cell.qualifier,
        )
    return response, None


def _in_time(request: pb.ScanCellsRequest, cell: CellKey, value: bytes) -> bool:
    timestamp = cell.timestamp
    if cell.space == LOCK:
        timestamp = int.from_bytes(value[:START_TIMESTAMP_BYTES], "big")
    until = request.until_timestamp
    return request.from_timestamp <= timestamp and (not until or timestamp < until)


def _entries(
    state: TabletState, request: pb.ScanCellsRequest, first: bytes, stop: bytes
) -> Iterator[Entry]:
    """Entries from `first` on: one more than a page examines, so that it knows what follows.

    They are read one by one, because each may hold megabytes, and then few fit into a page.
    """
    space, most = request.space, state.limits.slice_entries + 1
    if space == LOCK:
        locks = state.mirror.between(first[1:], _behind_space(stop))
        return _locks(state, islice(locks, most), request.until_timestamp)
    if space == NOTIFY and state.index.complete:
        found = state.index.between(first[1:], _behind_space(stop))
        return _present(state, N, islice(found, most))
    return islice(state.storage.iterate(first, stop), most)


def _locks(state: TabletState, locks: Iterable[tuple[bytes, bytes]], until: int) -> Iterator[Entry]:
    """The stored locks of these cells. Those of younger transactions are not read: besides one
    old lock, there may be millions of a job that is under way."""
    before = until.to_bytes(START_TIMESTAMP_BYTES, "big") if until else None
    get = state.storage.get
    for cell, header in locks:
        key = L + cell
        is_asked_for = before is None or header[:START_TIMESTAMP_BYTES] < before
        yield key, get(key) if is_asked_for else None


def _behind_space(stop: bytes) -> bytes | None:
    """The end of a range of keys, without its space byte; None if it is the end of the space."""
    return stop[1:] or None


def _present(state: TabletState, prefix: bytes, addresses: Iterable[bytes]) -> Iterator[Entry]:
    """The stored entries for addresses known in memory. Those already deleted are not left out:
    a page that saw fewer entries than it asked for would assume that nothing follows."""
    get = state.storage.get
    return ((prefix + address, get(prefix + address)) for address in addresses)


def clipped(state: TabletState, asked: cells_pb2.RowRange) -> tuple[bytes, bytes]:
    """The rows of a request that are in the tablet. Raises `InvalidArgument`."""
    identity = state.identity
    if asked.end and asked.start >= asked.end:
        raise InvalidArgument("range", "the end is not above the start: inverted or empty")
    start = max(asked.start, identity.start)
    ends = [end for end in (asked.end, identity.end) if end]
    end = min(ends) if ends else b""
    if end and start >= end:
        raise InvalidArgument("range", "does not overlap the tablet")
    return start, end


def plan_scan(state: TabletState, request: pb.ScanRequest, columns: ColumnEncoder) -> ScanPlan:
    """Checks a request. Raises `InvalidArgument` and `UnheardTimestamp`."""
    limits = state.limits
    # Who counts everything that is there may want the locks, whatever they were pushed above.
    if request.timestamp != NEWEST or not request.count:
        state.guard.check_read(request.timestamp, "timestamp")
    if not (request.all_columns or request.columns or request.column_prefixes):
        raise InvalidArgument("columns", "no columns and no prefixes, and not all_columns")
    wanted = chosen_columns("", request, columns, limits)
    predicate = Predicate(request.filter) if request.HasField("filter") else None
    if predicate is not None and wanted is not None:
        for column in predicate.columns:
            if columns[column] not in wanted:
                raise InvalidArgument("filter", f"column {quoted(column)} is not requested")
    if request.report_deletes and (predicate is not None or request.count):
        raise InvalidArgument("report_deletes", "cannot be combined with a filter or a count")
    if request.count and request.row_limit:
        raise InvalidArgument("row_limit", "cannot be combined with a count")
    sieve = None if predicate is None or request.reverse else Sieve(predicate, columns)
    return ScanPlan(
        timestamp=request.timestamp,
        passed=frozenset(request.passing),
        wanted=wanted,
        reverse=request.reverse,
        report_deletes=request.report_deletes,
        joined=request.joined,
        rows_max=min(request.page_rows_max or limits.page_rows_default, limits.page_rows_max),
        bytes_max=min(request.page_bytes_max or limits.page_bytes_default, limits.page_bytes_max),
        predicate=predicate,
        counts=request.count,
        sieve=sieve or None,
    )


CROWDED = 512
"""Locks on one page after which a stream ends early. Whoever meets so many has them resolved before
they go on, and the pages that were read in advance meanwhile, full of locks, would be for nobody.
Clients end such a scan, too (`WHOLE_PAGE`), but only once they have the page."""


async def pages(
    state: TabletState, request: pb.ScanRequest, plan: ScanPlan
) -> AsyncGenerator[pb.ScanResponse, None]:
    """Yields the pages of a scan; checks the ownership after a page was read, before it leaves."""
    rest: tuple[bytes, bytes] | None = clipped(state, request.range)
    rows_left = request.row_limit or _NO_LIMIT
    while rest is not None and rows_left:
        # A commit at or below the timestamp may be on its way, and it has no lock to report. There
        # must be no await between this and the page's view of the storage.
        if state.held_cells.holders:
            look = partial(state.held_cells.in_the_way_in_rows, *rest, plan.timestamp)
            await state.held_cells.let_pass(look)
        state.require_open()
        fence = state.load_fences.among(*rest)
        if fence is not None:
            raise closed(fence)
        rows_max = plan.rows_max if plan.predicate is not None else min(plan.rows_max, rows_left)
        page = ScanPage(state, plan, *rest, rows_max)
        try:
            response = await page.read()
        except InvariantViolation:
            # A value that lies apart from its record may be gone.
            _require_kept(state, plan)
            state.require_lifetimes(page.lifetimes)
            raise
        # Check after reading, since versions may have been collected in the meantime.
        _require_kept(state, plan)
        await state.require_ownership()
        locks = len(response.locks)
        yield response
        if locks >= CROWDED:
            return
        rest = page.rest
        rows_left -= page.rows


def _require_kept(state: TabletState, plan: ScanPlan) -> None:
    if plan.timestamp < state.safe_points.reads:
        raise too_old(plan.timestamp, state.safe_points.reads)


_NO_LIMIT = 2**63


# Proposes the row that divides a tablet into two halves of about the same size.
#
# The storage estimates the size of any range of keys, so a bisection over existing rows finds the
# middle in a few dozen seeks. The estimate does not see a tablet that is small or has only just
# been written; its middle is found by walking over it.

ESTIMATE_TRUSTED_BYTES = 32 * 1024 * 1024
"""Far above the largest write buffer: anything smaller may be mostly in memory."""
STEPS_MAX = 256
PARTS_MAX = 256
"""Roughly the most parts of one range."""


async def propose(state: TabletState) -> bytes | None:
    """The first row of the upper half; None if there are fewer than two rows."""
    identity = state.identity
    first, stop = space_bounds(W, identity.start, identity.end)
    lowest = _row_at(state.storage, first, stop)
    if lowest is None:
        return None
    estimate = state.storage.approximate_bytes(first, stop)
    if estimate >= ESTIMATE_TRUSTED_BYTES:
        found = _bisect(state.storage, first, stop, estimate // 2)
    else:
        found = await _walk(state, first, stop)
    return found if found is not None and found > lowest else None


def parts(state: TabletState, start: bytes, end: bytes, part_bytes: int) -> list[bytes]:
    """The first rows of all parts except the first; ranges are cut until they are small enough."""
    estimate = state.storage.approximate_bytes
    size, first, stop = max(
        (estimate(*bounds), *bounds) for bounds in (space_bounds(one, start, end) for one in (W, D))
    )
    if size <= part_bytes:
        return []
    row = _bisect(state.storage, first, stop, size // 2)
    if row is None:
        return []
    part_bytes = max(part_bytes, size // PARTS_MAX)
    return [*parts(state, start, row, part_bytes), row, *parts(state, row, end, part_bytes)]


def _row_at(storage: Storage[Any], key: bytes, stop: bytes) -> bytes | None:
    """The row of the first entry from this key on."""
    for found, _ in storage.iterate(key, stop):
        return split_component(found, 1)[0]
    return None


def _bisect(storage: Storage[Any], first: bytes, stop: bytes, half: int) -> bytes | None:
    """Finds the last row with at most half of the bytes before it, by halving the interval of keys;
    if that is the very first row, the one after it. None if there is only one.

    Keys are treated as binary fractions of any length. Both ends move on to rows that exist:
    otherwise, among rows that begin with the same long prefix, all steps would be spent on the
    empty interval between them and a row with another one.
    """

    def key_of(row: bytes) -> bytes:
        return first[:1] + component(row)

    def is_below(row: bytes) -> bool:
        return storage.approximate_bytes(first, key_of(row)) <= half

    lowest = _row_at(storage, first, stop)
    if lowest is None:
        return None
    above = _row_before(storage, stop)
    if above == lowest or is_below(above):
        return above if above > lowest else None
    below, low, high = lowest, key_of(lowest), key_of(above)
    for _ in range(STEPS_MAX):
        middle = _between(low, high)
        if middle is None:
            break
        row = _row_at(storage, middle, stop)
        if row is None:
            break
        if is_below(row):
            below, low = row, max(middle, key_of(row))
            continue
        above, row = row, _row_before(storage, middle)
        if row <= below or is_below(row):
            below = max(below, row)
            break
        above, high = row, key_of(row)
    return below if below > lowest else above


def _row_before(storage: Storage[Any], key: bytes) -> bytes:
    """The row of the last entry before this key, which must exist."""
    cursor = storage.cursor()
    try:
        cursor.seek(key)
        cursor.prev()
        return split_component(cursor.key(), 1)[0]
    finally:
        cursor.close()


def _between(low: bytes, high: bytes) -> bytes | None:
    """A key strictly between the two, near the middle; None if they are too close."""
    length = max(len(low), len(high)) + 1
    low_number = int.from_bytes(low.ljust(length, b"\0"), "big")
    high_number = int.from_bytes(high.ljust(length, b"\0"), "big")
    if high_number - low_number < 2:
        return None
    return ((low_number + high_number) // 2).to_bytes(length, "big")


async def _walk(state: TabletState, first: bytes, stop: bytes) -> bytes | None:
    """Exact, for a small tablet: finds the row at which the running total is nearest to half."""
    sizes: list[tuple[bytes, int]] = []
    total = 0
    row_prefix = b"\0"
    for entries, (key, value) in enumerate(state.storage.iterate(first, stop), 1):
        if not key.startswith(row_prefix):
            row, at = split_component(key, 1)
            row_prefix = key[:at]
            sizes.append((row, total))
        total += len(key) + len(value)
        if entries % state.limits.slice_entries == 0:
            await asyncio.sleep(0)
            state.require_open()
    return min(sizes, key=lambda found: abs(total - 2 * found[1]))[0] if sizes else None
