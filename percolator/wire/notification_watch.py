"""Being told of notifications as they are written, by all servers of the tables that matter.

One stream per tablet server. Streams that break are opened again, and servers that come to serve
one of the tables are watched as soon as this process learns of it. All of it makes work quick to be
found, and nothing more: `notifications.find_work` finds what no stream has told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from percolator.errors import PercolatorError, TabletLocation
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire.backoff import Backoff
from percolator.wire.methods import WATCH_NOTIFICATIONS
from percolator.wire.tablet_map import TabletMap
from percolator.world import World

_log = logging.getLogger(__name__)

_STREAM_SECONDS = 600.0
"""Then a stream is opened anew: even one that died without a sound ends."""
_KNOWN_SECONDS = 0.5
"""How often what this process knows is looked at for new servers: costs next to nothing."""
_ASK_SECONDS = 5.0
"""How often a master is asked where all tablets are."""
_RETRY_SECONDS_MIN = 0.05
_RETRY_SECONDS_MAX = 2.0
_BATCHES_WAITING_MAX = 64
"""Between streams and a slow reader; above it the servers wait, and leave out what has no room."""

Finder = Callable[[int, float], Awaitable[Sequence[TabletLocation]]]
"""All tablets of a table, by a deadline: `Catalog.all_tablets`."""


@dataclass(frozen=True, slots=True)
class WorkHints:
    """Some notifications that a tablet server has written."""

    address: str
    """Of the server."""
    began: bool
    """The stream has just begun: what the server wrote before may not have been told."""
    notifications: Sequence[wire.WatchedNotification]
    left_out: int
    """So many were not told before these, because this process reads slowly."""


async def watch_work(
    world: World,
    tablets: TabletMap,
    find: Finder,
    watched: Mapping[int, Sequence[bytes]],
    *,
    listen_only: bool = False,
) -> AsyncGenerator[WorkHints, None]:
    """Hints for these observers, by table, from everybody who serves a tablet of the tables.

    Of all who watch an observer, one is told of each row; who listens only is told of every row.
    Never ends by itself, and raises nothing that has to do with the cluster. Close it
    (`contextlib.aclosing`) to end the streams.
    """
    request = wire.WatchNotificationsRequest(
        watched=[
            wire.WatchNotificationsRequest.Watched(table_id=table_id, observers=observers)
            for table_id, observers in sorted(watched.items())
        ],
        listen_only=listen_only,
    )
    watch = _Watch(world, tablets, find, request)
    try:
        async for hints in watch.hints():
            yield hints
    finally:
        await watch.close()


class _Watch:
    def __init__(
        self,
        world: World,
        tablets: TabletMap,
        find: Finder,
        request: wire.WatchNotificationsRequest,
    ) -> None:
        self._world = world
        self._tablets = tablets
        self._find = find
        self._tables = [one.table_id for one in request.watched]
        self._request = request
        self._queue: asyncio.Queue[WorkHints] = asyncio.Queue(_BATCHES_WAITING_MAX)
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}

    async def hints(self) -> AsyncGenerator[WorkHints, None]:
        self._tasks[asyncio.create_task(self._follow())] = None
        while True:
            yield await self._queue.get()

    async def close(self) -> None:
        tasks = [*self._tasks, *self._streams.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self) -> None:
        """Keeps one stream to every server of the tables, and ends those to the others."""
        clock = self._world.clock
        asked = -_ASK_SECONDS
        while True:
            if clock.monotonic_seconds() - asked >= _ASK_SECONDS:
                await self._ask()
                asked = clock.monotonic_seconds()
            addresses = {
                location.address
                for table_id in self._tables
                for location in self._tablets.tablets(table_id)
            }
            for address in sorted(addresses - self._streams.keys()):
                self._streams[address] = asyncio.create_task(self._listen(address))
            for address in sorted(self._streams.keys() - addresses):
                task = self._streams.pop(address)
                self._tasks[task] = None
                task.add_done_callback(self._tasks.pop)
                task.cancel()
            await clock.sleep(_KNOWN_SECONDS)

    async def _ask(self) -> None:
        for table_id in self._tables:
            try:
                await self._find(table_id, self._world.clock.monotonic_seconds() + _ASK_SECONDS)
            except PercolatorError:
                # No master answers, or the table is gone: what is known is watched on.
                continue

    async def _listen(self, address: str) -> None:
        world = self._world
        backoff = _new_backoff(world)
        call = world.network.stream(address, WATCH_NOTIFICATIONS)
        while True:
            answers = call(self._request, _STREAM_SECONDS)
            began = True
            try:
                async for answer in answers:
                    hints = WorkHints(address, began, answer.notifications, answer.left_out)
                    await self._queue.put(hints)
                    began = False
                    backoff = _new_backoff(world)
            except PercolatorError as error:
                # It is down, or drains: its tablets will be elsewhere soon.
                _log.debug("the stream of notifications from %s ended: %s", address, error)
            finally:
                # Cancelled between two answers, it would live on until it is collected.
                if isinstance(answers, AsyncGenerator):
                    await answers.aclose()
            await world.clock.sleep(backoff.next_seconds())


def _new_backoff(world: World) -> Backoff:
    return Backoff(world.clock, world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
