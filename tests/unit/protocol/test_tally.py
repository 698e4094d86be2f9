"""Conflicts are counted by cell, in bounded memory."""

from __future__ import annotations

from percolator.errors import CellAddress
from percolator.protocol.environment import CELLS_MAX, ContendedCells, Tally


def _cell(number: int) -> CellAddress:
    return CellAddress(1, b"%d" % number, b"c")


def test_the_cell_with_most_conflicts_stays_first_however_many_others_there_are() -> None:
    cells = ContendedCells()
    for number in range(10 * CELLS_MAX):
        cells.lost_at(_cell(number))
        if number % 10 == 0:
            cells.lost_at(_cell(-1))
    [(hottest, count), *others] = cells.most(10 * CELLS_MAX)
    assert (hottest, count) == (_cell(-1), CELLS_MAX)
    assert len(others) < CELLS_MAX


def test_a_conflict_without_a_cell_is_counted_too() -> None:
    tally = Tally()
    tally.lost_at(None)
    tally.lost_at(_cell(1))
    assert (tally.conflicts, tally.cells.most(5)) == (2, [(_cell(1), 1)])
