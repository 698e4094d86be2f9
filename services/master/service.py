"""`percolator serve master`: a master on the store that its settings name.

A simulation runs `master_service` on a store of its own, without the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from percolator.services.chassis.coordinator.interface import Coordinator
from percolator.services.chassis.coordinator.times import CoordinatorTimes
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.lived_time import LivedTime
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.chassis.store_kinds.cluster_store import ClusterStore
from percolator.services.chassis.store_kinds.directory_store import DirectoryStore
from percolator.services.chassis.store_kinds.opening import opened
from percolator.services.chassis.store_kinds.row_cluster_store import RowClusterStore
from percolator.services.master.cluster_handler import ClusterHandler
from percolator.services.master.leader import TabletTerms
from percolator.services.master.master import Master
from percolator.services.master.master_handler import MasterHandler
from percolator.services.master.metrics import MasterMetrics, RowMasterMetrics, TabletMasterMetrics
from percolator.services.master.registry import Registry
from percolator.services.master.rows.row_handler import RowMasterHandler
from percolator.services.master.rows.row_term import RowTerms
from percolator.services.master.settings import MasterSettings
from percolator.v1 import cluster_pb2, master_pb2
from percolator.v1.cluster_pb2 import ServiceKind

_ELECTION_SECONDS = 1.0


class _Kind(NamedTuple):
    """A master over tablets, or over a row store."""

    master: Master[Any, Any]
    handler: object
    metrics: MasterMetrics[Any, Any]


@asynccontextmanager
async def master_service(
    host: Host[MasterSettings],
    store: ClusterStore,
    *,
    poll_seconds: float = CoordinatorTimes.poll_seconds,
) -> AsyncIterator[list[Exposed]]:
    """A master of the cluster that its store belongs to: the leader or, as a standby, one that
    looks every `poll_seconds`."""
    settings, world = host.settings, host.world
    identity = await store.establish_identity()
    host.log.info("serving a cluster", cluster_id=identity.cluster_id, store=store.name)
    store.watch(host)
    registry = Registry(
        world.clock,
        LivedTime(world.clock),
        silence_milliseconds=round(settings.server_silence_seconds * 1000),
        servers_max=settings.servers_max,
    )
    silence = settings.leader_silence_seconds
    coordinator = store.coordinator(
        CoordinatorTimes(grace_seconds=silence, poll_seconds=poll_seconds)
    )
    master, handler, metrics = _made(host, store, coordinator, registry)
    cluster = ClusterHandler(world.clock, identity, host.announced, registry, master, store.rows())
    host.metrics_registry.register(metrics)
    tasks = [
        host.background("watch", cluster.watch_forever()),
        host.background("list this master", master.keep_listed()),
        host.background("lead", master.run()),
    ]
    await master.candidacy.until_decided(_ELECTION_SECONDS)
    try:
        yield [
            Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], cluster),
            Exposed(master_pb2.DESCRIPTOR.services_by_name["MasterService"], handler),
        ]
    finally:
        for task in tasks:
            task.cancel()
        await coordinator.close()


def _made(
    host: Host[MasterSettings], store: ClusterStore, coordinator: Coordinator, registry: Registry
) -> _Kind:
    """A master of the kind that the store asks for: this is where they part."""
    settings, world, own = host.settings, host.world, host.announced
    if isinstance(store, RowClusterStore):
        over_rows = Master(
            world,
            own,
            coordinator,
            registry,
            RowTerms(world, registry, store, settings.times().collection),
        )
        return _Kind(
            over_rows,
            RowMasterHandler(world.clock, over_rows, store.name),
            RowMasterMetrics(own.address, registry, over_rows),
        )
    if not isinstance(store, DirectoryStore):
        raise TypeError(f"no master is over {type(store).__name__}")
    over_tablets = Master(
        world,
        own,
        coordinator,
        registry,
        TabletTerms(
            world, store.files, store.root, registry, settings.times(), settings.tablets_max
        ),
    )
    return _Kind(
        over_tablets,
        MasterHandler(world.clock, over_tablets),
        TabletMasterMetrics(own.address, registry, over_tablets),
    )


@asynccontextmanager
async def build(host: Host[MasterSettings]) -> AsyncIterator[list[Exposed]]:
    """A master on the store that its settings name."""
    async with opened(host) as store, master_service(host, store) as exposed:
        yield exposed


def main(arguments: Sequence[str]) -> int:
    """`percolator serve master`: returns the exit code."""
    return run(load(MasterSettings, arguments), ServiceKind.SERVICE_KIND_MASTER, build)
