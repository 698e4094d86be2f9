"""The real network: gRPC channels, one per address, shared by everything in the event loop.

The calls made most often travel in frames, where a server offers that (percolator/wire/frames).

When a call finds no server, or is refused as unauthenticated, the credential files are checked: if
they have changed, later calls use new channels with the new credentials. Calls in progress may
finish on the former channels: they were accepted when they were made. A channel that is no longer
used is closed (`ByAddress`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from percolator import errors
from percolator.v1.frames_pb2 import OfferFramesRequest, OfferFramesResponse
from percolator.wire.addresses import parse_host_port
from percolator.wire.credentials import PLAIN_TEXT, Credentials
from percolator.wire.frames import ByAddress, FrameConnections
from percolator.wire.methods import OFFER_FRAMES
from percolator.wire.status import from_rpc_error
from percolator.wire.tls import CLUSTER_NAME
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

# The channel to one address, and the calls in progress over it.


class Line:
    """A channel. Enter it for the time of each call; it is then not closed for being unused."""

    __slots__ = ("_calls", "_left", "_loop", "channel", "is_over")

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.is_over = False
        """There are other credentials, or it was unused for long: calls begin on another line."""
        self._loop = asyncio.get_running_loop()
        self._calls = 0
        self._left = self._loop.time()

    def __enter__(self) -> None:
        self._calls += 1

    def __exit__(self, *_: object) -> None:
        self._calls -= 1
        self._left = self._loop.time()

    def unused_since(self) -> float | None:
        return None if self._calls else self._left


SERVER_METADATA = "percolator-server"
"""The metadata key that tells a gateway to which server it must forward the call."""

FORWARDED_METADATA = "percolator-relayed"
"""The metadata key of a call that a gateway has forwarded: it is forwarded once. A gateway that is
listed with an id that is not its own, as after a restart, would otherwise call itself endlessly."""

_OFFER_SECONDS = 5.0

_MESSAGE_BYTES_MAX = 32 * 1024 * 1024
"""Above the largest request a server accepts (16 MiB): its own limit answers more precisely."""

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    # A silent peer is noticed in seconds, not when the kernel gives up after minutes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # A restarted server is found again at once, not after a back-off of minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This is also how long connecting may take: with TLS, to a busy or distant machine, a while.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A new channel does not inherit the back-off of another channel of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # A host name that has changed its address is not used with the old one for half a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Retries are decided where it is known whether they are safe: in the protocol, not here.
    ("grpc.enable_retries", 0),
]

_DIRECTLY = ("grpc.enable_http_proxy", 0)
"""Without it, gRPC calls through the proxy that the environment names, even on the same machine."""

_OTHER_CREDENTIALS_MAY_HELP = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)

_FORMER_SECONDS = 60.0
"""How long calls over channels of former credentials may last; a stream is then begun again."""

Metadata = tuple[tuple[str, str], ...] | None
_Bind = Callable[[grpc.aio.Channel], tuple[Any, Metadata]]


class GrpcNetwork:
    """A `percolator.world.Network` of gRPC channels. Belongs to one event loop."""

    def __init__(self, credentials: Credentials = PLAIN_TEXT, *, is_within: bool = False) -> None:
        """`is_within` for a part of the cluster: it never goes through a proxy. A client elsewhere
        may have to, to reach a gateway."""
        self._is_within = is_within
        self._lines = ByAddress(self._opened, self._close_later)
        self._former: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._renewal = credentials.renewal
        self._frames = FrameConnections(self._offered_frames, credentials)
        self._use(credentials)

    def _use(self, credentials: Credentials) -> None:
        self.credentials = self._frames.credentials = credentials
        self._tls: grpc.ChannelCredentials | None = None
        if (tls := credentials.tls) is not None:
            self._tls = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """After a failed call: switches to renewed credentials if that may help."""
        if self._renewal is None or error.code() not in _OTHER_CREDENTIALS_MAY_HELP:
            return
        found = self._renewal.current()
        if found == self.credentials:
            return
        self._use(found)
        for line in self._lines.take_all():
            self._close_later(line)

    def _close_later(self, line: Line) -> None:
        """Closes a channel as soon as no call over it is in progress."""
        line.is_over = True
        closing = asyncio.create_task(line.channel.close(_FORMER_SECONDS))
        self._former[closing] = line.channel
        closing.add_done_callback(self._former.pop)

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT], *, server: str = ""
    ) -> UnaryCall[RequestT, ResponseT]:
        """If `server` is given, `address` is that of a gateway, which forwards the call to it."""
        where = _where(method.path, address, server)
        bound = _Bound(
            self, address, lambda channel: self._callable(channel.unary_unary, method, server)
        )

        async def call(request: RequestT, timeout: float) -> ResponseT:
            used = self.credentials
            line, multicallable, metadata = bound.now()
            try:
                with line:
                    response: ResponseT | None = await multicallable(
                        request, timeout=timeout, metadata=metadata
                    )
            except grpc.aio.AioRpcError as error:
                meaning = self._meaning(error, where)
                if isinstance(meaning, errors.Unauthenticated) and self.credentials is not used:
                    # Nothing was executed, and by now there is another token.
                    return await call(request, timeout)
                raise meaning from None
            except grpc.aio.UsageError:
                raise self._closed_by(used, where) from None
            except asyncio.CancelledError:
                if cancelled_by_caller():
                    raise
                raise closed_meanwhile(where) from None
            return _understood(response, where)

        return call if server else self._frames.unary(address, method, call)

    async def _offered_frames(self, address: str) -> OfferFramesResponse:
        return await self.unary(address, OFFER_FRAMES)(OfferFramesRequest(), _OFFER_SECONDS)

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT], *, server: str = ""
    ) -> StreamCall[RequestT, ResponseT]:
        where = _where(method.path, address, server)
        bound = _Bound(
            self, address, lambda channel: self._callable(channel.unary_stream, method, server)
        )

        async def call(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            used = self.credentials
            line, multicallable, metadata = bound.now()
            try:
                with line:
                    responses = multicallable(request, timeout=timeout, metadata=metadata)
                    async with left_at_once(responses) as messages:
                        async for response in messages:
                            yield _understood(response, where)
            except grpc.aio.AioRpcError as error:
                meaning = self._meaning(error, where)
                if not isinstance(meaning, errors.Unauthenticated) or self.credentials is used:
                    raise meaning from None
            except grpc.aio.UsageError:
                raise self._closed_by(used, where) from None
            except asyncio.CancelledError:
                if cancelled_by_caller():
                    raise
                raise closed_meanwhile(where) from None
            else:
                return
            # Refused before its first message, and by now there is another token.
            async for response in call(request, timeout):
                yield response

        return call if server else self._frames.stream(address, method, call)

    async def close(self) -> None:
        self._renewal = None
        # The lines stay: a call that begins later finds a closed channel, and opens no other.
        channels = [*(line.channel for line in self._lines), *self._former.values()]
        for closing in self._former:
            closing.cancel()
        await asyncio.gather(self._frames.close(), *(channel.close() for channel in channels))

    def line(self, address: str) -> Line:
        """The line to an address, for callers that forward bytes without decoding them. Ask for it
        with each call."""
        if not address:
            raise errors.InvalidArgument("address", "is empty; expected host:port")
        return self._lines.get(address)

    def _opened(self, address: str) -> Line:
        options = list(_OPTIONS)
        if self._is_within or parse_host_port(address, "address").is_loopback():
            options.append(_DIRECTLY)
        if self._tls is None:
            return Line(grpc.aio.insecure_channel(address, options=options))
        options.append(("grpc.ssl_target_name_override", CLUSTER_NAME))
        return Line(grpc.aio.secure_channel(address, self._tls, options=options))

    def _callable(
        self,
        made: Callable[..., Any],
        method: UnaryMethod[RequestT, ResponseT] | StreamMethod[RequestT, ResponseT],
        server: str,
    ) -> tuple[Any, Metadata]:
        """The method over a channel, and the metadata of each call."""
        multicallable = made(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        metadata = self.credentials.metadata
        if server:
            metadata = (*(metadata or ()), (SERVER_METADATA, server))
        return multicallable, metadata

    def _closed_by(self, used: Credentials, where: str) -> errors.PercolatorError:
        """The error of a channel that was closed with its network, or to change credentials."""
        return _closed(where) if self.credentials is used else closed_meanwhile(where)

    def _meaning(self, error: grpc.aio.AioRpcError, where: str) -> errors.PercolatorError:
        self.failed(error)
        return from_rpc_error(error, where)


class _Bound:
    """A procedure at an address, over the line of the moment: another one after the credentials
    have changed, or after the line was long unused."""

    __slots__ = ("_address", "_bind", "_bound", "_line", "_network")

    def __init__(self, network: GrpcNetwork, address: str, bind: _Bind) -> None:
        self._network = network
        self._address = address
        self._bind = bind
        self._line = network.line(address)
        self._bound = bind(self._line.channel)

    def now(self) -> tuple[Line, Any, Metadata]:
        if self._line.is_over:
            self._line = self._network.line(self._address)
            self._bound = self._bind(self._line.channel)
        return self._line, *self._bound


def _where(path: str, address: str, server: str) -> str:
    return f"{path} at {server} through {address}" if server else f"{path} at {address}"


def _closed(where: str) -> errors.UsageError:
    return errors.UsageError("the network of this client is closed", where=where)


@asynccontextmanager
async def left_at_once(call: grpc.aio.Call) -> AsyncIterator[AsyncIterator[Any]]:
    """The messages of a stream, which is cancelled if it is left before its end.

    By itself, grpc.aio ends such a stream when it is garbage-collected, which is late, since call
    and iterator refer to each other: the server goes on reading, and what arrives is kept.
    """
    messages = aiter(call)
    try:
        yield messages
    finally:
        call.cancel()  # has no effect once it has ended
        await messages.aclose()


def cancelled_by_caller() -> bool:
    """True if the call's own task was cancelled: gRPC raises the same error for a closed channel.

    If a closed channel were mistaken for a cancellation, a task that was never cancelled would end
    silently, and if it serves a call, gRPC would send its caller no status at all.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def closed_meanwhile(where: str) -> errors.Unavailable:
    return errors.Unavailable("the channel was closed", where=where)


def _understood(response: ResponseT | None, where: str) -> ResponseT:
    """The response. gRPC gives None if it could not decode it: then the server, whatever it is, may
    have executed the call."""
    if response is None:
        raise errors.ExecutionUnknown("the response is not a message of its type", where=where)
    return response
