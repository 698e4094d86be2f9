"""What the transactions of one client came to: how many committed, how many lost, and where.

Only numbers are kept: every transaction counts. People ask for them when throughput falls, which it
usually does because many transactions write one cell.
"""

from __future__ import annotations

from collections import Counter

from percolator.errors import CellAddress

CELLS_MAX = 256
"""The most cells that are counted. When there are more, the half with the fewest conflicts is
forgotten, so a count is a lower bound; that of a cell that matters is hardly off."""


class ContendedCells:
    """The cells where transactions have lost, and how often."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[CellAddress] = Counter()

    def lost_at(self, cell: CellAddress) -> None:
        self._counts[cell] += 1
        if len(self._counts) > CELLS_MAX:
            self._counts = Counter(dict(self._counts.most_common(CELLS_MAX // 2)))

    def most(self, number: int) -> list[tuple[CellAddress, int]]:
        """The cells with the most conflicts, and their counts."""
        return self._counts.most_common(number)


class Tally:
    """The counts of one client since it connected. Blocking threads do not touch it."""

    __slots__ = ("cells", "commits", "conflicts")

    def __init__(self) -> None:
        self.commits = 0
        self.conflicts = 0
        self.cells = ContendedCells()

    def lost_at(self, cell: CellAddress | None) -> None:
        """Counts a conflict. The cell is None if the transaction was given up without one."""
        self.conflicts += 1
        if cell is not None:
            self.cells.lost_at(cell)
