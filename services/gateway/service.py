"""`percolator serve gateway`. A simulation runs `gateway_service` without the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from percolator.aio.row_store import connection_to
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.gateway.cluster_handler import ClusterHandler
from percolator.services.gateway.commits import COMMITS_RETRY_SECONDS, Commits
from percolator.services.gateway.gateway_handler import GatewayHandler
from percolator.services.gateway.metrics import GatewayMetrics
from percolator.services.gateway.row_store_handler import RowStoreHandler
from percolator.services.gateway.server_routes import ServerRoutes
from percolator.services.gateway.servers import Servers
from percolator.services.gateway.settings import GatewaySettings
from percolator.v1 import cluster_pb2, gateway_pb2, row_store_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.channels import GrpcNetwork

_DRAIN_SECONDS = 2.0
"""For commits in progress and their secondary cells. What is left can be finished by others."""


@asynccontextmanager
async def gateway_service(host: Host[GatewaySettings]) -> AsyncIterator[list[Exposed]]:
    """A gateway of the cluster whose masters its settings name."""
    settings, world = host.settings, host.world
    host.log.info("waiting until the cluster has an oracle")
    database = await connected(host)
    commits = Commits(
        database,
        commit_seconds=settings.commit_seconds,
        quota=host.quotas.of(
            "commits",
            "commits_max",
            settings.commits_max,
            retry_after_seconds=COMMITS_RETRY_SECONDS,
        ),
        remembered_max=settings.transactions_remembered_max,
    )
    servers = Servers(world, settings.masters, host.cluster_id)
    await servers.refresh()
    following = host.background("follow the cluster", servers.follow())
    if isinstance(world.network, GrpcNetwork):  # a simulated network forwards nothing
        routes = ServerRoutes(world.network, servers, host.announced)
        host.forwarder = routes
        host.on_drain(routes.end_watches)
        host.metrics_registry.register(GatewayMetrics(commits, routes.calls))
    handler = GatewayHandler(
        database.internal.engine, commits, answer_bytes_max=settings.answer_bytes_max
    )
    host.on_drain(handler.end_streams)
    rows = RowStoreHandler(servers, connection_to)
    cluster = ClusterHandler(servers, host.announced.version)
    try:
        yield [
            Exposed(gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"], handler),
            Exposed(row_store_pb2.DESCRIPTOR.services_by_name["RowStoreService"], rows),
            Exposed(cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"], cluster),
        ]
    finally:
        following.cancel()
        await commits.close(_DRAIN_SECONDS)
        await rows.close()
        await database.close(drain_seconds=_DRAIN_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """`percolator serve gateway`: returns the exit code."""
    return run(load(GatewaySettings, arguments), ServiceKind.SERVICE_KIND_GATEWAY, gateway_service)
