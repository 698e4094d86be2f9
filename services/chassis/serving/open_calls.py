"""Calls of gRPC's own services, health and reflection, which anyone may make who reaches the port.

They need no token, so they have small shares of a server: of memory (`Gate.open`), and of streams
that stay open. What is no message of its type is refused as other services refuse it. gRPC itself
would log a traceback, which could be caused as often as one likes, and would answer UNKNOWN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from percolator.errors import InvalidArgument, Overloaded, PercolatorError
from percolator.services.chassis.serving.arrivals import Arrivals, NoMoreRequests
from percolator.services.chassis.serving.quotas import CallerIdentity, machine_of
from percolator.services.chassis.serving.trailers import failure
from percolator.wire.roles import Role

OPEN_STREAMS_MAX = 1_000
CONNECTION_STREAMS_MAX = 16
"""Of those, the streams of one connection. It may have as many calls that are no streams."""
_RETRY_SECONDS = 1.0

MessageT = TypeVar("MessageT", bound=Message)

Context = Any
"""`grpc.aio.ServicerContext`: grpc has no types."""


class OpenCalls:
    """The handlers of these calls. Belongs to one event loop."""

    def __init__(self, arrivals: Arrivals, streams_max: int = OPEN_STREAMS_MAX) -> None:
        self._arrivals = arrivals
        self._streams_max = streams_max
        self._streams: Counter[str] = Counter()
        """Open streams, by connection."""
        self._calls: Counter[str] = Counter()
        """Calls whose requests have not arrived, by connection."""

    def unary(
        self,
        kind: type[MessageT],
        answer: Callable[[MessageT, Context], Awaitable[Message]],
    ) -> grpc.RpcMethodHandler:
        """Answers a request with a response."""

        async def call(requests: AsyncIterator[bytes], context: Context) -> bytes:
            try:
                self._require_few(self._calls[context.peer()], "calls")
                with _counted(self._calls, context):
                    request = await self._received(kind, context)
            except PercolatorError as error:
                await _abort(error, context)
            return (await answer(request, context)).SerializeToString()

        return grpc.stream_unary_rpc_method_handler(call)

    def stream(
        self,
        kind: type[MessageT],
        answer: Callable[[AsyncIterator[MessageT], Context], AsyncGenerator[Message, None]],
    ) -> grpc.RpcMethodHandler:
        """Answers requests with a stream of responses."""

        async def call(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            try:
                with self._opened(context):
                    async with aclosing(answer(self._all(kind, context), context)) as responses:
                        async for response in responses:
                            yield response.SerializeToString()
            except PercolatorError as error:
                await _abort(error, context)

        return grpc.stream_stream_rpc_method_handler(call)

    async def _all(self, kind: type[MessageT], context: Context) -> AsyncIterator[MessageT]:
        while True:
            try:
                yield await self._received(kind, context)
            except NoMoreRequests:
                return

    async def _received(self, kind: type[MessageT], context: Context) -> MessageT:
        # By machine, so that those of one cannot keep the health checks of all others waiting.
        caller = CallerIdentity(Role.CLIENT, (b"", machine_of(context.peer())))
        held = await self._arrivals.receive(context, caller)
        try:
            return kind.FromString(held.raw)
        except DecodeError:
            raise InvalidArgument("request", "is not a message of its type") from None
        finally:
            held.release()

    @contextmanager
    def _opened(self, context: Context) -> Iterator[None]:
        self._require_few(self._streams[context.peer()], "streams")
        if self._streams.total() >= self._streams_max:
            self._refuse(f"{self._streams_max} streams are open (open_streams_max)")
        with _counted(self._streams, context):
            yield

    def _require_few(self, count: int, what: str) -> None:
        if count >= CONNECTION_STREAMS_MAX:
            self._refuse(f"{CONNECTION_STREAMS_MAX} {what} are open on this connection")

    def _refuse(self, text: str) -> NoReturn:
        self._arrivals.refused["streams"] += 1
        raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)


@contextmanager
def _counted(counts: Counter[str], context: Context) -> Iterator[None]:
    peer = context.peer()
    counts[peer] += 1
    try:
        yield
    finally:
        counts[peer] -= 1
        if not counts[peer]:
            del counts[peer]


async def _abort(error: PercolatorError, context: Context) -> NoReturn:
    """Ends the call by raising gRPC's own exception."""
    await context.abort(*failure(error))
    raise error
