"""What must hold between a store and the timestamps of its cluster: oracle and collection."""

from __future__ import annotations

from collections.abc import Iterator

from percolator.formats.records import RecordKind
from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.isolation.history import CellKey
from percolator.testing.store_audit.invariants import Invariant
from percolator.testing.store_audit.stored_cells import StoredCells


def check_issued(stored: StoredCells, timestamp_max: int, report: Report) -> None:
    """No timestamp above the oracle's durable mark: it would be handed out again."""
    for key, timestamp, what in _timestamps(stored):
        if timestamp > timestamp_max:
            text = f"{what} of {shown_key(key)} at {timestamp}, above {timestamp_max}"
            report.add(Invariant.TIMESTAMP_ISSUED, text, key=key)


def _timestamps(stored: StoredCells) -> Iterator[tuple[CellKey, int, str]]:
    for key, commits in stored.commits.items():
        for commit in commits:
            yield key, commit.commit_ts, "commit"
            yield key, commit.record.start_timestamp, "start of a commit"
    for key, lock in stored.locks.items():
        yield key, lock.start_timestamp, "lock"
    for key, starts in stored.markers.items():
        for start in starts:
            yield key, start, "rollback marker"
    for key, values in stored.values.items():
        for start in values:
            yield key, start, "long value"
    for key, notifications in stored.notifications.items():
        for _, timestamp in notifications:
            yield key, timestamp, "notification"


def check_collected(stored: StoredCells, collected_below: int, report: Report) -> None:
    """After collection at a safe point, a cell keeps at most one record at or below it: a put.

    A cell that still waits for an observer keeps its newest record, even if it is a deletion.
    """
    for key, commits in stored.commits.items():
        old = [commit for commit in commits if commit.commit_ts <= collected_below]
        if not old:
            continue
        last_is_put = old[-1].record.kind in (RecordKind.PUT, RecordKind.PUT_IN_DATA)
        if len(old) > 1 or not (last_is_put or key in stored.notifications):
            listed = ", ".join(f"{c.record.kind.name} at {c.commit_ts}" for c in old)
            text = f"{shown_key(key)} holds {listed} below {collected_below}"
            report.add(Invariant.COLLECTED, text, key=key)
