"""`percolator.v1.ClusterService`, as a master answers it."""

from __future__ import annotations

from percolator.errors import InvalidArgument, WrongCluster
from percolator.v1 import cluster_pb2 as wire
from percolator.world import Clock
from services.chassis.cluster_identity import ClusterIdentity
from services.chassis.compatibility import are_compatible
from services.chassis.lived_time import LivedTime
from services.master.registry import Registry

REPORT_INTERVAL_MILLISECONDS = 1_000
_WATCH_SECONDS = 0.1


class ClusterHandler:
    """Tells who is there, and keeps apart what does not belong together.

    `watch_forever` has to run beside it: it lets time pass, and forgets who fell silent.
    """

    def __init__(
        self,
        clock: Clock,
        identity: ClusterIdentity,
        own: wire.Server,
        *,
        silence_milliseconds: int,
        servers_max: int,
    ) -> None:
        self._clock = clock
        self._identity = identity
        self._own = own
        self._started = clock.monotonic_seconds()
        self.registry = Registry(
            LivedTime(clock), silence_milliseconds=silence_milliseconds, servers_max=servers_max
        )

    async def describe(self, request: wire.DescribeRequest) -> wire.DescribeResponse:
        own = wire.Server()
        own.CopyFrom(self._own)
        own.uptime_milliseconds = int((self._clock.monotonic_seconds() - self._started) * 1000)
        servers = [own, *self.registry.servers()]
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
        self.registry.report(request.server)
        return wire.RegisterResponse(
            cluster_id=self._identity.cluster_id,
            format=self._identity.format,
            interval_milliseconds=REPORT_INTERVAL_MILLISECONDS,
        )

    async def watch_forever(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            self.registry.forget_silent()

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
