"""Cells as they are stored, including locks and markers, for `--raw` and `locks`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing

from percolator.aio.database import Database
from percolator.errors import CellAddress
from percolator.formats.hidden_cells import (
    acknowledging_observer,
    locked_column,
    observed_column,
)
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.routing.table_info import TableInfo
from percolator.row_text import row_text
from percolator.timestamps import in_json
from percolator.v1.cells_pb2 import Cell, Space

SPACES = {
    Space.SPACE_LOCK: "lock",
    Space.SPACE_WRITE: "write",
    Space.SPACE_DATA: "data",
    Space.SPACE_ROLLBACK: "rollback",
    Space.SPACE_NOTIFY: "notify",
}


async def stored_cells(
    database: Database,
    table: TableInfo,
    spaces: Sequence[Space],
    start: bytes = b"",
    end: bytes = b"",
    timeout_seconds: float = 10.0,
) -> AsyncGenerator[Cell, None]:
    """Yields cells, one space after the other.

    Only the cells of one page are read at the same moment.
    """
    contents = database.internal.engine.contents
    for space in spaces:
        async with aclosing(contents.cells(table, space, start, end, timeout_seconds)) as cells:
            async for cell in cells:
                yield cell


async def first_cells(
    database: Database,
    table: TableInfo,
    spaces: Sequence[Space],
    start: bytes,
    end: bytes,
    columns: Collection[bytes],
    limit: int,
    timeout_seconds: float,
) -> list[Cell]:
    """The first cells by row and column, of any of the spaces."""
    found: list[Cell] = []
    for space in spaces:
        # `limit` cells of each space: the first `limit` of all spaces are among them.
        here: list[Cell] = []
        async for cell in stored_cells(database, table, [space], start, end, timeout_seconds):
            if not columns or cell.column in columns:
                here.append(cell)
            if len(here) >= limit:
                break
        found += here
    found.sort(key=lambda cell: (cell.row, cell.column, cell.space, -cell.timestamp))
    return found[:limit]


def described(cell: Cell) -> dict[str, object]:
    """The fields of the record in a cell, without the value that it may hold."""
    if cell.space == Space.SPACE_LOCK:
        lock = LockRecord.decode(cell.value)
        return {
            "kind": kind_of(cell.column, lock.kind),
            "start_timestamp": in_json(lock.start_timestamp),
            "min_commit_timestamp": in_json(lock.min_commit_timestamp),
            "ttl_seconds": lock.ttl_milliseconds / 1000,
            "session": lock.session.hex() or None,
            "primary": primary_text(lock),
        }
    if cell.space == Space.SPACE_WRITE:
        write = WriteRecord.decode(cell.value)
        return {
            "kind": kind_of(cell.column, write.kind),
            "commit_timestamp": in_json(cell.timestamp),
            "start_timestamp": in_json(write.start_timestamp),
        }
    about: dict[str, object] = {"timestamp": in_json(cell.timestamp)}
    if cell.qualifier:
        about["observer"] = cell.qualifier.decode(errors="backslashreplace")
    return about


def shown_column(column: bytes) -> bytes:
    """The column that people know: the locked one, for the hidden column of a read lock."""
    locked = locked_column(column)
    return column if locked is None else locked


def column_text(column: bytes) -> str:
    """The column for people, also if it is a hidden one: what it belongs to, and for whom."""
    observed = observed_column(column)
    if observed is None:
        return row_text(shown_column(column))
    observer = acknowledging_observer(column)
    return f"{row_text(observed)}, acknowledged by {row_text(observer)}"


def kind_of(column: bytes, kind: RecordKind) -> str:
    """The kind of a lock or record in this column, as a word."""
    return kind.name.lower() if locked_column(column) is None else "read_lock"


def primary_text(lock: LockRecord) -> str:
    """The primary that a lock names."""
    table_id, row, column = lock.primary
    if locked_column(column) is None:
        return str(lock.primary)
    return f"the read lock of {CellAddress(table_id, row, shown_column(column))}"


def value_of(cell: Cell) -> bytes | None:
    """The user's value in the record; None if there is none."""
    if cell.space == Space.SPACE_LOCK:
        return LockRecord.decode(cell.value).value or None
    if cell.space == Space.SPACE_WRITE:
        return WriteRecord.decode(cell.value).value or None
    return cell.value if cell.space == Space.SPACE_DATA else None
