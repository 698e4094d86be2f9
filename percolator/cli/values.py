"""Rows and values of one table as people read and write them, by the codecs in its schema.

What has no codec there is text, or hex if it is not text. `--as` names another type.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from percolator import aio, codecs, named_codecs
from percolator.codec_names import CodecNames
from percolator.codecs import Codec
from percolator.errors import InvalidArgument, SchemaError
from percolator.routing.table_info import TableInfo
from percolator.row_text import row_bytes
from percolator.schema import Column, Table
from percolator.v1 import master_pb2 as pb


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
    """What the rows and values of a table look like."""

    def __init__(self, names: CodecNames, kind: ValueType | None = None) -> None:
        """`kind`: the type of all values; None if each column has its own."""
        self._names = names
        self._kind = kind
        self._key = named_codecs.key_codec(names.key)

    def codec(self, column: bytes) -> Codec[Any] | None:
        """What reads and writes the values of the column; None if they are text or unknown."""
        name = self._names.columns.get(column, "") if self._kind is None else self._kind.value
        return named_codecs.value_codec(name)

    def to_write(self, table: Table[bytes], column: bytes) -> Column[bytes]:
        """The column, for writing bytes. A type that was named is declared with it, and refused if
        the column has another one."""
        codec = codecs.stored if self._kind is None else _named(self._kind.value)
        return table.column(column, codec)

    def row(self, field: str, text: str) -> bytes:
        """The row that a person means. Raises `InvalidArgument`."""
        return named_codecs.key_bytes(field, self._key, text)

    def end_of_range(self, field: str, text: str) -> bytes:
        """The same for an option that may be left out: the range has no such end."""
        return self.row(field, text) if text else b""

    def prefix(self, field: str, text: str) -> bytes:
        """The beginning of rows that a person means. Raises `InvalidArgument`."""
        return named_codecs.prefix_bytes(field, self._key, text)

    def row_text(self, row: bytes) -> str:
        """A row on one line. An end of a range need not be a key: such bytes are shown as hex."""
        return named_codecs.key_text(self._key, row)

    def row_data(self, row: bytes) -> object:
        return named_codecs.key_data(self._key, row)

    def value(self, column: str, text: str) -> bytes:
        """The stored bytes of a value. Raises `InvalidArgument` about the column."""
        codec = self.codec(row_bytes("cells", column))
        return named_codecs.value_bytes(column, codec, text)

    def value_text(self, column: bytes, value: bytes) -> str:
        return named_codecs.value_text(self.codec(column), value)

    def value_data(self, column: bytes, value: bytes) -> object:
        return named_codecs.value_data(self.codec(column), value)


UNKNOWN = Forms(CodecNames())
"""The forms of a table that is not known, or no longer."""


class NamedTable(NamedTuple):
    """A table as people know it."""

    name: str
    forms: Forms


def named_tables(tables: Iterable[pb.Table]) -> dict[int, NamedTable]:
    """The tables by their ids."""
    return {one.table_id: NamedTable(one.name, Forms(CodecNames.of(one.codecs))) for one in tables}


def _named(name: str) -> Codec[bytes]:
    return Codec(name, bytes, bytes)


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
