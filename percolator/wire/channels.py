"""The real network: gRPC channels, one per address, shared by everybody in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from percolator import errors
from percolator.wire.status import from_rpc_error
from percolator.world import (
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
)

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
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retrying is decided where it is known whether it is safe: in the protocol, not here.
    ("grpc.enable_retries", 0),
]


class GrpcNetwork:
    """A `percolator.world.Network` of gRPC channels. Belongs to one event loop."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        multicallable = self._channel(address).unary_unary(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        where = f"{method.path} at {address}"

        async def call(request: RequestT, timeout: float) -> ResponseT:
            try:
                response: ResponseT | None = await multicallable(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, where) from None
            except grpc.aio.UsageError:
                raise _closed(where) from None
            except asyncio.CancelledError:
                if self._is_closed(address):
                    raise errors.Unavailable("the channel was closed", where=where) from None
                raise
            return _understood(response, where)

        return call

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT]
    ) -> StreamCall[RequestT, ResponseT]:
        multicallable = self._channel(address).unary_stream(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
        where = f"{method.path} at {address}"

        async def call(request: RequestT, timeout: float) -> AsyncIterator[ResponseT]:
            try:
                async for response in multicallable(request, timeout=timeout):
                    yield _understood(response, where)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, where) from None
            except grpc.aio.UsageError:
                raise _closed(where) from None

        return call

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if not address:
            raise errors.InvalidArgument("address", "is empty; expected host:port")
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
            self._channels[address] = channel
        return channel

    def _is_closed(self, address: str) -> bool:
        return address not in self._channels


def _closed(where: str) -> errors.UsageError:
    return errors.UsageError("the network of this client is closed", where=where)


def _understood(response: ResponseT | None, where: str) -> ResponseT:
    """gRPC gives None for what it could not decode: whatever listens there, it did something."""
    if response is None:
        raise errors.ExecutionUnknown("the answer is not a message of its type", where=where)
    return response
