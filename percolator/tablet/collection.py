"""Collection: deletes what no transaction can see any longer.

percolator/formats/records.py says which versions those are, apart from values that have expired
(state.py): no snapshot at or above the safe point sees one that had expired by then. What else
is to be observed in a tablet, and what each rule prevents:

* A deletion is removed last, in the same write as the versions left below it or in a later one.
* So is a value that has expired, since the version before it may be visible under another time to
  live. If the times to live change during a pass, it ends: a value that no longer expires may be
  being read.
* A deletion stays while its cell has a notification or a dead letter: otherwise an observer that
  has not run yet, or is to be retried, would never learn of it.
* What observers have acknowledged of a cell is removed with the cell's last record, or after it
  (below).
* The version that a cell had at the start of an observer's last run stays until the observer has
  run again: otherwise it could not undo what it has made of that version. It is needed only under a
  newer one, so that each observer of a column holds at most one version of a cell. A deletion for
  which no observer waits takes it along, in the same write: left alone, it would be visible again.
* Nothing is removed while a lock below the safe point is left here: the cells that say what became
  of its transaction would be removed, too.
* Nothing is removed before the safe point is durable in this tablet: a later owner must refuse the
  reads that this one has made unanswerable.
* Nothing is removed before roll-backs below it are refused, too. One that was sent while the lock
  existed may arrive long after its transaction was committed, and its commit collected.

* The change feed is collected up to the safe point of reads. A request for changes from below
  it is refused; all others need only what is above it.

The walk may end anywhere (a crash, a move); the next collection starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from percolator.errors import InvariantViolation, NotReady
from percolator.formats.records import (
    ACKNOWLEDGEMENTS,
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT_IN_DATA,
    START_TIMESTAMP_BYTES,
    WRITE_HEADER_BYTES,
    WRITE_KIND_OFFSET,
    Fate,
    Reach,
    acknowledged_start,
    acknowledgement_column,
    acknowledging_observer,
    observed_column,
    tells_of_a_dead_letter,
)
from percolator.tablet import opening
from percolator.tablet.cells import (
    FEED_FENCE,
    STATISTICS_KEY,
    TIMESTAMP_BYTES,
    TIMESTAMP_MAX,
    D,
    F,
    L,
    LockMirror,
    N,
    R,
    Tombstones,
    W,
    after_component,
    cell_bounds,
    change_key,
    component,
    inverted,
    space_bounds,
    split_change,
    split_component,
    timestamp_of,
)
from percolator.tablet.judge import WriteLatch
from percolator.tablet.state import Collected, Lifetimes, TabletState
from percolator.world import Storage

_ROW_END = b"\0\x01"
_MARK = _ROW_END + component(ACKNOWLEDGEMENTS)[:-2]
"""In an encoded cell, whose row is encoded too, this occurs only where such a column begins."""
WAITING_MAX = 10_000
"""The most that are held for one row. Any others stay stored."""

Record = tuple[bytes, bytes]
"""A stored acknowledgement: its key in the write space, and its write record."""


class AnsweredCells:
    """The acknowledgements of the row that a walk is in: deletes those of cells that no longer
    exist, or each deleted cell would leave one.

    An acknowledgement says which changes of its cell an observer has handled. Below the safe point,
    once none of the cell's records is left, it carries no information: whatever is committed there
    later is newer than anything that was acknowledged, and is handled with or without it.

    While the cell has a record, its acknowledgement stays, or a deletion would be handled twice. An
    acknowledgement that records a dead letter stays: the run for the next change has to know about
    it.

    Keys sort by row, then column, and these columns sort before all observed ones: during the walk
    over a row, its acknowledgements are held until the walk reaches their cells.
    """

    def __init__(self, gone: Callable[[Record], None]) -> None:
        """`gone` is called for each acknowledgement whose cell has no record left."""
        self._gone = gone
        self._row = b""
        self._waiting: dict[bytes, list[Record]] = {}
        """The acknowledgements that are held, by the cell that they refer to."""
        self._number = 0
        self.observers: dict[bytes, None] = {}
        """The observers that have acknowledged a cell of the row. There are few: what each has
        acknowledged of a cell is looked up only if one of its versions would be deleted."""

    def came_to(self, cell: bytes) -> list[Record]:
        """Returns the acknowledgements of the (encoded) cell that the walk has reached."""
        if not self.observers:
            return []
        if not cell.startswith(self._row):
            self.end()
            return []
        return self._waiting.pop(cell, [])

    def meet(self, cell: bytes) -> None:
        """The walk has come to this cell, which has `_MARK` in it."""
        _, behind_row = split_component(cell, 0)
        if cell[:behind_row] != self._row:
            self.end()
            self._row = cell[:behind_row]
        hidden = split_component(cell, behind_row)[0]
        if observed_column(hidden) is not None:
            self.observers[acknowledging_observer(hidden)] = None

    def last_runs(self, storage: Storage[Any], cell: bytes) -> list[int]:
        """The starts of the last runs for this cell, which the walk has reached; 0 if an observer
        of the row has not run for it."""
        if not self.observers:
            return []
        observed, _ = split_component(cell, len(self._row))
        hidden = (acknowledgement_column(one, observed) for one in self.observers)
        return [newest_acknowledged(storage, self._row + component(one)) for one in hidden]

    def wait(self, cell: bytes, record: Record) -> None:
        """Holds the current acknowledgement in this hidden cell until its own cell is reached."""
        observed = observed_column(split_component(cell, len(self._row))[0])
        if observed is None or self._number >= WAITING_MAX:
            return
        self._number += 1
        self._waiting.setdefault(self._row + component(observed), []).append(record)

    def end(self) -> None:
        """Ends the row or the walk: the cells still waited for do not exist."""
        for records in self._waiting.values():
            for record in records:
                self._gone(record)
        self._waiting.clear()
        self._number = 0
        self.observers.clear()


def newest_acknowledged(storage: Storage[Any], hidden: bytes) -> int:
    """The start timestamp in the newest acknowledgement in this (encoded) hidden cell; 0 if there
    is none."""
    cursor = storage.cursor()
    try:
        cursor.seek(W + hidden)
        while (entry := cursor.item())[0].startswith(W + hidden):
            kind = entry[1][WRITE_KIND_OFFSET]
            if kind == KIND_DELETE:
                return 0
            if kind != KIND_LOCK_ONLY:
                return acknowledged_start(noted_value(storage, hidden, kind, entry[1]))
            cursor.next()
        return 0
    finally:
        cursor.close()


_BEGIN = component(ACKNOWLEDGEMENTS)[:-2]
"""How such a column begins, as a component."""
_STOP = component(ACKNOWLEDGEMENTS[:-1])[:-2] + b"\x01"
"""Sorts after all of them: an encoded 00 is followed by ff."""


def may_be_put_aside(mirror: LockMirror, storage: Storage[Any], cell: bytes) -> bool:
    """True if a change of the cell may have become a dead letter: then its newest record has to
    stay. `cell` is an encoded row and column. No lock may be added or removed meanwhile.

    By then, its notifications are gone. What is left is the observer's note next to the cell. While
    the note's cell is locked, a note may be about to be committed: the notifications are deleted
    when the note is committed, which is before its lock is removed.
    """
    _, behind_row = split_component(cell, 0)
    row = cell[:behind_row]
    column, _ = split_component(cell, behind_row)
    first, stop = row + _BEGIN, row + _STOP
    for locked, _ in mirror.between(first, stop):
        if _observed(locked, len(row)) == column:
            return True
    cursor = storage.cursor()
    try:
        cursor.seek(W + first)
        while (entry := cursor.item())[0] < W + stop:
            key, value = entry
            noted = key[1:-TIMESTAMP_BYTES]
            kind = value[WRITE_KIND_OFFSET]
            if kind == KIND_LOCK_ONLY:
                cursor.next()
                continue
            if (
                kind != KIND_DELETE
                and _observed(noted, len(row)) == column
                and tells_of_a_dead_letter(noted_value(storage, noted, kind, value))
            ):
                return True
            # Older versions no longer matter, and there may be thousands.
            cursor.seek(W + after_component(noted))
        return False
    finally:
        cursor.close()


def _observed(hidden: bytes, row_bytes: int) -> bytes | None:
    """The column that a hidden cell refers to."""
    return observed_column(split_component(hidden, row_bytes)[0])


def noted_value(storage: Storage[Any], noted: bytes, kind: int, record: bytes) -> bytes:
    """The value that a write record of a hidden cell stands for."""
    if kind != KIND_PUT_IN_DATA:
        return record[WRITE_HEADER_BYTES:]
    start = int.from_bytes(record[:START_TIMESTAMP_BYTES], "big")
    return storage.get(D + noted + inverted(start)) or b""


HEAVY_DELETIONS = 4_096
"""Fewer deletions than this are not worth a compaction."""
PIECE_BYTES = 32 << 20
"""The size of one piece. Closing a tablet waits for at most one piece."""


async def compact_heavy(state: TabletState) -> None:
    """Compacts ranges that sweeps have left full of tombstones, piece by piece. If the tablet is
    closed, raises the reason.

    LevelDB compacts by itself only after many writes: by then, a cell that is overwritten all the
    time has tens of megabytes of dead versions. Where much was deleted and nothing more is written,
    it keeps its tombstones, and every seek into the range walks over them.

    A compaction rewrites everything alive in its range. That pays once about as much was deleted
    there as is stored, over however many sweeps.
    """
    left = state.tombstones
    if left.deletions < HEAVY_DELETIONS:
        return
    ranges = [sorted(key for key in left.boundaries if key.startswith(one)) for one in (W, D, F, R)]
    ranges = [boundaries for boundaries in ranges if boundaries]
    stored = sum(state.storage.approximate_bytes(one[0], one[-1] + b"\0") for one in ranges)
    if left.bytes < stored:
        return
    state.tombstones = Tombstones()
    for first, stop in _pieces(state, ranges):
        await state.storage.compact(first, stop)
        state.require_open()


def _pieces(state: TabletState, ranges: Iterable[list[bytes]]) -> list[tuple[bytes, bytes]]:
    pieces: list[tuple[bytes, bytes]] = []
    for boundaries in ranges:
        first = boundaries[0]
        for boundary in boundaries:
            if state.storage.approximate_bytes(first, boundary) >= PIECE_BYTES:
                pieces.append((first, boundary))
                first = boundary
        pieces.append((first, boundaries[-1] + b"\0"))
    return pieces


DELETIONS_PER_WRITE = 2_048
SLICE_SECONDS = 0.002
SLICE_ENTRIES = 256
_COUNTED = (W, D, R)
"""Spaces whose cells are included in the tablet's counts."""


