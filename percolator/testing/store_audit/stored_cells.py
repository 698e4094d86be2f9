"""Everything that a store holds, decoded once and arranged by cell and by transaction.

Cells are passed as they are stored: from a raw scan of every space of every tablet, or straight
from the storage. They may be in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from percolator.errors import InvariantViolation
from percolator.formats.records import LockRecord, WriteRecord
from percolator.testing.isolation.findings import Report, shown_key
from percolator.testing.isolation.history import CellKey, TransactionRecord
from percolator.testing.store_audit.invariants import Invariant
from percolator.v1 import cells_pb2


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
