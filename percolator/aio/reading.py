"""The reads of snapshots and transactions by key: cells and rows, all at their timestamp."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, overload

from percolator.aio.awaiting import must_be_awaited
from percolator.aio.named_cells import Columns, stored_names
from percolator.aio.scanning import Scanning
from percolator.arguments import (
    COLUMNS_MAX,
    listed,
    listed_cells,
    listed_columns,
    require_table,
)
from percolator.errors import CellAddress, InvalidArgument
from percolator.protocol.known_row import KnownRow, known_rows
from percolator.protocol.read import LockResolver, read_rows
from percolator.protocol.scan import own_value
from percolator.routing.cells import FoundCell, RowRequest, RowResult, wants
from percolator.routing.pending_cell import CellAnswer
from percolator.schema import Readable, Row, Table, decoded_value
from percolator.v1.tabletserver_pb2 import RowRead

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K")

_NOTHING = FoundCell(0, None)
_NO_WRITES: Mapping[bytes, bytes | None] = {}


def _portions(columns: dict[bytes, None]) -> Sequence[Iterable[bytes]]:
    """Columns of one row, as many at a time as one read may name."""
    if len(columns) <= COLUMNS_MAX:
        return (columns,)
    names = list(columns)
    return [names[at : at + COLUMNS_MAX] for at in range(0, len(names), COLUMNS_MAX)]


class Reading(Scanning):
    """Reads at one timestamp, which is fetched with the first read."""

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
    @must_be_awaited
    async def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell, or `default` if it has none.

        >>> await tx.get("bob", balance, default=0)
        """
        deadline = self._deadline(timeout)
        address = self._known_address(row, column) or await self._address(row, column, deadline)
        if self._late:
            await self._late.settle(deadline)
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
        cleanup = self._engine.cleanup
        resolver = LockResolver(self._env, cleanup, start, deadline, self.statistics)
        await resolver.read_past((request,), answers)
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
    @must_be_awaited
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
        if self._late:
            await self._late.settle(deadline)
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
                for (table_id, row), columns in wanted.items()
                for names in _portions(columns)
            ]
            engine = self._engine
            answers = await read_rows(
                engine.env, engine.cleanup, requests, deadline, self.statistics
            )
            for request, answer in zip(requests, answers, strict=True):
                for name, cell in answer.found.items():
                    found[CellAddress(request.table_id, request.read.row, name)] = cell.value
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
        names, prefixes = stored_names(table, columns)
        info.codecs.require(table, columns)
        keys = listed(rows, "rows", self._cells_max)
        if len(keys) * max(len(names or ()), 1) > self._cells_max:
            raise InvalidArgument("rows", f"more than {self._cells_max} cells at once")
        encoded = [self._row(table, key) for key in keys]
        if not (names is None or names or prefixes):
            return [Row(table, key, {}, columns, info.codecs) for key in keys]
        if self._late:
            await self._late.settle(deadline)
        start = self._start or await self._begin(deadline)
        known = known_rows(self._known, info.table_id, encoded, None if prefixes else names)
        requests = [
            RowRequest(
                info.table_id,
                RowRead(
                    row=row,
                    columns=names or (),
                    all_columns=names is None,
                    timestamp=start,
                    column_prefixes=prefixes,
                ),
            )
            for row in encoded
            if row not in known
        ]
        engine = self._engine
        answers = await read_rows(engine.env, engine.cleanup, requests, deadline, self.statistics)
        written = self._written(info.table_id, encoded, names, prefixes)
        read, found = iter(answers), list[Row[K]]()
        for key, row in zip(keys, encoded, strict=True):
            stored = known[row] if row in known else next(read).found
            cells = {
                column: cell.value
                for column, cell in stored.items()
                if cell is not None and cell.value is not None
            }
            for name, value in written.get(row, _NO_WRITES).items():
                if value is None:
                    cells.pop(name, None)
                else:
                    cells[name] = value
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
            self._env, self._engine.cleanup, requests, deadline, self.statistics
        )
        self._require_open()
        return {
            CellAddress(table_id, row, column): cell
            for (table_id, row), answer in zip(columns, answers, strict=True)
            for column, cell in answer.found.items()
        }

    def _written(
        self,
        table_id: int,
        rows: Sequence[bytes],
        names: list[bytes] | None,
        prefixes: tuple[bytes, ...],
    ) -> dict[bytes, dict[bytes, bytes | None]]:
        """What the transaction has written to these rows itself, by row and column; None for a
        deletion."""
        own = self._own
        if own is None or not own.cells:
            return {}
        if names is None or prefixes:
            cells = [
                CellAddress(table_id, row, column)
                for row, writes in own.of_rows(table_id, rows).items()
                for column in writes
                if wants(column, names, prefixes)
            ]
        else:
            cells = [CellAddress(table_id, row, name) for row in rows for name in names]
        found: dict[bytes, dict[bytes, bytes | None]] = {}
        for cell in cells:
            written = own_value(own, cell)
            if written is not None:
                found.setdefault(cell.row, {})[cell.column] = written.value
        return found
