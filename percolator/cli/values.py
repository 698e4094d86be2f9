"""Rows, values and stored cells as people read and write them, by the codecs in a table's schema.

A value without a codec is text, or hex if it is not text. `--as` names another type.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import Any, NamedTuple

from percolator import aio, codecs
from percolator.aio.database import Database
from percolator.codecs import Codec, readable
from percolator.codecs.names import CodecNames
from percolator.codecs.readable import row_bytes, row_text
from percolator.errors import CellAddress, InvalidArgument, SchemaError
from percolator.formats.records import (
    LockRecord,
    RecordKind,
    WriteRecord,
    acknowledging_observer,
    locked_column,
    observed_column,
)
from percolator.routing.catalog import TableInfo
from percolator.schema import Column, Table
from percolator.timestamps import in_json
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import Cell, Space


class ValueType(StrEnum):
    """How stored bytes are read and written on the command line."""

    TEXT = "text"
    RAW = "raw"
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    TIMESTAMP = "timestamp"
    DATE = "date"
    UUID = "uuid"
    JSON = "json"


class Forms:
    """The forms of a table's rows and values."""

    def __init__(self, names: CodecNames, kind: ValueType | None = None) -> None:
        """`kind`: the type of all values; None if each column has its own."""
        self._names = names
        self._kind = kind
        self._key = readable.key_codec(names.key)

    def codec(self, column: bytes) -> Codec[Any] | None:
        """The codec of the column's values; None if they are text or unknown."""
        name = self._names.columns.get(column, "") if self._kind is None else self._kind.value
        return readable.value_codec(name)

    def to_write(self, table: Table[bytes], column: bytes) -> Column[bytes]:
        """The column, for writing bytes. A type that was named is declared with it, and refused if
        the column has another one."""
        codec = codecs.stored if self._kind is None else readable.for_bytes(self._kind.value)
        return table.column(column, codec)

    def to_compare(self, table: Table[bytes], column: bytes) -> Column[bytes]:
        """The column, for conditions on bytes. Without a codec, bytes are compared as they are."""
        name = self._names.columns.get(column, "") if self._kind is None else self._kind.value
        return table.column(column, readable.for_bytes(name or codecs.raw.name))

    def row(self, field: str, text: str) -> bytes:
        """The row that a person means. Raises `InvalidArgument`."""
        return readable.key_bytes(field, self._key, text)

    def end_of_range(self, field: str, text: str) -> bytes:
        """The row of an option that may be left out: the range has no such end."""
        return self.row(field, text) if text else b""

    def prefix(self, field: str, text: str) -> bytes:
        """The beginning of rows that a person means. Raises `InvalidArgument`."""
        return readable.prefix_bytes(field, self._key, text)

    def row_text(self, row: bytes) -> str:
        """A row on one line. An end of a range need not be a key: such bytes are shown as hex."""
        return readable.key_text(self._key, row)

    def row_data(self, row: bytes) -> object:
        return readable.key_data(self._key, row)

    def value(self, column: str, text: str) -> bytes:
        """The stored bytes of a value. Raises `InvalidArgument` about the column."""
        codec = self.codec(row_bytes("cells", column))
        return readable.value_bytes(column, codec, text)

    def value_text(self, column: bytes, value: bytes) -> str:
        return readable.value_text(self.codec(column), value)

    def value_data(self, column: bytes, value: bytes) -> object:
        return readable.value_data(self.codec(column), value)


UNKNOWN = Forms(CodecNames())
"""The forms of a table that is not known, or no longer."""


class NamedTable(NamedTuple):
    """A table as people know it."""

    name: str
    forms: Forms


def named_tables(tables: Iterable[pb.Table]) -> dict[int, NamedTable]:
    """The tables by their ids."""
    return {one.table_id: NamedTable(one.name, Forms(CodecNames.of(one.codecs))) for one in tables}


async def table_info(database: aio.Database, table: str, timeout_seconds: float) -> TableInfo:
    """The table. Raises `SchemaError` if there is none."""
    engine = database.internal.engine
    try:
        named = Table(table, key=codecs.stored)
    except SchemaError as error:
        raise InvalidArgument("table", error.message) from error
    return await engine.table(named, engine.now() + timeout_seconds)


async def forms_of(
    database: aio.Database, table: str, kind: ValueType | None, timeout_seconds: float
) -> Forms:
    """The forms of a table. Raises `SchemaError` if there is none."""
    info = await table_info(database, table, timeout_seconds)
    return Forms(info.codecs.names, kind)


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

    Only the cells of one page are read at one time.
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