class Sweep:
    """One pass over a tablet, which deletes many stored cells in the background while it keeps
    serving.

    A sweep walks over the store in short slices, names what is to be deleted, and calls `breathe`
    after each slice. That pauses long enough to keep the sweep within its share of the time, and
    deletes what was named in one synced write, between two group commits, so that nothing is judged
    meanwhile.
    """

    def __init__(
        self, state: TabletState, latch: WriteLatch, lifetimes: Lifetimes | None = None
    ) -> None:
        """`latch` is held during writes. `lifetimes`: those under which nobody can see what is
        named; None if nobody can under any."""
        self._state = state
        self._latch = latch
        self._lifetimes = lifetimes
        self._named: list[tuple[bytes, int, bytes | None]] = []
        self._slice_began = state.clock.monotonic_seconds()
        self.deleted = 0
        self.deleted_bytes = 0
        self.spared = 0
        """Named, but not deleted: an observer was still to be notified of them."""

    def delete(self, key: bytes, size: int, unless_awaited: bytes | None = None) -> None:
        """Names a stored cell to be deleted; `size` is the size of its key and value.

        It is spared if, at the time of the write, an observer has yet to see the newest record of
        the cell `unless_awaited`: there is a notification for it, or a dead letter.
        """
        self._named.append((key, size, unless_awaited))

    def slice_over(self, entries: int) -> bool:
        """True if the slice should end after this many entries. The clock is checked after each
        entry, because reading a single one may have meant reading megabytes."""
        if entries >= SLICE_ENTRIES:
            return True
        return self._state.clock.monotonic_seconds() - self._slice_began >= SLICE_SECONDS

    async def breathe(self) -> None:
        """Pauses between two slices. If the tablet is closed, raises the reason."""
        if len(self._named) >= DELETIONS_PER_WRITE:
            await self.write()
        clock, share = self._state.clock, self._state.limits.sweep_share
        spent = clock.monotonic_seconds() - self._slice_began
        await clock.sleep(spent * (1 / share - 1))
        self._state.require_open()
        self._slice_began = clock.monotonic_seconds()

    async def write(self) -> None:
        """Deletes what was named. Raises `StoreUnusable`, `TabletMoved`, and `NotReady` if it may
        be visible again, because the times to live have changed."""
        state = self._state
        async with self._latch:
            state.require_open()
            if self._lifetimes is not None and state.lifetimes is not self._lifetimes:
                raise NotReady(
                    f"the times to live of {state.identity} were changed during its collection",
                    retry_after_seconds=1.0,
                )
            named, self._named = self._named, []
            going = []
            for number, (key, size, cell) in enumerate(named, 1):
                if not self._is_awaited(cell):
                    going.append((key, size))
                if number % SLICE_ENTRIES == 0:
                    await asyncio.sleep(0)
            self.spared += len(named) - len(going)
            if not going:
                return
            batch = state.storage.batch()
            for key, _ in going:
                batch.delete(key)
            counted = [size for key, size in going if key.startswith(_COUNTED)]
            state.counters.cells -= len(counted)
            state.counters.bytes -= sum(counted)
            # In the same write, or a crash would leave counts that include what was deleted.
            batch.put(STATISTICS_KEY, opening.counts_record(state))
            await state.write(batch)
            await state.require_ownership()
        self.deleted += len(counted)
        self.deleted_bytes += sum(counted)
        state.tombstones.add([key for key, _ in going], sum(size for _, size in going))

    def _is_awaited(self, cell: bytes | None) -> bool:
        if cell is None:
            return False
        state = self._state
        return self._is_notified(cell) or may_be_put_aside(state.mirror, state.storage, cell)

    def _is_notified(self, cell: bytes) -> bool:
        index = self._state.index
        if index.complete:
            return next(index.between(cell, after_component(cell)), None) is not None
        cursor = self._state.storage.cursor()
        try:
            cursor.seek(N + cell)
            return cursor.key().startswith(N + cell)
        finally:
            cursor.close()


