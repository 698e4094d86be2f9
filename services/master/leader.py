"""One term of a leading master over tablets: everything that it does, until it no longer leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.coordinator.interface import Leadership
from percolator.services.chassis.store.files import Files, fault_of
from percolator.services.master.history.collection import Collection, CollectionTimes
from percolator.services.master.history.tablet_collecting import TabletCollecting
from percolator.services.master.map.cluster_map import ClusterMap
from percolator.services.master.map.map_store import MapStore, decoded
from percolator.services.master.registry import Registry
from percolator.services.master.store_format import StoreFormat
from percolator.services.master.tablets.assignment import Assignment
from percolator.services.master.tablets.balance import Balance, BalanceLimits
from percolator.services.master.tablets.removal import Removal
from percolator.services.master.tablets.server_watch import ServerWatch, WatchTimes
from percolator.services.master.tablets.tables import Tables
from percolator.services.master.tablets.tablet_changes import TabletChanges
from percolator.services.master.term import Term
from percolator.v1.cluster_pb2 import Server, ServiceKind
from percolator.world import World

_FORGET_SECONDS = 5.0


@dataclass(frozen=True)
class MasterTimes:
    """How soon a leading master acts, and how often."""

    watch: WatchTimes = field(default_factory=WatchTimes)
    balance: BalanceLimits = field(default_factory=BalanceLimits)
    collection: CollectionTimes = field(default_factory=CollectionTimes)
    gather_seconds: float = 1.0
    """How long tablets without an owner wait for more servers after the first has appeared."""


USUAL_TIMES = MasterTimes()


class Leader(Term[ClusterMap]):
    """A term over tablets."""

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
        super().__init__(world, store, registry)
        self.store = store
        self.watch = ServerWatch(
            world, times.watch, self._changed, newest_timestamp=lambda: self.oracle_time.newest
        )
        self.assignment = Assignment(
            world, store, self.watch, self.start, gather_seconds=times.gather_seconds
        )
        self._store_format = StoreFormat(world, files, root, registry, store.current)
        self._tables = Tables(
            world.clock,
            store,
            self.assignment,
            self.oracle_time,
            self._store_format,
            tablets_max=tablets_max,
            retention_min_seconds=times.collection.retention_min_seconds,
        )
        self.changes = TabletChanges(
            world, store, self.watch, self.assignment, tablets_max=tablets_max
        )
        self.balance = Balance(
            world, store, self.watch, self.assignment, self.changes, times.balance
        )
        self.collection = Collection(
            world,
            store,
            registry,
            self.oracle_time,
            times.collection,
            partial(TabletCollecting, world, store),
        )
        self._removal = Removal(world, files, root, store, self.assignment)
        self._forgotten_at = self.now()

    @property
    def tables(self) -> Tables:
        return self._tables

    @property
    def store_format(self) -> int:
        return self._store_format.needed

    def require_opens(self, server: Server) -> None:
        self._store_format.require_opens(server)

    def _start_work(self) -> None:
        for tablet in self.store.current.tablets.values():
            if tablet.server_id:
                self.watch.watch(tablet.server_id, tablet.address)
        self.start("assign tablets", self.assignment.run())
        self.start("balance", self.balance.run())
        self.start("clear up", self._removal.run())
        self.start("forget drained servers", self.changes.forget_drained())
        self.start("collect history", self.collection.run())

    async def _close(self) -> None:
        await self.watch.close()

    def _changed(self) -> None:
        self.assignment.wake()

    def registered(self, server: Server) -> None:
        if server.kind == ServiceKind.SERVICE_KIND_TABLET_SERVER:
            self.watch.watch(server.server_id, server.address)

    def _tick(self) -> None:
        """Also forgets servers that are gone for good."""
        self.watch.tick()
        if self.now() - self._forgotten_at >= _FORGET_SECONDS:
            self._forgotten_at = self.now()
            needed = {one.server_id for one in self.store.current.tablets.values()}
            self.watch.forget(set(self.watch.servers) - needed)


class TabletTerms:
    """The terms of a master over tablets (`percolator.services.master.master.Terms`)."""

    def __init__(
        self,
        world: World,
        files: Files,
        root: Path,
        registry: Registry,
        times: MasterTimes = USUAL_TIMES,
        tablets_max: int = 100_000,
    ) -> None:
        self._world = world
        self._files = files
        self._root = root
        self._registry = registry
        self._times = times
        self._tablets_max = tablets_max

    async def begin(self, leadership: Leadership) -> Leader:
        store = await MapStore.load(leadership)
        await self._refuse_to_forget_tables(store.current.next_id, leadership)
        return Leader(
            self._world,
            self._files,
            self._root,
            store,
            self._registry,
            self._times,
            tablets_max=self._tablets_max,
        )

    async def _refuse_to_forget_tables(self, next_id: int, leadership: Leadership) -> None:
        """A map that is missing, or older than the tables: with it, they would be gone without an
        error, and new tables would get their ids, and then find their cells."""
        try:
            later = [one for one in await self._files.list(self._root) if _is_id(one, next_id)]
            for directory in (self._root / one for one in later):
                if any(map(_is_id, await self._files.list(directory))):
                    # Or it is of the next master's map, if this one was paused since it read its.
                    await leadership.check()
                    raise StoreUnusable(
                        f"{directory} is of a table that is newer than the master's map, which is "
                        "missing or from an older copy: restore it, or move this directory away",
                        fault=StoreFault.DAMAGED,
                    )
        except OSError as error:
            raise StoreUnusable(
                f"cannot list the tables in {self._root}: {error}", fault=fault_of(error)
            ) from error

    def decoded(self, stored: bytes | None) -> ClusterMap:
        return decoded(stored)


def _is_id(name: str, least: int = 1) -> bool:
    """Whether it names the directory of a table or tablet with at least this id."""
    return name.isdecimal() and name.isascii() and int(name) >= least
