"""Which way a call takes: frames where the server offers them, and gRPC at all other times.

Nothing waits for frames. Once a server was called a few times, it is asked over gRPC whether it
offers them, and connected to in the background; until that has succeeded, and whenever the
connection has ended, calls go over gRPC. So an older server, a closed port, or one that leads to
another server, costs nothing but speed.

Large requests always go over gRPC. A call is repeated over gRPC only if it was not executed: it did
not leave, or its token is no longer valid. gRPC reads the token again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic

from google.protobuf.message import DecodeError

from percolator.errors import ExecutionUnknown, PercolatorError, Unauthenticated
from percolator.tasks import Tasks
from percolator.v1.frames_pb2 import FramesHello, OfferFramesResponse
from percolator.wire.addresses import HostPort, parse_host_port
from percolator.wire.by_address import ByAddress
from percolator.wire.credentials import SCHEME, Credentials
from percolator.wire.frames import local_socket
from percolator.wire.frames.connection import FrameConnection
from percolator.wire.frames.layout import FRAMED, NotFrames
from percolator.world import (
    RequestT,
    Responses,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

CALLS_BEFORE = 4
"""A server is asked for frames after this many calls: a program that makes one or two has more to
lose than to gain."""
SMALL_BYTES_MAX = 8 * 1024
"""The size of the largest request that travels in a frame. Larger ones carry the rows of hundreds
of transactions: there a call's own cost is small, and gRPC sends it while Python goes on."""
CONNECT_SECONDS = 5.0
PAUSE_SECONDS_MIN = 0.5
PAUSE_SECONDS_MAX = 60.0
"""Between two attempts; twice as long after each that failed. A server that offers nothing may be
upgraded."""
STEADY_SECONDS = 10.0
"""A connection that has lasted so long was a success."""

Offer = Callable[[str], Awaitable[OfferFramesResponse]]
"""Asks the server at an address, over gRPC."""

_log = logging.getLogger("percolator.frames")


class FrameConnections:
    """The connections for frames of one network. Belongs to its event loop."""

    def __init__(self, offer: Offer, credentials: Callable[[], Credentials]) -> None:
        self._credentials = credentials
        self._tasks = Tasks()
        self._peers = ByAddress(lambda address: _Peer(address, offer, self._tasks), _Peer.leave)
        self._closed = False

    def faster(
        self,
        address: str,
        method: UnaryMethod[RequestT, ResponseT],
        slower: UnaryCall[RequestT, ResponseT],
    ) -> UnaryCall[RequestT, ResponseT]:
        """The call of a method by the best way there is at the moment; `slower` is gRPC."""
        if method.path not in FRAMED:
            return slower
        way = self._way(address, method)

        async def call(request: RequestT, timeout: float) -> ResponseT:
            response = await way.response(request, timeout)
            return await slower(request, timeout) if response is None else response

        return call

    def faster_stream(
        self,
        address: str,
        method: StreamMethod[RequestT, ResponseT],
        slower: StreamCall[RequestT, ResponseT],
    ) -> StreamCall[RequestT, ResponseT]:
        """The same for a method that streams. In a frame, a stream ends after its first response,
        so only short ones travel there."""
        is_short = method.is_short
        if method.path not in FRAMED or is_short is None:
            return slower
        way = self._way(address, method)

        def call(request: RequestT, timeout: float) -> Responses[ResponseT]:
            if not is_short(request):
                return slower(request, timeout)
            return _ShortStream(way, slower, request, timeout)

        return call

    def _way(
        self,
        address: str,
        method: UnaryMethod[RequestT, ResponseT] | StreamMethod[RequestT, ResponseT],
    ) -> _Way[RequestT, ResponseT]:
        where = f"{method.path} at {address}"
        return _Way(self, address, method.path, where, method.response)

    def peer(self, address: str) -> _Peer:
        return self._peers.get(address)

    def current(self, peer: _Peer) -> FrameConnection | None:
        """The connection for a call that begins now. If there is none, perhaps begins to connect,
        for later ones."""
        credentials = self._credentials()
        if peer.connection is not None and peer.credentials is credentials:
            return peer.connection
        if not self._closed:
            peer.called(credentials)
        return None

    async def close(self) -> None:
        """Ends all connections, and calls in progress with them."""
        self._closed = True
        await self._tasks.cancel()
        ending = [one.connection for one in self._peers if one.connection is not None]
        for connection in ending:
            connection.close()
        await asyncio.gather(*(connection.ended for connection in ending))


class _Way(Generic[RequestT, ResponseT]):
    """The way of one method to one server in frames."""

    __slots__ = ("_address", "_connections", "_decode", "_path", "_peer", "_where")

    def __init__(
        self,
        connections: FrameConnections,
        address: str,
        path: str,
        where: str,
        response: type[ResponseT],
    ) -> None:
        self._connections = connections
        self._address = address
        self._peer = connections.peer(address)
        self._path = path
        self._where = where
        self._decode = response.FromString

    async def response(self, request: RequestT, timeout: float) -> ResponseT | None:
        """None if the call has to go over gRPC: it was not executed."""
        if self._peer.is_over:
            self._peer = self._connections.peer(self._address)
        connection = self._connections.current(self._peer)
        if connection is None:
            return None
        encoded = request.SerializeToString()
        size_max = min(SMALL_BYTES_MAX, connection.request_bytes_max)
        if not connection.takes(self._path) or len(encoded) > size_max:
            return None
        try:
            answer = await connection.call(self._path, encoded, timeout)
        except Unauthenticated:
            connection.retire()
            return None
        except PercolatorError as error:
            error.where = error.where or self._where
            raise
        try:
            return self._decode(answer)
        except DecodeError:
            raise ExecutionUnknown(
                "the response is not a message of its type", where=self._where
            ) from None


