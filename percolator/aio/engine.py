"""What all transactions of one `Database` share: connections, caches, background work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from percolator.errors import TabletLocation, UsageError
from percolator.limits import Limits
from percolator.protocol.background import Background
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.heartbeats import Heartbeats
from percolator.protocol.surroundings import Owners, Surroundings, Timestamps
from percolator.protocol.verdicts import Verdicts
from percolator.schema import Table
from percolator.wire.catalog import Catalog, TableInfo
from percolator.wire.router import Router
from percolator.wire.tablet_map import TabletMap
from percolator.world import Clock, World

_log = logging.getLogger("percolator.transactions")

SLOW_LINES_PER_SECOND_MAX = 10


class Closes(Protocol):
    """Something with an end."""

    async def close(self) -> None: ...


class OpenStarts:
    """The start timestamps of what is open. History from the oldest one on has to be kept."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}

    def add(self, owner: object, start_timestamp: int) -> None:
        self._starts[id(owner)] = start_timestamp

    def discard(self, owner: object) -> None:
        self._starts.pop(id(owner), None)

    def oldest(self) -> int:
        """0 when nothing is open."""
        # A copy, since other threads may end their transactions at this moment.
        return min(list(self._starts.values()), default=0)


class SlowLog:
    """One line per slow transaction, but not a thousand a second when everything is slow."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def note(self, text: str, *arguments: object) -> None:
        second = int(self._clock.monotonic_seconds())
        if second != self._second:
            if self._left_out:
                _log.warning("%d more slow transactions were not logged", self._left_out)
            self._second, self._lines, self._left_out = second, 0, 0
        self._lines += 1
        if self._lines > SLOW_LINES_PER_SECOND_MAX:
            self._left_out += 1
        else:
            _log.warning(text, *arguments)


class Engine:
    """One client. Belongs to one event loop."""

    def __init__(
        self,
        world: World,
        masters: list[str],
        timestamps: Timestamps,
        owners: Owners,
        limits: Limits,
        open_starts: OpenStarts,
        closing: list[Closes],
    ) -> None:
        """`closing` is closed at the end, in this order, after everything of the engine's own."""
        self.world = world
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.tablets = TabletMap(self._find)
        self.router = Router(world, self.tablets, limits)
        self.catalog = Catalog(world, masters, self.tablets, self.router.schema_versions)
        self.open_starts = open_starts
        self.around = Surroundings(
            cells=self.router,
            timestamps=timestamps,
            owners=owners,
            schemas=self.catalog,
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
            background=Background(limits.background_tasks_max),
        )
        self.cleanup = Cleanup(self.around)
        self.heartbeats = Heartbeats(self.around)
        self.slow_log = SlowLog(world.clock)
        self.closed = False
        self._closing = closing

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        return await self.catalog.find(table_id, row)

    def now(self) -> float:
        return self.world.clock.monotonic_seconds()

    def require_usable(self) -> None:
        """Raises `UsageError` after `close`, and in another event loop."""
        if self.closed:
            raise UsageError("the database is closed")
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError("a database belongs to the event loop in which it was connected")

    async def table(self, table: Table[Any], deadline: float) -> TableInfo:
        return await self.catalog.table(table.name, deadline)

    async def close(self, drain_seconds: float) -> None:
        """Lets background work end, for at most so long, and then gives up everything."""
        if self.closed:
            return
        self.closed = True
        await self.around.background.drain(drain_seconds)
        self.heartbeats.close()
        await self.router.close()
        for one in self._closing:
            await one.close()
