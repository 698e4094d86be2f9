"""A master on a given store root, without its process, so that a simulation can run it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from percolator.v1 import cluster_pb2, master_pb2
from services.chassis.coordinator.directory import CoordinatorTimes, DirectoryCoordinator
from services.chassis.host import Host
from services.chassis.lived_time import LivedTime
from services.chassis.serving.rpc import Exposed
from services.chassis.store.cluster_identity import establish_identity
from services.master.cluster_handler import ClusterHandler
from services.master.master import Master, Site
from services.master.master_handler import MasterHandler
from services.master.metrics import MasterMetrics
from services.master.registry import Registry
from services.master.settings import MasterSettings

_ELECTION_SECONDS = 1.0


@asynccontextmanager
async def master_service(host: Host[MasterSettings], root: Path) -> AsyncIterator[list[Exposed]]:
    """A master of the cluster that its store root belongs to: the leader or a standby."""
    settings, world = host.settings, host.world
    identity = await establish_identity(host.files, root, world.random)
    host.log.info("serving a cluster", cluster_id=identity.cluster_id, store=settings.store)
    host.watch_store(root)
    registry = Registry(
        world.clock,
        LivedTime(world.clock),
        silence_milliseconds=round(settings.server_silence_seconds * 1000),
        servers_max=settings.servers_max,
    )
    grace = CoordinatorTimes(grace_seconds=settings.leader_silence_seconds)
    coordinator = DirectoryCoordinator(host.files, world.clock, root, grace)
    site = Site(world, host.files, root, host.announced, settings.times(), settings.tablets_max)
    master = Master(site, coordinator, registry)
    cluster = ClusterHandler(world.clock, identity, host.announced, registry, master)
    host.metrics_registry.register(MasterMetrics(host.announced.address, registry, master))
    tasks = [
        host.background("watch", cluster.watch_forever()),
        host.background("list this master", master.keep_listed()),
        host.background("lead", master.run()),
    ]
    await master.candidacy.until_decided(_ELECTION_SECONDS)
    try:
        yield [
            Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], cluster),
            Exposed(
                master_pb2.DESCRIPTOR.services_by_name["MasterService"],
                MasterHandler(world.clock, master),
            ),
        ]
    finally:
        for task in tasks:
            task.cancel()
        await coordinator.close()
