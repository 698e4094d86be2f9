"""The reads that snapshots and transactions offer to programs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, nullcontext
from typing import Any, TypeVar, overload

from percolator.aio.awaits import Awaits, must_be_awaited
from percolator.aio.find import Search, declared_index, found_rows
from percolator.aio.reader import Reader
from percolator.arguments import listed_columns
from percolator.conditions import Condition
from percolator.protocol.environment import Statistics
from percolator.routing.catalog import TableInfo
from percolator.schema import Column, Columns, Index, Readable, Row, Table, decoded_key
from percolator.timestamps import Timestamp

K = TypeVar("K")
T = TypeVar("T")
D = TypeVar("D")


class Reads(Awaits):
    """The reads of snapshots and transactions."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def statistics(self) -> Statistics:
        """The cost so far: round trips, retries, and the locks waited for, with their owners."""
        return self._reader.statistics

    def _is_over(self) -> bool:
        return bool(self._reader.ended)

    def require_not_ended(self) -> None:
        """Raises `UsageError` if it has ended, or the database was closed. Works in any thread."""
        self._reader.require_not_ended()

    @must_be_awaited
    def timestamp(self) -> Coroutine[Any, Any, Timestamp]:
        """The timestamp at which it reads. It is fetched now if nothing was read yet."""
        return self._reader.timestamp()

    @overload
    async def get(
        self, row: K, column: Readable[T, K], *, timeout: float | None = None
    ) -> T | None: ...
    @overload
    async def get(
        self, row: K, column: Readable[T, K], default: D, *, timeout: float | None = None
    ) -> T | D: ...
    @must_be_awaited
    def get(
        self, row: K, column: Readable[T, K], default: Any = None, *, timeout: float | None = None
    ) -> Coroutine[Any, Any, Any]:
        """The value of one cell, or `default` if it has none.

        >>> await tx.get("bob", balance, default=0)
        """
        return self._reader.get(row, column, default, timeout)

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
    def get_many(
        self,
        table: Table[Any] | Iterable[tuple[object, Readable[Any]]],
        rows: Iterable[Any] | None = None,
        columns: Columns | None = None,
        *,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Reads many rows of a table in one round trip: one `Row` for each key, in the same order.

        Without `columns`, it reads all columns; a row that does not exist is empty, and false. With
        an empty list, it reads none, and all rows are empty. Given pairs of a row and a column
        instead, of any tables, it returns their values, in the same order; None if there is none.

        >>> bob, joe = await tx.get_many(accounts, ["bob", "joe"], [balance])
        >>> left, state = await tx.get_many([("bob", balance), (17, order_state)])
        """
        return self._reader.get_many(table, rows, columns, timeout)

    async def scan(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        columns: Columns | None = None,
        where: Condition | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Row[K]]:
        """Yields the rows from `start` (inclusive) to `end` (exclusive), in order or in reverse.

        With a `prefix`, only rows whose keys begin with it: `start` says where to continue in them.
        The time-out applies to each page. Rows without a value in `columns` are left out. `where`
        keeps the rows that match a condition; tablet servers do not send the others.

        >>> async for row in snapshot.scan(accounts, prefix="b", columns=[balance]):
        ...     print(row.key, row[balance])
        >>> rich = snapshot.scan(accounts, where=(balance >= 1000) & owner.startswith("B"))
        """
        pages = self.scan_pages(
            table,
            start=start,
            end=end,
            prefix=prefix,
            columns=columns,
            where=where,
            reverse=reverse,
            limit=limit,
            timeout=timeout,
        )
        async with aclosing(pages):
            async for page in pages:
                for row in page:
                    # Rows that arrived with this page must not be used after the end.
                    self._reader.require_not_ended()
                    yield row

    async def find(
        self,
        index: Index[K] | Column[Any, K],
        *values: object,
        start: object = None,
        end: object = None,
        prefix: object = None,
        columns: Columns | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Row[K]]:
        """Yields the rows with these values in the first columns of an index, in its order.

        A column stands for the index of that column alone. `start` (inclusive), `end` (exclusive)
        and `prefix` are about the column after those whose values are given. Without any of them,
        it yields all rows that have a value in every column of the index. The time-out applies to
        each page. The transaction's own writes show.

        >>> async for row in snapshot.find(city, "Rome", columns=[name]):
        ...     print(row.key, row[name])
        >>> italians = snapshot.find(by_place, "IT", prefix="R")
        """
        search = Search(index, values, start, end, prefix, reverse, limit)
        async with aclosing(self.find_pages(search, columns, timeout)) as pages:
            async for page in pages:
                for row in page:
                    # Rows that arrived with this page must not be used after the end.
                    self._reader.require_not_ended()
                    yield row

    async def find_pages(
        self, search: Search, columns: Columns | None, timeout: float | None
    ) -> AsyncGenerator[list[Row[Any]], None]:
        """As `find`, but yields the pages in which the rows arrive."""
        reader = self._reader
        columns = None if columns is None else listed_columns(columns)
        async with aclosing(found_rows(reader, search, columns, timeout)) as pages:
            while True:
                with nullcontext() if self._waits is None else self._waits.call():
                    page = await anext(pages, None)
                    if page is None:
                        return
                    table = declared_index(search.by).table
                    info = await reader.info(table, reader.deadline(timeout))  # known: a page came
                yield [
                    Row(table, decoded_key(table, row), cells, columns, info.codecs)
                    for row, cells in page
                ]

    @must_be_awaited
    def count(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        where: Condition | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, int]:
        """The number of rows that `scan` would yield. Tablet servers count them.

        >>> await tx.count(accounts, where=balance >= 1000)
        """
        return self._reader.count(table, (start, end, prefix), where, timeout)

    async def scan_pages(
        self,
        table: Table[K],
        *,
        start: K | None = None,
        end: K | None = None,
        prefix: K | None = None,
        columns: Columns | None = None,
        where: Condition | None = None,
        reverse: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[list[Row[K]], None]:
        """As `scan`, but yields the pages in which the rows arrive."""
        reader = self._reader
        columns = None if columns is None else listed_columns(columns)
        pages = reader.found_pages(
            table,
            start,
            end,
            prefix,
            columns,
            where=where,
            reverse=reverse,
            limit=limit,
            timeout=timeout,
        )
        async with aclosing(pages):
            while True:
                with nullcontext() if self._waits is None else self._waits.call():
                    page = await anext(pages, None)
                    if page is None:
                        return
                    info = await reader.info(table, reader.deadline(timeout))  # known: a page came
                yield [_row_of(table, key, cells, columns, info) for key, cells in page]


def _row_of(
    table: Table[K],
    row: bytes,
    cells: dict[bytes, Any],
    columns: Columns | None,
    info: TableInfo,
) -> Row[K]:
    values = {column: found.value for column, found in cells.items()}
    return Row(table, decoded_key(table, row), values, columns, info.codecs)
