"""Bugs of batons that a simulation has to find: one for each of their rules (baton.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from percolator.errors import CellAddress
from percolator.protocol.contention.baton import Baton
from percolator.protocol.contention.hot_cells import HotCells, Turn
from percolator.protocol.write_steps import Write
from percolator.routing.cells import FollowedCommit
from percolator.tablet.writing import held_transactions
from percolator.tablet.writing.held_transactions import HeldTransactions
from percolator.tablet.writing.transactions import WholeTransaction

Patch = pytest.MonkeyPatch


def baton_taken_by_one_that_came_later(patch: Patch) -> None:
    """Its snapshot lacks what was committed before its first read, but after the winner."""
    correct = HotCells.leave

    def wrong(self: HotCells, turn: Turn, baton: Baton | None = None) -> None:
        turn.followers = self._joined
        correct(self, turn, baton)

    patch.setattr(HotCells, "leave", wrong)


def timestamp_is_not_set_aside(patch: Patch) -> None:
    """Another transaction has it, too: each of them takes the other's commit for its own."""

    def wrong(
        held: Iterable[WholeTransaction], first: int
    ) -> Iterator[tuple[int, WholeTransaction]]:
        yield from enumerate(held, first)

    async def one_each(self: HeldTransactions, held: Sequence[WholeTransaction]) -> int:
        assert self._state.timestamps is not None
        return await self._state.timestamps(len(held))

    patch.setattr(held_transactions, "commit_timestamps", wrong)
    patch.setattr(HeldTransactions, "_first_timestamp", one_each)


def baton_of_every_commit(patch: Patch) -> None:
    """For commits in two phases, and for those that were found, no timestamp was set aside."""

    def wrong(cls: type[Baton], commit: int, writes: Mapping[CellAddress, Write]) -> Baton | None:
        return correct(FollowedCommit(commit), writes)

    correct = Baton.after
    patch.setattr(Baton, "after", classmethod(wrong))


ALL = (
    (baton_taken_by_one_that_came_later, False),
    (timestamp_is_not_set_aside, True),
    (baton_of_every_commit, True),
)
"""Each with whether it is caught in seconds."""
