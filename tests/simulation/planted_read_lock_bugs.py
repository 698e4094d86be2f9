"""Bugs of read locks that a simulation has to find: one for each way to lose an exclusion."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from percolator.tablet.memory.read_locks import ReadLocks
from percolator.tablet.writing import mutation_queue
from percolator.tablet.writing.exclusion import Exclusion
from percolator.tablet.writing.lines import Lines
from tests.simulation.scenario import Kind

Patch = pytest.MonkeyPatch


def writers_pass_live_read_locks(patch: Patch) -> None:
    """Their owners commit later, and what they have read was changed before."""
    patch.setattr(Exclusion, "_read_lock", lambda self, cell: None)


def writers_pass_committed_read_locks(patch: Patch) -> None:
    """A writer that began before the commit has not seen what the reader added."""
    patch.setattr(Exclusion, "_newer_read", lambda self, cell, since, cursor: None)


def read_locks_pass_live_locks(patch: Patch) -> None:
    """The writer commits later, without what the reader adds."""
    patch.setattr(Exclusion, "_lock", lambda self, locked: None)


def read_locks_pass_newer_commits(patch: Patch) -> None:
    """What the transaction has read is not there any more when it commits."""
    patch.setattr(Exclusion, "_newer", lambda self, locked, since, cursor: None)


def writers_do_not_wait_for_read_locks_on_their_way(patch: Patch) -> None:
    """Both are judged before either is there."""
    patch.setattr(Lines, "_is_read_locked", lambda self, cell: False)


def read_locks_do_not_wait_for_writers_on_their_way(patch: Patch) -> None:
    """The same, the other way round."""
    patch.setattr(mutation_queue, "cells_locked_by", lambda cells: ())


def one_round_looks_at_its_own_cells_only(patch: Patch) -> None:
    """The short cut of what commits in one round forgets the other side."""
    patch.setattr(ReadLocks, "may_exclude", lambda self, cell, start: False)


def new_owner_forgets_the_read_locks(patch: Patch) -> None:
    """It takes the tablet over, and lets writers pass those that it found."""

    def wrong(self: ReadLocks, *_: object) -> None:
        self.used = self.noted = True

    patch.setattr(ReadLocks, "load", wrong)


_TAKEOVERS = (Kind.TAKEOVER, Kind.CRASH)

ALL: tuple[tuple[Callable[[Patch], None], tuple[Kind, ...], float, bool], ...] = (
    (writers_pass_live_read_locks, (), 0.0, True),
    (writers_pass_committed_read_locks, (), 0.0, True),
    (read_locks_pass_live_locks, (), 0.0, True),
    (read_locks_pass_newer_commits, (), 0.0, True),
    (writers_do_not_wait_for_read_locks_on_their_way, (), 0.8, False),
    (read_locks_do_not_wait_for_writers_on_their_way, (), 0.0, False),
    (one_round_looks_at_its_own_cells_only, (), 0.8, True),
    (new_owner_forgets_the_read_locks, _TAKEOVERS, 0.0, False),
)
"""The bugs, with the strikes that bring them to light, the share of transactions that try to commit
in one round, and whether they are caught in seconds."""
