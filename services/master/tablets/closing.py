"""Closing tablets: those that are about to be moved or split, and strays.

A stray is a tablet on a server that the map does not name: it was given to another server while
this one was away, or its table was deleted. It no longer acknowledges anything, closed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import structlog

from percolator.errors import PercolatorError
from percolator.services.master.map.map_store import MapStore
from percolator.services.master.tablets.server_watch import ServerWatch, WatchedServer
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.world import World

_CLOSE_SECONDS = 10.0

_log = structlog.get_logger("percolator.master")

Start = Callable[[str, Coroutine[Any, Any, object]], asyncio.Task[Any]]
"""Runs background work for as long as this master leads."""


class Closing:
    """Sends orders to close tablets, on behalf of a leading master."""

    def __init__(
        self,
        world: World,
        store: MapStore,
        watch: ServerWatch,
        start: Start,
        held: Collection[int],
    ) -> None:
        """Tablets in `held` are being moved or split, and are left alone."""
        self._world = world
        self._store = store
        self._watch = watch
        self._start = start
        self._held = held
        self._closing: set[tuple[str, int, int]] = set()

    def close_strays(self) -> None:
        """Starts closing every stray tablet."""
        for server in self._watch.alive():
            for reported in list(server.reported.values()):
                key = (server.server_id, reported.tablet_id, reported.epoch)
                if key in self._closing or reported.tablet_id in self._held:
                    continue
                if self._is_stray(server, reported):
                    self._closing.add(key)
                    name = f"close tablet {reported.tablet_id}"
                    self._start(name, self._close_stray(server, reported, key))

    def _is_stray(self, server: WatchedServer, reported: pb.ReportedTablet) -> bool:
        tablet = self._store.current.tablets.get(reported.tablet_id)
        if tablet is None:
            return True
        if tablet.epoch == reported.epoch:
            return tablet.server_id != server.server_id
        return reported.epoch < tablet.epoch and tablet.server_id != server.server_id

    async def _close_stray(
        self, server: WatchedServer, reported: pb.ReportedTablet, key: tuple[str, int, int]
    ) -> None:
        try:
            await self.close(server.address, reported.tablet_id, reported.epoch)
        except PercolatorError as error:
            _log.info("stray tablet not closed", tablet=reported.tablet_id, error=str(error))
        finally:
            self._closing.discard(key)

    async def close(self, address: str, tablet_id: int, epoch: int) -> None:
        """Asks a server to flush and close a tablet."""
        await self._store.leadership.check()
        call = self._world.network.unary(address, methods.CLOSE_TABLET)
        await call(pb.CloseTabletRequest(tablet_id=tablet_id, epoch=epoch), _CLOSE_SECONDS)
