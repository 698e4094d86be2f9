"""Collection: deletes what no transaction can see any more.

Given a safe point below which no read, prewrite or commit is admitted, and below which no lock is
left in any table, these have no reader: versions of a cell that are older than the newest put or
deletion at or below the safe point; that deletion itself, once everything older is gone; lock-only
records and rollback markers below it. What each rule prevents:

* A deletion goes last, in the same write as what is left under it or in a later one: alone, it
  would bring back what it had deleted.
* A deletion stays while a notification of its cell exists, or a dead letter: an observer that has
  not run yet, or is to try again, would otherwise never learn of it.
* What observers have acknowledged of a cell goes with the cell's last record, or after it
  (answered_cells.py).
* Nothing goes while a lock below the safe point is left here: the cells that say what became of its
  transaction would be among what goes.
* Nothing goes before the safe point is durable in this tablet: a later owner must refuse what this
  one has made unanswerable.
* Nothing goes before roll-backs below it are refused, too. One that was sent while the lock was
  there may come when its transaction has long been committed, and its commit collected.

The walk may end anywhere (a crash, a move) and is begun anew by whoever collects next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from percolator.errors import InvariantViolation, NotReady
from percolator.protocol.hidden_cells import tells_of_a_dead_letter
from percolator.protocol.records import (
    KIND_DELETE,
    KIND_LOCK_ONLY,
    KIND_PUT_IN_DATA,
    LOCK_HEADER,
    START_TIMESTAMP_BYTES,
    WRITE_KIND_OFFSET,
)
from percolator.tablet import keys
from percolator.tablet.answered_cells import AnsweredCells, Record
from percolator.tablet.compaction import compact_heavy
from percolator.tablet.dead_letters import noted_value
from percolator.tablet.keys import TIMESTAMP_BYTES, D, R, W, inverted, timestamp_of
from percolator.tablet.state import Collected, TabletState
from percolator.tablet.sweep import Sweep

NEWER_VERSIONS_WALKED = 16
"""A cell with more versions above the safe point is stepped over by a seek."""


async def collect(
    state: TabletState,
    turn: asyncio.Lock,
    below: int,
    *,
    before_deleting: Callable[[], Awaitable[None]],
) -> Collected:
    """Deletes what is out of reach of every read at or above `below`; before that, roll-backs
    below it have to be refused, durably.

    Raises `NotReady` while locks below it are left, and whatever the tablet is closed for.
    """
    if below > state.safe_points.reads:
        raise InvariantViolation(
            f"{state.identity} would collect below {below}, its safe point is "
            f"{state.safe_points.reads}"
        )
    await _require_no_older_locks(state, below)
    last, recent = state.collected, state.recent
    if not last.spared and max(recent.newest_commit, recent.newest_marker) < last.below:
        # Whatever is below the safe point now was below the last one.
        return replace(last, below=below, cells=0, bytes=0)
    await before_deleting()
    sweep = Sweep(state, turn)
    walk = _WalkOfVersions(state, sweep, below)
    await walk.run()
    await _markers(state, sweep, below)
    await sweep.write()
    await compact_heavy(state)
    return Collected(
        below, sweep.deleted, sweep.deleted_bytes, walk.history_bytes, sweep.spared > 0
    )


async def _require_no_older_locks(state: TabletState, below: int) -> None:
    for number, header in enumerate(list(state.mirror.headers.values()), 1):
        if LOCK_HEADER.unpack(header)[0] < below:
            raise NotReady(
                f"a lock below the safe point {below} is left in {state.identity}",
                retry_after_seconds=1.0,
            )
        if number % state.limits.slice_entries == 0:
            await asyncio.sleep(0)


class _WalkOfVersions:
    """Over all write records, newest version of each cell first."""

    def __init__(self, state: TabletState, sweep: Sweep, below: int) -> None:
        self._state = state
        self._sweep = sweep
        self._below = below
        self._cell = b""
        self._newer = 0
        """Versions of the cell above the safe point, so far."""
        self._hidden = False
        """Whether the newest put or deletion at or below the safe point was found: whatever comes
        after it in this cell is out of reach."""
        self._deletion: tuple[bytes, int] | None = None
        """That one, if it is a deletion, with its size."""
        self._answered = AnsweredCells(lambda record: self._delete(*record))
        self._acknowledgements: list[Record] = []
        """About the cell, as far as they may go with it."""
        self.history_bytes = 0

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
        """Walks from `first` on for a while; where to go on, or None at the end."""
        storage = self._state.storage
        for number, (key, value) in enumerate(storage.iterate(first, stop), 1):
            if not self._look_at(key, value):
                beyond = key[:-TIMESTAMP_BYTES] + inverted(self._below)
                self.history_bytes += storage.approximate_bytes(key, beyond)
                return beyond
            if self._sweep.slice_over(number):
                return key + b"\0"
        return None

    def _look_at(self, key: bytes, value: bytes) -> bool:
        """False when the other versions above the safe point are not worth walking over."""
        cell = key[1:-TIMESTAMP_BYTES]
        if cell != self._cell:
            self._end_cell()
            self._cell, self._newer, self._hidden = cell, 0, False
            self._acknowledgements = self._answered.came_to(cell)
        if timestamp_of(key) > self._below:
            self.history_bytes += len(key) + len(value) if self._newer else 0
            self._newer += 1
            return self._newer != NEWER_VERSIONS_WALKED
        kind = value[WRITE_KIND_OFFSET]
        if kind == KIND_LOCK_ONLY or self._hidden:
            self._delete(key, value)
        else:
            self._hidden = True
            if kind == KIND_DELETE:
                self._deletion = key, len(key) + len(value)
            elif not self._newer and self._answered.acknowledges(cell):
                self._keep_in_mind(key, value, kind)
        return True

    def _keep_in_mind(self, key: bytes, value: bytes, kind: int) -> None:
        """What an observer has acknowledged of a cell that comes later in the walk, or is gone."""
        if not tells_of_a_dead_letter(noted_value(self._state.storage, self._cell, kind, value)):
            self._answered.wait(self._cell, (key, value))

    def _delete(self, key: bytes, value: bytes, awaited: bytes | None = None) -> None:
        """The record and what it is of; unless somebody is to be notified of the cell `awaited`."""
        self._sweep.delete(key, len(key) + len(value), awaited)
        if value[WRITE_KIND_OFFSET] == KIND_PUT_IN_DATA:
            start = int.from_bytes(value[:START_TIMESTAMP_BYTES], "big")
            data = D + key[1:-TIMESTAMP_BYTES] + inverted(start)
            stored = self._state.storage.get(data)
            if stored is not None:
                self._sweep.delete(data, len(data) + len(stored), awaited)

    def _end_cell(self) -> None:
        """Everything under the cell's deletion was named before it."""
        if self._deletion is None:
            return
        self._sweep.delete(*self._deletion, unless_awaited=self._cell)
        self._deletion = None
        # In the same write, or not at all: left alone, the deletion would be answered again.
        for record in self._acknowledgements:
            self._delete(*record, self._cell)


async def _markers(state: TabletState, sweep: Sweep, below: int) -> None:
    """A rollback marker stops late prewrites, which are refused below the safe point anyway."""
    first: bytes | None
    first, stop = keys.space_bounds(R, state.identity.start, state.identity.end)
    while first is not None:
        following, first = first, None
        for number, (key, value) in enumerate(state.storage.iterate(following, stop), 1):
            if timestamp_of(key) < below:
                sweep.delete(key, len(key) + len(value))
            if sweep.slice_over(number):
                first = key + b"\0"
                break
        await sweep.breathe()
