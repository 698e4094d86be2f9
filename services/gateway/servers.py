"""The servers of the cluster, as a master last described them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from percolator.errors import (
    InvalidArgument,
    NotReady,
    PercolatorError,
    UnknownServer,
    WrongCluster,
)
from percolator.services.chassis.rpc import caller_identity
from percolator.tasks import outlasting
from percolator.v1 import cluster_pb2 as pb
from percolator.v1.cluster_pb2 import SERVICE_KIND_MASTER, DescribeResponse, Server
from percolator.wire.cluster import addresses_of, describe
from percolator.world import World

_REFRESH_SECONDS = 1.0
_DESCRIBE_SECONDS = 2.0
_LOOK_UP_SECONDS_MIN = 0.2
"""Without this pause, each call for an unknown server would become a request to a master."""

_FORGET_SECONDS = 30.0
"""How long a server that is no longer listed is still known. A master that has just started lists
no servers until they have registered again, and callers of those servers must not notice."""

_log = structlog.get_logger("percolator.gateway")


class Servers:
    """Asks a master every second, and whenever a call names an unknown server."""

    def __init__(self, world: World, masters: Sequence[str], cluster_id: str) -> None:
        self._world = world
        self._given = list(masters)
        self._cluster_id = cluster_id
        self.described: DescribeResponse | None = None
        """The last description; None before the first."""
        self._by_name: dict[str, tuple[Server, float]] = {}
        """By id and by address: the server as last listed, and when."""
        self._asking: asyncio.Task[None] | None = None
        self._asked_seconds = float("-inf")
        self._trouble = ""

    @property
    def masters(self) -> list[Server]:
        if self.described is None:
            return []
        return [one for one in self.described.servers if one.kind == SERVICE_KIND_MASTER]

    def known(self, name: str) -> Server | None:
        """The server with this id or advertised address, if it is known."""
        known = self._by_name.get(name)
        return None if known is None else known[0]

    async def find(self, name: str) -> Server:
        """As `known`, but asks a master before it raises `UnknownServer`."""
        known = self.known(name)
        if known is None:
            silence = self._world.clock.monotonic_seconds() - self._asked_seconds
            if self._asking is not None or silence >= _LOOK_UP_SECONDS_MIN:
                await self.refresh()
            known = self.known(name)
        if known is None and self._trouble:
            raise UnknownServer(
                f"server {name!r} is unknown here, and no master says whether it is in this "
                f"cluster: {self._trouble}",
                server=name,
            )
        if known is None:
            raise UnknownServer(f"no server {name!r} is in this cluster", server=name)
        return known

    async def refresh(self) -> None:
        """Asks a master. Concurrent calls share one answer; without one, what is known stays."""
        if self._asking is None:
            self._asked_seconds = self._world.clock.monotonic_seconds()
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._answered)
        await outlasting(self._asking)

    def _answered(self, asking: asyncio.Task[None]) -> None:
        self._asking = None

    async def follow(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._world.clock.sleep(_REFRESH_SECONDS)
            await self.refresh()

    async def _ask(self) -> None:
        addresses = list(self._given)
        if self.described is not None:
            listed = addresses_of(self.described, SERVICE_KIND_MASTER)
            addresses += [address for address in listed if address not in addresses]
        try:
            found = await describe(self._world.network, addresses, _DESCRIBE_SECONDS)
            if self._cluster_id and found.cluster_id != self._cluster_id:
                raise WrongCluster(
                    "a master describes another cluster",
                    expected=self._cluster_id,
                    found=found.cluster_id,
                )
        except PercolatorError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("no description of the cluster", reason=self._trouble)
            return
        self._trouble = ""
        self.described = found
        now = self._world.clock.monotonic_seconds()
        for one in found.servers:
            self._by_name[one.address] = self._by_name[one.server_id] = (one, now)
        for name, (_, last_listed) in list(self._by_name.items()):
            if now - last_listed > _FORGET_SECONDS:
                del self._by_name[name]


_RETRY_SECONDS = 0.5


class ClusterHandler:
    """Describes the cluster, and tells clients to send every call through this gateway."""

    def __init__(self, servers: Servers, own_version: str) -> None:
        self._servers = servers
        self._own_version = own_version

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        await self._servers.refresh()
        described = self._servers.described
        if described is None:
            raise NotReady(
                "no master has described the cluster yet", retry_after_seconds=_RETRY_SECONDS
            )
        answer = pb.DescribeResponse()
        answer.CopyFrom(described)
        answer.route = pb.ROUTE_THROUGH
        answer.version = self._own_version
        answer.restricted = caller_identity().rights is not None
        # They were the master's when it answered the gateway, which may be a while ago.
        answer.ClearField("wall_milliseconds")
        answer.ClearField("timestamp_lead_milliseconds")
        return answer

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        raise InvalidArgument("server", "a gateway does not register servers: ask a master")
