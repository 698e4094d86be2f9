"""Bugs of collecting history that a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from percolator.aio.engine import OpenStarts
from percolator.formats.records import START_TIMESTAMP_BYTES
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.services.master.collection import CollectionTimes
from percolator.services.master.tablet_collection import OldLocks
from percolator.tablet import opening
from percolator.tablet.collection import collection
from percolator.tablet.collection.answered_cells import AnsweredCells, Record
from percolator.tablet.collection.sweep import Sweep
from percolator.tablet.memory.lock_mirror import LockMirror
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading.point_reads import PointReads
from percolator.tablet.safe_points import SafePoints
from percolator.tablet.writing import mutation_queue
from tests.simulation import masters
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def collects_before_old_locks_are_resolved(patch: Patch) -> None:
    """The rest of a committed transaction is rolled back: its primary no longer shows a commit."""

    async def nothing(*_: object) -> None:
        return

    patch.setattr(OldLocks, "resolve", nothing)
    patch.setattr(collection, "_require_no_older_locks", lambda state, below: None)
    # Tablets also refuse rollback markers below what they have collected. With that, nothing would
    # be torn: the locks would stay, and the cells behind them would never be read again.
    patch.setattr(mutation_queue, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def old_locks_rolled_back_without_their_primary(patch: Patch) -> None:
    """Their owners need not be asked, but what the primary says counts: it may have committed."""
    correct = Cleanup.resolve

    async def wrong(
        self: Cleanup, met: Sequence[MetLock], *, ended_below: int = 0, **rest: Any
    ) -> set[int]:
        for one in met if ended_below else ():
            self._env.verdicts.put(one.lock.start_timestamp, ROLLED_BACK)
        return await correct(self, met, ended_below=ended_below, **rest)

    patch.setattr(Cleanup, "resolve", wrong)


def a_transaction_counts_as_gone_with_its_first_lock(patch: Patch) -> None:
    """The search for old locks does not find its other locks, and nobody rolls them forward."""

    def wrong(self: LockMirror, header: bytes) -> None:
        self._starts.pop(header[:START_TIMESTAMP_BYTES], None)

    patch.setattr(LockMirror, "_forget_start", wrong)
    patch.setattr(mutation_queue, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def new_owner_forgets_the_safe_point(patch: Patch) -> None:
    """It serves snapshots half of which its predecessor has collected."""
    correct = opening.load

    async def wrong(state: TabletState) -> None:
        await correct(state)
        state.safe_points = SafePoints()

    patch.setattr(opening, "load", wrong)
    collect_eagerly(patch, round_seconds=1.0)  # the next round tells the new owner


def safe_point_checked_before_the_read(patch: Patch) -> None:
    """While a page is being read, cells that it has not reached yet are collected."""
    patch.setattr(PointReads, "_refuse_too_old", lambda self: None)
    collect_eagerly(patch)


def newest_version_under_a_notification_collected(patch: Patch) -> None:
    """An observer that runs late does not find the change for which it had to run."""
    patch.setattr(Sweep, "_is_awaited", lambda self, cell: False)
    collect_eagerly(patch)


def acknowledgement_collected_although_its_cell_is_there(patch: Patch) -> None:
    """A second notification of the same change causes a second run."""

    def wrong(self: AnsweredCells, cell: bytes) -> list[Record]:
        self.end()
        return []

    patch.setattr(AnsweredCells, "came_to", wrong)
    collect_eagerly(patch)


def old_locks_rolled_back_when_collecting(patch: Patch) -> None:
    """The same, where tablets do not refuse it either."""
    old_locks_rolled_back_without_their_primary(patch)
    patch.setattr(mutation_queue, "marked_below", lambda collected, changes: 0)
    collect_eagerly(patch)


def collect_eagerly(patch: Patch, *, round_seconds: float = 0.2) -> None:
    """So that a run of a few seconds sees much of it. No client tells what it needs: then only
    being refused keeps it from what is gone."""
    patch.setattr(OpenStarts, "oldest", lambda self: 0)
    times = CollectionTimes(round_seconds=round_seconds, retention_seconds=0.3)
    patch.setattr(masters, "_COLLECTION", times)


ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None], ...] = (
    (collects_before_old_locks_are_resolved, (Kind.CLIENT_STEP,), None),
    (a_transaction_counts_as_gone_with_its_first_lock, (Kind.CLIENT_STEP,), None),
    (old_locks_rolled_back_when_collecting, (Kind.CLIENT_STEP,), None),
    (safe_point_checked_before_the_read, (Kind.PAUSE,), None),
    (newest_version_under_a_notification_collected, (Kind.PAUSE, Kind.CRASH), "chains"),
    (acknowledgement_collected_although_its_cell_is_there, (Kind.PAUSE, Kind.CRASH), "chains"),
)
"""Each with the strikes that bring it to light, and the workload; but for the safe point that is
forgotten, which takes owners that change when something was collected."""
