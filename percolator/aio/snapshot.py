"""A snapshot: reads at one timestamp, of the present or of the past."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar, cast

from percolator.aio.engine import Engine
from percolator.aio.reader import Reader
from percolator.aio.reads import Reads
from percolator.arguments import as_timestamp
from percolator.protocol.read import (
    LockResolver,
    pages_past_locks,
    read_rows,
    resolved_page,
    without_locks_of,
)
from percolator.routing.cells import CellPage, RangeRequest, RowRequest
from percolator.routing.range_scan import SentPage
from percolator.schema import Table
from percolator.timestamps import Timestamp
from percolator.v1.tabletserver_pb2 import RowRead

K = TypeVar("K")
T = TypeVar("T")
D = TypeVar("D")


class Snapshot(Reads):
    """Shows the store as it was at one timestamp, whatever is written meanwhile: that of its first
    read, or the one it was given. Entering the block reads nothing; `timestamp` counts as a read.

    >>> async with db.snapshot() as snapshot:
    ...     print(await snapshot.get("bob", balance))
    """

    _called = "snapshot"
    _end_of_unfinished = "nothing was read"

    def __init__(
        self, engine: Engine, at: Timestamp | datetime | None, timeout_seconds: float | None
    ) -> None:
        super().__init__(Reader(engine, timeout_seconds, "snapshot"))
        self._engine = engine
        self._reader.at = None if at is None else as_timestamp(at, "at")

    async def scan_cells(
        self,
        table: Table[Any],
        *,
        start: bytes = b"",
        end: bytes = b"",
        columns: Sequence[bytes] | None = None,
        leaving_out: Set[int] = frozenset(),
        timeout: float | None = None,
    ) -> AsyncGenerator[CellPage, None]:
        """Yields the cells of a range of rows as stored bytes, for code that moves many of them.

        An empty `end` means to the last row. The time-out applies to each page. `leaving_out`:
        start timestamps of transactions; a cell that one of them has locked need not be yielded.
        """
        pages = self._sent_pages(table, start, end, columns, leaving_out, timeout)
        async with aclosing(pages):
            async for page in pages:
                yield cast(CellPage, page)

    async def scan_joined(
        self,
        table: Table[Any],
        *,
        start: bytes = b"",
        end: bytes = b"",
        columns: Sequence[bytes] | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[SentPage, None]:
        """As `scan_cells`, but pages without locks may have their cells joined."""
        pages = self._sent_pages(table, start, end, columns, frozenset(), timeout, joined=True)
        async with aclosing(pages):
            async for page in pages:
                yield page

    async def _sent_pages(
        self,
        table: Table[Any],
        start: bytes,
        end: bytes,
        columns: Sequence[bytes] | None,
        leaving_out: Set[int],
        timeout: float | None,
        *,
        joined: bool = False,
    ) -> AsyncGenerator[SentPage, None]:
        deadline = self._reader.deadline(timeout)
        info = await self._reader.info(table, deadline)
        read_at = self._reader.start or await self._reader.begin(deadline)
        names = None if columns is None else tuple(columns)
        request = RangeRequest(info.table_id, start, end, names, read_at, joined=joined)
        seconds = timeout or self._reader.timeout_seconds
        engine = self._engine

        def begin(request: RangeRequest) -> AsyncGenerator[SentPage, None]:
            return engine.cells.scan_cells(request, seconds)

        async with aclosing(pages_past_locks(begin, request, engine.cleanup)) as pages:
            async for page in pages:
                self._reader.require_open()
                self.statistics.round_trips += 1
                if isinstance(page, CellPage):
                    if leaving_out:
                        page = without_locks_of(page, leaving_out)
                    if page.locks:
                        late = engine.now() + seconds
                        resolver = LockResolver(
                            engine.env, engine.cleanup, read_at, late, self.statistics
                        )
                        page = await resolved_page(resolver, request, page)
                yield page

    async def get_cells(
        self,
        table: Table[Any],
        rows: Sequence[bytes],
        *,
        columns: Sequence[bytes] | None = None,
        timeout: float | None = None,
    ) -> CellPage:
        """As `scan_cells`, but for these rows only, in one round trip."""
        deadline = self._reader.deadline(timeout)
        info = await self._reader.info(table, deadline)
        read_at = self._reader.start or await self._reader.begin(deadline)
        requests = [
            RowRequest(
                info.table_id,
                RowRead(
                    row=row, columns=columns or (), all_columns=columns is None, timestamp=read_at
                ),
            )
            for row in rows
        ]
        engine = self._engine
        answers = await read_rows(engine.env, engine.cleanup, requests, deadline, self.statistics)
        self._reader.require_open()
        page = CellPage([], [], [], [], [], [], b"", b"")
        for row, answer in zip(rows, answers, strict=True):
            for column, cell in answer.found.items():
                if cell.value is not None:
                    page.rows.append(row)
                    page.columns.append(column)
                    page.commit_timestamps.append(cell.commit_timestamp)
                    page.values.append(cell.value)
        return page

    async def close(self) -> None:
        """Ends the snapshot: from now on, the history that it needed may be collected.

        Raises `UsageError` if a read was not awaited.
        """
        self._end()
        forgotten = await self._forgotten()
        self._forget_calls(self._engine.loop)
        if forgotten is not None and sys.exc_info()[1] is None:  # else that error says more
            raise forgotten

    def _end(self) -> None:
        self._reader.finish("is closed")

    async def __aenter__(self) -> Snapshot:
        self._reader.require_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None and self._calls is not None:
            await self.close()
        else:
            self._end()
            self._forget_calls(self._engine.loop)

    def __del__(self) -> None:
        # There is no reader if it was refused when it was made.
        if hasattr(self, "_reader") and self._reader.start and not self._reader.ended:
            self._engine.open_starts.discard(self._reader)