def is_due(state: TabletState) -> bool:
    """True if there may be cells of other rows: the stored counts name the rows they cover."""
    return state.counted_rows != (state.identity.start, state.identity.end)


async def trim(state: TabletState, latch: WriteLatch) -> int:
    """Deletes the cells of other tablets' rows that a tablet starts with after a split; returns how
    many. If the tablet is closed meanwhile, raises the reason.

    Both halves are clones of the whole, and what is read from them is clipped to their rows. So the
    other half's cells do no harm, but they take up space, and until they are deleted a tablet's
    size is only an estimate. The walk may end anywhere (a crash, a move, another split), and the
    next owner starts it again; what was deleted is subtracted from the stored counts in the same
    write.
    """
    sweep = Sweep(state, latch)
    counters = state.counters
    foreign_cells, foreign_bytes = counters.foreign_cells, counters.foreign_bytes
    begin: bytes | None
    for space in (L, N, W, D, R):
        for first, stop in _outside(state, space):
            begin = first
            while begin is not None:
                begin = _slice(state, sweep, begin, stop)
                await sweep.breathe()
                counters.foreign_cells = max(0, foreign_cells - sweep.deleted)
                counters.foreign_bytes = max(0, foreign_bytes - sweep.deleted_bytes)
    begin = F if state.feed.ever_on else None
    while begin is not None:
        begin = _slice_of_feed(state, sweep, begin)
        await sweep.breathe()
    await sweep.write()
    counters.foreign_cells = counters.foreign_bytes = 0
    state.counted_rows = (state.identity.start, state.identity.end)
    await _note(state, latch)
    await compact_heavy(state)
    return sweep.deleted


