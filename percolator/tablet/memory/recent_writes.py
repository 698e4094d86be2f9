"""Which cells were committed recently, so that most prewrites need not look into the storage.

Nearly every transaction asks whether a cell was written since it began, a moment ago, and nearly
always it was not. The newest commit of each cell since some *horizon* fits into memory, and that
gives a bound for every cell: its own newest commit, or the horizon. A transaction that began above
the bound has its answer; any other has to look into the storage.

Kept in two generations: when the younger one is full, the older one is forgotten, and the horizon
moves to the newest commit that the younger one may lack. For rollback markers, the newest one is
enough: they are few, and transactions that begin later cannot have one.

Invariants, for everything that was published: no cell has a write record above its bound, and no
marker is above `newest_marker`. The two newest timestamps are stored with every batch that raises
them, so that they hold when the tablet is opened again (opening.py).
"""

from __future__ import annotations

import struct

NEWEST = struct.Struct(">QQ")
"""How the bounds are stored: newest commit, newest marker."""


class RecentWrites:
    """Bounds of the write records and rollback markers of one tablet."""

    def __init__(self, cells_max: int) -> None:
        """`cells_max` is the number of cells remembered in each of the two generations."""
        self._cells_max = cells_max
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._newest_before_young = 0
        self._horizon = 0
        self.newest_commit = 0
        self.newest_marker = 0

    def load(self, newest_commit: int, newest_marker: int) -> None:
        """Starts with nothing remembered, at opening: any cell may have the newest commit."""
        self.newest_commit = self._horizon = self._newest_before_young = newest_commit
        self.newest_marker = newest_marker

    def forget(self, newest_commit: int) -> None:
        """Forgets all cells: any of them may have unpublished writes up to this timestamp."""
        self._young, self._old = {}, {}
        self.load(max(newest_commit, self.newest_commit), self.newest_marker)

    def bound(self, cell: bytes) -> int:
        """A timestamp above which the cell has no write record."""
        found = self._young.get(cell)
        return self._old.get(cell, self._horizon) if found is None else found

    def publish(self, committed: dict[bytes, int], newest_commit: int, newest_marker: int) -> None:
        """Records a durable batch: its commits by cell, and the newest timestamps it wrote."""
        if min(committed.values(), default=0) >= self.newest_commit:
            self._young.update(committed)  # above every bound, as nearly always
        else:
            bound = self.bound
            self._young.update({cell: max(at, bound(cell)) for cell, at in committed.items()})
        self.newest_marker = max(self.newest_marker, newest_marker)
        self.newest_commit = max(self.newest_commit, newest_commit)
        if len(self._young) > self._cells_max:
            # Everything published before the young generation began is at or below this.
            self._horizon = self._newest_before_young
            self._old, self._young = self._young, {}
            self._newest_before_young = self.newest_commit
