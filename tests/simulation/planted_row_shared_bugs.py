"""Bugs of shared transactions in a row store that a simulation has to find.

That a part pushed above the commit is never committed, that nothing is committed after the marker
that closes it, and what becomes of proofs, is shown by tests/unit/rowstore/test_groups.py: the
moments in which it matters are too rare here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from percolator.rowstore import together
from percolator.rowstore.grouping import Group, grouped
from percolator.rowstore.layout import LOCKS
from percolator.rowstore.mapping import Step
from percolator.rowstore.port import Check, Selection
from percolator.rowstore.times import Times
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def all_locks_of_the_row_count(patch: Patch) -> None:
    """That of an attempt that was not chosen stands for one that was rolled back."""

    def wrong(check: Check) -> Check:
        selections = [Selection(LOCKS) if one.family == LOCKS else one for one in check.selections]
        return check._replace(selections=tuple(selections))

    _check(patch, wrong)


def all_locks_but_one_are_enough(patch: Patch) -> None:
    """One part was rolled back, and the others are committed."""
    _check(patch, lambda check: check._replace(more_than=check.more_than - 1))


def a_part_begins_in_a_row_whatever_closed_it(patch: Patch) -> None:
    """Its locks block others until they expire: nothing is left to roll it back."""

    def wrong(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
        asked = [step if step.changes else step._replace(selections=()) for step in steps]
        return grouped(asked, ranges_max, times)

    patch.setattr(together, "grouped", wrong)


def _check(patch: Patch, changed: Callable[[Check], Check]) -> None:
    """Changes what is asked before parts are committed."""

    def wrong(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
        group = grouped(steps, ranges_max, times)
        return group._replace(check=changed(group.check)) if group.check.found else group

    patch.setattr(together, "grouped", wrong)


ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], bool], ...] = (
    (all_locks_of_the_row_count, (), True),
    (all_locks_but_one_are_enough, (), True),
    (a_part_begins_in_a_row_whatever_closed_it, (), True),
)
"""Each with the strikes that bring it to light, and whether it is caught in seconds."""