def _outside(state: TabletState, space: bytes) -> list[tuple[bytes, bytes]]:
    """The keys of a space before the tablet's rows, and those after them."""
    first, stop = space_bounds(space, b"", b"")
    own_first, own_stop = space_bounds(space, state.identity.start, state.identity.end)
    return [(begin, end) for begin, end in ((first, own_first), (own_stop, stop)) if begin < end]


def _slice(state: TabletState, sweep: Sweep, first: bytes, stop: bytes) -> bytes | None:
    """Names a slice of cells from `first` on; returns where to continue, or None at the end."""
    for number, (key, value) in enumerate(state.storage.iterate(first, stop), 1):
        sweep.delete(key, len(key) + len(value))
        if sweep.slice_over(number):
            return key + b"\0"
    return None


def _slice_of_feed(state: TabletState, sweep: Sweep, first: bytes) -> bytes | None:
    """Like `_slice`, for the change feed, whose keys are not in the order of rows."""
    start, end = cell_bounds(state.identity.start, state.identity.end)
    for number, (key, value) in enumerate(state.storage.iterate(first, FEED_FENCE), 1):
        _, cell = split_change(key)
        if cell < start or (end is not None and cell >= end):
            sweep.delete(key, len(key) + len(value))
        if sweep.slice_over(number):
            return key + b"\0"
    return None


