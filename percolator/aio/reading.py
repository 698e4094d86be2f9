"""The reads of snapshots and transactions: cells, rows and ranges, all at their timestamp."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, overload

from percolator import codecs
from percolator.aio.moment import Moment
from percolator.arguments import (
    listed,
    listed_cells,
    listed_columns,
    require_bool,
    require_table,
    require_whole,
)
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    SchemaError,
    UsageError,
)
from percolator.protocol.known_row import KnownRow, known_rows
from percolator.protocol.read import read_past_locks, read_rows
from percolator.protocol.scan import FoundRow, own_value, scan_pages
from percolator.protocol.write_set import WriteSet
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import FoundCell, RangeRequest, RowRequest, RowResult, wants
from percolator.routing.pending_cell import CellAnswer
from percolator.schema import (
    Column,
    Family,
    Readable,
    Row,
    Table,
    decoded_key,
    decoded_value,
    encoded_key,
    encoded_prefix,
)
from percolator.v1.tabletserver_pb2 import RowRead

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K")

Columns = Sequence[Column[Any] | Family[Any]]
_NOTHING = FoundCell(0, None)


class Reading(Moment):
    """Reads at one timestamp, which is fetched with the first read."""

    _own: WriteSet | None = None
    """The transaction's own writes, overlaid on what it reads."""
    _known: KnownRow | None = None
    """Cells that are known as of its timestamp, and so need not be read."""

    @property
    def _cells_max(self) -> int:
        """The most cells that may be read at once."""
        return self._engine.limits.get_many_cells_max

    # ------------------------------------------------------------------ reads

    @overload
    async def get(
        self, row: K, column: Readable[T, K], *, timeout: float | None = None
    ) -> T | None: ...
    @overload
    async def get(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    async def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell, or `default` if it has none.

        >>> await tx.get("bob", balance, default=0)
        """
        deadline = self._deadline(timeout)
        address = self._known_address(row, column) or await self._address(row, column, deadline)
        if self._own is not None and self._own.cells:
            written = own_value(self._own, address)
            if written is not None:
                value = written.value
                return default if value is None else decoded_value(column, row, value)
        start = self._start or await self._begin_at(address, deadline)
        table_id, row_bytes, name = address
        found: CellAnswer
        if self._known is not None and self._known.has(address):
            found = self._known[name]
        else:
            self.statistics.round_trips += 1
            self.statistics.rows_read += 1
            found = await self._engine.cells.read_cell(table_id, row_bytes, name, start, deadline)
        if isinstance(found, RowResult):
            found = await self._past_locks(address, found, start, deadline)
        if found is None or found.value is None:
            return default
        return decoded_value(column, row, found.value)

    def _begin_at(self, address: CellAddress, deadline: float) -> Awaitable[int]:
        """Fetches the timestamp, in order to read this cell."""
        return self._begin(deadline)

    async def _past_locks(
        self, address: CellAddress, answer: RowResult, start: int, deadline: float
    ) -> FoundCell | None:
        """Resolves the lock on a cell, and reads the cell again."""
        table_id, row, name = address
        request = RowRequest(table_id, RowRead(row=row, columns=(name,), timestamp=start))
        answers = [answer]
        await read_past_locks(
            self._env,
            self._engine.cleanup,
            (request,),
            answers,
            start,
            deadline,
            self.statistics,
        )
        return answers[0].found.get(name)

    @overload
    async def get_many(
        self, table: Iterable[tuple[object, Readable[T]]], /, *, timeout: float | None = None
    ) -> list[T | None]: ...
    @overload
    async def get_many(
        self, table: Iterable[tuple[object, Readable[Any]]], /, *, timeout: float | None = None
    ) -> list[Any]: ...
    @overload
    async def get_many(
        self,
        table: Table[K],
        rows: Iterable[K],
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Row[K]]: ...
    async def get_many(
        self,
        table: Table[Any] | Iterable[tuple[object, Readable[Any]]],
        rows: Iterable[Any] | None = None,
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Reads many rows of a table in one round trip: one `Row` for each key, in the same order.

        Without `columns`, it reads all columns; a row that does not exist is empty, and false. With
        an empty list, it reads none, and all rows are empty. Given pairs of a row and a column
        instead, of any tables, it returns their values, in the same order; None if there is none.

        >>> bob, joe = await tx.get_many(accounts, ["bob", "joe"], [balance])
        >>> left, state = await tx.get_many([("bob", balance), (17, order_state)])
        """
        if isinstance(table, Table):
            return await self._get_rows(table, rows, columns, timeout)
        if rows is not None or columns is not None:
            require_table(table)  # raises
        return await self._get_cells(table, timeout)

    async def _get_cells(
        self, cells: Iterable[tuple[object, Readable[Any]]], timeout: float | None
    ) -> list[Any]:
        deadline = self._deadline(timeout)
        pairs = listed_cells(cells, self._cells_max)
        found: dict[CellAddress, bytes | None] = {}
        addresses: list[CellAddress] = []
        wanted: dict[tuple[int, bytes], dict[bytes, None]] = {}
        for row, column in pairs:
            address = self._known_address(row, column) or await self._address(row, column, deadline)
            addresses.append(address)
            written = None if self._own is None else own_value(self._own, address)
            if written is None and self._known is not None and self._known.has(address):
                written = self._known[address.column] or _NOTHING
            if written is None:
                wanted.setdefault(address[:2], {})[address.column] = None
            else:
                found[address] = written.value
        if wanted:
            start = self._start or await self._begin(deadline)
            requests = [
                RowRequest(table_id, RowRead(row=row, columns=names, timestamp=start))
                for (table_id, row), names in wanted.items()
            ]
            engine = self._engine
            answers = await read_rows(
                engine.env, engine.cleanup, requests, start, deadline, self.statistics
            )
            for (table_id, row), answer in zip(wanted, answers, strict=True):
                for name, cell in answer.found.items():
                    found[CellAddress(table_id, row, name)] = cell.value
        return [
            None if (value := found.get(address)) is None else decoded_value(column, row, value)
            for address, (row, column) in zip(addresses, pairs, strict=True)
        ]

    async def _get_rows(
        self,
        table: Table[K],
        rows: Iterable[K] | None,
        columns: Columns | None,
        timeout: float | None,
    ) -> list[Row[K]]:
        deadline = self._deadline(timeout)
        info = await self._info(table, deadline)
        columns = None if columns is None else listed_columns(columns)
        names, prefixes = self._names(table, columns)
        info.codecs.require(table, columns)
        keys = listed(rows, "rows", self._cells_max)
        if len(keys) * max(len(names or ()), 1) > self._cells_max:
            raise InvalidArgument("rows", f"more than {self._cells_max} cells at once")
        encoded = [self._row(table, key) for key in keys]
        if not (names is None or names or prefixes):
            return [Row(table, key, {}, columns, info.codecs) for key in keys]
        start = self._start or await self._begin(deadline)
        known = known_rows(self._known, info.table_id, encoded, None if prefixes else names)
        requests = [
            RowRequest(
                info.table_id,
                RowRead(
                    row=row,
                    columns=names or (),
                    all_columns=names is None or bool(prefixes),
                    timestamp=start,
                    column_prefixes=prefixes,
                ),
            )
            for row in encoded
            if row not in known
        ]
        engine = self._engine
        answers = await read_rows(
            engine.env, engine.cleanup, requests, start, deadline, self.statistics
        )
        read, found = iter(answers), list[Row[K]]()
        for key, row in zip(keys, encoded, strict=True):
            stored = known[row] if row in known else next(read).found
            cells = {
                column: cell.value
                for column, cell in stored.items()
                if cell is not None and cell.value is not None
            }
            if self._own is not None and self._own.cells:
                self._lay_over(info.table_id, row, names, prefixes, cells)
            found.append(Row(table, key, cells, columns, info.codecs))
        return found

    async def _versions(
        self, cells: Iterable[CellAddress], deadline: float
    ) -> dict[CellAddress, FoundCell]:
        columns: dict[tuple[int, bytes], list[bytes]] = {}
        for table_id, row, column in cells:
            columns.setdefault((table_id, row), []).append(column)
        start = self._start or await self._begin(deadline)
        requests = [
            RowRequest(
                table_id, RowRead(row=row, columns=names, timestamp=start, report_deletes=True)
            )
            for (table_id, row), names in columns.items()
        ]
        answers = await read_rows(
            self._env, self._engine.cleanup, requests, start, deadline, self.statistics
        )
        self._require_open()
        return {
            CellAddress(table_id, row, column): cell
            for (table_id, row), answer in zip(columns, answers, strict=True)
            for column, cell in answer.found.items()
        }

    def scan(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        columns: Columns | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Row[K]]:
        """Yields the rows from `start` (inclusive) to `end` (exclusive), in order or in reverse.

        With a `prefix`, only rows whose keys begin with it: `start` says where to continue in them.
        The time-out applies to each page. Rows without a value in `columns` are left out.

        >>> async for row in snapshot.scan(accounts, prefix="b", columns=[balance]):
        ...     print(row.key, row[balance])
        """
        return self._scan(table, start, end, prefix, columns, reverse, limit, timeout)

    async def _scan(
        self,
        table: Table[K],
        start: K | None,
        end: K | None,
        prefix: K | None,
        columns: Columns | None,
        reverse: bool,
        limit: int | None,
        timeout: float | None,
    ) -> AsyncGenerator[Row[K], None]:
        pages = self.scan_pages(
            table,
            start=start,
            end=end,
            prefix=prefix,
            columns=columns,
            reverse=reverse,
            limit=limit,
            timeout=timeout,
        )
        async with aclosing(pages):
            async for page in pages:
                for row in page:
                    # Rows that arrived with this page must not be used after the end.
                    self.require_not_ended()
                    yield row

    async def scan_pages(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        columns: Columns | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[Row[K]], None]:
        """As `scan`, but yields the pages in which the rows arrive."""
        columns = None if columns is None else listed_columns(columns)
        pages = self._found_pages(
            table, start, end, prefix, columns, reverse=reverse, limit=limit, timeout=timeout
        )
        async with aclosing(pages):
            async for page in pages:
                info = await self._info(table, self._deadline(timeout))  # known: a page came
                yield [_row(table, key, cells, columns, info) for key, cells in page]

    async def _found_pages(
        self,
        table: Table[K],
        start: K | None,
        end: K | None,
        prefix: K | None,
        columns: Columns | None,
        *,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[FoundRow], None]:
        """As `scan_pages`, but yields stored rows and cells."""
        deadline = self._deadline(timeout)
        if limit is not None:
            require_whole(limit, "limit", least=0)
        require_bool(reverse, "reverse")
        require_table(table)
        first, last = self._range(table, start, end, prefix)
        names, prefixes = self._names(table, columns)
        if not (names is None or names or prefixes):
            # Rows without a value in them are left out, so there would never be any.
            raise InvalidArgument("columns", "is empty; omit it to read all columns")
        info = await self._info(table, deadline)
        info.codecs.require(table, columns)
        if limit == 0 or (last and first >= last):
            return
        request = RangeRequest(
            info.table_id,
            first,
            last,
            None if names is None else tuple(names),
            self._start or await self._begin(deadline),
            reverse,
            limit or 0,
            prefixes=prefixes,
        )
        seconds = timeout or self._timeout_seconds
        left = limit
        engine = self._engine
        pages = scan_pages(engine.env, engine.cleanup, request, self._own, seconds, self.statistics)
        async with aclosing(pages):
            async for page in pages:
                self._require_open()
                rows = page[:left]
                if rows:
                    yield rows
                if left is not None:
                    left -= len(rows)
                    if left <= 0:
                        return

    # ------------------------------------------------------------------ arguments

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
        if len(row) > self._engine.limits.row_bytes_max:
            raise InvalidArgument(
                "row", f"has {len(row)} bytes, at most {self._engine.limits.row_bytes_max}"
            )
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

    def _lay_over(
        self,
        table_id: int,
        row: bytes,
        names: list[bytes] | None,
        prefixes: tuple[bytes, ...],
        cells: dict[bytes, bytes],
    ) -> None:
        """Overlays the transaction's own writes to one row on what was read."""
        own = self._own
        if own is None:
            return
        if names is None or prefixes:
            mine = [c for t, r, c in own.cells if t == table_id and r == row]
            names = [name for name in mine if wants(name, names, prefixes)]
        for name in names:
            written = own_value(own, CellAddress(table_id, row, name))
            if written is None:
                continue
            if written.value is None:
                cells.pop(name, None)
            else:
                cells[name] = written.value


Range = tuple[bytes, bytes]


def _row(
    table: Table[K],
    row: bytes,
    cells: dict[bytes, Any],
    columns: Columns | None,
    info: TableInfo,
) -> Row[K]:
    values = {column: found.value for column, found in cells.items()}
    return Row(table, decoded_key(table, row), values, columns, info.codecs)


def _end(row: bytes) -> bytes:
    """Refuses an empty row as the end of a range: it would mean "to the last row"."""
    if not row:
        raise InvalidArgument("end", "is empty, and no row is before the empty row")
    return row
