"""Audits a store at rest: the structural invariants of its locks, commits, markers and values.

    found = audit([StoredTable(1, "accounts", cells)], history=recorder.history)
    assert found.report, str(found.report)
    report = check(recorder.history, resolve=found.stored.commit_timestamp)

It needs only the stored cells. With the history of all clients, it also finds acknowledged commits
that are missing, aborted ones that are there, and transactions that were torn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, Protocol

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    TabletLocation,
    TabletMoved,
)
from percolator.formats.records import LockRecord, RecordKind, WriteRecord, locked_column
from percolator.routing.catalog import Catalog
from percolator.schema import SHARED_NAME
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.status import from_detail
from percolator.world import Network
from tests.isolation.checker import WatchedColumns, changes_of, settled
from tests.isolation.findings import Report, shown_key, shown_value
from tests.isolation.history import CellKey, History, Outcome, TransactionRecord

# Everything that a store holds, decoded once and arranged by cell and by transaction.
#
# Cells are passed as they are stored: from a raw scan of every space of every tablet, or straight
# from the storage. They may be in any order.

# The invariants that the audit checks.
#
# c is a commit timestamp, s a start timestamp. "At rest" means that nothing is written while the
# cells are collected; locks left behind by clients that died are not a violation.


class Invariant(Enum):
    """Which rule was broken."""

    READABLE = "a stored cell is malformed"
    ONE_LOCK = "more than one lock on a cell"
    SETTLED_LOCK = "a lock beside its own commit record or rollback marker"
    ONE_RECORD = "two commit records of one transaction on a cell"
    COMMIT_ABOVE_START = "commit not above start"
    ONE_COMMIT_TIMESTAMP = "a transaction with two commit timestamps"
    COMMITTED_OR_ROLLED_BACK = "a transaction both committed and rolled back"
    PRIMARY_FIRST = "a secondary committed without its primary"
    DISJOINT_COMMITS = "overlapping transactions committed one cell"
    LAST_CHANGE = "a lock-only record that hides a change"
    VALUE_STORED = "a commit record without its value"
    VALUE_OWNED = "a value without a record or lock"
    TIMESTAMP_ISSUED = "a timestamp that the oracle has not handed out"
    COLLECTED = "history left over below the collected safe point"
    ACKNOWLEDGED = "an acknowledged commit is not in the store"
    ATOMIC = "a transaction committed in part"
    ABORTED_ABSENT = "an aborted transaction left a commit record"
    RIGHT_VALUE = "a commit record with another value than was written"
    ACCOUNTED_FOR = "a commit record that no transaction wrote"
    NOTIFIED = "a change without a notification or a run"


class Cell(Protocol):
    """A stored cell: `percolator.v1.cells_pb2.Cell`, or anything with the same attributes."""

    @property
    def space(self) -> int: ...
    @property
    def row(self) -> bytes: ...
    @property
    def column(self) -> bytes: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def value(self) -> bytes: ...
    @property
    def qualifier(self) -> bytes: ...


@dataclass(frozen=True)
class StoredTable:
    """All cells of a table, from every tablet and every space."""

    table_id: int
    name: str
    """Its name in histories."""
    cells: Iterable[Cell]


class StoredCommit(NamedTuple):
    """A write record and its place."""

    key: CellKey
    commit_ts: int
    record: WriteRecord


class StoredCells:
    """The content of a store at rest. What cannot be decoded is reported while reading."""

    def __init__(
        self,
        tables: Iterable[StoredTable],
        report: Report,
        collected: Mapping[int, int] = MappingProxyType({}),
        parts: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """`collected` has the commit timestamps of transactions of which a record was seen to be
        collected, by their start timestamps. `parts` has the start timestamps of whole shared
        transactions by those of their parts: all that a part has stored counts as the whole's."""
        self._collected = {parts.get(start, start): commit for start, commit in collected.items()}
        self._parts = parts
        self.locks: dict[CellKey, LockRecord] = {}
        self.commits: dict[CellKey, list[StoredCommit]] = {}
        """Commits by cell, ascending by commit timestamp."""
        self.commits_of: dict[int, list[StoredCommit]] = {}
        """Commits by start timestamp."""
        self.values: dict[CellKey, dict[int, bytes]] = {}
        """By cell and start timestamp: what is in the space of long values."""
        self.markers: dict[CellKey, set[int]] = {}
        """By cell: the transactions that were rolled back there."""
        self.markers_of: dict[int, list[CellKey]] = {}
        self.notifications: dict[CellKey, list[tuple[str, int]]] = {}
        """By cell: observer and timestamp."""
        self.table_ids: dict[str, int] = {}
        self._table_names: dict[int, str] = {}
        self._report = report
        for table in tables:
            self.table_ids[table.name] = table.table_id
            self._table_names[table.table_id] = table.name
            for cell in table.cells:
                self._add((table.name, cell.row, cell.column), cell)
        for commits in self.commits.values():
            commits.sort(key=lambda commit: commit.commit_ts)

    def commit_timestamp(self, record: TransactionRecord) -> int | None:
        """How a transaction ended, according to the store: a resolver for the checker.

        One record on any of its cells is enough: a secondary is never committed alone.
        """
        commits = self.commits_of.get(record.start_ts)
        return commits[0].commit_ts if commits else self._collected.get(record.start_ts)

    def primary(self, lock: LockRecord) -> CellKey | None:
        """The cell that decides the outcome of a lock; None if its table does not exist."""
        name = self._table_names.get(lock.primary.table_id)
        return None if name is None else (name, lock.primary.row, lock.primary.column)

    def value(self, commit: StoredCommit) -> bytes | None:
        """The value of a put record: inlined, or at its start timestamp among the long values."""
        kind = commit.record.kind
        if kind is kind.PUT:
            return commit.record.value
        return self.values.get(commit.key, {}).get(commit.record.start_timestamp)

    def _add(self, key: CellKey, cell: Cell) -> None:
        self._report.looked_at["cells"] += 1
        try:
            self._decode(key, cell)
        except InvariantViolation as error:
            self._report.add(Invariant.READABLE, f"{shown_key(key)}: {error}", key=key)

    def _decode(self, key: CellKey, cell: Cell) -> None:
        space, timestamp = cell.space, cell.timestamp
        if cell.qualifier and space != cells_pb2.SPACE_NOTIFY:
            raise InvariantViolation("only a notification names an observer")
        match space:
            case cells_pb2.SPACE_LOCK:
                lock = LockRecord.decode(cell.value)
                start = self._whole(lock.start_timestamp)
                self._add_lock(key, timestamp, replace(lock, start_timestamp=start))
            case cells_pb2.SPACE_WRITE:
                record = WriteRecord.decode(cell.value)
                record = replace(record, start_timestamp=self._whole(record.start_timestamp))
                commit = StoredCommit(key, timestamp, record)
                self.commits.setdefault(key, []).append(commit)
                self.commits_of.setdefault(commit.record.start_timestamp, []).append(commit)
            case cells_pb2.SPACE_DATA:
                self.values.setdefault(key, {})[self._whole(timestamp)] = cell.value
            case cells_pb2.SPACE_ROLLBACK:
                start = self._whole(timestamp)
                self.markers.setdefault(key, set()).add(start)
                self.markers_of.setdefault(start, []).append(key)
            case cells_pb2.SPACE_NOTIFY:
                observer = cell.qualifier.decode("utf-8", "replace")
                self.notifications.setdefault(key, []).append((observer, timestamp))
            case _:
                raise InvariantViolation(f"there is no space {space}")

    def _whole(self, start: int) -> int:
        return self._parts.get(start, start)

    def _add_lock(self, key: CellKey, timestamp: int, lock: LockRecord) -> None:
        if timestamp:
            raise InvariantViolation(f"a lock is stored at timestamp {timestamp}, not 0")
        other = self.locks.setdefault(key, lock)
        if other is not lock:
            text = (
                f"{shown_key(key)} is locked by transactions {other.start_timestamp} "
                f"and {lock.start_timestamp}"
            )
            self._report.add(Invariant.ONE_LOCK, text, key=key)