async def _note(state: TabletState, latch: WriteLatch) -> None:
    """Stores that the tablet is trimmed, so that it is not walked over again."""
    async with latch:
        state.require_open()
        batch = state.storage.batch()
        batch.put(STATISTICS_KEY, opening.counts_record(state))
        await state.write(batch)
        await state.require_ownership()


NEWER_VERSIONS_WALKED = 16
"""If a cell has more versions than this above the safe point, a seek skips them."""


async def collect(
    state: TabletState,
    latch: WriteLatch,
    below: int,
    ended_below: int,
    *,
    before_deleting: Callable[[], Awaitable[None]],
) -> Collected:
    """Deletes what no read at or above `below` can reach, and the evidence of transactions that
    began below `ended_below`. Roll-backs below either must already be refused, durably.

    Raises `NotReady` while locks below either are left; if the tablet is closed, the reason.
    """
    ended_below = max(below, ended_below)
    reads, transactions, _ = state.safe_points
    if below > reads or ended_below > max(reads, transactions):
        raise InvariantViolation(
            f"{state.identity} would collect below {below}, and of ended transactions below "
            f"{ended_below}; its safe points are {reads} and {transactions}"
        )
    _require_no_older_locks(state, ended_below)
    last, recent = state.collected, state.recent
    newest = max(recent.newest_commit, recent.newest_marker)
    is_complete = not (last.spared or last.missed_load)
    if is_complete and below < last.more_at and newest < last.below:
        # Whatever is below the safe point now was below the last one, and nothing has expired.
        return replace(last, below=below, cells=0, bytes=0)
    await before_deleting()
    lifetimes = state.lifetimes
    sweep = Sweep(state, latch, lifetimes)
    walk = _WalkOfVersions(state, sweep, below, ended_below)
    await walk.run()
    await _markers(state, sweep, Reach(below, ended_below))
    await _changes(state, sweep, below)
    await sweep.write()
    await compact_heavy(state)
    return Collected(
        below,
        sweep.deleted,
        sweep.deleted_bytes,
        walk.history_bytes,
        sweep.spared > 0,
        # They may have changed since the last write: then this pass says nothing of what expires.
        walk.more_at if state.lifetimes is lifetimes else 0,
        # Of a load that was opened during this pass, it may have passed the rows before.
        missed_load=state.collected.missed_load and state.collected is not last,
    )


