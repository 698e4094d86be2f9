"""Receives notifications as they are written, from all servers of the watched tables.

There is one stream per tablet server. Broken streams are reopened, and a server that begins to
serve one of the tables is watched as soon as this process learns of it. Streams only make work
quick to find: `tablet_search.find_work` finds whatever they did not deliver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

from percolator.errors import ExecutionUnknown, NotExecuted, PercolatorError, TabletLocation
from percolator.observers.port import WorkHints
from percolator.routing.tablet_map import TabletMap
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.backoff import Backoff
from percolator.wire.methods import WATCH_NOTIFICATIONS
from percolator.world import World

_log = logging.getLogger(__name__)

_STREAM_SECONDS = 600.0
"""How long a stream may last. Then it is reopened, even if it has died without an error."""
_KNOWN_SECONDS = 0.5
"""How often this process's own map is checked for new servers, which costs almost nothing."""
_ASK_SECONDS = 5.0
"""How often a master is asked where all tablets are."""
_RETRY_SECONDS_MIN = 0.05
_RETRY_SECONDS_MAX = 2.0
_BATCHES_WAITING_MAX = 64
"""Batches kept for a slow reader. Above this, servers wait, and drop what has no room."""

Finder = Callable[[int, float], Awaitable[Sequence[TabletLocation]]]
"""Finds all tablets of a table, by a deadline: `Catalog.all_tablets`."""


async def watch_work(
    world: World,
    tablets: TabletMap,
    find: Finder,
    watched: Mapping[int, Sequence[bytes]],
    *,
    listen_only: bool = False,
) -> AsyncGenerator[WorkHints, None]:
    """Yields hints for these observers, by table, from every server of the tables' tablets.

    Each row goes to one of the workers that watch its observer; with `listen_only`, this process
    gets every row. The generator never ends by itself, and raises no errors of the cluster.
    Close it (`contextlib.aclosing`) to end the streams.
    """
    request = pb.WatchNotificationsRequest(
        watched=[
            pb.WatchNotificationsRequest.Watched(table_id=table_id, observers=observers)
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
        request: pb.WatchNotificationsRequest,
    ) -> None:
        self._world = world
        self._tablets = tablets
        self._find = find
        self._tables = [one.table_id for one in request.watched]
        self._request = request
        self._queue: asyncio.Queue[WorkHints] = asyncio.Queue(_BATCHES_WAITING_MAX)
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    async def hints(self) -> AsyncGenerator[WorkHints, None]:
        self._tasks.start(self._follow())
        while True:
            yield await self._queue.get()

    async def close(self) -> None:
        await self._tasks.cancel()

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
                self._streams[address] = self._tasks.start(self._listen(address))
            for address in sorted(self._streams.keys() - addresses):
                self._streams.pop(address).cancel()
            await clock.sleep(_KNOWN_SECONDS)

    async def _ask(self) -> None:
        for table_id in self._tables:
            try:
                await self._find(table_id, self._world.clock.monotonic_seconds() + _ASK_SECONDS)
            except (NotExecuted, ExecutionUnknown):
                # No master answers: keep watching the known servers, and ask about the others next
                # time. To wait for each table would take minutes.
                return
            except PercolatorError:
                continue  # the table is gone

    async def _listen(self, address: str) -> None:
        world = self._world
        backoff = _new_backoff(world)
        call = world.network.stream(address, WATCH_NOTIFICATIONS)
        while True:
            answers = call(self._request, _STREAM_SECONDS)
            began = True
            asked_seconds = 0.0
            try:
                async for answer in answers:
                    hints = WorkHints(address, began, answer.notifications, answer.left_out)
                    await self._queue.put(hints)
                    began = False
                    backoff = _new_backoff(world)
            except PercolatorError as error:
                # The server is down or drains: its tablets will soon be elsewhere.
                _log.debug("the stream of notifications from %s ended: %s", address, error)
                asked_seconds = error.retry_after_seconds
            finally:
                # If cancelled between two answers, it would live on until garbage collection.
                if isinstance(answers, AsyncGenerator):
                    await answers.aclose()
            await world.clock.sleep(max(backoff.next_seconds(), asked_seconds))


def _new_backoff(world: World) -> Backoff:
    return Backoff(world.clock, world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
