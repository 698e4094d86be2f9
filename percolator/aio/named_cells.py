"""Which stored cells the columns and keys of a caller mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import Column, Family, Table, encoded_key, encoded_prefix

K = TypeVar("K")

Columns = Sequence[Column[Any] | Family[Any]]
Range = tuple[bytes, bytes]


def stored_names(
    table: Table[Any], columns: Columns | None
) -> tuple[list[bytes] | None, tuple[bytes, ...]]:
    """The names of the columns, None for all, and the prefixes of the families."""
    if columns is None:
        return None, ()
    for column in columns:
        if column.table.name != table.name:
            raise SchemaError(f"{column!r} is not a column of table {table.name!r}")
    names = [column.name for column in columns if isinstance(column, Column)]
    return names, tuple(column.prefix for column in columns if isinstance(column, Family))


def stored_range(table: Table[K], start: K | None, end: K | None, prefix: K | None) -> Range:
    """The rows from the first one, and before the last one: empty if there is no last one."""
    first = b"" if start is None else encoded_key(table, start, field="start")
    last = b"" if end is None else _end(encoded_key(table, end, field="end"))
    if prefix is not None:
        begin = encoded_prefix(table, prefix)
        after = codecs.after_prefix(begin)
        first = max(first, begin)
        last = min(last, after) if last and after else last or after
    return first, last


def _end(row: bytes) -> bytes:
    """Refuses an empty row as the end of a range: it would mean "to the last row"."""
    if not row:
        raise InvalidArgument("end", "is empty, and no row is before the empty row")
    return row
