"""A gateway and the servers behind it, for tests of forwarded calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from percolator import errors
from percolator.services.chassis.rpc import Exposed, Gate, RpcEdge, RpcMetrics
from percolator.services.gateway.forwarded_call import ServerRoutes
from percolator.services.gateway.servers import Servers
from percolator.v1 import cluster_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.wire import methods
from percolator.wire.channels import SERVER_METADATA, GrpcNetwork
from percolator.wire.through import ThroughNetwork
from percolator.world import MachineClock, World, machine_random

SECONDS = 10.0
CLUSTER = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"]
OWN = Server(kind=cluster_pb2.SERVICE_KIND_GATEWAY, server_id="own-id", address="gateway:1")
REQUEST_BYTES_MAX = 100_000


@dataclass
class Behind(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A server behind the gateway. Each test says how it answers."""

    unary: Callable[[bytes, Any], Awaitable[bytes]] | None = None
    stream: Callable[[bytes, Any], AsyncIterator[bytes]] | None = None
    both: Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]] | None = None
    seen: list[dict[str, str | bytes]] = field(default_factory=list)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        self.seen.append(dict(details.invocation_metadata))
        if self.unary is not None:
            return grpc.unary_unary_rpc_method_handler(self.unary)
        if self.stream is not None:
            return grpc.unary_stream_rpc_method_handler(self.stream)
        if self.both is not None:
            return grpc.stream_stream_rpc_method_handler(self.both)
        return None


class Master:
    """Describes the cluster that a test has set up."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self.asked = 0

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        self.asked += 1
        return cluster_pb2.DescribeResponse(cluster_id="c", servers=self.servers)

    async def register(self, request: cluster_pb2.RegisterRequest) -> Any:
        raise errors.NotReady("not here")


@dataclass
class Site:
    """A gateway and the servers behind it."""

    behind: Behind
    server: Server
    master: Master
    routes: ServerRoutes
    gate: Gate
    address: str
    channel: grpc.aio.Channel
    through: ThroughNetwork
    listen: Callable[[grpc.GenericRpcHandler], Awaitable[str]]

    async def read(self, raw: bytes = b"", server: str | None = None, **extra: str) -> bytes:
        """A unary call with bytes that are not a message."""
        metadata = [*extra.items(), (SERVER_METADATA, server or self.server.server_id)]
        call = self.channel.unary_unary(methods.READ.path)
        answer: bytes = await call(raw, metadata=metadata, timeout=SECONDS)
        return answer

    def scan(self, raw: bytes = b"", path: str = methods.SCAN.path) -> Any:
        call = self.channel.unary_stream(path)
        metadata = [(SERVER_METADATA, self.server.address)]
        return call(raw, metadata=metadata, timeout=SECONDS)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    started: list[grpc.aio.Server] = []

    async def listen(handler: grpc.GenericRpcHandler) -> str:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", REQUEST_BYTES_MAX)])
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.append(server)
        return f"127.0.0.1:{port}"

    network, outside = GrpcNetwork(), GrpcNetwork()
    master, behind, gate, clock = Master(), Behind(), Gate(100, REQUEST_BYTES_MAX), MachineClock()
    master_edge = RpcEdge(Gate(100, REQUEST_BYTES_MAX), RpcMetrics(), clock)
    master_edge.expose([Exposed(CLUSTER, master)])
    master_address = await listen(master_edge)
    kind = cluster_pb2.SERVICE_KIND_TABLET_SERVER
    server = Server(kind=kind, server_id="behind-id", address=await listen(behind))
    master.servers = [server]
    servers = Servers(World(clock, network, machine_random()), [master_address], "c")
    routes = ServerRoutes(network, servers, OWN)
    edge = RpcEdge(gate, RpcMetrics(), clock)
    edge.expose([Exposed(CLUSTER, master)], routes)
    address = await listen(edge)
    channel = outside.line(address).channel
    through = ThroughNetwork(outside, [address])
    try:
        yield Site(behind, server, master, routes, gate, address, channel, through, listen)
    finally:
        await outside.close()
        for one in started:
            await one.stop(None)
        await network.close()


@asynccontextmanager
async def another_gateway(here: Site) -> AsyncIterator[tuple[Gate, ThroughNetwork]]:
    """A gateway before that of the site, as clients list them, and its gate."""
    gate = Gate(100, REQUEST_BYTES_MAX)
    edge = RpcEdge(gate, RpcMetrics(), MachineClock())
    edge.expose([Exposed(CLUSTER, here.master)], here.routes)
    network = GrpcNetwork()
    try:
        yield gate, ThroughNetwork(network, [await here.listen(edge), here.address])
    finally:
        await network.close()
