"""Scans: rows of a range as a timestamp sees them, page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from percolator.errors import InvalidArgument, InvariantViolation
from percolator.formats.reach import too_old
from percolator.tablet.keys import ColumnEncoder
from percolator.tablet.memory.load_fences import closed
from percolator.tablet.memory.state import TabletState
from percolator.tablet.reading.chosen_columns import chosen_columns
from percolator.tablet.reading.scan_page import ScanPage, ScanPlan
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb


def clipped(state: TabletState, asked: cells_pb2.RowRange) -> tuple[bytes, bytes]:
    """The rows of a request that are in the tablet. Raises `InvalidArgument`."""
    identity = state.identity
    if asked.end and asked.start >= asked.end:
        raise InvalidArgument("range", "the end is not above the start: inverted or empty")
    start = max(asked.start, identity.start)
    ends = [end for end in (asked.end, identity.end) if end]
    end = min(ends) if ends else b""
    if end and start >= end:
        raise InvalidArgument("range", "does not overlap the tablet")
    return start, end


def plan_scan(state: TabletState, request: pb.ScanRequest, columns: ColumnEncoder) -> ScanPlan:
    """Checks a request. Raises `InvalidArgument` and `UnheardTimestamp`."""
    limits = state.limits
    state.guard.check_read(request.timestamp, "timestamp")
    if not (request.all_columns or request.columns or request.column_prefixes):
        raise InvalidArgument("columns", "no columns and no prefixes, and not all_columns")
    return ScanPlan(
        timestamp=request.timestamp,
        passed=frozenset(request.passing),
        wanted=chosen_columns("", request, columns, limits),
        reverse=request.reverse,
        report_deletes=request.report_deletes,
        joined=request.joined,
        rows_max=min(request.page_rows_max or limits.page_rows_default, limits.page_rows_max),
        bytes_max=min(request.page_bytes_max or limits.page_bytes_default, limits.page_bytes_max),
    )


CROWDED = 512
"""Locks on one page after which a stream ends early. Whoever meets so many has them resolved before
they go on, and the pages that were read in advance meanwhile, full of locks, would be for nobody.
Clients end such a scan, too (`WHOLE_PAGE`), but only once they have the page."""


async def pages(
    state: TabletState, request: pb.ScanRequest, plan: ScanPlan
) -> AsyncGenerator[pb.ScanResponse, None]:
    """Yields the pages of a scan; checks the ownership after a page was read, before it leaves."""
    rest: tuple[bytes, bytes] | None = clipped(state, request.range)
    rows_left = request.row_limit or _NO_LIMIT
    while rest is not None and rows_left:
        # A commit at or below the timestamp may be on its way, and it has no lock to report. There
        # must be no await between this and the page's view of the storage.
        if state.held.holders:
            look = partial(state.held.in_the_way_in_rows, *rest, plan.timestamp)
            await state.held.let_pass(look)
        state.require_open()
        fence = state.load_fences.among(*rest)
        if fence is not None:
            raise closed(fence)
        page = ScanPage(state, plan, *rest, min(plan.rows_max, rows_left))
        try:
            response = await page.read()
        except InvariantViolation:
            # A value that lies apart from its record may be gone.
            _require_kept(state, plan)
            state.require_lifetimes(page.lifetimes)
            raise
        # Check after reading, since versions may have been collected in the meantime.
        _require_kept(state, plan)
        await state.require_ownership()
        locks = len(response.locks)
        yield response
        if locks >= CROWDED:
            return
        rest = page.rest
        rows_left -= page.rows


def _require_kept(state: TabletState, plan: ScanPlan) -> None:
    if plan.timestamp < state.safe_points.reads:
        raise too_old(plan.timestamp, state.safe_points.reads)


_NO_LIMIT = 2**63
