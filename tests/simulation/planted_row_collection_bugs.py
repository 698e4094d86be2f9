"""Bugs in the collection of rows: one for each rule of `rowstore/collecting.py` and its notes.

Those that break no promise of a history are found by tests/unit/rowstore, which uses them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import pytest

from percolator.aio.engine import OpenStarts
from percolator.errors import SnapshotTooOld
from percolator.history.rows import RowHistory
from percolator.protocol.steps import OWN_COMMIT
from percolator.routing.cells import Refused
from percolator.rowstore import (
    collecting,
    collector,
    common_steps,
    judging,
    mapping,
    mutating,
    selecting,
)
from percolator.rowstore.collected import newest_note
from percolator.rowstore.collecting import Bounds, Plan
from percolator.rowstore.layout import COLLECTED, DATA, WRITES
from percolator.rowstore.port import Change, Check, Selection, StoredCell
from percolator.rowstore.times import Times
from percolator.v1.tabletserver_pb2 import Mutation
from tests.simulation import row_collector
from tests.simulation.planted_collection_bugs import old_locks_rolled_back_without_their_primary
from tests.simulation.row_collector import CollectorTimes
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def prewrite_passes_the_note(patch: Patch) -> None:
    """What it would have conflicted with was collected: a lost update."""
    correct = mapping.oldest_admitted

    def wrong(step: Mutation) -> int:
        return 0 if step.not_below else correct(step)

    common = common_steps.prewrite_obstacles

    def wrong_too(column: bytes, start: int, times: Times) -> tuple[Selection, ...]:
        found = common(column, start, times)
        return tuple(one for one in found if one.family != COLLECTED)

    _admit(patch, wrong)
    patch.setattr(common_steps, "prewrite_obstacles", wrong_too)


def rollback_passes_the_note(patch: Patch) -> None:
    """The commit that it would have met was collected: a committed transaction is marked."""

    def wrong(step: Mutation) -> int:
        return step.not_below

    _admit(patch, wrong)


def note_judged_before_the_own_commit(patch: Patch) -> None:
    """A transaction whose commit is there is taken for one that never committed."""
    correct = judging.refusal

    def wrong(step: Mutation, cells: Sequence[StoredCell], times: Times) -> object:
        answer: object = correct(step, cells, times)
        oldest = mapping.oldest_admitted(step)
        if 0 < oldest < newest_note(cells, times):
            is_own = isinstance(answer, Refused) and answer.condition == OWN_COMMIT
            return SnapshotTooOld("judged first") if is_own else answer
        return answer

    patch.setattr(mutating, "refusal", wrong)


def read_passes_the_note(patch: Patch) -> None:
    """A snapshot misses what was collected."""
    patch.setattr(selecting, "_require_kept", lambda *_: None)


def deletes_without_a_note(patch: Patch) -> None:
    """Nobody is refused what was collected."""
    correct = Plan.changes

    def wrong(self: Plan, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        for part in correct(self, bounds, times):
            yield [one for one in part if one.family != COLLECTED]

    patch.setattr(Plan, "changes", wrong)


def collects_beside_an_older_lock(patch: Patch) -> None:
    """The lock can no longer be resolved: its rollback is refused, and its commit may be gone."""
    nowhere = Selection(COLLECTED, b"\xff")

    def wrong(bounds: Bounds, times: Times) -> Check:
        return Check((nowhere,), found=False)

    correct = collecting._Row._sort

    def blind(self: Any, cell: StoredCell) -> None:
        correct(self, cell)
        self.has_older_lock = False

    patch.setattr(collector, "no_older_lock", wrong)
    patch.setattr(collecting._Row, "_sort", blind)


def deletion_goes_first(patch: Patch) -> None:
    """What was deleted is back."""
    correct = Plan.changes

    def wrong(self: Plan, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        if any(one.family == WRITES for one in self.versions):
            self.versions.clear()
        return correct(self, bounds, times)

    patch.setattr(Plan, "changes", wrong)


def dead_letters_are_forgotten(patch: Patch) -> None:
    """The observer that tries again does not find the deletion for which it ran."""
    patch.setattr(collecting, "_tells_of_a_dead_letter", lambda cell: False)


def acknowledgements_stay(patch: Patch) -> None:
    """Each deleted cell leaves one, for ever."""
    patch.setattr(collecting, "_observed", lambda column: None)


def values_stay(patch: Patch) -> None:
    """Long values are never deleted."""
    correct = Plan.changes

    def wrong(self: Plan, bounds: Bounds, times: Times) -> Iterator[list[Change]]:
        self.versions = [one for one in self.versions if one.family != DATA]
        return correct(self, bounds, times)

    patch.setattr(Plan, "changes", wrong)


def collects_before_old_locks_are_resolved(patch: Patch) -> None:
    """The rest of a committed transaction is rolled back: its primary no longer shows a commit."""

    async def nothing(*_: object) -> None:
        return

    patch.setattr(RowHistory, "_resolve", nothing)


def eagerly(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The same bug where a run of a few seconds sees much collection. No client tells what it
    needs: then only being refused keeps it from what is gone."""

    @wraps(plant)
    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(OpenStarts, "oldest", lambda self: 0)
        times = CollectorTimes(round_seconds=0.2, retention_seconds=0.3)
        patch.setattr(row_collector, "_COLLECTION", times)

    return both


def _admit(patch: Patch, oldest_admitted: Any) -> None:
    patch.setattr(mapping, "oldest_admitted", oldest_admitted)
    patch.setattr(judging, "oldest_admitted", oldest_admitted)


_STOPS = (Kind.PAUSE, Kind.SLOW_LINKS)

ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], str | None], ...] = (
    (prewrite_passes_the_note, _STOPS, None),
    (deletes_without_a_note, _STOPS, None),
    (read_passes_the_note, (Kind.PAUSE,), None),
    (collects_before_old_locks_are_resolved, (Kind.CLIENT_STEP,), None),
    (old_locks_rolled_back_without_their_primary, (Kind.CLIENT_STEP,), None),
    (deletion_goes_first, (), None),
)
"""Each with the kinds of strikes and the workload that bring it to light."""
