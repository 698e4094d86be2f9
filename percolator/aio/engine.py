"""What all transactions of one `Database` share: connections, caches, background work."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from percolator.errors import TabletLocation, UsageError
from percolator.limits import Limits
from percolator.protocol.background import Background
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.heartbeats import Heartbeats
from percolator.protocol.surroundings import Owners, Surroundings
from percolator.protocol.verdicts import Verdicts
from percolator.schema import Table
from percolator.wire.advisory_locks import AdvisoryLocks
from percolator.wire.catalog import Catalog, TableInfo
from percolator.wire.deleted_tables import DeletedTables
from percolator.wire.router import Router
from percolator.wire.tablet_map import TabletMap
from percolator.wire.timestamp_source import TimestampSource
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
        timestamps: TimestampSource,
        owners: Owners,
        locks: AdvisoryLocks,
        limits: Limits,
        open_starts: OpenStarts,
        closing: list[Closes],
    ) -> None:
        """`closing` is closed at the end, in this order, after everything of the engine's own."""
        self.world = world
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.thread_ident = threading.get_ident()
        self.now = world.clock.monotonic_seconds
        self.tablets = TabletMap(self._find)
        self.router = Router(world, self.tablets, limits)
        self.catalog = Catalog(world, masters, self.tablets, self.router.schema_versions)
        self._deleted_tables = DeletedTables(world, self.catalog, limits)
        self.locks = locks
        self.timestamps = timestamps
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
            deleted_tables=self._deleted_tables,
        )
        self.cleanup = Cleanup(self.around)
        self.heartbeats = Heartbeats(self.around)
        self.slow_log = SlowLog(world.clock)
        self.closed = False
        self._all_is_closed = asyncio.Event()
        self._closing = closing

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        return await self.catalog.find(table_id, row)

    def require_usable(self) -> None:
        """Raises `UsageError` after `close`, and in another event loop."""
        if self.closed:
            raise UsageError("the database is closed")
        try:
            in_own_loop = asyncio.get_running_loop() is self.loop
        except RuntimeError:  # none runs in this thread
            in_own_loop = False
        if not in_own_loop:
            raise UsageError("a database belongs to the event loop in which it was connected")

    async def table(self, table: Table[Any], deadline: float) -> TableInfo:
        return await self.catalog.table(table.name, deadline)

    async def close(self, drain_seconds: float) -> None:
        """Lets background work end, for at most so long, and then gives up everything.

        Whoever closes it again waits for the first: what he does next may rely on the end.
        """
        if self.closed:
            await self._all_is_closed.wait()
            return
        self.closed = True
        # An interrupt in the middle must not leave the rest open: a session that is renewed for
        # ever tells others to wait for the locks of a client that nobody can use any more.
        async with AsyncExitStack() as ending:
            ending.callback(self._all_is_closed.set)
            for one in reversed(self._closing):
                ending.push_async_callback(one.close)
            ending.push_async_callback(self._deleted_tables.close)
            ending.push_async_callback(self.router.close)
            ending.callback(self.heartbeats.close)
            await self.around.background.drain(drain_seconds)
