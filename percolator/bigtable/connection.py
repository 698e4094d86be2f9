"""A connection to an instance of Bigtable: gRPC, without a client library of Google's.

Their library takes many times the CPU of a call, and repeats calls by rules of its own. This adds
the part of it that is needed: TLS and tokens, the header by which calls are routed, and enough
connections. Clients without an account call a gateway instead, through the same interface.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from percolator import errors
from percolator.bigtable import messages as bigtable
from percolator.bigtable.account import GoogleAccount, Metadata, Tokens, network_closed
from percolator.bigtable.errors import from_rpc_error
from percolator.bigtable.place import Place
from percolator.bigtable.store import CALLS_MAX, BigtableStore
from percolator.wire import methods
from percolator.wire.addresses import parse_host_port
from percolator.wire.channels import cancelled_by_caller, left_at_once
from percolator.wire.through import ThroughNetwork
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

STREAMS_MAX = 90
"""Calls in flight on one connection; the service permits a hundred, and lets more wait, unseen."""
_LANES_MAX = CALLS_MAX // STREAMS_MAX
_MESSAGE_BYTES_MAX = 256 * 1024 * 1024
"""The most that one row may have."""
_HEADERS_BYTES_MAX = 64 * 1024

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    # An error with more details than gRPC's usual 8 KiB would lose its status.
    ("grpc.max_metadata_size", _HEADERS_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", _HEADERS_BYTES_MAX),
    # A silent peer is noticed in seconds, not when the kernel gives up after minutes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A service that was away is found again in seconds, not after a back-off of two minutes, and
    # an emulator that was restarted at another address not with the old one for half a minute.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Channels to one address share their connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC repeats a call only if it is certain that no server has begun it: front ends of the
    # service leave now and then, and say how far they got. Which other calls may be repeated is
    # known to the protocol, not to a service config.
    ("grpc.enable_retries", 1),
    ("grpc.service_config_disable_resolution", 1),
]
_DIRECTLY = ("grpc.enable_http_proxy", 0)
"""A proxy would look for an emulator of this machine on its own."""

_ROUTED_BY = ("table_name", "parent", "name", "resource")
_ROUTES_MAX = 1_024
_SECONDS_MIN = 0.001
_NO_METADATA: Metadata = ()
_FEATURES = ("bigtable-features", "CAEgATgB")
"""Enables behaviour that the service reserves for clients that understand it: an encoded
`google.bigtable.v2.FeatureFlags` with `reverse_scans`, `last_scanned_row_responses` (a scan that
selects nothing for long says how far it has come) and `retry_info` (how long to pause)."""

_Route = Callable[[Message], Metadata]
_Method = UnaryMethod[Any, Any] | StreamMethod[Any, Any]


class BigtableNetwork:
    """A `percolator.world.Network` to the service, or to an emulator. Belongs to one event loop."""

    def __init__(self, tokens: Tokens | None = None, roots: bytes | None = None) -> None:
        """Without tokens, calls go in plain text, as emulators want them. `roots` are the
        authorities that may vouch for the service; by default, those that gRPC trusts."""
        self._tokens = tokens
        self._tls = None if tokens is None else grpc.ssl_channel_credentials(roots)
        self._lanes: dict[str, _Lanes] = {}
        self._is_closed = False

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        lanes, route, path = self._lanes_to(address), _route(method.request), method.path

        async def call(request: RequestT, timeout: float, *, again: bool = True) -> ResponseT:
            deadline, identity = _now() + timeout, _NO_METADATA
            if self._tokens is not None:
                identity = self._tokens.current() or await self._tokens.metadata(timeout)
            lane = lanes.lane()
            lane.in_flight += 1
            try:
                response: ResponseT | None = await lane.call(method)(
                    request, timeout=_left(deadline), metadata=route(request) + identity
                )
                return _understood(response, path)
            except grpc.aio.AioRpcError as failed:
                if not again or not self._may_be_repeated(failed, identity):
                    raise from_rpc_error(failed, _where(path, request)) from None
            except asyncio.CancelledError:
                if cancelled_by_caller():
                    raise
                raise _cut_off(path) from None
            finally:
                lane.in_flight -= 1
            return await call(request, _left(deadline), again=False)

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        lanes, route, path = self._lanes_to(address), _route(method.request), method.path

        async def call(
            request: RequestT, timeout: float, *, again: bool = True
        ) -> AsyncGenerator[ResponseT, None]:
            deadline, identity = _now() + timeout, _NO_METADATA
            if self._tokens is not None:
                identity = self._tokens.current() or await self._tokens.metadata(timeout)
            lane = lanes.lane()
            lane.in_flight += 1
            try:
                streaming = lane.call(method)(
                    request, timeout=_left(deadline), metadata=route(request) + identity
                )
                async with left_at_once(streaming) as responses:
                    async for response in responses:
                        again = False  # a repeated call would yield this message twice
                        yield _understood(response, path)
            except grpc.aio.AioRpcError as failed:
                if not again or not self._may_be_repeated(failed, identity):
                    raise from_rpc_error(failed, _where(path, request)) from None
            except asyncio.CancelledError:
                if cancelled_by_caller():
                    raise
                raise _cut_off(path) from None
            else:
                return
            finally:
                lane.in_flight -= 1
            # Refused before its first message, and by now there is another token.
            async with aclosing(call(request, _left(deadline), again=False)) as repeated:
                async for response in repeated:
                    yield response

        return call

    async def close(self) -> None:
        self._is_closed = True
        for each in self._lanes.values():
            await each.close()
        if self._tokens is not None:
            await self._tokens.close()

    def _may_be_repeated(self, failed: grpc.aio.AioRpcError, identity: Metadata) -> bool:
        """True if another token may help: a call that was not admitted was not executed."""
        if self._tokens is None or failed.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return False
        self._tokens.refused(identity)
        return True

    def _lanes_to(self, address: str) -> _Lanes:
        lanes = self._lanes.get(address)
        if lanes is None:
            if self._is_closed:
                raise network_closed()  # a channel opened now would never be closed
            lanes = self._lanes[address] = _Lanes(address, self._tls)
        return lanes


class _Lane:
    """One connection, and how many calls are in flight on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.in_flight = 0
        self._calls: dict[str, Callable[..., Any]] = {}

    def call(self, method: _Method) -> Callable[..., Any]:
        """The procedure, over this connection."""
        call = self._calls.get(method.path)
        if call is None:
            is_unary = isinstance(method, UnaryMethod)
            bind = self.channel.unary_unary if is_unary else self.channel.unary_stream
            call = self._calls[method.path] = bind(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
        return call


class _Lanes:
    """The connections to one address. Another one is opened when all before it are full."""

    def __init__(self, address: str, tls: grpc.ChannelCredentials | None) -> None:
        self._address = address
        self._tls = tls
        self._options = list(_OPTIONS)
        if parse_host_port(address, "address").is_loopback():
            self._options.append(_DIRECTLY)
        self._lanes: list[_Lane] = []
        self._is_closed = False

    def lane(self) -> _Lane:
        """The first connection that is not full; if all are, the one with the fewest calls."""
        if self._is_closed:
            raise network_closed()
        for lane in self._lanes:
            if lane.in_flight < STREAMS_MAX:
                return lane
        if len(self._lanes) < _LANES_MAX:
            self._lanes.append(_Lane(self._opened()))
            return self._lanes[-1]
        return min(self._lanes, key=lambda lane: lane.in_flight)

    async def close(self) -> None:
        self._is_closed = True
        lanes, self._lanes = self._lanes, []
        await asyncio.gather(*(lane.channel.close() for lane in lanes))

    def _opened(self) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._tls, options=self._options)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(deadline: float) -> float:
    """Time that waiting for a token, or a refused call, has left of a call's."""
    return max(deadline - _now(), _SECONDS_MIN)


