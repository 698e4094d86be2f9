"""python -m services.master: what everybody looks for, and finds the others through."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.v1 import cluster_pb2
from services.chassis.cluster_identity import establish_identity
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.rpc import Exposed
from services.chassis.settings import load
from services.master.handler import ClusterHandler
from services.master.metrics import MasterMetrics
from services.master.settings import MasterSettings


@asynccontextmanager
async def build(host: Host[MasterSettings]) -> AsyncIterator[list[Exposed]]:
    """A master of the cluster that its store root belongs to."""
    settings, world = host.settings, host.world
    identity = await establish_identity(host.files, settings.store_root, world.random)
    host.log.info("the cluster", cluster_id=identity.cluster_id, store=settings.store)
    handler = ClusterHandler(
        world.clock,
        identity,
        host.announced,
        silence_milliseconds=round(settings.server_silence_seconds * 1000),
        servers_max=settings.servers_max,
    )
    host.metrics_registry.register(MasterMetrics(handler.registry))
    host.background("watch", handler.watch_forever())
    yield [Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], handler)]


if __name__ == "__main__":
    sys.exit(run(load(MasterSettings), cluster_pb2.SERVICE_KIND_MASTER, build))
