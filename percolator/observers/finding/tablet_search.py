"""Finds work for observers, by asking tablets for it.

`find_work` asks tablets what waits, with one call per tablet server for all of its tablets, and
follows tablets that have moved or been split. It finds whatever the streams of
`notification_watch.watch_work` did not deliver: those are quick, and may leave something out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    NotReady,
    PercolatorError,
    TabletLocation,
    TabletMoved,
    Unavailable,
)
from percolator.observers.port import FoundWork, Waiting, WorkRequest
from percolator.routing.tablet_map import TabletMap
from percolator.row_text import quoted
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.backoff import Backoff
from percolator.wire.methods import SCAN_NOTIFICATIONS
from percolator.wire.status import from_detail
from percolator.world import World

_SCANS_PER_CALL_MAX = 64
_ATTEMPT_SECONDS_MAX = 5.0
_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0


async def find_work(
    world: World, tablets: TabletMap, requests: Sequence[WorkRequest], deadline: float
) -> list[FoundWork]:
    """Finds what waits in these ranges: one answer per tablet, in order of requests and rows.

    A tablet that moves or is split meanwhile is asked at its new place. Raises nothing: the answer
    for a range that was not answered by the deadline says why.
    """
    return await _Search(world, tablets, deadline).answer(requests)


class _Part:
    """A part of a request that is not answered yet."""

    __slots__ = ("location", "order", "problem", "request")

    def __init__(self, order: tuple[int, bytes], request: WorkRequest) -> None:
        self.order = order
        self.request = request
        self.location: TabletLocation | None = None
        self.problem: PercolatorError | None = None


class _Search:
    """One call of `find_work`."""

    def __init__(self, world: World, tablets: TabletMap, deadline: float) -> None:
        self._world = world
        self._tablets = tablets
        self._deadline = deadline
        self._answers: list[tuple[tuple[int, bytes], FoundWork]] = []
        self._no_master: PercolatorError | None = None
        """Why no master has answered in this round. Each further question would take seconds, while
        the parts whose tablets are known wait."""

    async def answer(self, requests: Sequence[WorkRequest]) -> list[FoundWork]:
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        left = [_Part((index, asked.start), asked) for index, asked in enumerate(requests)]
        while left:
            placed, left = await self._place(left)
            calls = [self._ask(address, parts) for address, parts in _by_server(placed)]
            for unanswered in await asyncio.gather(*calls):
                left += unanswered
            if left and not await backoff.pause(self._deadline):
                self._answers += [(part.order, _unanswered(part)) for part in left]
                break
        return [answer for _, answer in sorted(self._answers, key=lambda pair: pair[0])]

    async def _place(self, parts: Sequence[_Part]) -> tuple[list[_Part], list[_Part]]:
        """The parts, cut at tablet boundaries, and the parts whose tablets are not known."""
        placed: list[_Part] = []
        lost: list[_Part] = []
        self._no_master = None
        for part in parts:
            start, asked = part.request.start, part.request
            while True:
                piece = _Part((part.order[0], start), replace(asked, start=start))
                piece.problem = part.problem
                location = await self._locate(piece)
                if location is None:
                    if not isinstance(piece.problem, _PASSING):
                        self._answers.append((piece.order, _unanswered(piece)))
                    else:
                        lost.append(piece)
                    break
                ends = [end for end in (asked.end, location.end) if end]
                piece.location = location
                piece.request = replace(piece.request, end=min(ends) if ends else b"")
                placed.append(piece)
                start = location.end
                if not start or (asked.end and start >= asked.end):
                    break
        return placed, lost

    async def _locate(self, part: _Part) -> TabletLocation | None:
        table_id, row = part.request.table_id, part.request.start
        location = self._tablets.locate(table_id, row)
        if location is not None:
            return location
        part.problem = await self._refresh(table_id, row)
        if part.problem is not None:
            return None
        location = self._tablets.locate(table_id, row)
        if location is None:
            part.problem = Unavailable(f"no tablet is known to hold row {quoted(row)}")
        return location

    async def _ask(self, address: str, parts: list[_Part]) -> list[_Part]:
        """Asks one server. Returns the parts to ask again, of whichever server has them by then."""
        seconds = self._deadline - self._world.clock.monotonic_seconds()
        call = self._world.network.unary(address, SCAN_NOTIFICATIONS)
        request = pb.ScanNotificationsRequest(scans=[_scan(part) for part in parts])
        try:
            response = await call(request, min(max(seconds, 0.001), _ATTEMPT_SECONDS_MAX))
            if len(response.scans) != len(parts):
                raise ExecutionUnknown(
                    f"{address} answered {len(response.scans)} of {len(parts)} scans"
                )
        except PercolatorError as error:
            await self._look_up(parts[0], error)
            for part in parts:
                part.problem = error
            return self._still_open(parts)
        unanswered = []
        for part, result in zip(parts, response.scans, strict=True):
            if result.HasField("error"):
                part.problem = from_detail(result.error)
                await self._look_up(part, part.problem)
                unanswered.append(part)
            else:
                self._answers.append((part.order, _found(part, result)))
        return self._still_open(unanswered)

    async def _look_up(self, part: _Part, error: PercolatorError) -> None:
        location, asked = part.location, part.request
        if location is None or not isinstance(error, TabletMoved | NotReady | ExecutionUnknown):
            return
        if isinstance(error, TabletMoved):
            self._tablets.learn(error.locations)
        if self._tablets.locate(asked.table_id, asked.start) is not location:
            return
        # If that fails, only the old map is available; the next attempt may come here again.
        silent = location.address if isinstance(error, DeadlineExceeded) else ""
        await self._refresh(asked.table_id, asked.start, silent)

    async def _refresh(self, table_id: int, row: bytes, server: str = "") -> PercolatorError | None:
        """Asks a master where the row is, or all tablets of a server; returns why that failed."""
        if self._no_master is not None:
            return self._no_master
        try:
            if server:
                await self._tablets.refresh_server(server)
            else:
                await self._tablets.refresh(table_id, row)
        except PercolatorError as error:
            if isinstance(error, _PASSING):
                self._no_master = error
            return error
        return None

    def _still_open(self, parts: list[_Part]) -> list[_Part]:
        """The parts that may still be answered. A permanent error counts as an answer."""
        lasting = [part for part in parts if not isinstance(part.problem, _PASSING)]
        self._answers += [(part.order, _unanswered(part)) for part in lasting]
        return [part for part in parts if isinstance(part.problem, _PASSING)]


_PASSING = (NotExecuted, ExecutionUnknown)
"""Errors after which another attempt may succeed."""


def _by_server(parts: Sequence[_Part]) -> list[tuple[str, list[_Part]]]:
    """The calls to make: address and parts, at most `_SCANS_PER_CALL_MAX` each."""
    servers: dict[str, list[_Part]] = {}
    for part in parts:
        if part.location is not None:
            servers.setdefault(part.location.address, []).append(part)
    return [
        (address, placed[at : at + _SCANS_PER_CALL_MAX])
        for address, placed in servers.items()
        for at in range(0, len(placed), _SCANS_PER_CALL_MAX)
    ]


def _scan(part: _Part) -> pb.NotificationScan:
    asked = part.request
    scan = pb.NotificationScan(
        range=RowRange(start=asked.start, end=asked.end),
        observers=asked.observers,
        locked_columns=asked.locked_columns,
        locks_before=asked.locks_before,
        row_limit=asked.row_limit,
    )
    if part.location is not None:
        scan.target.tablet_id, scan.target.epoch = part.location.tablet_id, part.location.epoch
    return scan


def _found(part: _Part, result: pb.NotificationScanResult) -> FoundWork:
    table_id, location = part.request.table_id, part.location
    tablet = (location.tablet_id, location.epoch) if location is not None else None
    return FoundWork(
        request=part.request,
        waiting=[
            Waiting(table_id, one.row, one.column, one.observer, tuple(one.timestamps))
            for one in result.notifications
        ],
        locks=list(result.locks),
        rest=(result.rest.start, result.rest.end) if result.HasField("rest") else None,
        problem=None,
        place=tablet,
        mark=result.notifications_written,
    )


def _unanswered(part: _Part) -> FoundWork:
    asked = part.request
    return FoundWork(asked, [], [], (asked.start, asked.end), part.problem)
