"""The other side of a connection, in memory: another implementation of HTTP/2, or raw bytes.

`Peer` is a server made with the library `h2`, which refuses whatever breaks the protocol: windows,
states of streams, headers. `Wire` has nothing behind it: a test says byte by byte what arrives.
"""

from __future__ import annotations

import asyncio
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from hpack import Encoder

from percolator.bigtable.http2.connection import Connection
from percolator.bigtable.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD_BYTES,
    HEADERS,
    PREFACE,
    SETTINGS,
    Frame,
    frame,
)
from percolator.bigtable.http2.headers import RequestHeads
from percolator.bigtable.http2.messages import prefixed

PATH = "/test.Service/Method"
OK = [(":status", "200"), ("content-type", "application/grpc")]
DONE = [("grpc-status", "0")]


def block(*fields: tuple[str, str]) -> bytes:
    """A block of headers, without a table that changes."""
    encoder = Encoder()
    encoder.header_table_size = 0
    encoded: bytes = encoder.encode(list(fields))
    return encoded


def head(seconds: float = 10.0) -> bytes:
    return RequestHeads("server:1", is_secure=True, user_agent="test").head(PATH, (), seconds)


class Transport:
    """What a connection writes to."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.writes: list[bytes] = []
        self.is_closed = False
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def abort(self) -> None:
        self.is_aborted = True
        self.close()


class Wire:
    """A connection, and the bytes that it sends and gets."""

    def __init__(self, *, settings: bytes | None = b"") -> None:
        """`settings` are those that the peer begins with."""
        self.connection = Connection()
        self.transport = self._transport()
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]  # what it uses
        self._read = 0
        if settings is not None:
            self.arrive(frame(SETTINGS, 0, 0, settings))

    def _transport(self) -> Transport:
        return Transport(self.connection)

    def arrive(self, *frames: bytes) -> None:
        self.connection.data_received(b"".join(frames))

    async def sent(self) -> list[Frame]:
        """The frames that were sent since the last time."""
        await asyncio.sleep(0)
        data = b"".join(self.transport.writes[self._read :])
        self._read = len(self.transport.writes)
        return _frames_in(data.removeprefix(PREFACE))

    def lose(self, error: Exception) -> None:
        """The connection breaks."""
        self.transport.is_closed = True
        self.connection.connection_lost(error)

    async def answered(self, message: bytes, *, body: bytes = b"") -> None:
        """Makes one call, which is answered with that message."""
        call = self.connection.begin(head(), prefixed(body), 5.0, wants_all=True)
        self.answer(call.stream, message)
        if await call.message() != message:
            raise AssertionError("another answer")
        self.connection.leave(call)

    def answer(self, stream: int, message: bytes) -> None:
        self.arrive(
            frame(HEADERS, END_HEADERS, stream, block(*OK)),
            frame(DATA, 0, stream, prefixed(message)),
            frame(HEADERS, END_HEADERS | END_STREAM, stream, block(*DONE)),
        )


def _frames_in(data: bytes) -> list[Frame]:
    found = []
    while data:
        end = HEAD_BYTES + int.from_bytes(data[:3])
        stream = int.from_bytes(data[5:HEAD_BYTES])
        found.append((data[3], data[4], stream, data[HEAD_BYTES:end]))
        data = data[end:]
    return found


class _Reading(Transport):
    """Hands what is written to a peer, and back what that answers."""

    def __init__(self, connection: Connection, peer: Peer) -> None:
        super().__init__(connection)
        self.peer = peer

    def write(self, data: bytes) -> None:
        super().write(data)
        self.peer.receive(data)


class Peer(Wire):
    """A server that reads what it is sent, and checks it."""

    def __init__(self, *, consumes: bool = True, settings: dict[int, int] | None = None) -> None:
        """`consumes` if it gives windows back for what it has received."""
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings(settings or {})
        self.events: list[Event] = []
        self.requests: dict[int, dict[str, str]] = {}
        self.bodies: dict[int, bytes] = {}
        self.whole: set[int] = set()
        """Streams whose requests have come completely."""
        self.resets: dict[int, int] = {}
        self.pongs = 0
        self.last_words: ConnectionTerminated | None = None
        self._consumes = consumes
        super().__init__(settings=None)
        self.send()

    def _transport(self) -> Transport:
        return _Reading(self.connection, self)

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            self.events.append(event)
            match event:
                case RequestReceived():
                    self.requests[self._stream(event)] = {
                        str(name): str(value) for name, value in event.headers or []
                    }
                case DataReceived():
                    self._take(event)
                case StreamEnded():
                    self.whole.add(self._stream(event))
                case StreamReset():
                    self.resets[self._stream(event)] = int(event.error_code or 0)
                case PingAckReceived():
                    self.pongs += 1
                case ConnectionTerminated():
                    self.last_words = event
        self.send()

    @staticmethod
    def _stream(event: Any) -> int:
        stream: int = event.stream_id
        return stream

    def _take(self, event: DataReceived) -> None:
        stream = self._stream(event)
        self.bodies[stream] = self.bodies.get(stream, b"") + (event.data or b"")
        if self._consumes and event.flow_controlled_length:
            self.h2.acknowledge_received_data(event.flow_controlled_length, stream)

    def send(self) -> None:
        """Sends what the library has to send, in the next pass of the event loop."""
        data = self.h2.data_to_send()
        if data:
            asyncio.get_running_loop().call_soon(self._deliver, data)

    def _deliver(self, data: bytes) -> None:
        if not self.transport.is_closed:
            self.connection.data_received(data)

    def begin_answer(self, stream: int) -> None:
        self.h2.send_headers(stream, OK)
        self.send()

    def end_answer(self, stream: int) -> None:
        self.h2.send_headers(stream, DONE, end_stream=True)
        self.send()

    def say(self, stream: int, data: bytes) -> int:
        """Sends as much as the connection permits, in frames; returns how much."""
        said = 0
        while said < len(data):
            size = min(
                self.h2.local_flow_control_window(stream),
                self.h2.max_outbound_frame_size,
                len(data) - said,
            )
            if size <= 0:
                break
            self.h2.send_data(stream, data[said : said + size])
            said += size
        self.send()
        return said


async def passes(number: int = 10) -> None:
    """Lets the event loop do what is ready, and what follows from that."""
    for _ in range(number):
        await asyncio.sleep(0)
