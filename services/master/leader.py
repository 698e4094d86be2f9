"""One term of a leading master: everything that it does, until it no longer leads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from percolator.errors import NotReady, StoreUnusable
from percolator.tasks import Tasks
from percolator.v1 import master_records_pb2
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.world import World
from services.chassis.coordinator.interface import Leadership
from services.chassis.lived_time import ASK_SECONDS
from services.chassis.store.files import Files
from services.master.history.collection import Collection, CollectionTimes
from services.master.map.map_store import MapStore
from services.master.oracle_time import OracleTime
from services.master.registry import Registry
from services.master.tablets.assignment import Assignment
from services.master.tablets.balance import Balance, BalanceLimits
from services.master.tablets.removal import Removal
from services.master.tablets.server_watch import ServerWatch, WatchTimes
from services.master.tablets.tables import Tables
from services.master.tablets.tablet_changes import TabletChanges

SERVERS_KEY = "servers"
_FORGET_SECONDS = 5.0

_log = structlog.get_logger("percolator.master")


@dataclass(frozen=True)
class MasterTimes:
    """How soon a leading master acts, and how often."""

    watch: WatchTimes = field(default_factory=WatchTimes)
    balance: BalanceLimits = field(default_factory=BalanceLimits)
    collection: CollectionTimes = field(default_factory=CollectionTimes)
    gather_seconds: float = 1.0
    """How long tablets without an owner wait for more servers after the first has appeared."""


class Leader:
    """`begin` starts its work; `until_over` returns or raises when the term has ended."""

    def __init__(
        self,
        world: World,
        files: Files,
        root: Path,
        store: MapStore,
        registry: Registry,
        times: MasterTimes,
        *,
        tablets_max: int,
    ) -> None:
        self._world = world
        self._registry = registry
        self._tasks = Tasks(self._failed)
        self.began_at = self.now()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._noted: list[str] = []
        self.leadership: Leadership = store.leadership
        self.store = store
        self.oracle_time = OracleTime(world, registry)
        self.watch = ServerWatch(
            world, times.watch, self._changed, newest_timestamp=lambda: self.oracle_time.newest
        )
        self.assignment = Assignment(
            world, store, self.watch, self.start, gather_seconds=times.gather_seconds
        )
        self.tables = Tables(
            world.clock,
            store,
            self.assignment,
            self.oracle_time,
            tablets_max=tablets_max,
            retention_min_seconds=times.collection.retention_min_seconds,
        )
        self.changes = TabletChanges(
            world, store, self.watch, self.assignment, tablets_max=tablets_max
        )
        self.balance = Balance(
            world, store, self.watch, self.assignment, self.changes, times.balance
        )
        self.collection = Collection(world, store, registry, self.oracle_time, times.collection)
        self._removal = Removal(world, files, root, store, self.assignment)

    def now(self) -> float:
        """Monotonic time."""
        return self._world.clock.monotonic_seconds()

    async def begin(self) -> None:
        """Starts asking the servers that the map names, and starts all background work."""
        stored = await self.leadership.get(SERVERS_KEY)
        for server in master_records_pb2.ServersRecord.FromString(stored or b"").servers:
            self._registry.report(server)
            self.registered(server)
        for tablet in self.store.current.tablets.values():
            if tablet.server_id:
                self.watch.watch(tablet.server_id, tablet.address)
        self.start("watch", self._keep_time())
        self.start("assign tablets", self.assignment.run())
        self.start("balance", self.balance.run())
        self.start("clear up", self._removal.run())
        self.start("ask the oracle", self.oracle_time.run())
        self.start("collect history", self.collection.run())
        self.start("note servers", self._note_servers())

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Runs background work for as long as this term lasts. If it fails, the term ends."""
        return self._tasks.start(work, name=name)

    async def until_over(self) -> None:
        """Raises `NotReady` when another master leads, or the error that made a task fail."""
        try:
            await self._over
        finally:
            await self._tasks.cancel()
            await self.watch.close()

    def _changed(self) -> None:
        self.assignment.wake()

    def registered(self, server: Server) -> None:
        """A server has reported to the registry."""
        if server.kind == ServiceKind.SERVICE_KIND_TABLET_SERVER:
            self.watch.watch(server.server_id, server.address)

    def _failed(self, _: asyncio.Task[Any], error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def _keep_time(self) -> None:
        """Advances time, notices a successor, and forgets servers that are gone for good."""
        clock = self._world.clock
        forgotten_at = clock.monotonic_seconds()
        while True:
            await clock.sleep(ASK_SECONDS)
            self.watch.tick()
            if not await self.leadership.stands():
                raise NotReady("another master leads")
            if clock.monotonic_seconds() - forgotten_at >= _FORGET_SECONDS:
                forgotten_at = clock.monotonic_seconds()
                needed = {one.server_id for one in self.store.current.tablets.values()}
                self.watch.forget(set(self.watch.servers) - needed)

    async def _note_servers(self) -> None:
        """Records the servers, which standbys list too."""
        while True:
            servers = self._registry.servers()
            listed = [f"{one.server_id} {one.address}" for one in servers]
            if listed != self._noted:
                record = master_records_pb2.ServersRecord(servers=servers)
                try:
                    await self.leadership.put(SERVERS_KEY, record.SerializeToString())
                except StoreUnusable as error:
                    _log.warning(
                        "the list of servers for standbys was not stored", error=str(error)
                    )
                else:
                    self._noted = listed
            await self._world.clock.sleep(1.0)
