"""Read locks, by the cells that they lock: which are set or held, and how new the last one is.

A read lock is a lock-only write of a hidden column of its row (formats/hidden_cells.py). Each
transaction has a column of its own, so read locks of a cell never meet each other, and everything
that deals with locks and lock-only records deals with them as well. Only this is different: a read
lock and a write of the cell that it locks exclude each other (writing/exclusion.py). So the tablet
has to find the read locks of a cell, and that is what is kept here.

* Nothing is kept, and nothing is looked up, in a tablet that has never had a read lock.
* A tablet that has had one has format 3. A release that does not know read locks would commit
  writes beside them. So that release has to refuse the tablet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from percolator.tablet.keys import READ_LOCK_MARK, locked_cell
from percolator.tablet.memory.recent_writes import RecentWrites

FORMAT_WITH_READ_LOCKS = b"3"


class ReadLocks:
    """The read locks of one tablet."""

    def __init__(self, cells_max: int) -> None:
        """`cells_max` is the number of cells remembered as in `RecentWrites`."""
        self.used = False
        """Whether there is, was, or is about to be any. Public, since the hottest paths ask."""
        self.noted = False
        """Whether the storage says so."""
        self.live: dict[bytes, dict[bytes, None]] = {}
        """The hidden cells that have a lock, by locked cell. No entry is empty."""
        self.held: dict[bytes, int] = {}
        """The number of transactions that hold a read lock while they commit, by locked cell."""
        self.recent = RecentWrites(cells_max)
        """A timestamp above which no read lock of a cell was committed, by locked cell."""

    def load(self, newest_commit: int) -> None:
        """Begins in a tablet that is being opened and has had read locks. `add` all of its locked
        cells, too."""
        self.used = self.noted = True
        self.recent.load(newest_commit, 0)

    def note(self, cell: bytes) -> None:
        """Notes that a cell is about to be locked or written. From the first read lock on, all of
        the tablet's mutations are judged by read locks, too."""
        if not self.used and locked_cell(cell) is not None:
            self.used = True

    def hold(self, cells: Iterable[bytes]) -> None:
        """Notes that a transaction holds read locks of these cells."""
        for cell in cells:
            self.held[cell] = self.held.get(cell, 0) + 1

    def let_go(self, cells: Iterable[bytes]) -> None:
        for cell in cells:
            left = self.held.pop(cell) - 1
            if left:
                self.held[cell] = left

    def may_exclude(self, cell: bytes, start: int) -> bool:
        """Whether a transaction that began then may be excluded from this cell, which it wants to
        write or, if it is a hidden one, to hold a read lock in."""
        return cell in self.live or self.recent.bound(cell) >= start or READ_LOCK_MARK in cell

    def publish(
        self, put: Iterable[bytes], removed: Iterable[bytes], committed: Mapping[bytes, int]
    ) -> None:
        """Applies a durable batch: its locks, in the order in which it was judged, and commits."""
        for cell in removed:
            locked = locked_cell(cell)
            if locked is not None and locked in self.live:
                self.live[locked].pop(cell, None)
                if not self.live[locked]:
                    del self.live[locked]
        self.add(put)
        reads: dict[bytes, int] = {}
        for cell, timestamp in committed.items():
            locked = locked_cell(cell)
            if locked is not None:
                reads[locked] = max(timestamp, reads.get(locked, 0))
        if reads:
            self.recent.publish(reads, max(reads.values()), 0)

    def add(self, cells: Iterable[bytes]) -> None:
        """Notes those of these cells, which have locks, that are read locks."""
        for cell in cells:
            locked = locked_cell(cell)
            if locked is not None:
                self.live.setdefault(locked, {})[cell] = None


def cells_locked_by(cells: Collection[bytes]) -> list[bytes]:
    """The cells that are locked by the read locks among these hidden and other cells."""
    return [locked for cell in cells if (locked := locked_cell(cell)) is not None]
