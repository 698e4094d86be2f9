"""A caller over HTTP/2 that begins requests and does not finish them."""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Iterable, Sequence

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from percolator.wire.tls import CLUSTER_NAME

STALLED_SECONDS = 0.3
"""A server that takes nothing for so long has stopped this sender."""
_TURN_SECONDS = 0.01
_MESSAGE = struct.Struct(">BI")
_CHUNK_BYTES = 65_536


class Unfinished:
    """One connection. A context manager; leave it, and the connection ends."""

    def __init__(self, address: str, tls: ssl.SSLContext | None) -> None:
        self._address = address
        self._tls = tls
        config = h2.config.H2Configuration(client_side=True)
        self._h2 = h2.connection.H2Connection(config)
        self.answers: dict[int, str] = {}
        """The status of each stream that was answered, by stream."""
        self.streams: list[int] = []
        self.sent = 0
        """Bytes of all requests."""

    async def __aenter__(self) -> Unfinished:
        host, _, port = self._address.rpartition(":")
        name = CLUSTER_NAME if self._tls is not None else None
        self._reader, self._writer = await asyncio.open_connection(
            host, int(port), ssl=self._tls, server_hostname=name
        )
        self._h2.initiate_connection()
        await self._flush()
        await self._hear(STALLED_SECONDS)  # the settings of the server
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.transport.abort()

    async def begin(
        self, paths: Iterable[str], size: int, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Begins a request of `size` bytes for each path, and sends of each all but its last byte,
        as far as the server takes it."""
        left: dict[int, int] = {}
        for path in paths:
            stream = self._h2.get_next_available_stream_id()
            headers = [
                (":method", "POST"),
                (":scheme", "http" if self._tls is None else "https"),
                (":path", path),
                (":authority", CLUSTER_NAME),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                *metadata,
            ]
            try:
                self._h2.send_headers(stream, headers)
                self._h2.send_data(stream, _MESSAGE.pack(0, size))
            except h2.exceptions.TooManyStreamsError:
                break
            self.streams.append(stream)
            left[stream] = size - 1
        await self._flush()
        while left:
            moved = sum([await self._send(stream, left) for stream in list(left)])
            self.sent += moved
            if not await self._hear(_TURN_SECONDS if moved else STALLED_SECONDS) and not moved:
                return

    async def _send(self, stream: int, left: dict[int, int]) -> int:
        try:
            window = self._h2.local_flow_control_window(stream)
            now = min(window, self._h2.max_outbound_frame_size, left[stream])
            if now > 0:
                self._h2.send_data(stream, bytes(now))
        except h2.exceptions.StreamClosedError:
            now, left[stream] = 0, 0
        left[stream] -= now
        if not left[stream]:
            del left[stream]
        await self._flush()
        return now

    async def _hear(self, seconds: float) -> bool:
        """Takes what the server says; whether it said anything."""
        try:
            async with asyncio.timeout(seconds):
                data = await self._reader.read(_CHUNK_BYTES)
        except TimeoutError:
            return False
        if not data:
            raise ConnectionResetError
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                for name, value in event.headers:
                    if name == b"grpc-status":
                        self.answers[event.stream_id] = value.decode()
        await self._flush()
        return True

    async def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
        await self._writer.drain()
