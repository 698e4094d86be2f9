"""The changes of a tablet in the order of their commits, from its change feed.

A request for the changes up to a timestamp gets all of them, although commits of different
transactions reach the tablet in any order. For each transaction that commits at or below `until`,
let its commit timestamp have been handed out before the request was sent. Its locks were durable
before that, since an owner asks for its commit timestamp only then. So when the scan looks, the
transaction either has its lock here, or it has been committed or rolled back here already. One that
commits in one round has no lock, but holds its cells from before its timestamp is asked for until
its commit is published (cells.py). The scan

0. waits until no cell is held for a commit at or below `until`. Later holders commit above it;
1. walks over the locks in memory. The storage decides whether each is still there, since a batch
   shows in the storage before memory hears of it. A lock whose transaction may still commit at or
   below `until` ends the scan just below the first timestamp at which it could;
2. creates its cursor only then. A lock that was gone has left its commit and the commit's entry in
   the feed, in one write.

A lock that comes after the scan has passed its place belongs to a commit above `until`. So the walk
over locks may pause, however many there are.

A bulk load behaves as a lock on all of its rows: its commit is above its run. What it has stored so
far is left out. Once the scan knows how far it may go, nothing below that changes any more, except
that collection may remove it. So each page is checked against the safe point after it was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from percolator.errors import InvalidArgument, InvariantViolation, SnapshotTooOld
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
from percolator.tablet.cells import (
    TIMESTAMP_MAX,
    W,
    cell_bounds,
    change_key,
    inverted,
    is_reserved,
    split_change,
    split_component,
    timestamp_of,
    unescaped,
)
from percolator.tablet.scans import clipped
from percolator.tablet.state import TabletState
from percolator.tablet.visible_cells import LockReader, lock_cell, value_in_data
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import Cursor

LOCKS_PER_SLICE = 4_096
LOCKS_REPORTED_MAX = 256
"""A client that has resolved these asks again."""


@dataclass(frozen=True)
class ChangePlan:
    """The parameters of a scan of changes."""

    start: bytes
    end: bytes
    after: int
    until: int
    passed: frozenset[int] = frozenset()
    changes_max: int = 0
    bytes_max: int = 0
    before: bool = False
    settled: bool = False
    """Everything up to `until` is known to be stored."""


def plan_changes(state: TabletState, request: pb.ScanChangesRequest) -> ChangePlan:
    """Checks a request. Raises `InvalidArgument`, `UnheardTimestamp` and `SnapshotTooOld`."""
    check_times(state, request.after, request.until)
    limits = state.limits
    start, end = clipped(state, request.range)
    return ChangePlan(
        start,
        end,
        request.after,
        request.until,
        frozenset(request.passing),
        request.changes_max,
        min(request.page_bytes_max or limits.page_bytes_default, limits.page_bytes_max),
        request.before,
        request.settled,
    )


async def require_feed(state: TabletState) -> None:
    """Raises `InvalidArgument` if the table has no feed. A former owner of the tablet may not know
    that it has one by now, and has to say that it is one."""
    if not state.feed.on:
        await state.require_ownership()
        raise _no_feed(state)


def _no_feed(state: TabletState) -> InvalidArgument:
    return InvalidArgument("target", f"the table of {state.identity} has no change feed")


def check_times(state: TabletState, after: int, until: int) -> None:
    """Raises `InvalidArgument`, `UnheardTimestamp`, and `SnapshotTooOld` if the feed is not
    complete above `after`."""
    state.guard.check_read(until, "until")
    if until == TIMESTAMP_MAX:
        # A scan ends before the key of the timestamp above it, and there is none.
        raise InvalidArgument("until", f"expected less than {TIMESTAMP_MAX}, found {until}")
    if until <= after:
        raise InvalidArgument("until", f"expected more than after, {after}; found {until}")
    require_complete(state, after)


def require_complete(state: TabletState, after: int) -> None:
    """Raises `InvalidArgument` or `SnapshotTooOld` unless the feed has every change above this."""
    if not state.feed.on:
        raise _no_feed(state)
    if after < state.safe_points.reads:
        raise too_old(after, state.safe_points.reads)
    complete_from = state.feed.complete_from
    if after < complete_from:
        raise SnapshotTooOld(
            f"changes after {after} ({Timestamp(after).describe()}) were asked for, and the change "
            f"feed is complete only from {complete_from} "
            f"({Timestamp(complete_from).describe()}) on",
            timestamp=after,
            safe_point=complete_from,
        )


async def pages(state: TabletState, plan: ChangePlan) -> AsyncIterator[pb.ScanChangesResponse]:
    """Yields pages; checks history and ownership after a page was read, before it leaves."""
    settled = Settled(plan.until) if plan.settled else await find_settled(state, plan)
    scan = _ChangeScan(state, plan, settled.until)
    while True:
        state.require_open()  # the tablet may have been closed since the last page was taken
        page, ended = await scan.page()
        if ended:
            for row, column, record in settled.locks:
                page.locks.add(lock=lock_cell(row, column, record))
        await state.require_ownership()
        require_complete(state, plan.after)  # by what this owner knows after that
        yield page
        if ended:
            return


async def look(state: TabletState, asked: pb.ChangesLook) -> pb.ChangesLookResult:
    """How far changes are settled, and where the newest one is. Raises as `pages` does."""
    identity = state.identity
    passed = frozenset(asked.passing)
    plan = ChangePlan(identity.start, identity.end, asked.after, asked.until, passed)
    settled = await find_settled(state, plan)
    result = pb.ChangesLookResult(reached=settled.until)
    for row, column, record in settled.locks:
        result.locks.add(lock=lock_cell(row, column, record))
    cursor = state.storage.cursor()
    try:
        # Forwards first: there may be nothing but a million deleted entries before `after`.
        cursor.seek(change_key(b"", asked.after + 1))
        stop = change_key(b"", settled.until + 1)
        if cursor.key() < stop:
            cursor.seek(stop)
            cursor.prev()
            result.newest, _ = split_change(cursor.key())
    finally:
        cursor.close()
    await state.require_ownership()
    require_complete(state, asked.after)
    return result


# ---------------------------------------------------------------------------- how far


@dataclass
class Settled:
    """How far it is certain that nothing more can be committed, and what is in the way beyond."""

    until: int
    locks: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    """Row, column and record of some locks."""


async def find_settled(state: TabletState, plan: ChangePlan) -> Settled:
    """Looks at all locks in the range that may matter. The caller creates its cursor afterwards.

    A follower comes back again and again while a job holds millions of locks: one that can neither
    end the scan earlier nor be reported is not read, and none is looked at if nothing can be left.
    """
    await _no_commit_is_landing(state, plan)
    settled = Settled(plan.until)
    reader = LockReader(state.storage, state.mirror, plan.until, plan.passed)
    first, stop = cell_bounds(plan.start, plan.end)
    following: bytes | None = first
    while following is not None:
        cells = [*islice(state.mirror.between(following, stop), LOCKS_PER_SLICE)]
        for cell, header in cells:
            is_full = len(settled.locks) >= LOCKS_REPORTED_MAX
            if is_full and _last_before(header) >= settled.until:
                continue  # what is stored may be later, but not earlier
            record = reader.on_cell(cell)
            if record is None or is_reserved(cell):
                continue
            settled.until = min(settled.until, _last_before(record))
            if not is_full:
                row, at = split_component(cell, 0)
                column, _ = split_component(cell, at)
                settled.locks.append((row, column, record))
        following = None
        nothing_left = settled.until <= plan.after and len(settled.locks) >= LOCKS_REPORTED_MAX
        if len(cells) == LOCKS_PER_SLICE and not nothing_left:
            following = cells[-1][0] + b"\0"
            await asyncio.sleep(0)
            state.require_open()
    for fence in state.load_fences:
        if fence.overlaps(plan.start, plan.end):
            last = fence.commit_timestamp - 1 if fence.commit_timestamp else fence.run
            settled.until = min(settled.until, last)
    settled.until = max(settled.until, plan.after)
    return settled


def _last_before(lock: bytes) -> int:
    """The last timestamp at which the transaction of this lock cannot commit."""
    start: int
    min_commit: int
    start, min_commit, _, _ = LOCK_HEADER.unpack_from(lock)
    return max(start, min_commit - 1)


async def _no_commit_is_landing(state: TabletState, plan: ChangePlan) -> None:
    """Returns when no transaction that commits in one round can still commit up to `until`."""
    look = partial(state.held_cells.in_the_way_in_rows, plan.start, plan.end, plan.until)
    await state.held_cells.let_pass(look)
    state.require_open()


# ---------------------------------------------------------------------------- reading


class _ChangeScan:
    """One scan: its position in the feed, and the page that it fills."""

    def __init__(self, state: TabletState, plan: ChangePlan, until: int) -> None:
        self._state = state
        self._plan = plan
        self._until = until
        self._first, self._stop = cell_bounds(plan.start, plan.end)
        self._at = change_key(b"", plan.after + 1)
        """Where the next page begins."""
        self._reached = plan.after
        self._commit = 0
        """The commit timestamp of the last change."""
        self._changes = 0

    async def page(self) -> tuple[pb.ScanChangesResponse, bool]:
        """The next page, and whether it is the last one."""
        state, plan = self._state, self._plan
        response = pb.ScanChangesResponse()
        cursor = state.storage.cursor()
        cells = state.storage.cursor() if plan.before else None
        found = _Found(state, plan.after, cells)
        try:
            cursor.seek(self._at)
            behind = change_key(b"", self._until + 1)
            ended = True
            looked_at = 0
            while (key := cursor.key()) < behind:
                commit_ts, cell = split_change(key)
                if commit_ts != self._commit:
                    self._reached = commit_ts - 1
                    if plan.changes_max and self._changes >= plan.changes_max:
                        break
                    self._commit = commit_ts
                if found.bytes >= plan.bytes_max:
                    self._at, ended = key, False
                    break
                if self._is_wanted(cell):
                    found.take(commit_ts, cell, cursor.item()[1])
                    self._changes += 1
                cursor.next()
                looked_at += 1
                if looked_at % state.limits.slice_entries == 0:
                    await asyncio.sleep(0)
                    state.require_open()
            else:
                self._reached = self._until
        finally:
            cursor.close()
            if cells is not None:
                cells.close()
        found.put_into(response.found)
        response.reached = self._reached
        state.counters.rows_scanned += len(found.rows)
        state.counters.read_rate.add(len(found.rows))
        return response, ended

    def _is_wanted(self, cell: bytes) -> bool:
        """True if the cell is in the range, and not behind the fence of a bulk load."""
        if cell < self._first or (self._stop is not None and cell >= self._stop):
            return False
        fences = self._state.load_fences
        return not fences or fences.over(split_component(cell, 0)[0]) is None


class _Found:
    """The changes of one page, as parallel lists."""

    def __init__(self, state: TabletState, after: int, cells: Cursor | None) -> None:
        """`cells` is a cursor for looking at what was before each change, if that is wanted."""
        self._state = state
        self._lifetimes = state.lifetimes
        self._after = after
        self._cells = cells
        self.bytes = 0
        self.rows: list[bytes] = []
        self._columns: list[bytes] = []
        self._commits: list[int] = []
        self._values: list[bytes] = []
        self._deletes: list[int] = []
        self._before: list[bytes] = []
        self._new_cells: list[int] = []

    def take(self, commit_ts: int, cell: bytes, record: bytes) -> None:
        kind = record[WRITE_KIND_OFFSET]
        if kind == KIND_DELETE:
            self._deletes.append(len(self.rows))
            value = b""
        elif kind == KIND_PUT:
            value = record[WRITE_HEADER_BYTES:]
        else:
            value = self._value_of_write(cell, commit_ts)
        row, at = split_component(cell, 0)
        if self._cells is not None:
            before = self._value_before(self._cells, cell, commit_ts)
            if before is None:
                self._new_cells.append(len(self.rows))
            self._before.append(before or b"")
            self.bytes += len(before or b"")
        self.rows.append(row)
        self._columns.append(unescaped(cell[at:-2]))
        self._commits.append(commit_ts)
        self._values.append(value)
        self.bytes += len(cell) + len(value) + 9

    def put_into(self, found: pb.FoundChanges) -> None:
        found.commit_timestamps.extend(self._commits)
        found.rows.extend(self.rows)
        found.columns.extend(self._columns)
        found.values.extend(self._values)
        found.deletes.extend(self._deletes)
        found.values_before.extend(self._before)
        found.new_cells.extend(self._new_cells)

    def _value_of_write(self, cell: bytes, commit_ts: int) -> bytes:
        """The value of a commit whose entry in the feed does not have it."""
        record = self._state.storage.get(W + cell + inverted(commit_ts))
        if record is None:
            raise self._missing(commit_ts)
        return self._value(cell, record, commit_ts)

    def _value_before(self, cursor: Cursor, cell: bytes, commit_ts: int) -> bytes | None:
        """The value that the cell had just below this commit; None if it had none, or if it had
        expired by then."""
        prefix = W + cell
        cursor.seek(prefix + inverted(commit_ts - 1))
        while True:
            key, record = cursor.item()
            if not key.startswith(prefix) or record[WRITE_KIND_OFFSET] == KIND_DELETE:
                return None
            if record[WRITE_KIND_OFFSET] != KIND_LOCK_ONLY:
                if self._lifetimes:
                    end = self._lifetimes.end_of(cell, timestamp_of(key))
                    if end is not None and end < commit_ts:
                        return None
                return self._value(cell, record, commit_ts)
            named = last_change(record)
            if named is None:
                cursor.next()
            else:
                cursor.seek(prefix + inverted(named))

    def _value(self, cell: bytes, record: bytes, commit_ts: int) -> bytes:
        if record[WRITE_KIND_OFFSET] == KIND_PUT:
            return record[WRITE_HEADER_BYTES:]
        try:
            return value_in_data(self._state.storage.get, cell, record)
        except InvariantViolation:
            raise self._missing(commit_ts) from None

    def _missing(self, commit_ts: int) -> Exception:
        """The error that a missing commit, or a missing value of one, means."""
        state, after = self._state, self._after
        if after < state.safe_points.reads:
            return too_old(after, state.safe_points.reads)
        state.require_lifetimes(self._lifetimes)
        return InvariantViolation(
            f"{state.identity} has a change at {commit_ts} in its feed whose value is missing"
        )