class _ShortStream(Generic[RequestT, ResponseT]):
    """The responses to a short request: the first one in a frame, or all of them over gRPC.

    Not a generator: one that is left before its end would cost a task that closes it.
    """

    __slots__ = ("_begun", "_request", "_responses", "_slower", "_timeout", "_way")

    def __init__(
        self,
        way: _Way[RequestT, ResponseT],
        slower: StreamCall[RequestT, ResponseT],
        request: RequestT,
        timeout: float,
    ) -> None:
        self._way = way
        self._slower = slower
        self._request = request
        self._timeout = timeout
        self._begun = False
        self._responses: Responses[ResponseT] | None = None

    def __aiter__(self) -> AsyncIterator[ResponseT]:
        return self

    async def __anext__(self) -> ResponseT:
        if not self._begun:
            self._begun = True
            response = await self._way.response(self._request, self._timeout)
            if response is not None:
                return response
            self._responses = self._slower(self._request, self._timeout)
        if self._responses is None:
            raise StopAsyncIteration
        return await anext(self._responses)

    async def aclose(self) -> None:
        self._begun = True
        if self._responses is not None:
            await self._responses.aclose()


class _Peer:
    """A server, and the connection to it."""

    def __init__(self, address: str, offer: Offer, tasks: Tasks) -> None:
        self._address = address
        self._offer = offer
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._last_call = self._loop.time()
        """The last one over gRPC; the connection knows its own."""
        self.is_over = False
        """It was unused for long: calls use another object for its address."""
        self._connecting = False
        self._not_before = 0.0
        self._pause = PAUSE_SECONDS_MIN
        self._said = ""
        self.connection: FrameConnection | None = None
        self.credentials: Credentials | None = None
        """Those with which the connection was made."""

    def unused_since(self) -> float | None:
        if self._connecting:
            return None
        return self._last_call if self.connection is None else self.connection.unused_since()

    def leave(self) -> None:
        """Ends the connection, which is no longer used."""
        self.is_over = True
        if self.connection is not None:
            self.connection.retire()

    def called(self, credentials: Credentials) -> None:
        """Counts a call that has to go over gRPC; perhaps begins to connect."""
        self._calls += 1
        now = self._last_call = self._loop.time()
        if self._connecting or self._calls <= CALLS_BEFORE or now < self._not_before:
            return
        self._connecting = True
        self._tasks.start(self._connect(credentials))

    async def _connect(self, credentials: Credentials) -> None:
        if self.connection is not None:
            # It was made with former credentials.
            self.connection.retire()
            self.connection = None
        try:
            connection = await self._connected(credentials)
        except (PercolatorError, NotFrames, OSError, TimeoutError) as error:
            self._say(str(error) or type(error).__name__)
            self._pause_before_the_next()
            return
        finally:
            self._connecting = False
        self.connection, self.credentials = connection, credentials
        began = self._loop.time()

        def ended(_: object) -> None:
            if self.connection is connection:
                self.connection = None
                if self._loop.time() - began > STEADY_SECONDS:
                    self._pause = PAUSE_SECONDS_MIN
                self._pause_before_the_next()

        connection.ended.add_done_callback(ended)

    async def _connected(self, credentials: Credentials) -> FrameConnection:
        dialled = parse_host_port(self._address, "address")
        context = None
        if credentials.tls is not None:
            context = credentials.tls.client_context
            if context is None:
                raise NotFrames("the certificate files were not tried")
        offered = await self._offer(self._address)
        if not offered.port:
            raise NotFrames("the server offers no frames")
        hello = FramesHello(server_id=offered.server_id)
        if credentials.token:
            hello.authorization = SCHEME + credentials.token
        if self._is_near(offered, dialled) and context is None:
            try:
                return await FrameConnection.open_local(offered.local_name, hello, CONNECT_SECONDS)
            except (NotFrames, OSError, TimeoutError) as error:
                self._say(f"no local socket: {error!r}")
        return await FrameConnection.open(
            dialled.host, offered.port, hello, context, CONNECT_SECONDS
        )

    def _is_near(self, offered: OfferFramesResponse, dialled: HostPort) -> bool:
        """Whether the server is on this machine, with nothing between it and us."""
        return (
            local_socket.AVAILABLE
            and bool(offered.local_name)
            and dialled.is_loopback()
            and offered.local_address == self._address
        )

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            _log.info("calls to %s go over gRPC: %s", self._address, reason)

    def _pause_before_the_next(self) -> None:
        self._not_before = self._loop.time() + self._pause
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)
