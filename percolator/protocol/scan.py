"""Scanning a range at a timestamp, with the transaction's own writes laid over the stored cells.

A page reports the locks that it met. Either a lock says what its cell holds, or the row is read
again by itself, at the same timestamp, once the lock is resolved; the other rows are kept, since a
snapshot does not change. Then the scan is begun again behind the page if more transactions are
known by now whose locks it may pass: a job with a million locks is asked about once, and not with
each page. A page full of locks always ends the scan for the time being: once they are resolved, the
next pages have fewer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Set
from contextlib import aclosing
from typing import TypeVar

from percolator.errors import CellAddress
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_READ_LOCK,
    START_TIMESTAMP_BYTES,
    timestamp_bytes,
)
from percolator.protocol.environment import Environment, Statistics
from percolator.protocol.read import PASSING_MAX, LockResolver
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.resolving.rolling_in_bulk import WHOLE_PAGE
from percolator.protocol.write_set import WriteSet
from percolator.routing.cells import (
    CellPage,
    FoundCell,
    RangePage,
    RangeRequest,
    RowRequest,
    RowResult,
)
from percolator.routing.range_scan import JoinedPage, SentPage
from percolator.v1.tabletserver_pb2 import RowRead

_LOCKS = (KIND_LOCK_ONLY, KIND_READ_LOCK)
"""Writes that change nothing a reader could see."""

FoundRow = tuple[bytes, dict[bytes, FoundCell]]
"""A row, and its cells by column: at least one."""


Page = TypeVar("Page", RangePage, CellPage, SentPage)


async def pages_past_locks(
    begin: Callable[[RangeRequest], AsyncGenerator[Page, None]],
    request: RangeRequest,
    cleanup: Cleanup,
) -> AsyncGenerator[Page, None]:
    """Yields the pages of a scan. The caller resolves the locks of each before it asks for the
    next."""
    passing = cleanup.passable(request.timestamp, PASSING_MAX)
    rest: RangeRequest | None = request
    while rest is not None:
        asked, rest = rest._replace(passing=passing), None
        left: RangeRequest | None = asked
        crowded: Page | None = None
        async with aclosing(begin(asked)) as pages:
            async for page in pages:
                left = None if left is None else _behind(left, page, request.row_limit)
                if len(page.locks) >= WHOLE_PAGE:
                    crowded, rest = page, left
                    break
                has_locks = bool(page.locks)
                yield page
                if has_locks and left is not None:
                    known = cleanup.passable(request.timestamp, PASSING_MAX)
                    if not set(known) <= set(passing):
                        passing, rest = known, left
                        break
        if crowded is not None:
            # Meanwhile the server must not read pages that will look different afterwards.
            yield crowded
            passing = cleanup.passable(request.timestamp, PASSING_MAX)


def _behind(asked: RangeRequest, page: RangePage | SentPage, row_limit: int) -> RangeRequest | None:
    """What is left of a scan after a page; None after the last one. Behind all the rows that it
    wanted, it wants `row_limit` again."""
    limit = asked.row_limit
    if limit and not isinstance(page, JoinedPage):
        limit -= len({*page.rows, *(lock.row for lock in page.locks)})
        limit = limit if limit > 0 else row_limit
    if asked.reverse:
        is_last = not page.start or page.start <= asked.start
        return None if is_last else asked._replace(end=page.start, row_limit=limit)
    is_last = not page.end or (bool(asked.end) and page.end >= asked.end)
    return None if is_last else asked._replace(start=page.end, row_limit=limit)


async def scan_pages(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    own: WriteSet | None,
    timeout_seconds: float,
    statistics: Statistics,
) -> AsyncGenerator[list[FoundRow], None]:
    """Yields the rows of the range in order, in pages. The timeout applies to each page."""

    def begin(request: RangeRequest) -> AsyncGenerator[RangePage, None]:
        return env.cells.scan(request, timeout_seconds)

    async with aclosing(pages_past_locks(begin, request, cleanup)) as pages:
        async for page in pages:
            statistics.round_trips += 1
            rows = page.rows
            statistics.rows_read += len(rows)
            if page.locks:
                timestamp, deadline = request.timestamp, env.now() + timeout_seconds
                resolver = LockResolver(env, cleanup, timestamp, deadline, statistics)
                rows = await _without_locks(resolver, request, page)
            written = None
            if own is not None and own.cells:
                written = own.rows(request.table_id, page.start, page.end)
                _lay_over(rows, written, request)
            if page.locks or written:
                found = [(row, cells) for row, cells in rows.items() if cells]
                found.sort(key=_row_of, reverse=request.reverse)
                yield found
            else:
                yield list(rows.items())


def without_locks_of(page: CellPage, starts: Set[int]) -> CellPage:
    """The page without the locks of these transactions: their cells count as missing."""
    if not page.locks:
        return page
    # A lock begins with its start timestamp. Decoding each of many would take longer.
    left_out = {timestamp_bytes(start) for start in starts}
    locks = [lock for lock in page.locks if lock.value[:START_TIMESTAMP_BYTES] not in left_out]
    return page._replace(locks=locks)


async def resolved_page(resolver: LockResolver, request: RangeRequest, page: CellPage) -> CellPage:
    """The page after its rows with locks were read again; deleted cells are left out."""
    rows = await _without_locks(resolver, request, page.by_row())
    cells = [
        (row, column, found.commit_timestamp, found.value)
        for row in sorted(rows, reverse=request.reverse)
        for column, found in sorted(rows[row].items())
        if found.value is not None
    ]
    return CellPage(
        [row for row, _, _, _ in cells],
        [column for _, column, _, _ in cells],
        [commit for _, _, commit, _ in cells],
        [value for _, _, _, value in cells],
        [],
        [],
        page.start,
        page.end,
    )


async def _without_locks(
    resolver: LockResolver, request: RangeRequest, page: RangePage
) -> dict[bytes, dict[bytes, FoundCell]]:
    """The page's rows, with what is behind the locks."""
    rows = page.rows
    blocked: dict[bytes, RowResult] = {}
    for lock in page.locks:
        answer = blocked.get(lock.row)
        if answer is None:
            answer = blocked[lock.row] = RowResult()
            answer.found = rows.get(lock.row, {})
        answer.locks.append(lock)
    again = [
        RowRequest(
            request.table_id,
            RowRead(
                row=row,
                columns=request.columns,
                all_columns=request.all_columns,
                timestamp=request.timestamp,
                report_deletes=request.report_deletes,
                column_prefixes=request.prefixes,
            ),
        )
        for row in blocked
    ]
    answers = list(blocked.values())
    await resolver.read_past(again, answers)
    for row, answer in zip(blocked, answers, strict=True):
        rows[row] = answer.found
    return rows


def _lay_over(
    rows: dict[bytes, dict[bytes, FoundCell]],
    written: dict[bytes, dict[bytes, tuple[int, bytes]]],
    request: RangeRequest,
) -> None:
    for row, writes in written.items():
        cells = rows.setdefault(row, {})
        for column, (kind, value) in writes.items():
            if kind in _LOCKS or not request.wants(column):
                continue
            if kind == KIND_PUT:
                cells[column] = FoundCell(0, value)
            else:
                cells.pop(column, None)


def _row_of(row: FoundRow) -> bytes:
    return row[0]


def own_value(own: WriteSet, cell: CellAddress) -> FoundCell | None:
    """The transaction's own write, with a value of None if it deleted the cell; None if it has not
    written the cell."""
    write = own.cells.get(cell)
    if write is None or write[0] in _LOCKS:
        return None
    return FoundCell(0, write[1] if write[0] == KIND_PUT else None)
