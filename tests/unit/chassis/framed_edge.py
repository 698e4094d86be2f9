"""A server of gRPC and frames in this process, and callers of both kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from percolator.services.chassis.frames import UNFINISHED_BYTES_MAX, UNKNOWN_MAX, FrameServer
from percolator.services.chassis.rpc import Exposed, Gate, Quota, RpcEdge, RpcMetrics
from percolator.v1 import oracle_pb2
from percolator.v1.frames_pb2 import FramesHello
from percolator.v1.oracle_pb2 import (
    AdvanceEpochRequest,
    AdvanceEpochResponse,
    CheckTimestampsRequest,
    CheckTimestampsResponse,
    GetTimestampsRequest,
    GetTimestampsResponse,
)
from percolator.wire.addresses import HostPort
from percolator.wire.channels import GrpcNetwork
from percolator.wire.frames import (
    CALLS_BEFORE,
    FRAMED,
    PREAMBLE,
    Frame,
    FrameConnection,
    FrameReader,
    Kind,
    frame,
)
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.world import MachineClock

SECONDS = 30.0
"""How long anything may take that has to happen soon, however busy the machine is. Calls last
longer, so that their deadlines are not what ends them."""
SERVER_ID = "this server"
REQUEST_BYTES_MAX = 65_536

Answer = Callable[[GetTimestampsRequest], Awaitable[GetTimestampsResponse]]


class OracleHandler:
    """Answers as each test requires."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        return await self._answer(request)

    async def advance_epoch(self, request: AdvanceEpochRequest) -> AdvanceEpochResponse:
        raise AssertionError("nobody calls this")

    async def check_timestamps(self, request: CheckTimestampsRequest) -> CheckTimestampsResponse:
        raise AssertionError("nobody calls this")


async def echo(request: GetTimestampsRequest) -> GetTimestampsResponse:
    return GetTimestampsResponse(first=7, count=request.count)


@dataclass
class Framed:
    address: str
    network: GrpcNetwork
    gate: Gate
    frames: FrameServer
    refusals: list[None]
    peers: list[Peer] = field(default_factory=list)

    async def timestamps(
        self, count: int = 1, timeout: float = 2 * SECONDS
    ) -> GetTimestampsResponse:
        call = self.network.unary(self.address, GET_TIMESTAMPS)
        return await call(GetTimestampsRequest(count=count), timeout)

    @property
    def connection(self) -> FrameConnection | None:
        """The connection on which calls of the network travel in frames."""
        return self.network._frames._peers.get(self.address).connection

    async def until_connected(self) -> FrameConnection:
        """Calls until calls travel in frames."""
        async with asyncio.timeout(SECONDS):
            for _ in range(CALLS_BEFORE):
                await self.timestamps()
            while (connection := self.connection) is None:
                await self.timestamps()
            return connection

    async def connected(self, server_id: str = SERVER_ID) -> FrameConnection:
        hello = FramesHello(server_id=server_id)
        return await FrameConnection.open(
            "127.0.0.1", self.frames.listen.port, hello, None, SECONDS
        )

    async def dialled(self) -> Peer:
        """A caller who writes what it likes."""
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.frames.listen.port))
        self.peers.append(peer)
        return peer

    async def greeted(self) -> Peer:
        """A peer after its hello."""
        peer = await self.dialled()
        peer.send(
            PREAMBLE + frame(Kind.HELLO, 0, FramesHello(server_id=SERVER_ID).SerializeToString())
        )
        assert (await peer.received()).kind == Kind.WELCOME
        return peer


class Peer:
    """The other end of a connection for frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._frames = FrameReader(2**31)

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def received(self) -> Frame:
        async with asyncio.timeout(SECONDS):
            while (found := self._frames.next()) is None:
                data = await self._reader.read(65_536)
                assert data, "the connection was ended"
                self._frames.add(data)
        return found

    async def is_ended(self) -> bool:
        """Returns when the other side has ended the connection."""
        async with asyncio.timeout(SECONDS):
            try:
                while await self._reader.read(65_536):
                    pass
            except ConnectionError:
                pass
        return True


@asynccontextmanager
async def framed(
    answer: Answer,
    *more: Exposed,
    offers: bool = True,
    server_id: str = SERVER_ID,
    near: bool = False,
    connections_max: int = 100,
    framed_paths: Container[str] = FRAMED,
    unknown_max: int = UNKNOWN_MAX,
    unfinished_bytes_max: int = UNFINISHED_BYTES_MAX,
) -> AsyncIterator[Framed]:
    """A server that offers frames, as `server_id`; it accepts a hello for `SERVER_ID`. `near`: also
    at a socket of this machine. `more` services, beside the oracle's."""
    gate = Gate(200, REQUEST_BYTES_MAX)
    edge = RpcEdge(gate, RpcMetrics(), MachineClock())
    refusals: list[None] = []
    frames = FrameServer(
        HostPort("127.0.0.1", 0),
        REQUEST_BYTES_MAX,
        None,
        lambda: refusals.append(None),
        Quota("connections", "frame_connections_max", connections_max),
        unknown_max=unknown_max,
        unfinished_bytes_max=unfinished_bytes_max,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((edge,))
    listen = HostPort("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    await frames.start(near=listen if near else None)
    service = Exposed(
        oracle_pb2.DESCRIPTOR.services_by_name["OracleService"], OracleHandler(answer)
    )
    offer = frames.offer(server_id)
    frames.offer(SERVER_ID)
    edge.expose([service, *more, offer] if offers else [service, *more])
    frames.answer({path: unary for path, unary in edge.unary.items() if path in framed_paths})
    await server.start()
    network = GrpcNetwork()
    edge_of_both = Framed(str(listen), network, gate, frames, refusals)
    try:
        yield edge_of_both
    finally:
        for peer in edge_of_both.peers:
            peer.writer.transport.abort()
        await network.close()
        await frames.stop(0)
        await server.stop(None)
