"""`percolator.v1.ClusterService`, as a master serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from percolator.errors import InvalidArgument, WrongCluster
from percolator.services.chassis.compatibility import are_compatible
from percolator.services.chassis.lived_time import ASK_SECONDS
from percolator.services.chassis.store.cluster_identity import ClusterIdentity
from percolator.services.master.registry import Registry
from percolator.v1 import cluster_pb2 as pb
from percolator.world import Clock

REPORT_INTERVAL_MILLISECONDS = 1_000


class Members(Protocol):
    """The processes of the cluster, as far as this master knows."""

    @property
    def masters(self) -> Sequence[pb.Server]:
        """All living masters, including this one."""
        ...

    @property
    def timestamp_lead_milliseconds(self) -> int | None:
        """How far the oracle's timestamps are ahead of this master's wall clock, if it knows."""
        ...

    @property
    def store_format(self) -> int:
        """The format that the leading master has given to the store; 1 on any other."""
        ...

    async def servers(self) -> Sequence[pb.Server]:
        """All other servers."""
        ...

    async def registered(self, server: pb.Server, wall_milliseconds: int) -> None:
        """A server reports. `NotReady` tells it to report to another master."""
        ...


class ClusterHandler:
    """Describes the cluster, and refuses processes of other clusters and releases.

    `watch_forever` has to run beside it: it advances time, and forgets servers that fell silent.
    """

    def __init__(
        self,
        clock: Clock,
        identity: ClusterIdentity,
        own: pb.Server,
        registry: Registry,
        members: Members,
        rows: pb.RowStorePlace | None = None,
    ) -> None:
        """`rows` has the cells, unless tablet servers have them."""
        self._clock = clock
        self._identity = identity
        self._own = own
        self._started = clock.monotonic_seconds()
        self._registry = registry
        self._members = members
        self._rows = rows

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        own = pb.Server()
        own.CopyFrom(self._own)
        own.uptime_milliseconds = int((self._clock.monotonic_seconds() - self._started) * 1000)
        own.clock_lead_milliseconds = 0
        others = [one for one in self._members.masters if one.server_id != own.server_id]
        servers = [own, *others, *await self._members.servers()]
        servers.sort(key=lambda server: (server.kind, server.address))
        return pb.DescribeResponse(
            cluster_id=self._identity.cluster_id,
            version=self._own.version,
            format=self._format,
            route=pb.ROUTE_DIRECT,
            servers=servers,
            wall_milliseconds=self._clock.wall_milliseconds(),
            timestamp_lead_milliseconds=self._members.timestamp_lead_milliseconds,
            gone=self._registry.missed(),
            row_store=self._rows,
        )

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        if not request.HasField("server"):
            raise InvalidArgument("server", "is missing")
        self._refuse_foreign(request)
        await self._members.registered(request.server, request.wall_milliseconds)
        return pb.RegisterResponse(
            cluster_id=self._identity.cluster_id,
            format=self._format,
            interval_milliseconds=REPORT_INTERVAL_MILLISECONDS,
        )

    @property
    def _format(self) -> int:
        """It may have been raised since this process read it."""
        return max(self._identity.format, self._members.store_format)

    async def watch_forever(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._clock.sleep(ASK_SECONDS)
            self._registry.forget_silent()

    def _refuse_foreign(self, request: pb.RegisterRequest) -> None:
        own, other = self._identity.cluster_id, request.cluster_id
        # Empty for a process that does not know the id yet, and learns it from the answer.
        if other and other != own:
            raise WrongCluster(f"this is cluster {own}, not {other}", expected=own, found=other)
        release = request.server.version
        if not are_compatible(self._own.version, release):
            raise WrongCluster(
                f"release {release!r} does not work with release {self._own.version}: both must "
                "have the same major version, and be at most one minor version apart",
                expected=self._own.version,
                found=release,
            )
