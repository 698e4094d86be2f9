"""`percolator serve gateway`. A simulation runs `gateway_service` without the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, ClassVar

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from pydantic import Field, field_validator

from percolator.aio.row_store import connection_to
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.metrics import ServiceMetrics
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import (
    DialAddress,
    ListenAddress,
    Seconds,
    ServiceSettings,
    load,
)
from percolator.services.gateway.commits import COMMITS_RETRY_SECONDS, Commits
from percolator.services.gateway.forwarded_call import ForwardedCalls, ServerRoutes
from percolator.services.gateway.gateway_handler import GatewayHandler
from percolator.services.gateway.row_store_handler import RowStoreHandler
from percolator.services.gateway.servers import ClusterHandler, Servers
from percolator.v1 import cluster_pb2, gateway_pb2, row_store_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.channels import GrpcNetwork
from percolator.wire.timestamp_source import OracleOfCluster


class GatewaySettings(ServiceSettings):
    """The settings of a gateway."""

    service: ClassVar[str] = "gateway"

    listen: ListenAddress = "127.0.0.1:7110"
    """host:port to serve on; port 0 is any free one."""

    commit_seconds: Seconds = 10.0
    """How long a commit is tried, however long its caller waits for it."""

    commits_max: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Commits in progress at once, including those whose callers have gone."""

    transactions_remembered_max: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """How many recent transactions are remembered, about 500 bytes each. The commit of one that was
    forgotten costs one more round trip."""

    answer_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 30)] = 16 << 20
    """The largest answer to one Get."""

    @field_validator("masters")
    @classmethod
    def _has_a_cluster(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        if not masters:
            raise ValueError("is missing: a gateway needs the address of at least one master")
        return masters


class GatewayMetrics(ServiceMetrics):
    """Collects `percolator_gateway_*`."""

    prefix = "percolator_gateway_"

    def __init__(self, commits: Commits, forwarded: ForwardedCalls) -> None:
        self._commits = commits
        self._forwarded = forwarded

    def collect(self) -> Iterator[Metric]:
        commits, forwarded = self._commits, self._forwarded
        outcomes = dict(sorted(commits.outcomes.items()))
        yield self.counters("commits", "Finished commits, by outcome.", "outcome", outcomes)
        yield self.gauge("commits_in_progress", "Commits in progress.", commits.in_progress)
        yield self.counter(
            "commits_joined",
            "Commits that found the same commit in progress or done.",
            commits.joined,
        )
        yield self.counter(
            "commits_looked_up",
            "Commits that first looked at the cells for traces of earlier attempts.",
            commits.looked_up,
        )
        finished = CounterMetricFamily(
            self.prefix + "forwarded", "Forwarded calls, by status code.", labels=["method", "code"]
        )
        for (method, code), count in tuple(forwarded.finished.items()):
            finished.add_metric([method, code], count)
        yield finished
        yield self.gauge(
            "forwarded_in_flight",
            "Forwarded calls in progress, streams included.",
            forwarded.in_flight,
        )
        yield self.counter(
            "forwarded_request_bytes", "Bytes forwarded to servers.", forwarded.request_bytes
        )
        yield self.counter(
            "forwarded_answer_bytes", "Bytes forwarded back to callers.", forwarded.answer_bytes
        )


_DRAIN_SECONDS = 2.0
"""For commits in progress and their secondary cells. What is left can be finished by others."""


@asynccontextmanager
async def gateway_service(host: Host[GatewaySettings]) -> AsyncIterator[list[Exposed]]:
    """A gateway of the cluster whose masters its settings name."""
    settings, world = host.settings, host.world
    host.log.info("waiting until the cluster has an oracle")
    database = await connected(host)
    oracle = OracleOfCluster(world, settings.masters)
    commits = Commits(
        database,
        oracle,
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
        await oracle.close()
        await database.close(drain_seconds=_DRAIN_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """`percolator serve gateway`: returns the exit code."""
    return run(load(GatewaySettings, arguments), ServiceKind.SERVICE_KIND_GATEWAY, gateway_service)
