"""Collection: deletes what no transaction can see any longer.

percolator/formats/reach.py says which versions those are, apart from values that have expired
(lifetimes.py): no snapshot at or above the safe point sees one that had expired by then. What else
is to be observed in a tablet, and what each rule prevents:

* A deletion is removed last, in the same write as the versions left below it or in a later one.
* So is a value that has expired, since the version before it may be visible under another time to
  live. If the times to live change during a pass, it ends: a value that no longer expires may be
  being read.
* A deletion stays while its cell has a notification or a dead letter: otherwise an observer that
  has not run yet, or is to be retried, would never learn of it.
* What observers have acknowledged of a cell is removed with the cell's last record, or after it
  (answered_cells.py).
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

from collections.abc import Awaitable, Callable
from dataclasses import replace

from percolator.errors import InvariantViolation, NotReady
from percolator.formats.hidden_cells import tells_of_a_dead_letter
from percolator.formats.reach import Fate, Reach
from percolator.formats.records import (
    KIND_PUT_IN_DATA,
    START_TIMESTAMP_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.tablet import keys
from percolator.tablet.collection.answered_cells import AnsweredCells, Record
from percolator.tablet.collection.compaction import compact_heavy
from percolator.tablet.collection.dead_letters import noted_value
from percolator.tablet.collection.sweep import Sweep
from percolator.tablet.keys import TIMESTAMP_BYTES, TIMESTAMP_MAX, D, R, W, inverted, timestamp_of
from percolator.tablet.memory.state import Collected, TabletState
from percolator.tablet.writing.write_latch import WriteLatch

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
        """The same count since the last deletion or seek."""
        self._reach = Reach(below, ended_below)
        self._deletion: Record | None = None
        """The newest change at or below the safe point, if it is a deletion, or has expired."""
        self._answered = AnsweredCells(lambda record: self._delete(*record))
        self._acknowledgements: list[Record] = []
        """Acknowledgements of the cell that may be deleted with it."""
        self._lifetimes = state.lifetimes
        self._any_expires = bool(state.lifetimes)
        self.history_bytes = 0
        self.more_at = TIMESTAMP_MAX
        """The first timestamp at which a value that stays has expired."""

    async def run(self) -> None:
        identity = self._state.identity
        first: bytes | None
        first, stop = keys.space_bounds(W, identity.start, identity.end)
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
        kind, timestamp = value[WRITE_KIND_OFFSET], timestamp_of(key)
        fate = self._reach.fate(kind, timestamp)
        if fate is Fate.STAYS and self._any_expires and self._has_expired(cell, timestamp):
            fate = Fate.GOES_LAST
        match fate:
            case Fate.NEWER:
                return self._look_above(key, value, timestamp)
            case Fate.GOES:
                self._delete(key, value)
                self._walked = 0
            case Fate.GOES_LAST:
                self._deletion = key, value
            case Fate.STAYS if not self._newer and self._answered.acknowledges(cell):
                self._keep_in_mind(key, value, kind)
        return None

    def _has_expired(self, cell: bytes, commit: int) -> bool:
        """Whether no snapshot at or above the safe point sees this value."""
        end = self._lifetimes.end_of(cell, commit)
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
        self._delete(*self._deletion, self._cell)
        self._deletion = None
        # In the same write or not at all: left alone, the deletion would be handled again.
        for record in self._acknowledgements:
            self._delete(*record, self._cell)


async def _markers(state: TabletState, sweep: Sweep, reach: Reach) -> None:
    """Deletes rollback markers that no late prewrite needs to meet."""
    first: bytes | None
    first, stop = keys.space_bounds(R, state.identity.start, state.identity.end)
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
    first: bytes | None = keys.change_key(b"", 0 if last.missed_load else last.below)
    stop = keys.change_key(b"", below + 1)
    while first is not None:
        following, first = first, None
        for number, (key, value) in enumerate(state.storage.iterate(following, stop), 1):
            sweep.delete(key, len(key) + len(value))
            if sweep.slice_over(number):
                first = key + b"\0"
                break
        await sweep.breathe()