# Reads every stored cell of some tables from their tablet servers, for the audit.
#
# The cluster has to be at rest: two readings in a row have to be equal. Otherwise, something that
# was collected between the reading of two spaces would look like a commit without its value. A
# tablet that is not where the map says is an error, and the reading starts again: half of a store
# proves nothing.

_SPACES = (
    cells_pb2.SPACE_LOCK,
    cells_pb2.SPACE_WRITE,
    cells_pb2.SPACE_DATA,
    cells_pb2.SPACE_ROLLBACK,
    cells_pb2.SPACE_NOTIFY,
)
_CALL_SECONDS = 20.0
_READINGS_MAX = 20


async def stored_tables(
    network: Network, catalog: Catalog, names: Sequence[str], deadline: float
) -> list[StoredTable]:
    """All cells of all spaces of these tables. Raises the error if one cannot be read."""
    former: list[StoredTable] | None = None
    for _ in range(_READINGS_MAX):
        try:
            stored = await _read(network, catalog, names, deadline)
        except TabletMoved:
            former = None
            continue
        if stored == former:
            return stored
        former = stored
    raise NotReady("the store does not come to rest")


async def _read(
    network: Network, catalog: Catalog, names: Sequence[str], deadline: float
) -> list[StoredTable]:
    stored = []
    for name in names:
        info = await catalog.table(name, deadline)
        cells: list[cells_pb2.Cell] = []
        for tablet in await catalog.all_tablets(info.table_id, deadline):
            for space in _SPACES:
                cells += await _cells(network, tablet, info.schema.version, space)
        stored.append(StoredTable(info.table_id, name, cells))
    return stored


