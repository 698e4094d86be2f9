"""Everything that a store holds, decoded once and arranged by cell and by transaction.

Cells are passed as they are stored: from a raw scan of every space of every tablet, or straight
from the storage. They may be in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from percolator.errors import InvariantViolation, NotReady, TabletLocation, TabletMoved
from percolator.formats.records import LockRecord, WriteRecord
from percolator.routing.catalog import Catalog
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.status import from_detail
from percolator.world import Network
from tests.isolation.findings import Report, shown_key
from tests.isolation.history import CellKey, TransactionRecord

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
