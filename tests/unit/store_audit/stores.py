"""Short notation for stored cells: one table "t" with id 7, one column "v" unless named."""

from __future__ import annotations

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.v1 import cells_pb2
from percolator.v1.cells_pb2 import Cell
from tests.isolation.checker import WatchedColumns
from tests.isolation.history import History
from tests.isolation.store_audit import Audit, StoredTable, audit
from tests.unit.isolation.histories import cell

TABLE_ID = 7
PUT, DATA = RecordKind.PUT, RecordKind.PUT_IN_DATA
DELETE, LOCK_ONLY = RecordKind.DELETE, RecordKind.LOCK_ONLY


def _cell(space: cells_pb2.Space, name: str, timestamp: int, value: bytes) -> Cell:
    _, row, column = cell(name)
    return Cell(space=space, row=row, column=column, timestamp=timestamp, value=value)


def commit(
    name: str,
    start_ts: int,
    commit_ts: int,
    value: str = "",
    kind: RecordKind = PUT,
    last_change: int | None = None,
) -> Cell:
    record = WriteRecord(start_ts, kind, value.encode(), last_change)
    return _cell(cells_pb2.SPACE_WRITE, name, commit_ts, record.encode())


def lock(
    name: str,
    start_ts: int,
    primary: str,
    *,
    value: str = "",
    kind: RecordKind = PUT,
    table_id: int = TABLE_ID,
) -> Cell:
    _, row, column = cell(primary)
    record = LockRecord(
        start_ts,
        start_ts + 1,
        3000,
        kind,
        b"",
        CellAddress(table_id, row, column),
        value.encode(),
    )
    return _cell(cells_pb2.SPACE_LOCK, name, 0, record.encode())


def data(name: str, start_ts: int, value: str) -> Cell:
    return _cell(cells_pb2.SPACE_DATA, name, start_ts, value.encode())


def marker(name: str, start_ts: int) -> Cell:
    return _cell(cells_pb2.SPACE_ROLLBACK, name, start_ts, b"")


def notification(name: str, timestamp: int, observer: str = "index") -> Cell:
    stored = _cell(cells_pb2.SPACE_NOTIFY, name, timestamp, b"")
    stored.qualifier = observer.encode()
    return stored


def audited(
    *cells: Cell,
    history: History | None = None,
    complete: bool = True,
    observers: tuple[WatchedColumns, ...] = (),
    timestamp_max: int | None = None,
    collected_below: int = 0,
    collection_finished: bool = False,
) -> Audit:
    return audit(
        [StoredTable(TABLE_ID, "t", cells)],
        history=history,
        history_is_complete=complete,
        observers=observers,
        timestamp_max=timestamp_max,
        collected_below=collected_below,
        collection_finished=collection_finished,
    )
