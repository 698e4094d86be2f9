"""Bugs of collecting history that a simulation has to find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from percolator.aio.engine import OpenStarts
from percolator.tablet import collection, opening
from percolator.tablet.answered_cells import AnsweredCells, Record
from percolator.tablet.point_reads import PointReads
from percolator.tablet.state import SafePoints, TabletState
from percolator.tablet.sweep import Sweep
from services.master.collection import CollectionTimes
from services.master.old_locks import OldLocks
from tests.simulation import masters
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def collects_before_old_locks_are_settled(patch: Patch) -> None:
    """What is left of a committed transaction is rolled back: its primary tells of it no more."""

    async def nothing(*_: object) -> None:
        return

    patch.setattr(OldLocks, "settle", nothing)
    patch.setattr(collection, "_require_no_older_locks", nothing)
    _collect_eagerly(patch)


def new_owner_forgets_the_safe_point(patch: Patch) -> None:
    """It answers snapshots of which its predecessor has collected half."""
    correct = opening.load

    async def wrong(state: TabletState) -> None:
        await correct(state)
        state.safe_points = SafePoints()

    patch.setattr(opening, "load", wrong)
    _collect_eagerly(patch, round_seconds=1.0)  # the next round tells the new owner


def safe_point_checked_before_the_read(patch: Patch) -> None:
    """While a page is read, what it has not reached yet is collected."""
    patch.setattr(PointReads, "_refuse_too_old", lambda self: None)
    _collect_eagerly(patch)


def newest_version_under_a_notification_collected(patch: Patch) -> None:
    """An observer that comes late finds nothing that it had to answer."""
    patch.setattr(Sweep, "_is_awaited", lambda self, cell: False)
    _collect_eagerly(patch)


def acknowledgement_collected_although_its_cell_is_there(patch: Patch) -> None:
    """What is told of the same change once more is answered once more."""

    def wrong(self: AnsweredCells, cell: bytes) -> list[Record]:
        self.end()
        return []

    patch.setattr(AnsweredCells, "came_to", wrong)
    _collect_eagerly(patch)


def _collect_eagerly(patch: Patch, *, round_seconds: float = 0.2) -> None:
    """So that a run of a few seconds sees much of it. No client tells what it needs: then only
    being refused keeps it from what is gone."""
    patch.setattr(OpenStarts, "oldest", lambda self: 0)
    times = CollectionTimes(round_seconds=round_seconds, retention_seconds=0.3)
    patch.setattr(masters, "_COLLECTION", times)


ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None], ...] = (
    (collects_before_old_locks_are_settled, (Kind.CLIENT_STEP,), None),
    (safe_point_checked_before_the_read, (Kind.PAUSE,), None),
    (newest_version_under_a_notification_collected, (Kind.PAUSE, Kind.CRASH), "chains"),
    (acknowledgement_collected_although_its_cell_is_there, (Kind.PAUSE, Kind.CRASH), "chains"),
)
"""Each with the strikes that bring it to light, and the workload; but for the safe point that is
forgotten, which takes owners that change when something was collected."""
