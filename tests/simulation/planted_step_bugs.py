"""Bugs in the steps that travel as parallel lists: at the tablet, and where answers come back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from percolator.routing import mutation_lane
from percolator.routing.cells import APPLIED
from percolator.routing.lanes import Problem, Queued
from percolator.tablet.writing import listed_steps
from percolator.tablet.writing.mutations import ABSENT, CheckedCondition, PrewriteConditions
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_ROLLBACK, SPACE_WRITE
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def listed_prewrite_ignores_newer_commits(patch: Patch) -> None:
    """A lost update."""
    correct = listed_steps.prewrite_conditions

    def wrong(start: int) -> list[CheckedCondition]:
        conditions = correct(start)
        conditions[3] = (SPACE_WRITE, ABSENT, 1, 2, b"", b"", b"")
        return conditions

    patch.setattr(listed_steps, "prewrite_conditions", wrong)


def listed_steps_ignore_markers(patch: Patch) -> None:
    """Late ones resurrect a transaction that others have rolled back. Either of them would stop it,
    so neither of the two is enough of a bug."""
    prewrite, commit = listed_steps.prewrite_conditions, listed_steps.commit_conditions

    def wrong_prewrite(start: int) -> PrewriteConditions:
        return PrewriteConditions(start, _without_marker(prewrite(start)))

    def wrong_commit(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
        return _without_marker(commit(kind, start, min_commit))

    patch.setattr(listed_steps, "prewrite_conditions", wrong_prewrite)
    patch.setattr(listed_steps, "commit_conditions", wrong_commit)


def _without_marker(conditions: list[CheckedCondition]) -> list[CheckedCondition]:
    """The same number of them, since the client reads their indexes."""
    holds: CheckedCondition = (SPACE_ROLLBACK, ABSENT, 1, 2, b"", b"", b"")
    return [holds if one[0] == SPACE_ROLLBACK else one for one in conditions]


def listed_commit_overlooks_a_push(patch: Patch) -> None:
    """A reader above the commit timestamp has pushed the lock, and has read past it."""
    correct = listed_steps.commit_conditions

    def wrong(kind: int, start: int, min_commit: int) -> list[CheckedCondition]:
        return correct(listed_steps.COMMIT_SECONDARY, start, min_commit)

    patch.setattr(listed_steps, "commit_conditions", wrong)


def unapplied_steps_taken_for_applied(patch: Patch) -> None:
    """A transaction goes on without its locks."""

    def wrong(group: Sequence[Queued], result: pb.MutationBatchResult) -> list[Problem]:
        for entry in group:
            entry.pending.answer(entry.index, APPLIED)
        return []

    patch.setattr(mutation_lane, "_answer", wrong)


ALL = (
    (listed_prewrite_ignores_newer_commits, (), False),
    (listed_steps_ignore_markers, (Kind.PAUSE, Kind.SLOW_LINKS), False),
    (listed_commit_overlooks_a_push, (), False),
    (unapplied_steps_taken_for_applied, (), False),
)
"""With the strikes that show it, and whether it is quickly caught."""
