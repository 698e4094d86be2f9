"""Scanning a range that may span many tablets, on servers that come and go.

Tablets are scanned one after another, each as a stream of pages. A page says what remains after it,
so a stream that breaks is continued at exactly that place, on the server that has the tablet by
then. A tablet without rows yields a page like any other, and does not end the scan. A silent server
is never given all the remaining time: some is left for the server that took over from it.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import NamedTuple, cast

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    PercolatorError,
    Retry,
    SchemaChanged,
    TabletLocation,
    TabletMoved,
    Unavailable,
)
from percolator.limits import Limits
from percolator.routing.catalog import TabletMap
from percolator.routing.cells import CellPage, RangePage, RangeRequest
from percolator.routing.lanes import SchemaVersions
from percolator.tasks import stop_waiting_for
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell, RowRange
from percolator.wire.backoff import Backoff
from percolator.wire.methods import SCAN
from percolator.wire.status import from_detail
from percolator.world import World

# Pages of a scan as blocks of memory, for callers that never look at a single cell.

_OFFSET_BYTES = 4


class JoinedBytes:
    """Values one behind the other."""

    __slots__ = ("block", "offsets")

    def __init__(self, block: bytes, offsets: bytes) -> None:
        self.block = block
        self.offsets = offsets
        """Where each begins, and where the last one ends: 4 bytes each, little-endian."""

    def __len__(self) -> int:
        return len(self.offsets) // _OFFSET_BYTES - 1

    def cut(self) -> list[bytes]:
        """The values."""
        block = self.block
        return [block[at:end] for at, end in pairwise(self.bounds())]

    def ends(self) -> tuple[bytes, bytes]:
        """The first and the last value."""
        return self.block[: self._offset(1)], self.block[self._offset(-2) :]

    def is_whole(self) -> bool:
        """True if its values fill the block. Arrow would look outside of it without asking."""
        if not self.offsets or len(self.offsets) % _OFFSET_BYTES:
            return False
        bounds = self.bounds().tolist()
        return bounds[0] == 0 and bounds[-1] == len(self.block) and bounds == sorted(bounds)

    def _offset(self, index: int) -> int:
        at = _OFFSET_BYTES * index % len(self.offsets)
        return int.from_bytes(self.offsets[at : at + _OFFSET_BYTES], "little")

    def bounds(self) -> array[int]:
        """Where each begins, and where the last one ends, as this machine counts."""
        bounds = array("i", self.offsets)
        if sys.byteorder == "big":
            bounds.byteswap()
        return bounds


class JoinedPage(NamedTuple):
    """A page without locks, all of whose rows have the same columns. As `CellPage` otherwise."""

    rows: JoinedBytes
    columns: Mapping[bytes, JoinedBytes]
    """By name: the value of each row."""
    start: bytes
    end: bytes
    locks: Sequence[Cell] = ()


SentPage = CellPage | JoinedPage
"""A page in one of the forms in which servers send it."""


def joined_page(found: pb.JoinedCells, start: bytes, end: bytes) -> JoinedPage | None:
    """The page that a server has sent; None if it makes no sense."""
    rows = _of(found.rows)
    columns = {column.name: _of(column.values) for column in found.columns}
    if not rows.is_whole() or not len(rows) or not columns:
        return None
    if not all(one.is_whole() and len(one) == len(rows) for one in columns.values()):
        return None
    return JoinedPage(rows, columns, start, end)


def _of(message: pb.JoinedBytes) -> JoinedBytes:
    return JoinedBytes(message.block, message.offsets)


ROWS_WANTED_MAX = 1 << 30
"""The largest row limit sent to tablet servers; callers enforce their own limits."""
_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0


class RangeScan:
    """One scan: its position in the range, and how to continue from there."""

    def __init__(
        self,
        request: RangeRequest,
        timeout_seconds: float,
        tablets: TabletMap,
        versions: SchemaVersions,
        world: World,
        limits: Limits,
    ) -> None:
        self._wanted = request
        self._start = request.start
        self._end = request.end
        self._left = self._at_once = min(request.row_limit, ROWS_WANTED_MAX)
        self._timeout_seconds = timeout_seconds
        self._tablets = tablets
        self._versions = versions
        self._world = world
        self._limits = limits
        self._start_was_found = False
        self._at_end = bool(request.end) and request.start >= request.end

    def ended(self) -> bool:
        """True if the scan has reached the end of the range."""
        return self._at_end

    async def pages(self) -> AsyncGenerator[RangePage, None]:
        """Yields pages with an object for each cell. The request must not take joined ones."""
        async with aclosing(self.sent_pages()) as pages:
            async for page in pages:
                yield cast(CellPage, page).by_row()

    async def sent_pages(self) -> AsyncGenerator[SentPage, None]:
        """Yields pages as the servers send them."""
        patience = self._new_patience()
        while not self.ended():
            location: TabletLocation | None = None
            try:
                location = await self._locate()
                left = patience[0] - self._world.clock.monotonic_seconds()
                seconds = min(max(left, 0.001), self._limits.attempt_seconds_max)
                async with aclosing(self._tablet_pages(location, seconds)) as pages:
                    while (page := await self._next_page(pages, location)) is not None:
                        yield page
                        if self.ended():
                            return
                        patience = self._new_patience()
            except (NotExecuted, ExecutionUnknown) as error:
                self._learn(location, error)
                deadline, backoff = patience
                if not await backoff.pause(deadline):
                    if location is not None:
                        # Otherwise, the next scan would wait for the same silent server and fail.
                        self._tablets.doubt(location)
                    raise self._late(error) from error
                if not isinstance(error, SchemaChanged):
                    await self._look_up(location, silent=isinstance(error, DeadlineExceeded))

    async def _next_page(
        self, pages: AsyncGenerator[SentPage, None], location: TabletLocation
    ) -> SentPage | None:
        """The next page, or None at the end of the tablet. A silent server is abandoned once
        another one serves the tablet."""
        coming: asyncio.Future[SentPage | None] = asyncio.ensure_future(anext(pages, None))
        try:
            await self._wait_for(coming, location)
        except BaseException:
            # This reader leaves without the page, which may have failed by now.
            stop_waiting_for(coming)
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})
            raise
        return coming.result()

    async def _wait_for(
        self, coming: asyncio.Future[SentPage | None], location: TabletLocation
    ) -> None:
        """Returns when the page has come, or has failed."""
        while True:
            await asyncio.wait({coming}, timeout=self._limits.silence_seconds)
            if coming.done():
                return
            await self._look_up(location, silent=True)
            # If the page came in the meantime, it has moved the position, perhaps to another
            # tablet, so that the comparison would mean nothing.
            if not coming.done() and self._known() != location:
                raise DeadlineExceeded(
                    "no page, and another server now has the tablet", where=location.address
                )

    def _new_patience(self) -> tuple[float, Backoff]:
        """The deadline of the next page, and the pauses between attempts to get it."""
        deadline = self._world.clock.monotonic_seconds() + self._timeout_seconds
        return deadline, Backoff(
            self._world.clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX
        )

    async def _locate(self) -> TabletLocation:
        location = self._known()
        if location is None:
            await self._find()
            location = self._known()
        if location is None:
            raise Unavailable(f"no tablet is known for row {self._start!r}")
        return location

    async def _find(self) -> None:
        """Asks where the next rows are. A master lists tablets upwards from a row, in pages."""
        table_id = self._wanted.table_id
        if not self._wanted.reverse:
            await self._tablets.refresh(table_id, self._start)
            return
        if self._known() is None and not self._start_was_found:
            # For most ranges, this finds all tablets at once.
            await self._tablets.refresh(table_id, self._start)
            self._start_was_found = True
            if self._known() is not None:
                return
        # Also when a tablet is known: its server has refused it, so the map is out of date there.
        last = _last_row_below(self._end, self._limits.row_bytes_max)
        await self._tablets.refresh(table_id, last)

    def _known(self) -> TabletLocation | None:
        if self._wanted.reverse:
            return self._tablets.locate_below(self._wanted.table_id, self._end)
        return self._tablets.locate(self._wanted.table_id, self._start)

    async def _tablet_pages(
        self, location: TabletLocation, timeout_seconds: float
    ) -> AsyncGenerator[SentPage, None]:
        """Yields the pages of one tablet. Before each page, moves the position past it."""
        start = max(self._start, location.start)
        end = min(self._end or location.end, location.end or self._end)
        call = self._world.network.stream(location.address, SCAN)
        async for response in call(self._request(location, start, end), timeout_seconds):
            if response.HasField("error"):
                raise from_detail(response.error)
            rest = response.rest if response.HasField("rest") else None
            page = self._page(response, start, end, rest)
            self._advance(page, location)
            yield page
            if rest is None:
                return
            start, end = rest.start, rest.end
        # The server may end a stream early, after a complete page: the scan continues there.

    def _request(self, location: TabletLocation, start: bytes, end: bytes) -> pb.ScanRequest:
        request = self._wanted
        version = self._versions.get(request.table_id, location.tablet_id)
        return pb.ScanRequest(
            target=pb.TabletTarget(
                tablet_id=location.tablet_id, epoch=location.epoch, schema_version=version
            ),
            range=RowRange(start=start, end=end),
            columns=request.columns or (),
            all_columns=request.all_columns,
            timestamp=request.timestamp,
            passing=request.passing,
            reverse=request.reverse,
            row_limit=self._left,
            page_rows_max=self._limits.page_rows_max,
            page_bytes_max=self._limits.page_bytes_max,
            report_deletes=request.report_deletes,
            column_prefixes=request.prefixes,
            joined=request.joined and not request.row_limit,
            filter=None if request.predicate is None else request.predicate.message,
            count=request.counts,
        )

    def _page(
        self, response: pb.ScanResponse, start: bytes, end: bytes, rest: RowRange | None
    ) -> SentPage:
        if rest is not None:
            if not _is_part(rest, start, end, reverse=self._wanted.reverse):
                raise _malformed("the rest that it names is not the rest of its range")
            start, end = (rest.end, end) if self._wanted.reverse else (start, rest.start)
        if response.HasField("joined"):
            return self._joined_page(response.joined, start, end)
        found = response.found
        rows = list(found.rows)
        cells = len(rows)
        if not cells == len(found.columns) == len(found.commit_timestamps) == len(found.values):
            raise _malformed("its lists differ in length")
        if rows:
            _require_inside(start, end, rows[0], rows[-1])
        return CellPage(
            rows,
            list(found.columns),
            list(found.commit_timestamps),
            list(found.values),
            list(found.deletes),
            [blocking.lock for blocking in response.locks],
            start,
            end,
            response.counted,
        )

    def _joined_page(self, joined: pb.JoinedCells, start: bytes, end: bytes) -> JoinedPage:
        page = joined_page(joined, start, end) if self._wanted.joined else None
        if page is None:
            raise _malformed("its joined cells make no sense, or nobody has asked for them")
        _require_inside(start, end, *page.rows.ends())
        return page

    def _advance(self, page: SentPage, location: TabletLocation) -> None:
        if self._wanted.reverse:
            self._end = page.start
            self._at_end = page.start <= self._start or not page.start
        else:
            self._start = page.end
            self._at_end = not page.end or (bool(self._end) and page.end >= self._end)
        if self._left and isinstance(page, CellPage):
            seen = len(set(page.rows).union(cell.row for cell in page.locks))
            self._left -= seen
            if self._left <= 0:
                # A caller that goes on has deleted some of these rows itself. It may have deleted
                # many more, and they must not take a call each.
                self._left = self._at_once = min(2 * self._at_once, ROWS_WANTED_MAX)

    def _learn(self, location: TabletLocation | None, error: PercolatorError) -> None:
        if isinstance(error, SchemaChanged) and location is not None:
            self._versions.refused(location.tablet_id, error)
        elif isinstance(error, TabletMoved):
            self._tablets.learn(error.locations)

    async def _look_up(self, location: TabletLocation | None, *, silent: bool) -> None:
        # Equal, not the same object: an answer of a master that changes nothing makes another one.
        if location is None or self._known() == location:
            try:
                if location is not None and silent:
                    await self._tablets.refresh_server(location.address)
                else:
                    await self._find()
            except (NotExecuted, ExecutionUnknown):
                return  # the old map is all we have; the next attempt may ask again

    def _late(self, error: PercolatorError) -> DeadlineExceeded:
        late = DeadlineExceeded(f"no page came in time; last error: {error.message}")
        late.retry = Retry.SAFE
        return late


def _require_inside(start: bytes, end: bytes, *rows: bytes) -> None:
    if not all(start <= row and (not end or row < end) for row in rows):
        raise _malformed("it has rows outside of its range")


def _malformed(why: str) -> ExecutionUnknown:
    return ExecutionUnknown(f"a tablet server's page is malformed: {why}")


def _is_part(rest: RowRange, start: bytes, end: bytes, *, reverse: bool) -> bool:
    """True if a page was taken off the range at the right side; otherwise a scan might never
    end."""
    if reverse:
        return rest.start == start and start < rest.end and (not end or rest.end < end)
    return rest.end == end and start < rest.start and (not end or rest.start < end)


def _last_row_below(end: bytes, row_bytes_max: int) -> bytes:
    """The greatest possible row below `end` (empty: the greatest of all)."""
    if not end:
        return b"\xff" * row_bytes_max
    if end[-1] == 0:
        return end[:-1]
    return end[:-1] + bytes([end[-1] - 1]) + b"\xff" * (row_bytes_max - len(end))
