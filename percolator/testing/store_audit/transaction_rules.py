"""What must hold across the cells of one transaction, as far as the store alone can tell."""

from __future__ import annotations

from collections.abc import Collection

from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.store_audit.invariants import Invariant
from percolator.testing.store_audit.stored_cells import StoredCells


def check_transactions(
    stored: StoredCells, collected_below: int, left_out: Collection[int], report: Report
) -> None:
    """Adds to `report` every transaction that committed twice, in part, or against its marker."""
    for start, commits in stored.commits_of.items():
        first = commits[0]
        for other in commits[1:]:
            if other.commit_ts != first.commit_ts:
                text = (
                    f"transaction {start} committed {shown_key(first.key)} at {first.commit_ts}, "
                    f"but {shown_key(other.key)} at {other.commit_ts}"
                )
                report.add(Invariant.ONE_COMMIT_TIMESTAMP, text, key=other.key)
        for key in stored.markers_of.get(start, []):
            text = (
                f"transaction {start} committed {shown_key(first.key)} at {first.commit_ts}, "
                f"but is rolled back on {shown_key(key)}"
            )
            report.add(Invariant.COMMITTED_OR_ROLLED_BACK, text, key=key)
    _check_primaries(stored, collected_below, left_out, report)


def _check_primaries(
    stored: StoredCells, collected_below: int, left_out: Collection[int], report: Report
) -> None:
    """A lock names its primary: if any cell of its transaction is committed, the primary is."""
    for key, lock in stored.locks.items():
        start = lock.start_timestamp
        primary = stored.primary(lock)
        if primary is None:
            if lock.primary.table_id in left_out:
                continue  # nothing is known of it here
            text = f"the lock on {shown_key(key)} names table {lock.primary.table_id}"
            report.add(Invariant.READABLE, text, key=key)
            continue
        commits = stored.commits_of.get(start, [])
        if not commits or commits[0].commit_ts <= collected_below:
            continue  # nothing of it committed, or the primary's record may be collected
        if all(commit.key != primary for commit in commits):
            text = (
                f"transaction {start} committed {shown_key(commits[0].key)} at "
                f"{commits[0].commit_ts}, but not its primary {shown_key(primary)}"
            )
            report.add(Invariant.PRIMARY_FIRST, text, key=primary)
