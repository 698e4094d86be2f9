"""Requests of gRPC's own services, health and reflection, that are not messages of their type.

gRPC decodes them before a handler runs. If that fails it logs a traceback, which anyone who reaches
the port could cause as often as they like, and answers UNKNOWN. Here they are decoded as None, and
refused as other services refuse them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from percolator.errors import InvalidArgument
from services.chassis.serving.trailers import failure

MessageT = TypeVar("MessageT", bound=Message)


def none_unless(kind: type[MessageT]) -> Callable[[bytes], MessageT | None]:
    """Decodes a message; what is none of this kind becomes None."""

    def decode(raw: bytes) -> MessageT | None:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return None

    return decode


async def decoded(request: MessageT | None, context: grpc.aio.ServicerContext) -> MessageT:
    """The request, or the end of the call with `InvalidArgument`."""
    if request is None:
        error = InvalidArgument("request", "is not a message of its type")
        await context.abort(*failure(error))
        raise error
    return request


async def all_decoded(
    requests: AsyncIterator[MessageT | None], context: grpc.aio.ServicerContext
) -> AsyncIterator[MessageT]:
    """The requests of a stream, until one is not a message."""
    async for request in requests:
        yield await decoded(request, context)
