"""How far the history of a tablet's cells may have been collected."""

from __future__ import annotations

from typing import NamedTuple


class SafePoints(NamedTuple):
    """Timestamps below which requests are refused; stored before they apply, and never lowered."""

    reads: int = 0
    """The safe point of snapshots: versions superseded below it may have been deleted."""
    transactions: int = 0
    """The safe point of prewrites and commits: the highest one of all tables, because a
    transaction's evidence may be in a different table than its locks."""
    collected: int = 0
    """The safe point of roll-backs: it is raised when something is collected, at which time all
    locks below it are resolved, in all tables. A roll-back that was sent earlier and arrives late
    would find no commit, because it was collected, and would mark a committed transaction as
    rolled back."""

    def raised_to(self, asked: SafePoints) -> SafePoints:
        return SafePoints(*map(max, self, asked))