def _route(request: type[Message]) -> _Route:
    """Makes the header that tells the service's front ends whose call it is."""
    fields = request.DESCRIPTOR.fields_by_name
    named = next(field for field in _ROUTED_BY if field in fields)
    with_profile = "app_profile_id" in fields
    known: dict[tuple[str, str], Metadata] = {}

    def route(request: Message) -> Metadata:
        name: str = getattr(request, named)
        profile: str = getattr(request, "app_profile_id") if with_profile else ""  # noqa: B009
        metadata: Metadata | None = known.get((name, profile))
        if metadata is None:
            text = f"{named}={quote(name, safe='')}"
            if profile:
                text += f"&app_profile_id={quote(profile, safe='')}"
            if len(known) >= _ROUTES_MAX:
                known.clear()
            metadata = (("x-goog-request-params", text),)
            if with_profile:
                metadata = (*metadata, _FEATURES)
            known[name, profile] = metadata
        return metadata

    return route


def _where(path: str, request: Message) -> str:
    """The method, and the table or instance that it was called for."""
    named = next(field for field in _ROUTED_BY if hasattr(request, field))
    return f"{path} of {getattr(request, named)}"


def _understood(response: ResponseT | None, where: str) -> ResponseT:
    """The response; gRPC gives None if there was none, or one that it could not decode."""
    if response is None:
        raise errors.ExecutionUnknown("the response is not a message of its type", where=where)
    return response


def _cut_off(where: str) -> errors.Unavailable:
    return errors.Unavailable("the connection was closed", where=where)


RELAYED = {
    bigtable.CHECK_AND_MUTATE_ROW.path: methods.CHECK_AND_MUTATE_ROW.path,
    bigtable.MUTATE_ROWS.path: methods.MUTATE_ROWS.path,
    bigtable.READ_ROWS.path: methods.READ_ROWS.path,
    bigtable.SAMPLE_ROW_KEYS.path: methods.SAMPLE_ROW_KEYS.path,
}
"""Methods of a gateway for Bigtable's. None of them creates or deletes tables."""


class RelayedNetwork:
    """A `percolator.world.Network` to Bigtable by the gateways of a cluster, which have an account
    there and refuse some calls (services/gateway/row_store_handler.py).

    The messages are the same; only the methods have other names. The caller closes `through`.
    """

    def __init__(self, through: ThroughNetwork) -> None:
        self._through = through

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        relayed = UnaryMethod(_relayed(method.path), method.request, method.response)
        return self._through.unary_of_any(relayed)

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        relayed = StreamMethod(_relayed(method.path), method.request, method.response)
        return self._through.stream_of_any(relayed)

    async def close(self) -> None:
        """Nothing to close: the network of the gateways is the caller's."""


def _relayed(path: str) -> str:
    found = RELAYED.get(path)
    if found is None:
        raise errors.UsageError(f"no gateway makes the call {path}")
    return found


class Connection:
    """The network to an instance, and the row store over it. Belongs to one event loop.

    No server is dialled, and no credentials are looked for, before the first call.
    """

    def __init__(self, place: Place) -> None:
        """Raises `UsageError` if credentials are needed, and `google-auth` is missing."""
        self.place = place
        tokens = None if place.is_emulated else Tokens(GoogleAccount().token)
        self.network = BigtableNetwork(tokens)
        self.store = BigtableStore(self.network, place)

    async def close(self) -> None:
        await self.network.close()
