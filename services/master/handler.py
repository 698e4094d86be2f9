"""`percolator.v1.ClusterService`, as a master answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from percolator.errors import InvalidArgument, WrongCluster
from percolator.v1 import cluster_pb2 as wire
from percolator.world import Clock
from services.chassis.cluster_identity import ClusterIdentity
from services.chassis.compatibility import are_compatible
from services.chassis.lived_time import ASK_SECONDS
from services.master.registry import Registry

REPORT_INTERVAL_MILLISECONDS = 1_000


class Members(Protocol):
    """Who belongs to the cluster, as far as this master knows."""

    @property
    def masters(self) -> Sequence[wire.Server]:
        """All that live, this one among them."""
        ...

    async def servers(self) -> Sequence[wire.Server]:
        """All others."""
        ...

    def registered(self, server: wire.Server) -> None:
        """`NotReady` when it has to tell another master."""
        ...


class ClusterHandler:
    """Tells who is there, and keeps apart what does not belong together.

    `watch_forever` has to run beside it: it lets time pass, and forgets who fell silent.
    """

    def __init__(
        self,
        clock: Clock,
        identity: ClusterIdentity,
        own: wire.Server,
        registry: Registry,
        members: Members,
    ) -> None:
        self._clock = clock
        self._identity = identity
        self._own = own
        self._started = clock.monotonic_seconds()
        self._registry = registry
        self._members = members

    async def describe(self, request: wire.DescribeRequest) -> wire.DescribeResponse:
        own = wire.Server()
        own.CopyFrom(self._own)
        own.uptime_milliseconds = int((self._clock.monotonic_seconds() - self._started) * 1000)
        others = [one for one in self._members.masters if one.server_id != own.server_id]
        servers = [own, *others, *await self._members.servers()]
        servers.sort(key=lambda server: (server.kind, server.address))
        return wire.DescribeResponse(
            cluster_id=self._identity.cluster_id,
            version=self._own.version,
            format=self._identity.format,
            route=wire.ROUTE_DIRECT,
            servers=servers,
        )

    async def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        if not request.HasField("server"):
            raise InvalidArgument("server", "is missing")
        self._refuse_foreign(request)
        self._members.registered(request.server)
        return wire.RegisterResponse(
            cluster_id=self._identity.cluster_id,
            format=self._identity.format,
            interval_milliseconds=REPORT_INTERVAL_MILLISECONDS,
        )

    async def watch_forever(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(ASK_SECONDS)
            self._registry.forget_silent()

    def _refuse_foreign(self, request: wire.RegisterRequest) -> None:
        own, other = self._identity.cluster_id, request.cluster_id
        # Empty: a process that has not learned it yet, and learns it from the answer.
        if other and other != own:
            raise WrongCluster(f"this is cluster {own}, not {other}", expected=own, found=other)
        release = request.server.version
        if not are_compatible(self._own.version, release):
            raise WrongCluster(
                f"release {release!r} does not work with release {self._own.version}: they have "
                "to be of the same major version, and one minor version apart at most",
                expected=self._own.version,
                found=release,
            )
