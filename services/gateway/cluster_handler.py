"""`percolator.v1.ClusterService`, as a gateway answers it: the master's words, another route."""

from __future__ import annotations

from percolator.errors import InvalidArgument, NotReady
from percolator.v1 import cluster_pb2 as wire
from services.gateway.servers import Servers

_RETRY_SECONDS = 0.5


class ClusterHandler:
    """Tells who is there, and to send everything through here."""

    def __init__(self, servers: Servers, own_version: str) -> None:
        self._servers = servers
        self._own_version = own_version

    async def describe(self, request: wire.DescribeRequest) -> wire.DescribeResponse:
        await self._servers.refresh()
        described = self._servers.described
        if described is None:
            raise NotReady(
                "no master has described the cluster yet", retry_after_seconds=_RETRY_SECONDS
            )
        answer = wire.DescribeResponse()
        answer.CopyFrom(described)
        answer.route = wire.ROUTE_THROUGH
        answer.version = self._own_version
        return answer

    async def register(self, request: wire.RegisterRequest) -> wire.RegisterResponse:
        raise InvalidArgument("server", "a gateway registers nobody: ask a master")
