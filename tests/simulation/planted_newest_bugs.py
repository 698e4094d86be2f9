"""Bugs of reads without a timestamp that a simulation has to find: one for each of their rules."""

from __future__ import annotations

import pytest

from percolator.errors import CellAddress
from percolator.protocol.newest import NewestReads, NotNow
from percolator.routing.cells import FoundCell
from percolator.tablet.memory.held_cells import HeldCells, Holder
from percolator.tablet.reading.locks_in_the_way import LockReader
from percolator.timestamps import NEWEST

Patch = pytest.MonkeyPatch


def locks_are_not_in_the_way_of_now(patch: Patch) -> None:
    """What was acknowledged when its primary was committed is not shown."""
    correct = LockReader.on_cell

    def wrong(self: LockReader, cell: bytes) -> bytes | None:
        return None if self._timestamp == NEWEST else correct(self, cell)

    patch.setattr(LockReader, "on_cell", wrong)


def reads_of_now_do_not_wait_for_held_cells(patch: Patch) -> None:
    """A commit is missed whose timestamp is below one that the reader had before."""
    correct = HeldCells.in_the_way

    def wrong(self: HeldCells, cell: bytes, timestamp: int) -> Holder | None:
        return None if timestamp == NEWEST else correct(self, cell, timestamp)

    patch.setattr(HeldCells, "in_the_way", wrong)


def locked_cell_counts_as_empty(patch: Patch) -> None:
    """The answer that reports a lock does not have the cell's value."""
    correct = NewestReads.read

    async def wrong(
        self: NewestReads, cell: CellAddress, deadline: float
    ) -> FoundCell | NotNow | None:
        found = await correct(self, cell, deadline)
        return None if isinstance(found, NotNow) else found

    patch.setattr(NewestReads, "read", wrong)


ALL = (
    (locks_are_not_in_the_way_of_now, 0.0),
    (locked_cell_counts_as_empty, 0.0),
    (reads_of_now_do_not_wait_for_held_cells, 0.8),
)
"""Each with the share of transactions that try to commit in one round."""
