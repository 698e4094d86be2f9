"""Asks an address what it is, when a server registers there as another kind than the listed one.

Anyone who may register could otherwise list a second server at the address of a first one: clients
would ask a tablet server for timestamps, or wait for a lock service that is not one. But a port may
also be given to another kind of server, legitimately, and its former entry stays for seconds. The
process that listens there knows which of the two it is: its health service knows its services.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from percolator.errors import InvalidArgument, NotReady, PercolatorError
from percolator.v1 import cluster_pb2 as cluster
from percolator.v1.cluster_pb2 import Server
from percolator.world import Network, StreamMethod

HEALTH = StreamMethod("/grpc.health.v1.Health/Watch", HealthCheckRequest, HealthCheckResponse)

SERVICE_OF: dict[int, str] = {
    cluster.SERVICE_KIND_MASTER: "percolator.v1.MasterService",
    cluster.SERVICE_KIND_ORACLE: "percolator.v1.OracleService",
    cluster.SERVICE_KIND_LOCK_SERVICE: "percolator.v1.LockService",
    cluster.SERVICE_KIND_TABLET_SERVER: "percolator.v1.TabletServerService",
    cluster.SERVICE_KIND_GATEWAY: "percolator.v1.GatewayService",
}
"""A service that servers of no other kind have under this name. A worker has none."""

_ANSWER_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class KindCheck:
    """Decides between two kinds of servers at one address."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.questions = 0

    async def require(self, server: Server, listed: Sequence[Server]) -> None:
        """Returns if the server may register although these are listed at its address, all of
        other kinds. Raises `InvalidArgument` if one of them is still there, and `NotReady` if the
        address does not answer."""
        for other in listed:
            if await self._is_still(other, server):
                raise InvalidArgument(
                    "server.kind",
                    f"{server.address} answers as a {_name(other)}, not as a {_name(server)}; "
                    "register the address that this process listens on",
                )

    async def _is_still(self, listed: Server, claimed: Server) -> bool:
        service = SERVICE_OF.get(listed.kind)
        if service is not None:
            return await self._knows(claimed.address, service)
        # A worker has no service by which to know it, but the one that replaces it has.
        return not await self._knows(claimed.address, SERVICE_OF[claimed.kind])

    async def _knows(self, address: str, service: str) -> bool:
        self.questions += 1
        ask = self._network.stream(address, HEALTH)
        watching: Any = ask(HealthCheckRequest(service=service), _ANSWER_SECONDS)
        try:
            async with aclosing(watching):
                async for answer in watching:
                    return bool(answer.status != HealthCheckResponse.SERVICE_UNKNOWN)
        except PercolatorError as error:
            raise NotReady(
                f"another kind of server is listed at {address}, which does not say what it is: "
                f"{error.message}",
                retry_after_seconds=_RETRY_SECONDS,
            ) from error
        raise NotReady(f"{address} does not say what it is", retry_after_seconds=_RETRY_SECONDS)


def _name(server: Server) -> str:
    return cluster.ServiceKind.Name(server.kind).removeprefix("SERVICE_KIND_").lower()
