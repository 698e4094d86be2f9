"""Scanning a range at a timestamp, with the transaction's own writes laid over the stored cells.

A page reports the locks that it met. A row with a lock is read again by itself, at the same
timestamp, once the lock is resolved; the other rows are kept, since a snapshot does not change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from percolator.errors import CellAddress
from percolator.formats.records import KIND_LOCK_ONLY, KIND_PUT, KIND_READ_LOCK
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.environment import Environment, Statistics
from percolator.protocol.read import read_rows
from percolator.protocol.write_set import WriteSet
from percolator.routing.cells import (
    CellPage,
    FoundCell,
    RangePage,
    RangeRequest,
    RowRequest,
)
from percolator.v1.tabletserver_pb2 import RowRead

_LOCKS = (KIND_LOCK_ONLY, KIND_READ_LOCK)
"""Writes that change nothing a reader could see."""

FoundRow = tuple[bytes, dict[bytes, FoundCell]]
"""A row, and its cells by column: at least one."""


async def scan_pages(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    own: WriteSet | None,
    timeout_seconds: float,
    statistics: Statistics,
) -> AsyncGenerator[list[FoundRow], None]:
    """Yields the rows of the range in order, in pages. The timeout applies to each page."""
    async with aclosing(env.cells.scan(request, timeout_seconds)) as pages:
        async for page in pages:
            statistics.round_trips += 1
            rows = page.rows
            statistics.rows_read += len(rows)
            if page.locks:
                deadline = env.clock.monotonic_seconds() + timeout_seconds
                rows = await _without_locks(env, cleanup, request, page, deadline, statistics)
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


async def resolved_page(
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    page: CellPage,
    timeout_seconds: float,
    statistics: Statistics,
) -> CellPage:
    """The page after its rows with locks were read again; deleted cells are left out."""
    if not page.locks:
        return page
    deadline = env.clock.monotonic_seconds() + timeout_seconds
    rows = await _without_locks(env, cleanup, request, page.by_row(), deadline, statistics)
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
    env: Environment,
    cleanup: Cleanup,
    request: RangeRequest,
    page: RangePage,
    deadline: float,
    statistics: Statistics,
) -> dict[bytes, dict[bytes, FoundCell]]:
    """The page's rows, after those with locks were read again."""
    rows = page.rows
    blocked = sorted({cell.row for cell in page.locks})
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
    answers = await read_rows(env, cleanup, again, request.timestamp, deadline, statistics)
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
