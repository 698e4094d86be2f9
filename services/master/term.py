"""A term of a leading master, over tablets or rows: it keeps time, and knows servers and oracle.

`services/master/leader.py` is a term over tablets, `services/master/row_term.py` one over a
row store.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Generic

import structlog

from percolator.errors import NotReady, Overloaded, StoreUnusable
from percolator.services.chassis.coordinator import ASK_SECONDS, Leadership, Trouble
from percolator.services.master.collection import Collection, OracleTime
from percolator.services.master.map_store import MapT, StoredMap
from percolator.services.master.registry import Registry
from percolator.services.master.table_changes import TableChanges
from percolator.tasks import Tasks
from percolator.v1 import master_records_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.world import World

SERVERS_KEY = "servers"
_SETTLE_SECONDS = 1.0

_log = structlog.get_logger("percolator.master")


class Term(ABC, Generic[MapT]):
    """`begin` starts its work; `until_over` returns or raises when the term has ended."""

    collection: Collection
    """Collects history. Each kind of term makes its own."""

    tables: TableChanges[MapT]
    """Changes of tables."""

    def __init__(self, world: World, store: StoredMap[MapT], registry: Registry) -> None:
        self._world = world
        self._registry = registry
        self._tasks = Tasks(self._failed)
        self.began_at = self.now()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.knows_servers = False
        """True if it has learned the servers that the former leader knew."""
        self._noted: list[str] = []
        self._noting = asyncio.Lock()
        self._not_noted = Trouble(
            _log,
            "the list of servers for standbys was not stored",
            "the list of servers for standbys is stored again",
        )
        self.leadership: Leadership = store.leadership
        self.stored: StoredMap[MapT] = store
        self.oracle_time = OracleTime(world, registry)

    @property
    def is_over(self) -> bool:
        """True if its work has ended, or is about to: what calls in progress use may be closed."""
        return self._over.done()

    def now(self) -> float:
        """Monotonic time."""
        return self._world.clock.monotonic_seconds()

    async def begin(self) -> None:
        """Learns the servers that the former leader knew, and starts all background work."""
        stored = await self.leadership.get(SERVERS_KEY)
        for server in master_records_pb2.ServersRecord.FromString(stored or b"").servers:
            try:
                self._registry.report(server)
            except Overloaded as error:
                # The former leader was allowed to list more.
                _log.warning("not all servers are listed", error=str(error))
                break
            self.registered(server)
        self.knows_servers = True
        self.start("watch", self._keep_time())
        self._start_work()
        self.start("ask the oracle", self.oracle_time.run())
        self.start("note servers", self._note_servers())
        self.start("settle the map", self._settle_map())

    @abstractmethod
    def _start_work(self) -> None:
        """Starts what only this kind of term does."""

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Runs background work for as long as this term lasts. If it fails, the term ends."""
        return self._tasks.start(work, name=name)

    async def until_over(self) -> None:
        """Raises `NotReady` when another master leads, or the error that made a task fail."""
        try:
            await self._over
        finally:
            await self._tasks.cancel()
            await self._close()

    async def _close(self) -> None:
        """Called when all background work has ended."""

    def registered(self, server: Server) -> None:
        """A server has reported to the registry."""

    def _failed(self, _: asyncio.Task[Any], error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def _keep_time(self) -> None:
        """Advances time, and notices a successor."""
        while True:
            await self._world.clock.sleep(ASK_SECONDS)
            self._tick()
            if not await self.leadership.was_held():
                raise NotReady("another master leads")

    def _tick(self) -> None:
        """Called many times a second."""

    async def _settle_map(self) -> None:
        """A change whose write failed may be stored, and the next one may be days away."""
        while True:
            await self._world.clock.sleep(_SETTLE_SECONDS)
            with suppress(StoreUnusable):  # whoever asked for the change was told
                await self.stored.settle()

    async def _note_servers(self) -> None:
        while True:
            await self.note_servers()
            await self._world.clock.sleep(1.0)

    async def note_servers(self) -> None:
        """Records the servers, which standbys list too, and which the next leader may miss."""
        async with self._noting:
            servers = self._registry.servers()
            listed = [f"{one.server_id} {one.address} {one.leaving}" for one in servers]
            if listed == self._noted:
                return
            record = master_records_pb2.ServersRecord(servers=servers)
            try:
                await self.leadership.put(SERVERS_KEY, record.SerializeToString())
            except StoreUnusable as error:
                self._not_noted.lasts(error)
            else:
                self._not_noted.is_over()
                self._noted = listed
