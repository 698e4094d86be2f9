"""Scans of snapshots and transactions: the rows of a range, in order, at one timestamp."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from percolator.aio.awaiting import LateWrites
from percolator.aio.moment import Moment
from percolator.aio.named_cells import Columns, stored_names, stored_range
from percolator.arguments import listed_columns, require_bool, require_table, require_whole
from percolator.errors import InvalidArgument
from percolator.protocol.scan import FoundRow, scan_pages
from percolator.protocol.write_set import WriteSet
from percolator.routing.cells import RangeRequest
from percolator.routing.table_info import TableInfo
from percolator.schema import Row, Table, decoded_key

K = TypeVar("K")


class Scanning(Moment):
    """Scans at one timestamp, which is fetched with the first read."""

    _own: WriteSet | None = None
    """The transaction's own writes, overlaid on what it reads."""
    _late: LateWrites | None = None
    """The writes that have not taken effect yet, but must before anything is read."""

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
        first, last = stored_range(table, start, end, prefix)
        names, prefixes = stored_names(table, columns)
        if not (names is None or names or prefixes):
            # Rows without a value in them are left out, so there would never be any.
            raise InvalidArgument("columns", "is empty; omit it to read all columns")
        info = await self._info(table, deadline)
        info.codecs.require(table, columns)
        if self._late:
            await self._late.settle(deadline)
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


def _row(
    table: Table[K],
    row: bytes,
    cells: dict[bytes, Any],
    columns: Columns | None,
    info: TableInfo,
) -> Row[K]:
    values = {column: found.value for column, found in cells.items()}
    return Row(table, decoded_key(table, row), values, columns, info.codecs)
