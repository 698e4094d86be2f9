"""The real master as a program of the simulated cluster, and an operator that gives it orders."""

from __future__ import annotations

import asyncio

from percolator.errors import PercolatorError
from percolator.services.chassis.cluster_store import STORE_FORMAT, establish_identity
from percolator.services.chassis.coordinator import CoordinatorTimes, LivedTime
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.process import version
from percolator.services.chassis.rpc import Exposed
from percolator.services.master.collection import CollectionTimes
from percolator.services.master.handlers import ClusterHandler, MasterHandler
from percolator.services.master.leader import MasterTimes, TabletTerms
from percolator.services.master.master import Master
from percolator.services.master.registry import Registry
from percolator.services.master.server_watch import WatchTimes
from percolator.v1 import cluster_pb2, master_pb2
from percolator.wire import methods
from percolator.world import Random, World
from tests.simulation.disks import ROOT
from tests.simulation.process import Incarnation
from tests.simulation.programs import POLL_SECONDS, StoreRoot

_LEASE_SECONDS = 1.5
_ASK_SECONDS = 0.4
_SILENCE_MILLISECONDS = 5_000
_COLLECTION = CollectionTimes(round_seconds=0.7, retention_seconds=1.5, retention_min_seconds=1.0)
_CALL_SECONDS = 6.0


class Masters:
    """Any number of masters: one leads, the others wait."""

    def __init__(self, root: StoreRoot) -> None:
        self._root = root

    async def serve(self, incarnation: Incarnation) -> None:
        """The program of a master."""
        world, clock = incarnation.world, incarnation.world.clock
        files = self._root.files(incarnation)
        identity = await establish_identity(files, ROOT, world.random)
        own = cluster_pb2.Server(
            kind=cluster_pb2.SERVICE_KIND_MASTER,
            server_id=world.random.randbytes(8).hex(),
            address=incarnation.address,
            version=version(),
            store_format=STORE_FORMAT,
        )
        registry = Registry(
            clock, LivedTime(clock), silence_milliseconds=_SILENCE_MILLISECONDS, servers_max=100
        )
        looks = CoordinatorTimes(grace_seconds=_LEASE_SECONDS, poll_seconds=POLL_SECONDS)
        coordinator = DirectoryCoordinator(files, clock, ROOT, looks)
        watch = WatchTimes(lease_seconds=_LEASE_SECONDS, ask_seconds=_ASK_SECONDS)
        times = MasterTimes(watch, collection=_COLLECTION, gather_seconds=0.1)
        master = Master(
            world, own, coordinator, registry, TabletTerms(world, files, ROOT, registry, times)
        )
        cluster = ClusterHandler(clock, identity, own, registry, master)
        incarnation.listen(
            [
                Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], cluster),
                Exposed(
                    master_pb2.DESCRIPTOR.services_by_name["MasterService"],
                    MasterHandler(clock, master),
                ),
            ]
        )
        async with asyncio.TaskGroup() as tasks:
            for work in (cluster.watch_forever(), master.keep_listed(), master.run()):
                tasks.create_task(work)


class Operator:
    """Moves and splits tablets while everything else continues."""

    def __init__(self, masters: list[str], servers: list[str], random: Random) -> None:
        self._masters = masters
        self._servers = servers
        self._random = random

    async def move(self, world: World) -> None:
        for master in self._masters:
            try:
                tablet = await self._any_tablet(world, master)
                request = master_pb2.MoveTabletRequest(
                    tablet_id=tablet, server=self._random.choice(self._servers)
                )
                await world.network.unary(master, methods.MOVE_TABLET)(request, _CALL_SECONDS)
            except PercolatorError:
                continue

    async def split(self, world: World) -> None:
        for master in self._masters:
            try:
                tablet = await self._any_tablet(world, master)
                request = master_pb2.SplitTabletRequest(tablet_id=tablet)
                await world.network.unary(master, methods.SPLIT_TABLET)(request, _CALL_SECONDS)
            except PercolatorError:
                continue

    async def _any_tablet(self, world: World, master: str) -> int:
        tables = await world.network.unary(master, methods.LIST_TABLES)(
            master_pb2.ListTablesRequest(), _CALL_SECONDS
        )
        table = self._random.choice(tables.tables)
        found = await world.network.unary(master, methods.LOCATE_TABLETS)(
            master_pb2.LocateTabletsRequest(table_id=table.table_id), _CALL_SECONDS
        )
        return self._random.choice(found.locations).tablet_id
