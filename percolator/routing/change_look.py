"""Asking all tablets of a table how new their changes are: one call to each of its servers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from percolator.errors import (
    ExecutionUnknown,
    NotExecuted,
    PercolatorError,
    TabletLocation,
    TabletMoved,
)
from percolator.limits import Limits
from percolator.routing.cells import ChangesRequest, ChangesSeen
from percolator.routing.tablet_map import Searched, TabletMap
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell
from percolator.wire.backoff import Backoff
from percolator.wire.methods import LOOK_FOR_CHANGES
from percolator.wire.status import from_detail
from percolator.world import World

_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0

RowRange = tuple[bytes, bytes]


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
        self._ranges: list[RowRange] = []
        self._locks: list[Cell] = []

    async def seen(self, deadline: float) -> ChangesSeen:
        """Asks until every row is covered by an answer. A tablet that was split is asked again, as
        its halves."""
        left: list[RowRange] = [(b"", b"")]
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

    async def _look_up(self, left: Sequence[RowRange]) -> None:
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
    ) -> tuple[list[RowRange], PercolatorError | None]:
        """Asks the servers of these tablets. Returns the rows without an answer, and why."""
        by_server: defaultdict[str, list[TabletLocation]] = defaultdict(list)
        for location in asked:
            by_server[location.address].append(location)
        calls = (self._call(address, of, deadline) for address, of in by_server.items())
        left: list[RowRange] = []
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
