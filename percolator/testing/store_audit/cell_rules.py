"""What must hold within one cell: its lock, its commits, its long values, its markers."""

from __future__ import annotations

from itertools import pairwise

from percolator.formats.hidden_cells import locked_column
from percolator.formats.records import RecordKind
from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.isolation.history import CellKey
from percolator.testing.store_audit.invariants import Invariant
from percolator.testing.store_audit.stored_cells import StoredCells, StoredCommit


def check_cells(stored: StoredCells, report: Report) -> None:
    """Adds to `report` whatever is wrong within single cells."""
    for key, commits in stored.commits.items():
        _check_commits(key, commits, report)
        _check_last_changes(key, commits, report)
        _check_read_lock(key, commits, stored, report)
    for key in stored.locks:
        _check_lock(key, stored, report)
    _check_values(stored, report)


def _check_commits(key: CellKey, commits: list[StoredCommit], report: Report) -> None:
    seen: dict[int, StoredCommit] = {}
    for commit in commits:
        start = commit.record.start_timestamp
        if commit.commit_ts <= start:
            text = f"{_named(commit)} began at {start}"
            report.add(Invariant.COMMIT_ABOVE_START, text, key=key)
        other = seen.setdefault(start, commit)
        if other is not commit:
            text = f"{_named(other)} and {_named(commit)} are both of transaction {start}"
            report.add(Invariant.ONE_RECORD, text, key=key)
    for before, after in pairwise(commits):
        # Each held the lock from its start to its commit, so no two of them can overlap.
        start = after.record.start_timestamp
        if start <= before.commit_ts and start != before.record.start_timestamp:
            text = f"{_named(after)} began at {start}, and did not see {_named(before)}"
            report.add(Invariant.DISJOINT_COMMITS, text, key=key)


def _check_last_changes(key: CellKey, commits: list[StoredCommit], report: Report) -> None:
    """Readers skip from a lock-only record to the change that it names: none may be in between."""
    newest: StoredCommit | None = None
    for commit in commits:
        if commit.record.kind is not RecordKind.LOCK_ONLY:
            newest = commit
            continue
        named = commit.record.last_change
        if named is None:
            continue  # it names nothing: readers step over it
        if named >= commit.commit_ts:
            text = f"{_named(commit)} names a later one, at {named}"
            report.add(Invariant.LAST_CHANGE, text, key=key)
        elif newest is not None and newest.commit_ts > named:
            text = f"{_named(commit)} names the one at {named}, and hides {_named(newest)}"
            report.add(Invariant.LAST_CHANGE, text, key=key)


def _check_read_lock(
    key: CellKey, commits: list[StoredCommit], stored: StoredCells, report: Report
) -> None:
    """A read lock and the commits of the cell that it locks do not overlap either."""
    table, row, name = key
    column = locked_column(name)
    if column is None:
        return
    writes = stored.commits.get((table, row, column), [])
    for commit in commits:
        for other in writes:
            start, other_start = commit.record.start_timestamp, other.record.start_timestamp
            if start < other.commit_ts and other_start < commit.commit_ts:
                text = f"{_named(commit)} began at {start}, and overlaps {_named(other)}"
                report.add(Invariant.DISJOINT_COMMITS, text, key=key)


def _check_lock(key: CellKey, stored: StoredCells, report: Report) -> None:
    start = stored.locks[key].start_timestamp
    for commit in stored.commits.get(key, []):
        if commit.record.start_timestamp == start:
            text = f"transaction {start} still holds the lock of {_named(commit)}"
            report.add(Invariant.SETTLED_LOCK, text, key=key)
        elif commit.commit_ts >= start:
            text = f"transaction {start} holds a lock below {_named(commit)}"
            report.add(Invariant.DISJOINT_COMMITS, text, key=key)
    if start in stored.markers.get(key, ()):
        text = f"transaction {start} holds a lock on {shown_key(key)}, where it was rolled back"
        report.add(Invariant.SETTLED_LOCK, text, key=key)


def _check_values(stored: StoredCells, report: Report) -> None:
    """Every long value belongs to a record or a lock, and a record of one has its value."""
    owned: set[tuple[CellKey, int]] = set()
    for key, commits in stored.commits.items():
        for commit in commits:
            if commit.record.kind is not RecordKind.PUT_IN_DATA:
                continue
            owned.add((key, commit.record.start_timestamp))
            if stored.value(commit) is None:
                report.add(Invariant.VALUE_STORED, _named(commit), key=key)
    for key, lock in stored.locks.items():
        if lock.kind is RecordKind.PUT_IN_DATA:
            owned.add((key, lock.start_timestamp))
            if lock.start_timestamp not in stored.values.get(key, {}):
                text = f"lock of transaction {lock.start_timestamp} on {shown_key(key)}"
                report.add(Invariant.VALUE_STORED, text, key=key)
    for key, values in stored.values.items():
        for start in values:
            if (key, start) not in owned:
                text = f"{shown_key(key)} at {start}"
                report.add(Invariant.VALUE_OWNED, text, key=key)


def _named(commit: StoredCommit) -> str:
    return f"the commit of {shown_key(commit.key)} at {commit.commit_ts}"
