"""Which versions of a cell are out of reach: the rule of all collection, in tablets and in rows.

Assume a safe point below which no read, prewrite or commit is admitted, and below which no table
has a lock left. Then nothing can read versions of a cell that are older than the newest put or
deletion at or below the safe point, nor that deletion itself once everything older is gone.

Lock-only records and rollback markers are part of no snapshot. They are evidence of the outcome of
their transaction. So they need not stay as long as snapshots do: they are deleted once no
transaction that began below them is still running in any table, which may be much earlier. They
are not deleted before that, even if the cell has a newer commit. A newer commit excludes the same
transactions, but does not show the outcome of the earlier one.
"""

from __future__ import annotations

from enum import Enum, auto

from percolator.errors import SnapshotTooOld
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY
from percolator.timestamps import Timestamp


class Fate(Enum):
    """What collection does with a version."""

    NEWER = auto()
    """It stays: it lies above the safe point."""
    STAYS = auto()
    """It stays: it is what a read at the safe point sees."""
    GOES = auto()
    GOES_LAST = auto()
    """It is a deletion, and goes with the last version below it, or later: removing it alone would
    bring back what it has deleted."""


class Reach:
    """Walks over the versions of cells, the newest of each first."""

    __slots__ = ("_below", "_ended_below", "_hidden")

    def __init__(self, below: int, ended_below: int) -> None:
        """`below` is the safe point of snapshots, `ended_below` that of transactions."""
        self._below = below
        self._ended_below = max(below, ended_below)
        self._hidden = False
        """Whether the newest put or deletion at or below the safe point was found: everything
        after it in this cell is out of reach."""

    def next_cell(self) -> None:
        self._hidden = False

    def fate(self, kind: int, timestamp: int) -> Fate:
        """The fate of the next version."""
        if timestamp > self._below:
            is_over = kind == KIND_LOCK_ONLY and timestamp < self._ended_below
            return Fate.GOES if is_over else Fate.NEWER
        if kind == KIND_LOCK_ONLY or self._hidden:
            return Fate.GOES
        self._hidden = True
        return Fate.GOES_LAST if kind == KIND_DELETE else Fate.STAYS

    def drops_marker(self, start_timestamp: int) -> bool:
        """Whether a rollback marker goes: it stops late prewrites, which are refused anyway."""
        return start_timestamp < self._ended_below


def too_old(timestamp: int, safe_point: int) -> SnapshotTooOld:
    """The refusal of what is below a safe point."""
    return SnapshotTooOld(
        f"timestamp {timestamp} ({Timestamp(timestamp).describe()}) is older than the history "
        f"that is kept, which goes back to {safe_point} ({Timestamp(safe_point).describe()}); a "
        "transaction, snapshot or pin keeps older history only while its session lives, and not "
        "beyond the cluster's limit (client_held_seconds_max)",
        timestamp=timestamp,
        safe_point=safe_point,
    )