async def _cells(
    network: Network, tablet: TabletLocation, schema_version: int, space: cells_pb2.Space
) -> list[cells_pb2.Cell]:
    target = pb.TabletTarget(
        tablet_id=tablet.tablet_id, epoch=tablet.epoch, schema_version=schema_version
    )
    request = pb.ScanCellsRequest(target=target, space=space)
    request.range.start, request.range.end = tablet.start, tablet.end
    found: list[cells_pb2.Cell] = []
    scan = network.stream(tablet.address, methods.SCAN_CELLS)
    async for page in scan(request, _CALL_SECONDS):
        if page.HasField("error"):
            raise from_detail(page.error)
        found.extend(page.cells)
    return found


# Rules of one cell: its lock, its commits, its long values, its markers.


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


# Rules between a store and the history of the clients that wrote it.
#
# A commit that was acknowledged is there, at the timestamp and with the values that the client
# knows. An aborted transaction is not there. One of unknown outcome is there as a whole, or not at
# all.

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


# No change of a watched cell is forgotten: it has a notification, or a committed run above it.
#
# This holds whenever the store is at rest, even before observers have finished. A cell that is
# still locked needs no notification yet: the lock is the hint, and committing the cell writes it.


def check_notified(
    stored: StoredCells, history: History, observers: Iterable[WatchedColumns], report: Report
) -> None:
    """Adds to `report` every change for which no observer will ever run."""
    last_runs: dict[tuple[str, CellKey], int] = {}
    for record in history:
        for trigger in record.triggers if record.committed else ():
            name = record.observer, trigger
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


# Rules between a store and the timestamps of its cluster: oracle and collection.


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


# Rules across the cells of one transaction, as far as the store alone can tell.


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


__all__ = ["Audit", "Cell", "Invariant", "StoredCells", "StoredTable", "audit"]


class Audit(NamedTuple):
    """Findings of the audit, and the stored contents."""

    report: Report
    stored: StoredCells


def audit(
    tables: Iterable[StoredTable],
    *,
    history: History | None = None,
    history_is_complete: bool = False,
    observers: Iterable[WatchedColumns] = (),
    timestamp_max: int | None = None,
    collected_below: int = 0,
    collection_finished: bool = False,
    collected: Mapping[int, int] = MappingProxyType({}),
    parts: Mapping[int, int] = MappingProxyType({}),
    left_out: Collection[int] = (),
    violations_max: int = 100,
) -> Audit:
    """Audits all tables together, because transactions may span several.

    `history_is_complete` says that no other client ever wrote. `timestamp_max` is the oracle's
    durable mark. Below `collected_below`, the safe point, history may be collected, and if
    `collection_finished`, it must be. `collected` has the commit timestamps of transactions of
    which a record was seen to be collected, by their start timestamps: the store cannot tell.
    `parts` has the start timestamps of the parts of shared transactions that were chosen to be
    committed, and those under which the history knows the whole. `left_out` has the ids of other
    tables, such as dropped ones that are still stored: transactions may have their primaries there.
    """
    report = Report(violations_max)
    stored = StoredCells(tables, report, collected, parts)
    check_cells(stored, report)
    check_transactions(stored, collected_below, left_out, report)
    if timestamp_max is not None:
        check_issued(stored, timestamp_max, report)
    if collection_finished:
        check_collected(stored, collected_below, report)
    if history is not None:
        final = settled(history, stored.commit_timestamp)
        check_against_history(stored, final, collected_below, report)
        check_notified(stored, final, observers, report)
        if history_is_complete:
            check_accounted_for(stored, final, report)
    return Audit(report, stored)
