"""Snapshot isolation by definition, pair by pair and slow: the checker must give the same verdict.

It works on settled histories (without unknown outcomes).
"""

from __future__ import annotations

from itertools import combinations, permutations

from tests.isolation.history import (
    CellKey,
    Delete,
    Found,
    History,
    Outcome,
    Put,
    Read,
    Scan,
    TransactionRecord,
)


def is_snapshot_isolated(history: History) -> bool:
    """Whether every rule holds."""
    return (
        all(_reads_its_snapshot(history, record) for record in history if record.start_ts)
        and _timestamps_are_unique(history)
        and all(_commits_above_its_start(record) for record in history)
        and not any(_concurrent(*pair) for pair in combinations(history, 2))
        and all(_in_session_order(*pair) for pair in permutations(history, 2))
        and all(_in_real_time_order(*pair) for pair in permutations(history, 2))
    )


def _snapshot(history: History, timestamp: int) -> dict[CellKey, bytes | None]:
    snapshot: dict[CellKey, bytes | None] = dict(history.initial)
    committed = [r for r in history if r.committed and r.writes()]
    for record in sorted(committed, key=lambda record: record.commit_ts):
        if record.commit_ts and record.commit_ts <= timestamp:
            snapshot |= record.writes()
    return snapshot


def _reads_its_snapshot(history: History, record: TransactionRecord) -> bool:
    visible = _snapshot(history, record.start_ts)
    for operation in record.operations:
        match operation:
            case Read(key, value):
                if visible.get(key) != value:
                    return False
            case Put(key, value):
                visible[key] = value
            case Delete(key):
                visible[key] = None
            case Scan():
                if not _is_right(operation, visible):
                    return False
            case _:
                pass
    return True


def _is_right(scan: Scan, visible: dict[CellKey, bytes | None]) -> bool:
    rows: dict[bytes, list[Found]] = {}
    for (table, row, column), value in visible.items():
        in_range = scan.start <= row and (scan.stop == b"" or row < scan.stop)
        wanted = scan.columns is None or column in scan.columns
        if table == scan.table and in_range and wanted and value is not None:
            rows.setdefault(row, []).append(Found(row, column, value))
    due = sorted(rows, reverse=scan.reverse)[: scan.row_limit or None]
    got: list[bytes] = []
    for found in scan.found:
        if not got or got[-1] != found.row:
            got.append(found.row)
    if not scan.complete:
        due = due[: len(got)]
    cells = [cell for row in due for cell in rows[row]]
    return got == due and sorted(scan.found) == sorted(cells)


def _committed_at(record: TransactionRecord) -> int | None:
    """A transaction that wrote nothing has no commit timestamp, whatever its record says."""
    return record.commit_ts if record.committed and record.locked() else None


def _handed_out(record: TransactionRecord) -> list[int]:
    timestamps = []
    if record.start_ts and not record.historic:
        timestamps.append(record.start_ts)
    commit_ts = _committed_at(record)
    if commit_ts is not None:
        timestamps.append(commit_ts)
    return timestamps


def _timestamps_are_unique(history: History) -> bool:
    timestamps = [timestamp for record in history for timestamp in _handed_out(record)]
    return len(set(timestamps)) == len(timestamps)


def _commits_above_its_start(record: TransactionRecord) -> bool:
    commit_ts = _committed_at(record)
    return commit_ts is None or commit_ts > record.start_ts


def _concurrent(one: TransactionRecord, other: TransactionRecord) -> bool:
    """Both committed, both wrote or locked one cell, and neither began after the other."""
    exclude = one.locked() & other.locked()
    exclude |= one.locked() & other.read_locked() | one.read_locked() & other.locked()
    if not (one.committed and other.committed and exclude):
        return False
    return one.commit_ts > other.start_ts and other.commit_ts > one.start_ts


def _in_session_order(before: TransactionRecord, after: TransactionRecord) -> bool:
    if before.session != after.session or before.number >= after.number:
        return True
    if before.historic or after.historic or not before.start_ts or not after.start_ts:
        return True
    told = _committed_at(before) if before.outcome is Outcome.COMMITTED else None
    return after.start_ts > max(before.start_ts, told or 0)


def _in_real_time_order(before: TransactionRecord, after: TransactionRecord) -> bool:
    if before.historic or after.historic or before.clock != after.clock:
        return True
    received = [(before.begin_returned, before.start_ts)]
    if before.outcome is Outcome.COMMITTED:
        received.append((before.commit_returned, _committed_at(before) or 0))
    asked = [
        (after.begin_called, after.start_ts),
        (after.commit_called, _committed_at(after) or 0),
    ]
    return all(
        later > earlier
        for received_at, earlier in received
        for asked_at, later in asked
        if received_at is not None and asked_at is not None and earlier and later
        if received_at < asked_at
    )
