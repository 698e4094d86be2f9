"""Sends a request to every tablet of a range, one after another, wherever each is at that time.

The request must be safe to repeat: if an answer is lost, it is sent again, and if a tablet was
split, it is sent to both halves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from percolator.errors import (
    ExecutionUnknown,
    NotExecuted,
    TabletLocation,
    TabletMoved,
)
from percolator.routing.catalog import TabletMap
from percolator.wire.backoff import Backoff
from percolator.world import World

_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 1.0

Ask = Callable[[TabletLocation], Awaitable[None]]


class TabletWalk:
    """Walks over tablets; `patience_seconds` is how long each answer may take, with retries."""

    def __init__(self, world: World, tablets: TabletMap, patience_seconds: float) -> None:
        self._world = world
        self._tablets = tablets
        self._patience_seconds = patience_seconds

    async def each(self, table_id: int, start: bytes, end: bytes, ask: Ask) -> None:
        """Asks all tablets with rows in [start, end); an empty end means to the last row."""
        row = start
        while True:
            location = await self.one(table_id, row, ask)
            if not location.end or (end and location.end >= end):
                return
            row = location.end

    async def one(self, table_id: int, row: bytes, ask: Ask) -> TabletLocation:
        """Asks the tablet that holds a row; returns which tablet it was."""
        clock = self._world.clock
        deadline = clock.monotonic_seconds() + self._patience_seconds
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        while True:
            try:
                location = await self._tablets.located(table_id, row)
                await ask(location)
            except (NotExecuted, ExecutionUnknown) as error:
                if isinstance(error, TabletMoved):
                    self._tablets.learn(error.locations)
                if not await backoff.pause(deadline):
                    raise
                await self._tablets.try_refresh(table_id, row)
            else:
                return location
