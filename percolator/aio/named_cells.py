"""Which stored cells the keys and columns of a caller mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from percolator import codecs
from percolator.aio.moment import Moment
from percolator.arguments import require_table
from percolator.errors import CellAddress, InvalidArgument, SchemaError, UsageError
from percolator.routing.table_info import TableInfo
from percolator.schema import Column, Family, Readable, Table, encoded_key, encoded_prefix

K = TypeVar("K")

Columns = Sequence[Column[Any] | Family[Any]]
Range = tuple[bytes, bytes]


class NamedCells(Moment):
    """Tables, keys and columns, as they are stored at one instant."""

    def _known_address(self, row: object, column: Readable[Any]) -> CellAddress | None:
        """The cell's address, if its table was used before."""
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        table = column.table
        info = self._bound(table.name)
        if info is None:
            return None
        if info.codecs.readable.get(column.name) is not column:
            info.codecs.require_readable(column)
        return CellAddress(info.table_id, self._row(table, row, column), column.name)

    async def _address(self, row: object, column: Readable[Any], deadline: float) -> CellAddress:
        table = column.table
        info = await self._info(table, deadline)
        info.codecs.require_readable(column)
        return CellAddress(info.table_id, self._row(table, row, column), column.name)

    async def _info(self, table: Table[Any], deadline: float) -> TableInfo:
        require_table(table)
        return self._bound(table.name) or self._bind(await self._engine.table(table, deadline))

    def _row(self, table: Table[Any], key: object, column: Readable[Any] | None = None) -> bytes:
        row = encoded_key(table, key, column=column)
        self._engine.require_row("row", row)
        return row

    @staticmethod
    def _names(
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

    @staticmethod
    def _range(table: Table[K], start: K | None, end: K | None, prefix: K | None) -> Range:
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
