"""The way to one address through gRPC's own client: for proxies, which only that can use, and for
whoever asks for it because our own (`percolator/bigtable/http2`) meets trouble."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from percolator.bigtable.http2.headers import Metadata
from percolator.bigtable.http2.messages import MESSAGE_BYTES_MAX
from percolator.bigtable.http2.status import CallFailed, Code
from percolator.bigtable.lanes import LANES_MAX, STREAMS_MAX
from percolator.wire.channels import cancelled_by_caller, left_at_once

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Channels to one address share their connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    # Retries are decided where it is known whether they are safe: in the protocol, not here.
    ("grpc.enable_retries", 0),
]
_DETAILS = "grpc-status-details-bin"
_CLOSED = "the connection was closed"


class GrpcLane:
    """Belongs to one event loop."""

    calls_max = LANES_MAX * STREAMS_MAX

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        self._channel: Any = (
            grpc.aio.insecure_channel(address, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        )
        self._unary: dict[str, Any] = {}
        self._streams: dict[str, Any] = {}
        self.in_flight = 0

    async def unary(self, path: str, request: bytes, timeout: float, metadata: Metadata) -> bytes:
        invoke = self._unary.get(path)
        if invoke is None:
            invoke = self._unary[path] = self._channel.unary_unary(path)
        try:
            answer: bytes | None = await invoke(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.CancelledError:
            if cancelled_by_caller():
                raise
            raise CallFailed(Code.UNAVAILABLE, _CLOSED) from None
        if answer is None:
            raise CallFailed(Code.INTERNAL, "an answer without a message")
        return answer

    async def stream(
        self, path: str, request: bytes, timeout: float, metadata: Metadata
    ) -> AsyncGenerator[bytes, None]:
        invoke = self._streams.get(path)
        if invoke is None:
            invoke = self._streams[path] = self._channel.unary_stream(path)
        try:
            async with left_at_once(invoke(request, timeout=timeout, metadata=metadata)) as answers:
                async for message in answers:
                    yield message
        except grpc.aio.AioRpcError as error:
            raise _failed(error) from None
        except asyncio.CancelledError:
            if cancelled_by_caller():
                raise
            raise CallFailed(Code.UNAVAILABLE, _CLOSED) from None

    async def close(self) -> None:
        await self._channel.close()


def _failed(error: grpc.aio.AioRpcError) -> CallFailed:
    details = b""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            details = value
            break
    return CallFailed(error.code(), error.details() or "", details)
