"""The network over which Bigtable is called: bare calls, without a client library of Google's.

Their client takes many times the CPU of a call, and wants a protobuf runtime of its own. This adds
what they would: TLS and tokens, the header by which calls are routed, and enough connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from importlib import import_module
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError, Message

from percolator import errors
from percolator.bigtable.grpc_lane import GrpcLane
from percolator.bigtable.http2.dialling import secure
from percolator.bigtable.http2.headers import Metadata
from percolator.bigtable.http2.lane import HttpLane
from percolator.bigtable.http2.status import CallFailed, Code
from percolator.bigtable.lanes import Lane, Lanes, network_closed
from percolator.bigtable.meanings import meaning
from percolator.bigtable.tokens import Tokens
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

_log = logging.getLogger("percolator.bigtable")

_ROUTED_BY = ("table_name", "parent", "name", "resource")
_ROUTES_MAX = 1_024
_SECONDS_MIN = 0.001
_NO_METADATA: Metadata = ()
_FEATURES = ("bigtable-features", "CAEgATgB")
"""What the service does only for clients that say they understand it: an encoded
`google.bigtable.v2.FeatureFlags` with `reverse_scans`, `last_scanned_row_responses` (a scan that
selects nothing for long says how far it has come) and `retry_info` (how long to pause)."""
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that name the proxy that gRPC uses for all calls."""

_Route = Callable[[Message], Metadata]


class BigtableNetwork:
    """A `percolator.world.Network` to the service, or to an emulator. Belongs to one event loop."""

    def __init__(
        self, tokens: Tokens | None = None, roots: bytes | None = None, *, by_grpc: bool = False
    ) -> None:
        """Without tokens, calls go in plain text, as emulators want them. `roots` are the
        authorities that may vouch for the service; by default, those of the machine. `by_grpc`
        makes all calls through gRPC's own client."""
        self._tokens = tokens
        self._roots = roots
        self._by_grpc = by_grpc
        self._tls: ssl.SSLContext | None = None
        self._lanes: dict[str, Lanes] = {}
        self._is_closed = False

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        lanes, route, path = self._lanes_to(address), _route(method.request), method.path
        decode = method.response.FromString

        async def call(request: RequestT, timeout: float, *, again: bool = True) -> ResponseT:
            deadline, identity = _now() + timeout, _NO_METADATA
            if self._tokens is not None:
                identity = self._tokens.current() or await self._tokens.metadata(timeout)
            lane = lanes.lane()
            lane.in_flight += 1
            try:
                encoded, left = request.SerializeToString(), _left(deadline)
                return decode(await lane.unary(path, encoded, left, route(request) + identity))
            except CallFailed as failed:
                if not again or not self._may_be_repeated(failed, identity):
                    raise meaning(failed, _where(path, request)) from None
            except DecodeError:
                raise _not_understood(path) from None
            finally:
                lane.in_flight -= 1
            return await call(request, _left(deadline), again=False)

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        lanes, route, path = self._lanes_to(address), _route(method.request), method.path
        decode = method.response.FromString

        async def call(
            request: RequestT, timeout: float, *, again: bool = True
        ) -> AsyncGenerator[ResponseT, None]:
            deadline, identity = _now() + timeout, _NO_METADATA
            if self._tokens is not None:
                identity = self._tokens.current() or await self._tokens.metadata(timeout)
            lane = lanes.lane()
            lane.in_flight += 1
            try:
                encoded, left = request.SerializeToString(), _left(deadline)
                messages = lane.stream(path, encoded, left, route(request) + identity)
                async with aclosing(messages):
                    async for message in messages:
                        again = False  # whoever repeats it would get this message twice
                        yield decode(message)
            except CallFailed as failed:
                if not again or not self._may_be_repeated(failed, identity):
                    raise meaning(failed, _where(path, request)) from None
            except DecodeError:
                raise _not_understood(path) from None
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

    def _may_be_repeated(self, failed: CallFailed, identity: Metadata) -> bool:
        """Whether another token may help: the service has not executed what it did not admit."""
        if self._tokens is None or failed.code is not Code.UNAUTHENTICATED:
            return False
        self._tokens.refused(identity)
        return True

    def _lanes_to(self, address: str) -> Lanes:
        lanes = self._lanes.get(address)
        if lanes is None:
            if self._is_closed:
                raise network_closed()  # a channel opened now would never be closed
            lanes = self._lanes[address] = Lanes(self._opening(address))
        return lanes

    def _opening(self, address: str) -> Callable[[], Lane]:
        """What opens connections there."""
        is_proxied = _is_proxied(address)
        if is_proxied and not self._by_grpc:
            _log.info("calls of %s go through a proxy, and so through gRPC's own client", address)
        if is_proxied or self._by_grpc:
            credentials = None
            if self._tokens is not None:
                credentials = grpc.ssl_channel_credentials(self._roots)
            return partial(GrpcLane, address, credentials)
        if self._tokens is not None and self._tls is None:
            self._tls = secure(self._roots)
        return partial(HttpLane, address, self._tls)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _left(deadline: float) -> float:
    """What waiting for a token, or a refused call, has left of a call's time."""
    return max(deadline - _now(), _SECONDS_MIN)


def _is_proxied(address: str) -> bool:
    """Whether the environment says that the address is reached through a proxy."""
    if not any(os.environ.get(name) for name in _PROXIES):
        return False
    # What it imports costs a program more than all of this module.
    bypassed: bool = import_module("urllib.request").proxy_bypass_environment(address)
    return not bypassed


def _route(request: type[Message]) -> _Route:
    """What makes the header that tells the service's front ends whose call it is."""
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
    """The method, and what it was called for."""
    named = next(field for field in _ROUTED_BY if hasattr(request, field))
    return f"{path} of {getattr(request, named)}"


def _not_understood(where: str) -> errors.PercolatorError:
    return errors.ExecutionUnknown("the response is not a message of its type", where=where)
