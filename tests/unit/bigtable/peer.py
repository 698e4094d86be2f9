"""A server of HTTP/2 that answers calls of gRPC as a test says, also as no server should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from google.protobuf.message import Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded, StreamReset

HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
DONE = [("grpc-status", "0")]


class Peer:
    """Calls `answer_call` with the stream of each call that has arrived completely."""

    def __init__(self, answer_call: Callable[[PeerConnection, int], None]) -> None:
        self.answer_call = answer_call
        self.calls = 0
        self.connections: list[PeerConnection] = []
        self.resets: asyncio.Queue[int] = asyncio.Queue()
        """The codes with which callers have given up calls."""

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[str]:
        """Yields its address."""
        loop = asyncio.get_running_loop()
        async with await loop.create_server(
            lambda: PeerConnection(self), "127.0.0.1", port
        ) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for connection in self.connections:
            connection.transport.abort()
            await connection.lost


class PeerConnection(asyncio.Protocol):
    """One connection to it."""

    transport: asyncio.Transport

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer.connections.append(self)
        self.h2.initiate_connection()
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, DataReceived) and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamReset):
                self.peer.resets.put_nowait(event.error_code)
            elif isinstance(event, StreamEnded):
                self.peer.calls += 1
                self.peer.answer_call(self, event.stream_id)
        self._send()

    def answer(self, stream: int, message: Message) -> None:
        """With one message, as a server should."""
        self.begin(stream, message.SerializeToString())
        self.h2.send_headers(stream, DONE, end_stream=True)

    def begin(self, stream: int, *messages: bytes) -> None:
        """An answer that is not ended."""
        self.h2.send_headers(stream, HEADERS)
        for message in messages:
            self.h2.send_data(stream, b"\0" + len(message).to_bytes(4) + message)

    def leave(self, last: int) -> None:
        """Says that it takes no calls after that of the stream `last` (GOAWAY)."""
        self._send()
        self.transport.write(b"\0\0\x08\x07\0" + bytes(4) + last.to_bytes(4) + bytes(4))

    def _send(self) -> None:
        if data := self.h2.data_to_send():
            self.transport.write(data)
