"""The network over which Bigtable is called: bare gRPC, without a client library of Google's.

Their client takes four times the CPU of a call, and wants a protobuf runtime of its own. This adds
what they would: TLS and tokens, the header by which calls are routed, and enough connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from urllib.parse import quote

import grpc
from google.protobuf.message import Message

from percolator import errors
from percolator.bigtable.lanes import Lane, Lanes, Procedure
from percolator.bigtable.meanings import meaning
from percolator.bigtable.tokens import Metadata, Tokens
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

_MESSAGE_BYTES_MAX = 256 * 1024 * 1024
"""The most that one row may have."""
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Channels to one address share their connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are decided where it is known whether they are safe: in the protocol, not here.
    ("grpc.enable_retries", 0),
]
_ROUTED_BY = ("table_name", "parent", "name", "resource")
_ROUTES_MAX = 1_024
_NO_METADATA: Metadata = ()

_Route = Callable[[Message], Metadata]


class BigtableNetwork:
    """A `percolator.world.Network` to the service, or to an emulator. Belongs to one event loop."""

    def __init__(self, tokens: Tokens | None = None, roots: bytes | None = None) -> None:
        """Without tokens, calls go in plain text, as emulators want them. `roots` are the
        authorities that may vouch for the service; by default, those that gRPC trusts."""
        self._tokens = tokens
        self._tls = None if tokens is None else grpc.ssl_channel_credentials(roots)
        self._lanes: dict[str, Lanes] = {}

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        lanes, route = self._lanes_to(address), _route(method.request)

        async def call(request: RequestT, timeout: float, *, again: bool = True) -> ResponseT:
            identity = _NO_METADATA if self._tokens is None else await self._identity(timeout)
            lane = lanes.lane()
            invoke = lane.procedures.get(method.path) or _unary(lane, method)
            lane.in_flight += 1
            try:
                response: ResponseT | None = await invoke(
                    request, timeout=timeout, metadata=route(request) + identity
                )
            except grpc.aio.AioRpcError as error:
                if again and self._may_be_repeated(error, identity):
                    return await call(request, timeout, again=False)
                raise meaning(error, _where(method.path, request)) from None
            except asyncio.CancelledError:
                raise _cut_off(_where(method.path, request)) from None
            finally:
                lane.in_flight -= 1
            return _understood(response, method.path)

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        lanes, route = self._lanes_to(address), _route(method.request)

        async def call(
            request: RequestT, timeout: float, *, again: bool = True
        ) -> AsyncIterator[ResponseT]:
            identity = await self._identity(timeout)
            lane = lanes.lane()
            invoke = lane.procedures.get(method.path) or _stream(lane, method)
            streaming = invoke(request, timeout=timeout, metadata=route(request) + identity)
            lane.in_flight += 1
            try:
                async for response in streaming:
                    yield _understood(response, method.path)
            except grpc.aio.AioRpcError as error:
                if not again or not self._may_be_repeated(error, identity):
                    raise meaning(error, _where(method.path, request)) from None
            except asyncio.CancelledError:
                raise _cut_off(_where(method.path, request)) from None
            else:
                return
            finally:
                lane.in_flight -= 1
                streaming.cancel()
            # Refused before its first message, and by now there is another token.
            async for response in call(request, timeout, again=False):
                yield response

        return call

    async def close(self) -> None:
        lanes, self._lanes = self._lanes, {}
        for each in lanes.values():
            await each.close()
        if self._tokens is not None:
            await self._tokens.close()

    async def _identity(self, timeout: float) -> Metadata:
        if self._tokens is None:
            return _NO_METADATA
        return self._tokens.current() or await self._tokens.metadata(timeout)

    def _may_be_repeated(self, error: grpc.aio.AioRpcError, identity: Metadata) -> bool:
        """Whether another token may help: the service has not executed what it did not admit."""
        if self._tokens is None or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return False
        self._tokens.refused(identity)
        return True

    def _lanes_to(self, address: str) -> Lanes:
        lanes = self._lanes.get(address)
        if lanes is None:
            lanes = self._lanes[address] = Lanes(partial(self._open, address))
        return lanes

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        return grpc.aio.secure_channel(address, self._tls, options=_OPTIONS)


def _unary(lane: Lane, method: UnaryMethod[RequestT, ResponseT]) -> Procedure:
    invoke: Procedure = lane.channel.unary_unary(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )
    lane.procedures[method.path] = invoke
    return invoke


def _stream(lane: Lane, method: StreamMethod[RequestT, ResponseT]) -> Procedure:
    invoke: Procedure = lane.channel.unary_stream(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.response.FromString,
    )
    lane.procedures[method.path] = invoke
    return invoke


def _route(request: type[Message]) -> _Route:
    """What makes the header that tells the service's front ends whose call it is."""
    fields = request.DESCRIPTOR.fields_by_name
    named = next(field for field in _ROUTED_BY if field in fields)
    with_profile = "app_profile_id" in fields
    known: dict[tuple[str, str], Metadata] = {}

    def route(request: Message) -> Metadata:
        name: str = getattr(request, named)
        profile: str = getattr(request, "app_profile_id") if with_profile else ""  # noqa: B009
        metadata = known.get((name, profile))
        if metadata is None:
            text = f"{named}={quote(name, safe='')}"
            if profile:
                text += f"&app_profile_id={quote(profile, safe='')}"
            if len(known) >= _ROUTES_MAX:
                known.clear()
            metadata = known[name, profile] = (("x-goog-request-params", text),)
        return metadata

    return route


def _where(path: str, request: Message) -> str:
    """The method, and what it was called for."""
    named = next(field for field in _ROUTED_BY if hasattr(request, field))
    return f"{path} of {getattr(request, named)}"


def _cut_off(where: str) -> BaseException:
    """gRPC cancels the calls of a channel that is closed, as their callers' tasks would. A task
    that was never cancelled must not end silently."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        return asyncio.CancelledError()
    return errors.Unavailable("the connection was closed", where=where)


def _understood(response: ResponseT | None, where: str) -> ResponseT:
    """The response. gRPC gives None if it could not decode it."""
    if response is None:
        raise errors.ExecutionUnknown("the response is not a message of its type", where=where)
    return response
