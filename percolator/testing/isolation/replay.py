"""Replays a history in timestamp order, which decides snapshot isolation exactly.

Timestamps say what every transaction must have seen: all commits with commit_ts <= its start_ts,
and nothing else. So no search is needed. The commits and starts are sorted; a commit moves the
frontier; at a start, the reads and scans of that transaction are compared with the frontier. The
cost is near-linear: the sorting, plus each operation once.

Transactions that aborted or never ended must have read the same snapshot: their programs acted on
what they read.
"""

from __future__ import annotations

from percolator.testing.isolation.blame import Blame, Version
from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.isolation.frontier import Frontier
from percolator.testing.isolation.history import (
    CellKey,
    Delete,
    History,
    Put,
    Read,
    Scan,
    TransactionRecord,
)
from percolator.testing.isolation.scans import check_scan
from percolator.testing.isolation.violations import ViolationKind

_COMMIT, _END, _START = range(3)
"""At equal timestamps commits come first: a commit is visible iff commit_ts <= start_ts. At the end
of its time to live, a value is no longer visible."""


def replay(history: History, report: Report) -> None:
    """Adds to `report` every wrong read and scan, and every pair of concurrent writes."""
    scanned = {o.table for t in history for o in t.operations if isinstance(o, Scan)}
    _Replay(history, Frontier(history.initial, scanned), Blame(history), report).run()


class _Replay:
    def __init__(self, history: History, frontier: Frontier, blame: Blame, report: Report) -> None:
        self._history = history
        self._frontier = frontier
        self._blame = blame
        self._report = report
        self._last_commit: dict[CellKey, TransactionRecord] = {}
        """The last transaction to commit a lock on each cell, lock-only writes included."""
        self._last_read_lock: dict[CellKey, TransactionRecord] = {}
        """The last transaction to commit a read lock of each cell."""

    def run(self) -> None:
        transactions = self._history.transactions
        events: list[tuple[int, int, int]] = []
        for index, record in enumerate(transactions):
            if record.start_ts:
                events.append((record.start_ts, _START, index))
            if record.committed and record.commit_ts:
                events.append((record.commit_ts, _COMMIT, index))
                if self._history.ttls:
                    events.extend((end, _END, index) for end in self._ends(record).values())
        events.sort()
        for timestamp, kind, index in events:
            if kind == _COMMIT:
                self._commit(transactions[index])
            elif kind == _END:
                self._end(transactions[index], timestamp)
            else:
                self._start(transactions[index])

    def _start(self, record: TransactionRecord) -> None:
        """Checks all reads: the frontier of this instant is the transaction's snapshot."""
        own: dict[CellKey, bytes | None] = {}
        self._report.looked_at["operations"] += len(record.operations)
        for operation in record.operations:
            if isinstance(operation, Read):
                self._read(record, operation, own)
            elif isinstance(operation, Put):
                own[operation.key] = operation.value
            elif isinstance(operation, Delete):
                own[operation.key] = None
            elif isinstance(operation, Scan):
                check_scan(record, operation, self._frontier, own, self._blame, self._report)

    def _read(
        self, record: TransactionRecord, read: Read, own: dict[CellKey, bytes | None]
    ) -> None:
        key, found = read
        if key in own:
            if own[key] == found:
                return
            kind, text, writer = self._blame.wrong_own_read(record, key, found, own[key])
        else:
            expected = self._frontier.get(key)
            if expected.value == found:
                return
            kind, text, writer = self._blame.wrong_read(record, key, found, expected)
        self._report.add(kind, text, record, writer, key=key)

    def _commit(self, record: TransactionRecord) -> None:
        for key in record.read_locked():
            self._exclude(record, self._last_commit.get(key), key)
            self._last_read_lock[key] = record
        for key in record.locked():
            self._exclude(record, self._last_commit.get(key), key)
            self._exclude(record, self._last_read_lock.get(key), key)
            self._last_commit[key] = record
        for key, value in record.writes().items():
            self._frontier.put(key, Version(value, record))

    def _ends(self, record: TransactionRecord) -> dict[CellKey, int]:
        """When the values expire that a transaction has put."""
        ends = {
            key: self._history.end_of(key, record.commit_ts)
            for key, value in record.writes().items()
            if value is not None
        }
        return {key: end for key, end in ends.items() if end is not None}

    def _end(self, record: TransactionRecord, timestamp: int) -> None:
        """Values of this transaction expire, unless others have replaced them."""
        for key, end in self._ends(record).items():
            if end == timestamp and self._frontier.get(key).writer is record:
                self._frontier.put(key, Version(None, record, expired=True))

    def _exclude(
        self, record: TransactionRecord, other: TransactionRecord | None, key: CellKey
    ) -> None:
        """Checks that the record began after the other one had ended: they must not overlap."""
        if other is None or other.commit_ts <= record.start_ts:
            return
        text = (
            f"{record} committed {shown_key(key)} at {record.commit_ts}, although {other} had "
            f"committed it at {other.commit_ts}, above the snapshot {record.start_ts}"
        )
        self._report.add(ViolationKind.CONFLICT, text, record, other, key=key)
