"""The programs of the simulated cluster: what each process runs, from its start to its end.

Each is the real service, put together as its `__main__` does, without sockets and threads. A
program that returns or raises has exited, and a simulation fails if one does that by itself.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NoReturn, TypeVar

import structlog
from prometheus_client import CollectorRegistry

from percolator.errors import (
    InvariantViolation,
    PercolatorError,
    Retry,
    StoreFault,
    StoreUnusable,
)
from percolator.services.chassis.cluster_store import (
    ClusterStore,
    DirectoryStore,
    establish_identity,
)
from percolator.services.chassis.coordinator import Coordinator, CoordinatorTimes, LivedTime
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.host import Host
from percolator.services.chassis.process import version
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import ServiceSettings
from percolator.services.lockservice.handler import LockCounts, LockServiceHandler
from percolator.services.lockservice.sessions import LockServiceLimits
from percolator.services.master.collection import CollectionTimes
from percolator.services.master.handlers import ClusterHandler, MasterHandler
from percolator.services.master.leader import MasterTimes, begin_tablet_term
from percolator.services.master.map_store import decoded
from percolator.services.master.master import Master
from percolator.services.master.registry import Registry
from percolator.services.master.server_watch import WatchTimes
from percolator.services.master.tablet_data import DirectoryTablets
from percolator.services.oracle.service import OracleSettings, oracle_service
from percolator.services.tabletserver.service import tablet_server
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.tabletserver.storage import TabletStore
from percolator.v1 import cluster_pb2, lockservice_pb2, master_pb2
from percolator.v1.cluster_pb2 import RowStorePlace
from percolator.wire import methods
from percolator.wire.cluster import describe
from percolator.wire.methods import REGISTER
from percolator.world import Random, World
from tests.doubles.memory_files import MemoryDisk
from tests.simulation.bucket import BucketOfTablets, SimulatedBucket, SimulatedBucketStore
from tests.simulation.disks import ROOT, SimulatedFiles, SimulatedTabletStore
from tests.simulation.process import Incarnation

SettingsT = TypeVar("SettingsT", bound=ServiceSettings)

CLUSTER_ID = "simulated"
MASTER = "master:7100"
STANDBY = "spare:7100"
ORACLE = "oracle:7001"
STANDBY_ORACLE = "spare:7001"
"""On one machine with the standby master: they have one clock, and may be wrong together."""
LOCK_SERVICE = "lockservice:7002"
POLL_SECONDS = 0.25
"""The interval at which a candidate checks who leads. In production it is shorter: these checks are
most of what a quiet cluster does."""
_REGISTER_SECONDS = 1.0
_BUCKET_SILENCE_SECONDS = 1.0
"""Soon: a successor begins above the mark, which is 2.9 s ahead of what its predecessor, if that is
paused, has handed out."""
_DESCRIBE_SECONDS = 0.5
_AGAIN_SECONDS = 0.2
_CALL_SECONDS = 0.5
_LOCK_SERVICE_LIMITS = LockServiceLimits(ttl_milliseconds_max=3_000)
"""As long as the sessions of the simulated clients live: this long after a restart it is known
again which of them need history."""


class StoreRoot:
    """The disk that all servers share, as their programs open it."""

    def __init__(self, occurred: Counter[str], fsync_seconds_max: float) -> None:
        self.disk = MemoryDisk()
        self.disk.make_durable_directory(ROOT)
        self.occurred = occurred
        self._fsync_seconds_max = fsync_seconds_max
        self.collected: dict[int, int] = {}
        """Commit timestamps of transactions of which a record was collected, by start timestamp."""
        self.open_files: dict[str, SimulatedFiles] = {}
        """The files of the present incarnations, by address."""
        self.lock_counts: list[LockCounts] = []
        """The counts of locks of each incarnation of the lock service."""
        self.answers = asyncio.Event()
        """While it is not set, the store stalls for all processes, also for those started now."""
        self.answers.set()

    def files(self, incarnation: Incarnation) -> SimulatedFiles:
        files = SimulatedFiles(
            incarnation.wire.loop,
            self.disk,
            incarnation.world.random,
            self.occurred,
            self._fsync_seconds_max,
            self.answers,
        )
        incarnation.life.at_end(files.kill)
        self.open_files[incarnation.address] = files
        return files


class _OraclesStore(DirectoryStore):
    """The mark is in a directory, even if the cells are in a row store."""

    place: RowStorePlace | None = None

    def rows(self) -> RowStorePlace | None:
        return self.place


class Programs:
    """The programs that can be started. All state that outlives a process is in the store root."""

    def __init__(
        self,
        root: StoreRoot,
        masters: Sequence[str],
        rows: RowStorePlace | None = None,
        bucket: SimulatedBucket | None = None,
        tablets: BucketOfTablets | None = None,
    ) -> None:
        """`rows`: where the cells are, if not in tablet servers. `bucket`: where the roles of
        masters and oracles are, and `tablets` where tablets are, if not in directories."""
        self._root = root
        self._bucket = bucket
        self._tablets = tablets
        self._rows = rows
        self._masters = masters
        self._several = len(masters) > 1
        """Not the stand-in for the master, which knows all servers anyway."""

    async def oracle(self, incarnation: Incarnation) -> None:
        files = self._root.files(incarnation)
        masters = tuple(self._masters) if self._several else ()
        settings = OracleSettings(
            store=str(ROOT),
            standby=True,
            masters=masters,
            leader_silence_seconds=_BUCKET_SILENCE_SECONDS if self._bucket is not None else None,
        )
        kind = cluster_pb2.SERVICE_KIND_ORACLE
        if self._bucket is not None:
            incarnation.wire.wake(incarnation.address)  # it asks the store before it listens
            cluster_id = await cluster_id_of(incarnation.world, masters)
            host = host_for(incarnation, files, settings, kind, cluster_id)
            async with needing_the_store():
                bucket = self._bucket.opened(incarnation, files)
                await bucket.refuse_other_cluster(cluster_id)
                await self._serve_oracle(incarnation, host, bucket)
        host = host_for(incarnation, files, settings, kind, CLUSTER_ID)
        store = _OraclesStore(files, ROOT, incarnation.world)
        store.place = self._rows
        await self._serve_oracle(incarnation, host, store)

    async def _serve_oracle(
        self, incarnation: Incarnation, host: Host[OracleSettings], store: ClusterStore
    ) -> NoReturn:
        async with oracle_service(host, store, poll_seconds=POLL_SECONDS) as exposed:
            incarnation.listen(exposed)
            host.background(
                "register",
                register(incarnation, self._masters, host.announced, forever=self._several),
            )
            await host.failed.wait()
        raise failure(host, incarnation)

    async def lock_service(self, incarnation: Incarnation) -> None:
        world = incarnation.world
        handler = LockServiceHandler(world.clock, world.random, _LOCK_SERVICE_LIMITS)
        self._root.lock_counts.append(handler.locks.counts)
        service = lockservice_pb2.DESCRIPTOR.services_by_name["LockService"]
        incarnation.listen([Exposed(service, handler)])
        kind = cluster_pb2.SERVICE_KIND_LOCK_SERVICE
        own = _server(incarnation, kind)
        await asyncio.gather(
            handler.expire_forever(),
            register(incarnation, self._masters, own, forever=self._several),
        )

    async def tablet_server(self, incarnation: Incarnation) -> None:
        files = self._root.files(incarnation)
        kind = cluster_pb2.SERVICE_KIND_TABLET_SERVER
        settings = TabletServerSettings(store=str(ROOT), masters=tuple(self._masters))
        host = host_for(incarnation, files, settings, kind, CLUSTER_ID)
        occurred, collected = self._root.occurred, self._root.collected
        store: TabletStore = SimulatedTabletStore(files, occurred, collected)
        if self._tablets is not None:
            store = SimulatedBucketStore(self._tablets, incarnation, files, collected)
        host.watch_store(ROOT)
        async with tablet_server(host, store, ROOT) as exposed:
            incarnation.listen(exposed)
            host.background(
                "register",
                register(incarnation, self._masters, host.announced, forever=self._several),
            )
            await host.failed.wait()
        raise failure(host, incarnation)


async def cluster_id_of(world: World, masters: Sequence[str]) -> str:
    """As a service learns it before it does anything else."""
    while True:
        seconds = _DESCRIBE_SECONDS * len(masters)
        try:
            return (await describe(world.network, masters, seconds)).cluster_id
        except PercolatorError:
            await asyncio.sleep(_AGAIN_SECONDS)


@asynccontextmanager
async def needing_the_store() -> AsyncIterator[None]:
    """A store that does not answer when a process starts ends the process."""
    try:
        yield
    except PercolatorError as error:
        if error.retry is Retry.USELESS:
            raise
        raise StoreUnusable(str(error), fault=StoreFault.INPUT_OUTPUT) from error


async def register(
    incarnation: Incarnation,
    masters: Sequence[str],
    server: cluster_pb2.Server,
    *,
    forever: bool,
) -> None:
    """Registers every second with any master that accepts it, as the chassis does."""
    world = incarnation.world
    for attempt in itertools.count():
        call = world.network.unary(masters[attempt % len(masters)], REGISTER)
        wall = world.clock.wall_milliseconds()
        request = cluster_pb2.RegisterRequest(server=server, wall_milliseconds=wall)
        try:
            await call(request, _CALL_SECONDS)
        except PercolatorError:
            await asyncio.sleep(_AGAIN_SECONDS)
            continue
        if not forever:
            return
        await asyncio.sleep(_REGISTER_SECONDS)


def failure(host: Host[SettingsT], incarnation: Incarnation) -> PercolatorError:
    """Why a process ends whose service has failed."""
    if host.gone:
        return StoreUnusable(host.gone, fault=StoreFault.INPUT_OUTPUT)
    return InvariantViolation(f"a background task of {incarnation.life.name} failed")


def host_for(
    incarnation: Incarnation,
    files: SimulatedFiles,
    settings: SettingsT,
    kind: cluster_pb2.ServiceKind,
    cluster_id: str,
) -> Host[SettingsT]:
    """Host that a process offers to its service."""
    server = _server(incarnation, kind)
    return Host(
        settings,
        incarnation.world,
        files,
        server.server_id,
        cluster_id,
        server,
        structlog.stdlib.get_logger("simulated"),
        CollectorRegistry(),
    )


def _server(incarnation: Incarnation, kind: cluster_pb2.ServiceKind) -> cluster_pb2.Server:
    return cluster_pb2.Server(
        kind=kind,
        server_id=incarnation.world.random.randbytes(8).hex(),
        address=incarnation.address,
        version=version(),
    )


# The real master as a program of the simulated cluster, and an operator that gives it orders.

_LEASE_SECONDS = 1.5
_ASK_SECONDS = 0.4
_SILENCE_MILLISECONDS = 5_000
_COLLECTION = CollectionTimes(round_seconds=0.7, retention_seconds=1.5, retention_min_seconds=1.0)
_MASTERS_CALL_SECONDS = 6.0


class Masters:
    """Any number of masters: one leads, the others wait."""

    def __init__(self, root: StoreRoot, bucket: SimulatedBucket | None) -> None:
        """`bucket`: where their role is, if not in a directory."""
        self._root = root
        self._bucket = bucket

    async def serve(self, incarnation: Incarnation) -> None:
        """The program of a master."""
        world, clock = incarnation.world, incarnation.world.clock
        files = self._root.files(incarnation)
        identity = await establish_identity(files, ROOT, world.random)
        looks = CoordinatorTimes(grace_seconds=_LEASE_SECONDS, poll_seconds=POLL_SECONDS)
        coordinator: Coordinator = DirectoryCoordinator(files, clock, ROOT, looks)
        if self._bucket is not None:
            incarnation.wire.wake(incarnation.address)  # it asks the store before it listens
            bucket = self._bucket.opened(incarnation, files)
            async with needing_the_store():
                identity = await bucket.establish_identity()
            coordinator = bucket.coordinator(looks)
        own = cluster_pb2.Server(
            kind=cluster_pb2.SERVICE_KIND_MASTER,
            server_id=world.random.randbytes(8).hex(),
            address=incarnation.address,
            version=version(),
        )
        registry = Registry(
            clock, LivedTime(clock), silence_milliseconds=_SILENCE_MILLISECONDS, servers_max=100
        )
        watch = WatchTimes(lease_seconds=_LEASE_SECONDS, ask_seconds=_ASK_SECONDS)
        times = MasterTimes(watch, collection=_COLLECTION, gather_seconds=0.1)
        begin = partial(
            begin_tablet_term, world, DirectoryTablets(files, ROOT), registry, times=times
        )
        master = Master(world, own, coordinator, registry, begin, decoded)
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
                await world.network.unary(master, methods.MOVE_TABLET)(
                    request, _MASTERS_CALL_SECONDS
                )
            except PercolatorError:
                continue

    async def split(self, world: World) -> None:
        for master in self._masters:
            try:
                tablet = await self._any_tablet(world, master)
                request = master_pb2.SplitTabletRequest(tablet_id=tablet)
                await world.network.unary(master, methods.SPLIT_TABLET)(
                    request, _MASTERS_CALL_SECONDS
                )
            except PercolatorError:
                continue

    async def _any_tablet(self, world: World, master: str) -> int:
        tables = await world.network.unary(master, methods.LIST_TABLES)(
            master_pb2.ListTablesRequest(), _MASTERS_CALL_SECONDS
        )
        table = self._random.choice(tables.tables)
        found = await world.network.unary(master, methods.LOCATE_TABLETS)(
            master_pb2.LocateTabletsRequest(knows_indexes=True, table_id=table.table_id),
            _MASTERS_CALL_SECONDS,
        )
        return self._random.choice(found.locations).tablet_id