def _require_no_older_locks(state: TabletState, below: int) -> None:
    if state.mirror.has_older(below):
        raise NotReady(
            f"a lock below the safe point {below} is left in {state.identity}",
            retry_after_seconds=1.0,
        )


class _WalkOfVersions:
    """Walks over all write records, the newest version of each cell first."""

    def __init__(self, state: TabletState, sweep: Sweep, below: int, ended_below: int) -> None:
        self._state = state
        self._sweep = sweep
        self._below = below
        self._ended_below = ended_below
        self._cell = b""
        self._newer = 0
        """How many versions of the cell above the safe point stay, so far."""
        self._walked = 0
        """How many of them since the last deletion or seek."""
        self._reach = Reach(below, ended_below)
        self._deletion: Record | None = None
        """The newest change at or below the safe point, if it is a deletion, or has expired."""
        self._answered = AnsweredCells(lambda record: self._delete(*record))
        self._acknowledgements: list[Record] = []
        """Acknowledgements of the cell that may be deleted with it."""
        self._newest_below = 0
        """The commit timestamp of the newest change at or below the safe point."""
        self._seen_at: list[int] | None = None
        """The starts of last runs of observers that have seen a version older than that and than
        those the walk has come to; None until it matters."""
        self._seen: list[Record] = []
        """Versions that they saw then, under a deletion: they may be deleted with it."""
        self._lifetimes = state.lifetimes
        self._any_expires = bool(state.lifetimes)
        self.history_bytes = 0
        self.more_at = TIMESTAMP_MAX
        """The first timestamp at which a value that stays has expired."""

    async def run(self) -> None:
        identity = self._state.identity
        first: bytes | None
        first, stop = space_bounds(W, identity.start, identity.end)
        while first is not None:
            first = self._slice(first, stop)
            await self._sweep.breathe()
        self._end_cell()
        self._answered.end()

    def _slice(self, first: bytes, stop: bytes) -> bytes | None:
        """Walks over a slice from `first` on; returns where to continue, or None at the end."""
        storage = self._state.storage
        for number, (key, value) in enumerate(storage.iterate(first, stop), 1):
            next_at = self._look_at(key, value)
            if next_at is not None:
                beyond = key[:-TIMESTAMP_BYTES] + inverted(next_at)
                self.history_bytes += storage.approximate_bytes(key, beyond)
                return beyond
            if self._sweep.slice_over(number):
                return key + b"\0"
        return None

    def _look_at(self, key: bytes, value: bytes) -> int | None:
        """Returns the timestamp of the cell to seek to, if that is better than walking there."""
        cell = key[1:-TIMESTAMP_BYTES]
        if cell != self._cell:
            self._end_cell()
            self._cell, self._newer, self._walked = cell, 0, 0
            self._reach.next_cell()
            self._acknowledgements = self._answered.came_to(cell)
            self._seen_at = None
            if _MARK in cell:
                self._answered.meet(cell)
        kind, timestamp = value[WRITE_KIND_OFFSET], timestamp_of(key)
        fate = self._reach.fate(kind, timestamp)
        if fate is Fate.STAYS or fate is Fate.GOES_LAST:
            self._newest_below = timestamp
        if fate is Fate.STAYS and self._any_expires and self._has_expired(cell, timestamp):
            fate = Fate.GOES_LAST
        match fate:
            case Fate.NEWER:
                return self._look_above(key, value, timestamp)
            case Fate.GOES if (
                self._answered.observers
                and kind != KIND_LOCK_ONLY
                and self._was_last_seen(cell, timestamp)
            ):
                if self._deletion is not None:
                    self._seen.append((key, value))
                self._walked = 0
            case Fate.GOES:
                self._delete(key, value)
                self._walked = 0
            case Fate.GOES_LAST:
                self._deletion = key, value
            case Fate.STAYS if not self._newer and _MARK in cell:
                self._keep_in_mind(key, value, kind)
        return None

    def _was_last_seen(self, cell: bytes, timestamp: int) -> bool:
        """True if this version is what the last run of some observer has seen: the newest one at or
        below its start. Deletions are no exception, since they hide what is below them."""
        if self._seen_at is None:
            starts = self._answered.last_runs(self._state.storage, cell)
            self._seen_at = [one for one in starts if one < self._newest_below]
        later = [one for one in self._seen_at if one < timestamp]
        found = len(later) < len(self._seen_at)
        self._seen_at = later
        return found

    def _has_expired(self, cell: bytes, commit_ts: int) -> bool:
        """True if no snapshot at or above the safe point sees this value."""
        end = self._lifetimes.end_of(cell, commit_ts)
        if end is None:
            return False
        if end > self._below:
            self.more_at = min(self.more_at, end)
        return end <= self._below

    def _look_above(self, key: bytes, value: bytes, timestamp: int) -> int | None:
        """Like `_look_at`, for a version above the safe point of reads that stays."""
        self.history_bytes += len(key) + len(value) if self._newer else 0
        self._newer += 1
        self._walked += 1
        if self._walked < NEWER_VERSIONS_WALKED:
            return None
        self._walked = 0
        return self._ended_below if timestamp > self._ended_below else self._below

    def _keep_in_mind(self, key: bytes, value: bytes, kind: int) -> None:
        """Holds an acknowledgement of a cell that comes later in the walk, or no longer exists."""
        if not tells_of_a_dead_letter(noted_value(self._state.storage, self._cell, kind, value)):
            self._answered.wait(self._cell, (key, value))

    def _delete(self, key: bytes, value: bytes, awaited: bytes | None = None) -> None:
        """Deletes a record and its value, unless an observer has yet to see the cell `awaited`."""
        self._sweep.delete(key, len(key) + len(value), awaited)
        if value[WRITE_KIND_OFFSET] == KIND_PUT_IN_DATA:
            start = int.from_bytes(value[:START_TIMESTAMP_BYTES], "big")
            data = D + key[1:-TIMESTAMP_BYTES] + inverted(start)
            stored = self._state.storage.get(data)
            if stored is not None:
                self._sweep.delete(data, len(data) + len(stored), awaited)

    def _end_cell(self) -> None:
        """Names the cell's deletion or expired value, now that all below it has been named."""
        if self._deletion is None:
            return
        for record in self._seen:
            self._delete(*record, self._cell)
        self._seen = []
        self._delete(*self._deletion, self._cell)
        self._deletion = None
        # In the same write or not at all: left alone, the deletion would be handled again.
        for record in self._acknowledgements:
            self._delete(*record, self._cell)


async def _markers(state: TabletState, sweep: Sweep, reach: Reach) -> None:
    """Deletes rollback markers that no late prewrite needs to meet."""
    first: bytes | None
    first, stop = space_bounds(R, state.identity.start, state.identity.end)
    while first is not None:
        following, first = first, None
        for number, (key, value) in enumerate(state.storage.iterate(following, stop), 1):
            if reach.drops_marker(timestamp_of(key)):
                sweep.delete(key, len(key) + len(value))
            if sweep.slice_over(number):
                first = key + b"\0"
                break
        await sweep.breathe()


async def _changes(state: TabletState, sweep: Sweep, below: int) -> None:
    """Deletes the beginning of the change feed: those who may still ask begin after it."""
    if not state.feed.ever_on:
        return
    last = state.collected
    # What the last pass deleted is not walked over again.
    first: bytes | None = change_key(b"", 0 if last.missed_load else last.below)
    stop = change_key(b"", below + 1)
    while first is not None:
        following, first = first, None
        for number, (key, value) in enumerate(state.storage.iterate(following, stop), 1):
            sweep.delete(key, len(key) + len(value))
            if sweep.slice_over(number):
                first = key + b"\0"
                break
        await sweep.breathe()
