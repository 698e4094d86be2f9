"""Reading the changes of a table in the order of their commits, from tablets that come and go.

Each range of rows is read from its tablet as a stream of pages. The position in it is a change, not
a row: if the stream breaks, the range is read again from the last whole commit on, wherever it is
by then, and what was already seen is skipped. If the range has become several tablets, their
streams are merged. Merging emits only what no other stream can still precede.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    NotReady,
    PercolatorError,
    Retry,
    TabletLocation,
    TabletMoved,
)
from percolator.limits import Limits
from percolator.routing.cells import ChangesRequest, StoredChange
from percolator.routing.tablet_map import TabletMap
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.backoff import Backoff
from percolator.wire.methods import SCAN_CHANGES
from percolator.wire.status import from_detail
from percolator.world import World

Pages = AsyncGenerator[list[StoredChange], None]

PAGES_BYTES = 16 << 20
"""The size of the pages of all streams of a scan together, as far as their least size allows."""
PAGE_BYTES_MIN = 64 << 10
_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0
_BEFORE_ALL = StoredChange(0, b"", b"", None, None)


class ChangeScan:
    """Scans of changes of one table."""

    def __init__(
        self,
        request: ChangesRequest,
        timeout_seconds: float,
        tablets: TabletMap,
        world: World,
        limits: Limits,
    ) -> None:
        self._wanted = request
        self._timeout_seconds = timeout_seconds
        self._tablets = tablets
        self._world = world
        self._limits = limits
        self._page_bytes = limits.page_bytes_max

    def pages(self, ranges: Sequence[tuple[bytes, bytes]]) -> Pages:
        """Yields the changes of these rows."""
        share = PAGES_BYTES // max(1, len(ranges))
        self._page_bytes = min(self._page_bytes, max(PAGE_BYTES_MIN, share))
        after = self._wanted.after
        return merged([self._of_range(start, end, after, _BEFORE_ALL) for start, end in ranges])

    async def _of_range(self, start: bytes, end: bytes, after: int, last: StoredChange) -> Pages:
        """The changes of a range above `after`, without those up to `last`."""
        until = self._wanted.until
        patience = self._new_patience()
        while after < until:
            location: TabletLocation | None = None
            try:
                location = await self._tablets.located(self._wanted.table_id, start)
                if location.end and (not end or location.end < end):
                    # It was split: each half goes on from here by itself.
                    halves = ((start, location.end), (location.end, end))
                    parts = merged([self._of_range(*half, after, last) for half in halves])
                    async with aclosing(parts) as pages:
                        async for page in pages:
                            yield page
                    return
                async with aclosing(
                    self._answers(location, start, end, after, patience)
                ) as answers:
                    async for answer in answers:
                        page = [
                            change for change in _changes(answer.found) if change[:3] > last[:3]
                        ]
                        if page:
                            last = page[-1]
                            yield page
                        if page or answer.reached > after:
                            patience = self._new_patience()
                        after = max(after, answer.reached)
                if after < until:
                    raise NotReady(f"its changes are settled only up to {after}")
            except (NotExecuted, ExecutionUnknown) as error:
                await self._wait(location, start, patience, error)

    def _new_patience(self) -> tuple[float, Backoff]:
        """The deadline of the next page, and the pauses between attempts to get it."""
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        return clock.monotonic_seconds() + self._timeout_seconds, backoff

    async def _wait(
        self,
        location: TabletLocation | None,
        row: bytes,
        patience: tuple[float, Backoff],
        error: PercolatorError,
    ) -> None:
        """Pauses before the next attempt, and asks where the row is. Raises at the deadline."""
        if isinstance(error, TabletMoved):
            self._tablets.learn(error.locations)
        deadline, backoff = patience
        if not await backoff.pause(deadline):
            if location is not None:
                self._tablets.doubt(location)
            late = DeadlineExceeded(f"no changes came in time; last error: {error.message}")
            late.retry = Retry.SAFE
            raise late from error
        await self._tablets.try_refresh(self._wanted.table_id, row)

    async def _answers(
        self,
        location: TabletLocation,
        start: bytes,
        end: bytes,
        after: int,
        patience: tuple[float, Backoff],
    ) -> AsyncGenerator[pb.ScanChangesResponse, None]:
        request = pb.ScanChangesRequest(
            target=pb.TabletTarget(tablet_id=location.tablet_id, epoch=location.epoch),
            range=RowRange(start=start, end=end),
            after=after,
            until=self._wanted.until,
            page_bytes_max=self._page_bytes,
            before=self._wanted.before,
            settled=True,
        )
        left = patience[0] - self._world.clock.monotonic_seconds()
        seconds = min(max(left, 0.001), self._limits.attempt_seconds_max)
        call = self._world.network.stream(location.address, SCAN_CHANGES)
        async for answer in call(request, seconds):
            if answer.HasField("error"):
                raise from_detail(answer.error)
            yield answer


async def merged(sources: Sequence[Pages]) -> Pages:
    """Merges streams, each in order, into one."""
    async with AsyncExitStack() as closing:
        for source in sources:
            closing.push_async_callback(source.aclose)
        buffers: dict[Pages, list[StoredChange]] = {source: [] for source in sources}
        while buffers:
            empty = [source for source, buffer in buffers.items() if not buffer]
            for source, page in zip(empty, await _next_pages(empty), strict=True):
                if page is None:
                    del buffers[source]
                else:
                    buffers[source] = page
            if not buffers:
                return
            # Nothing that still comes is below the last change of a buffer.
            bound = min(buffer[-1] for buffer in buffers.values())
            out: list[StoredChange] = []
            for source, buffer in buffers.items():
                upto = bisect_right(buffer, bound[:3], key=lambda change: change[:3])
                out += buffer[:upto]
                buffers[source] = buffer[upto:]
            if len(buffers) > 1:
                out.sort()
            yield out


async def _next_pages(sources: Sequence[Pages]) -> list[list[StoredChange] | None]:
    """The next page of each stream; None at its end."""
    if len(sources) == 1:
        return [await anext(sources[0], None)]
    coming = [asyncio.ensure_future(_next_page(source)) for source in sources]
    try:
        return await asyncio.gather(*coming)
    except BaseException:
        # The streams are closed next, which is possible only when none of them is being read.
        for one in coming:
            one.cancel()
        await asyncio.wait(coming)
        raise


async def _next_page(source: Pages) -> list[StoredChange] | None:
    return await anext(source, None)


def _changes(found: pb.FoundChanges) -> list[StoredChange]:
    number = len(found.rows)
    if not number == len(found.columns) == len(found.commit_timestamps) == len(found.values):
        raise ExecutionUnknown("a tablet server's page of changes has lists of different lengths")
    values: list[bytes | None] = list(found.values)
    for place in found.deletes:
        values[place] = None
    before: list[bytes | None] = list(found.values_before) or [None] * number
    for place in found.new_cells:
        before[place] = None
    return list(
        map(StoredChange, found.commit_timestamps, found.rows, found.columns, values, before)
    )
