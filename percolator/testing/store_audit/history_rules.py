"""What must hold between a store and the history of the clients that wrote it.

A commit that was acknowledged is there, at the timestamp and with the values that the client knows.
An aborted transaction is not there. One of unknown outcome is there as a whole, or not at all.
"""

from __future__ import annotations

from percolator.errors import InvalidArgument
from percolator.formats.records import RecordKind
from percolator.schema import SHARED_NAME
from percolator.testing.isolation.findings import Report, shown_key, shown_value
from percolator.testing.isolation.history import CellKey, History, Outcome, TransactionRecord
from percolator.testing.store_audit.invariants import Invariant
from percolator.testing.store_audit.stored_cells import StoredCells, StoredCommit

_LOCK_ONLY = object()
"""Used in place of a value: the cell was locked and not changed."""


def check_against_history(
    stored: StoredCells, history: History, collected_below: int, report: Report
) -> None:
    """Adds to `report` every difference. The outcomes of `history` must be settled."""
    audit = _Audit(stored, history, collected_below, report)
    for record in history:
        report.looked_at["transactions"] += 1
        if record.start_ts and not record.historic:
            audit.check(record)


def check_accounted_for(stored: StoredCells, history: History, report: Report) -> None:
    """Every commit record belongs to a recorded transaction that wrote its cell."""
    written = {record.start_ts: record for record in history if not record.historic}
    for start, commits in stored.commits_of.items():
        record = written.get(start)
        for commit in commits:
            # A run of an observer also writes cells that its function does not see.
            if record is None or not (record.observer or commit.key in record.locked()):
                text = f"{shown_key(commit.key)} at {commit.commit_ts} by transaction {start}"
                report.add(Invariant.ACCOUNTED_FOR, text, record, key=commit.key)


class _Audit:
    def __init__(
        self, stored: StoredCells, history: History, collected_below: int, report: Report
    ) -> None:
        self._stored = stored
        self._report = report
        self._collected_below = collected_below
        self._kept = _kept(history, collected_below)

    def check(self, record: TransactionRecord) -> None:
        """Compares one transaction with its records in the store."""
        commits = self._stored.commits_of.get(record.start_ts, [])
        locked = record.locked()
        if not record.committed:
            for commit in commits[:1]:
                text = f"{record} committed {shown_key(commit.key)} at {commit.commit_ts}"
                self._report.add(Invariant.ABORTED_ABSENT, text, record, key=commit.key)
        elif locked:
            by_key = {commit.key: commit for commit in commits}
            self._check_primary(record, by_key, self._primary(locked))
            self._check_whole(record, by_key, locked)
            self._check_values(record, commits, locked)

    def _check_primary(
        self, record: TransactionRecord, by_key: dict[CellKey, StoredCommit], primary: CellKey
    ) -> None:
        """The primary's record is the commit: it is there, at the timestamp that was reported."""
        commit = by_key.get(primary)
        if commit is None and self._may_be_collected(primary, record.commit_ts):
            return
        if commit is not None and commit.commit_ts == record.commit_ts:
            return
        told = record.outcome is Outcome.COMMITTED
        claim = "was told that it" if told else "has a secondary that"
        found = "no commit" if commit is None else f"a commit at {commit.commit_ts}"
        text = (
            f"{record} {claim} committed at {record.commit_ts}; its primary "
            f"{shown_key(primary)} holds {found} of it"
        )
        invariant = Invariant.ACKNOWLEDGED if told else Invariant.PRIMARY_FIRST
        self._report.add(invariant, text, record, key=primary)

    def _check_whole(
        self, record: TransactionRecord, by_key: dict[CellKey, StoredCommit], locked: set[CellKey]
    ) -> None:
        """Each of its cells is committed, or still locked by it and waiting to be committed."""
        for key in sorted(locked):
            lock = self._stored.locks.get(key)
            pending = lock is not None and lock.start_timestamp == record.start_ts
            if key in by_key or pending or self._may_be_collected(key, record.commit_ts):
                continue
            text = f"{record}, committed at {record.commit_ts}, has no record on {shown_key(key)}"
            self._report.add(Invariant.ATOMIC, text, record, key=key)

    def _check_values(
        self, record: TransactionRecord, commits: list[StoredCommit], locked: set[CellKey]
    ) -> None:
        writes = record.writes()
        for commit in commits:
            if commit.key not in locked:
                continue
            due = writes.get(commit.key, _LOCK_ONLY)
            found = _meaning(commit, self._stored)
            if found != due:
                text = (
                    f"{record} wrote {_shown(due)} to {shown_key(commit.key)}; "
                    f"stored is {_shown(found)}"
                )
                self._report.add(Invariant.RIGHT_VALUE, text, record, key=commit.key)

    def _may_be_collected(self, key: CellKey, commit_ts: int) -> bool:
        return commit_ts <= self._collected_below and self._kept.get(key) != commit_ts

    def _primary(self, locked: set[CellKey]) -> CellKey:
        """The cell that decides. Those of a shared transaction are in a row of its own; its other
        cells may be locked for good, if nobody reads them or a reader may pass their locks."""
        shared = {key for key in locked if key[0] == SHARED_NAME}
        return min(shared or locked, key=self._order)

    def _order(self, key: CellKey) -> tuple[int, bytes, bytes]:
        """The order by which a transaction chooses its primary: the first of its cells."""
        table, row, column = key
        table_id = self._stored.table_ids.get(table)
        if table_id is None:
            raise InvalidArgument("tables", f"the history writes {table}, which was not passed")
        return table_id, row, column


def _kept(history: History, collected_below: int) -> dict[CellKey, int]:
    """For each cell, the commit at or below the safe point that collection has to keep, if any: not
    a deletion, nor a value that had expired by then."""
    newest: dict[CellKey, tuple[int, bytes | None]] = {}
    for record in history:
        if record.committed and record.commit_ts <= collected_below:
            for key, value in record.writes().items():
                if record.commit_ts > newest.get(key, (0, None))[0]:
                    newest[key] = record.commit_ts, value
    return {
        key: commit_ts
        for key, (commit_ts, value) in newest.items()
        if value is not None and not _had_expired(history, key, commit_ts, collected_below)
    }


def _had_expired(history: History, key: CellKey, commit_ts: int, timestamp: int) -> bool:
    end = history.end_of(key, commit_ts)
    return end is not None and end <= timestamp


def _meaning(commit: StoredCommit, stored: StoredCells) -> object:
    """The value that a record gives its cell; None for a deletion; `_LOCK_ONLY` for a lock."""
    kind = commit.record.kind
    if kind is RecordKind.LOCK_ONLY:
        return _LOCK_ONLY
    return None if kind is RecordKind.DELETE else stored.value(commit)


def _shown(meaning: object) -> str:
    if meaning is _LOCK_ONLY:
        return "only a lock"
    return shown_value(meaning) if isinstance(meaning, bytes) else "a deletion"
