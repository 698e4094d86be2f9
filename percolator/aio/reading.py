"""What snapshots and transactions read: cells, rows and ranges, all at their timestamp."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, overload

from percolator import codecs
from percolator.aio.moment import Moment
from percolator.arguments import (
    listed,
    listed_columns,
    require_table,
    require_whole,
)
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    SchemaError,
    UsageError,
)
from percolator.protocol.read import read_past_locks, read_rows
from percolator.protocol.scan import own_value, scan_pages
from percolator.protocol.write_set import WriteSet
from percolator.schema import Column, Readable, Row, Table
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.wire.catalog import TableInfo
from percolator.wire.cell_read import CellAnswer
from percolator.wire.questions import FoundCell, RangeQuestion, RowAnswer, RowQuestion

T = TypeVar("T")
D = TypeVar("D")
K = TypeVar("K")

Columns = Sequence[Column[Any]]


class Reading(Moment):
    """Reads at one timestamp, which is fetched with the first of them."""

    _own: WriteSet | None = None
    """What a transaction has written itself, laid over what it reads."""
    _remembered: dict[CellAddress, FoundCell | None] | None = None
    """Cells as they are at its timestamp, which therefore need not be read."""

    @property
    def _cells_max(self) -> int:
        """How many cells may be read at once."""
        return self._engine.limits.get_many_cells_max

    # ------------------------------------------------------------------ reads

    @overload
    async def get(
        self, row: object, column: Readable[T], *, timeout: float | None = None
    ) -> T | None: ...
    @overload
    async def get(
        self, row: object, column: Readable[T], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    async def get(
        self, row: object, column: Readable[T], default: Any = None, *, timeout: float | None = None
    ) -> Any:
        """The value of one cell, or `default` when it has none.

        >>> await tx.get("bob", balance, default=0)
        """
        deadline = self._deadline(timeout)
        address = self.known_address(row, column) or await self._address(row, column, deadline)
        if self._own is not None and self._own.cells:
            written = own_value(self._own, address)
            if written is not None:
                value = written.value
                return default if value is None else column.codec.decode(value)
        start = self._start or await self._begin(deadline)
        table_id, row_bytes, name = address
        found: CellAnswer
        if self._remembered is not None and address in self._remembered:
            found = self._remembered[address]
        else:
            self.statistics.round_trips += 1
            found = await self._engine.router.read_cell(table_id, row_bytes, name, start, deadline)
        if isinstance(found, RowAnswer):
            found = await self._past_locks(address, found, start, deadline)
        if found is None or found.value is None:
            return default
        return column.codec.decode(found.value)

    def remember(self, address: CellAddress, found: FoundCell | None) -> None:
        """Keeps what was read at its timestamp by other means."""
        if self._remembered is None:
            self._remembered = {}
        self._remembered[address] = found

    async def _past_locks(
        self, address: CellAddress, answer: RowAnswer, start: int, deadline: float
    ) -> FoundCell | None:
        """Settles the lock on a cell, and reads it again."""
        table_id, row, name = address
        question = RowQuestion(table_id, RowRead(row=row, columns=(name,), timestamp=start))
        answers = [answer]
        await read_past_locks(
            self._around,
            self._engine.cleanup,
            (question,),
            answers,
            start,
            deadline,
            self.statistics,
        )
        return answers[0].found.get(name)

    async def get_many(
        self,
        table: Table[K],
        rows: Iterable[K],
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Row[K]]:
        """Many rows of a table in one round trip: one `Row` for each that was asked for, in order.

        Without `columns`, all columns. A row that does not exist is empty, and false.

        >>> bob, joe = await tx.get_many(accounts, ["bob", "joe"], [balance])
        """
        deadline = self._deadline(timeout)
        info = await self._info(table, deadline)
        names = self._names(table, columns)
        keys = listed(rows, "rows", self._cells_max)
        if len(keys) * max(len(names or ()), 1) > self._cells_max:
            raise InvalidArgument("rows", f"more than {self._cells_max} cells at once")
        encoded = [self._row(table, key) for key in keys]
        start = self._start or await self._begin(deadline)
        questions = [
            RowQuestion(
                info.table_id,
                RowRead(row=row, columns=names or (), all_columns=names is None, timestamp=start),
            )
            for row in encoded
        ]
        engine = self._engine
        answers = await read_rows(
            engine.around, engine.cleanup, questions, start, deadline, self.statistics
        )
        found = []
        for key, row, answer in zip(keys, encoded, answers, strict=True):
            cells = {
                column: cell.value
                for column, cell in answer.found.items()
                if cell.value is not None
            }
            if self._own is not None and self._own.cells:
                self._lay_over(info.table_id, row, names, cells)
            found.append(Row(table, key, cells))
        return found

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
        """The rows of a range in order (or against it), those from `start` to before `end`.

        The time-out is that of each page. Rows without a value in `columns` are left out.

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
                    # What came along must not outlive what it was read in.
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
        """As `scan`, in the pages in which the rows arrive."""
        deadline = self._deadline(timeout)
        if limit is not None:
            require_whole(limit, "limit", least=0)
        if not isinstance(reverse, bool):
            raise InvalidArgument("reverse", f"expected a bool, got {type(reverse).__name__}")
        require_table(table)
        first, last = self._range(table, start, end, prefix)
        names = self._names(table, columns)
        info = await self._info(table, deadline)
        if limit == 0 or (last and first >= last):
            return
        question = RangeQuestion(
            info.table_id,
            first,
            last,
            None if names is None else tuple(names),
            self._start or await self._begin(deadline),
            reverse,
            limit or 0,
        )
        seconds = timeout or self._timeout_seconds
        left = limit
        decode = table.key.decode
        engine = self._engine
        pages = scan_pages(
            engine.around, engine.cleanup, question, self._own, seconds, self.statistics
        )
        async with aclosing(pages):
            async for page in pages:
                self._require_open()
                rows = [_row(table, decode(key), cells) for key, cells in page[:left]]
                if rows:
                    yield rows
                if left is not None:
                    left -= len(rows)
                    if left <= 0:
                        return

    # ------------------------------------------------------------------ what was asked for

    def known_address(self, row: object, column: Readable[Any]) -> CellAddress | None:
        """The cell's address, if its table was used before."""
        if not isinstance(column, Column):
            raise UsageError(f"expected a Column, got {type(column).__name__}")
        table = column.table
        info = self._engine.catalog.known(table.name)
        if info is None:
            return None
        return CellAddress(info.table_id, self._row(table, row), column.name)

    async def _address(self, row: object, column: Readable[Any], deadline: float) -> CellAddress:
        table = column.table
        info = await self._info(table, deadline)
        return CellAddress(info.table_id, self._row(table, row), column.name)

    async def _info(self, table: Table[Any], deadline: float) -> TableInfo:
        require_table(table)
        return await self._engine.table(table, deadline)

    def _row(self, table: Table[Any], key: object) -> bytes:
        row: bytes = table.key.encode(key)
        if len(row) > self._engine.limits.row_bytes_max:
            raise InvalidArgument(
                "row", f"has {len(row)} bytes, at most {self._engine.limits.row_bytes_max}"
            )
        return row

    @staticmethod
    def _names(table: Table[Any], columns: Columns | None) -> list[bytes] | None:
        if columns is None:
            return None
        wanted = listed_columns(columns)
        if not wanted:
            raise InvalidArgument("columns", "is empty; leave it out for all columns")
        for column in wanted:
            if column.table.name != table.name:
                raise SchemaError(f"{column!r} is not a column of table {table.name!r}")
        return [column.name for column in wanted]

    @staticmethod
    def _range(table: Table[K], start: K | None, end: K | None, prefix: K | None) -> Range:
        if prefix is not None:
            if start is not None or end is not None:
                raise InvalidArgument("prefix", "cannot be given together with start or end")
            begin = table.key.encode_prefix(prefix)
            return begin, codecs.after_prefix(begin)
        return (
            b"" if start is None else table.key.encode(start),
            b"" if end is None else _end(table.key.encode(end)),
        )

    def _lay_over(
        self, table_id: int, row: bytes, names: list[bytes] | None, cells: dict[bytes, bytes]
    ) -> None:
        """The transaction's own writes to one row."""
        own = self._own
        if own is None:
            return
        if names is None:
            names = [c for t, r, c in own.cells if t == table_id and r == row]
        for name in names:
            written = own_value(own, CellAddress(table_id, row, name))
            if written is None:
                continue
            if written.value is None:
                cells.pop(name, None)
            else:
                cells[name] = written.value


Range = tuple[bytes, bytes]


def _row(table: Table[K], key: K, cells: dict[bytes, Any]) -> Row[K]:
    return Row(table, key, {column: found.value for column, found in cells.items()})


def _end(row: bytes) -> bytes:
    """As the end of a range, no bytes mean "to the last row": nothing lies before the first."""
    if not row:
        raise InvalidArgument("end", "nothing lies before the empty row")
    return row
