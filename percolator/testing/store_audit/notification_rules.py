"""No change of a watched cell is forgotten: it has a notification, or a committed run above it.

This holds whenever the store is at rest, even before observers have finished. A cell that is still
locked needs no notification yet: the lock is the hint, and committing the cell writes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.isolation.history import CellKey, History
from percolator.testing.isolation.observer_runs import WatchedColumns, changes_of
from percolator.testing.store_audit.invariants import Invariant
from percolator.testing.store_audit.stored_cells import StoredCells


def check_notified(
    stored: StoredCells, history: History, observers: Iterable[WatchedColumns], report: Report
) -> None:
    """Adds to `report` every change for which no observer will ever run."""
    last_runs: dict[tuple[str, CellKey], int] = {}
    for record in history:
        if record.observer and record.trigger is not None and record.committed:
            name = record.observer, record.trigger
            last_runs[name] = max(last_runs.get(name, 0), record.start_ts)
    changes = changes_of(history)
    for watched in observers:
        for key, commits in changes.items():
            if (key[0], key[2]) not in watched.columns:
                continue
            newest = watched.owed(key, commits)
            if last_runs.get((watched.observer, key), 0) >= newest:
                continue
            notified = any(
                observer == watched.observer and timestamp >= newest
                for observer, timestamp in stored.notifications.get(key, [])
            )
            lock = stored.locks.get(key)
            pending = lock is not None and lock.start_timestamp == commits[newest].start_ts
            if not notified and not pending:
                text = (
                    f"{shown_key(key)}, changed at {newest} by {commits[newest]}, has neither a "
                    f"notification of {watched.observer} nor a run above it"
                )
                report.add(Invariant.NOTIFIED, text, commits[newest], key=key)
