"""`percolator.v1.ClusterService`, as a gateway serves it: a master's answer with another route."""

from __future__ import annotations

from percolator.errors import InvalidArgument, NotReady
from percolator.services.gateway.servers import Servers
from percolator.v1 import cluster_pb2 as pb

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
        # They were the master's when it answered the gateway, which may be a while ago.
        answer.ClearField("wall_milliseconds")
        answer.ClearField("timestamp_lead_milliseconds")
        return answer

    async def register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        raise InvalidArgument("server", "a gateway does not register servers: ask a master")
