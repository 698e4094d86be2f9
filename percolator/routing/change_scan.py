"""Reading the changes of a table in the order of their commits, from tablets that come and go.

Each range of rows is read from its tablet as a stream of pages. The position in it is a change, not
a row: if the stream breaks, the range is read again from the last whole commit on, wherever it is
by then, and what was already seen is skipped. If the range has become several tablets, their
streams are merged. Merging emits only what no other stream can still precede.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import defaultdict
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
from percolator.routing.catalog import Searched, TabletMap
from percolator.routing.cells import ChangesRequest, ChangesSeen, StoredChange
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell, RowRange
from percolator.wire.backoff import Backoff
from percolator.wire.methods import LOOK_FOR_CHANGES, SCAN_CHANGES
from percolator.wire.status import from_detail
from percolator.world import World

# Asking all tablets of a table how new their changes are: one call to each of its servers.

_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0

LookedAt = tuple[bytes, bytes]


class ChangeLook:
    """One look at all tablets, wherever they are."""

    def __init__(
        self,
        request: ChangesRequest,
        passing: Sequence[int],
        tablets: TabletMap,
        world: World,
        limits: Limits,
    ) -> None:
        self._wanted = request
        self._passing = passing
        self._tablets = tablets
        self._world = world
        self._limits = limits
        self._reached = request.until
        self._newest = 0
        self._ranges: list[LookedAt] = []
        self._locks: list[Cell] = []

    async def seen(self, deadline: float) -> ChangesSeen:
        """Asks until every row is covered by an answer. A tablet that was split is asked again, as
        its halves."""
        left: list[LookedAt] = [(b"", b"")]
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        while left:
            problem: PercolatorError | None = None
            try:
                asked = [one for rows in left for one in await self._located(*rows)]
            except (NotExecuted, ExecutionUnknown) as error:
                problem = error
            else:
                left, problem = await self._ask(asked, deadline)
            if problem is not None:
                if not await backoff.pause(deadline):
                    raise problem
                await self._look_up(left)
        return ChangesSeen(self._reached, self._newest, sorted(self._ranges), self._locks)

    async def _look_up(self, left: Sequence[LookedAt]) -> None:
        """Asks a master where these rows are now. One answer is about many tablets. If there is
        none, the old map is all we have, and each further question would take seconds."""
        searched: Searched | None = None
        for start, _ in sorted(left):
            if searched is None or not searched.has(start):
                try:
                    searched = await self._tablets.refresh(self._wanted.table_id, start)
                except (NotExecuted, ExecutionUnknown):
                    return

    async def _located(self, start: bytes, end: bytes) -> list[TabletLocation]:
        """The tablets that hold these rows."""
        found: list[TabletLocation] = []
        while True:
            location = await self._tablets.located(self._wanted.table_id, start)
            found.append(location)
            if not location.end or (end and location.end >= end):
                return found
            start = location.end

    async def _ask(
        self, asked: Sequence[TabletLocation], deadline: float
    ) -> tuple[list[LookedAt], PercolatorError | None]:
        """Asks the servers of these tablets. Returns the rows without an answer, and why."""
        by_server: defaultdict[str, list[TabletLocation]] = defaultdict(list)
        for location in asked:
            by_server[location.address].append(location)
        calls = (self._call(address, of, deadline) for address, of in by_server.items())
        left: list[LookedAt] = []
        problem: PercolatorError | None = None
        for locations, answers in await asyncio.gather(*calls):
            for location, answer in zip(locations, answers, strict=True):
                if isinstance(answer, PercolatorError):
                    if not isinstance(answer, NotExecuted | ExecutionUnknown):
                        raise answer
                    if isinstance(answer, TabletMoved):
                        self._tablets.learn(answer.locations)
                    left.append((location.start, location.end))
                    problem = answer
                else:
                    self._learn(location, answer)
        return left, problem

    async def _call(
        self, address: str, locations: list[TabletLocation], deadline: float
    ) -> tuple[list[TabletLocation], list[pb.ChangesLookResult | PercolatorError]]:
        request = pb.LookForChangesRequest(
            looks=[
                pb.ChangesLook(
                    target=pb.TabletTarget(tablet_id=one.tablet_id, epoch=one.epoch),
                    after=self._wanted.after,
                    until=self._wanted.until,
                    passing=self._passing,
                )
                for one in locations
            ]
        )
        left = deadline - self._world.clock.monotonic_seconds()
        seconds = min(max(left, 0.001), self._limits.attempt_seconds_max)
        try:
            response = await self._world.network.unary(address, LOOK_FOR_CHANGES)(request, seconds)
        except PercolatorError as error:
            return locations, [error] * len(locations)
        if len(response.looks) != len(locations):
            raise ExecutionUnknown(f"{address} returned the wrong number of answers")
        return locations, [
            from_detail(one.error) if one.HasField("error") else one for one in response.looks
        ]

    def _learn(self, location: TabletLocation, answer: pb.ChangesLookResult) -> None:
        self._reached = min(self._reached, answer.reached)
        self._newest = max(self._newest, answer.newest)
        self._locks += (blocking.lock for blocking in answer.locks)
        if answer.newest:
            self._ranges.append((location.start, location.end))


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
