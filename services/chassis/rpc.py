"""The edge of a server: handlers on one side, bytes on the other, by gRPC or in frames.

A handler is an object with one method per RPC, in snake_case. It knows messages and
`PercolatorError`s, but not gRPC, so that a simulation can call the very same object. This module
counts and times a call, checks it against the limits, decodes it, and maps its error.

A method may be cancelled at any `await`, when its caller gives up: work that must not be torn
belongs in a separate task of the service.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    InvariantViolation,
    NotReady,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
)
from percolator.services.chassis.gate import (
    OWN,
    Access,
    Arrivals,
    CallerIdentity,
    Check,
    Gate,
    Held,
    NoMoreRequests,
    by_address,
    failure,
    machine_of,
)
from percolator.services.chassis.metrics import MethodMetrics, RpcMetrics
from percolator.wire.channels import cancelled_by_caller
from percolator.wire.methods import method_name
from percolator.wire.roles import Role
from percolator.wire.status import status_code
from percolator.world import Clock

OPEN_STREAMS_MAX = 1_000
CONNECTION_STREAMS_MAX = 16
"""Of those, the streams of one connection. It may have as many calls that are no streams."""
_RETRY_SECONDS = 1.0

MessageT = TypeVar("MessageT", bound=Message)

Context = Any
"""`grpc.aio.ServicerContext`: grpc has no types."""


class OpenCalls:
    """Handlers for calls of gRPC's own services, health and reflection, which anyone may make who
    reaches the port.

    They need no token, so they have small shares of a server: of memory (`Gate.open`), and of
    streams that stay open. What is no message of its type is refused as other services refuse it.
    gRPC itself would log a traceback, which could be caused as often as one likes, and would answer
    UNKNOWN.
    """

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
                await _abort_call(error, context)
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
                await _abort_call(error, context)

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


async def _abort_call(error: PercolatorError, context: Context) -> NoReturn:
    """Ends the call by raising gRPC's own exception."""
    await context.abort(*failure(error))
    raise error


_STARTING_RETRY_SECONDS = 0.25
_CHECKED_AGAIN_SECONDS = 1.0
"""How old the check of a stream's caller may be when an answer is sent."""
_OWN_PACKAGE = "/percolator."

Unary = Callable[[bytes, Any], Awaitable[bytes]]
"""Answers a request with a response. Takes a `grpc.aio.ServicerContext`, or what stands for it."""

Unreceived = AsyncIterator[bytes]
"""The request of a call over gRPC, whose message nobody has received yet. gRPC has it so only for
methods that stream their requests: of others it receives the message, however large, before it
asks anybody. To callers both look alike."""

_remaining: ContextVar[Callable[[], float | None] | None] = ContextVar("remaining", default=None)

_caller: ContextVar[CallerIdentity] = ContextVar("caller", default=OWN)

_log = structlog.get_logger("percolator.rpc")


def remaining_seconds() -> float | None:
    """How long the caller of the current RPC will still wait; None if it set no deadline."""
    remaining = _remaining.get()
    return None if remaining is None else remaining()


def caller_role() -> Role:
    """The role of the caller of the current RPC. Without TLS, callers have no names, and may do
    everything that an operator may."""
    return _caller.get().role


def caller_identity() -> CallerIdentity:
    """The caller of the current RPC."""
    return _caller.get()


@dataclass(frozen=True)
class Exposed:
    """A service of the wire API, and the object that answers it.

    `descriptor` is, for example, `oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]`. A unary
    method is `async def get_timestamps(self, request) -> response`; a method that streams its
    response is an asynchronous generator.
    """

    descriptor: ServiceDescriptor
    handler: object

    def __post_init__(self) -> None:
        for method in self.descriptor.methods:
            if not callable(getattr(self.handler, method_name(method.name), None)):
                raise InvariantViolation(
                    f"{type(self.handler).__name__} has no {method_name(method.name)}(), "
                    f"which {self.descriptor.full_name} needs"
                )


class Forwarder(Protocol):
    """Forwards calls that are meant for other servers, without decoding them."""

    @property
    def services(self) -> Sequence[str]:
        """Full names of the services for which it answers, in addition to those of this process."""
        ...

    def handler(
        self, details: grpc.HandlerCallDetails, gate: Gate, check: Check
    ) -> grpc.RpcMethodHandler | None:
        """None for a call that is meant for this process.

        The handler that it returns subjects the call to the gate and the check.
        """
        ...


class RpcEdge(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Answers the calls to the exposed services; before they are, tells callers to come back."""

    def __init__(
        self, gate: Gate, metrics: RpcMetrics, clock: Clock, access: Access | None = None
    ) -> None:
        self._gate = gate
        self._access = access
        self._metrics = metrics
        self._clock = clock
        self._methods: dict[str, grpc.RpcMethodHandler] = {}
        self.unary: dict[str, Unary] = {}
        """The exposed methods by path, for calls that do not come by gRPC and have one response: of
        a stream, the first."""
        self._forwarder: Forwarder | None = None
        self._starting: grpc.RpcMethodHandler | None = grpc.stream_unary_rpc_method_handler(
            _refuse_starting
        )

    def expose(self, services: list[Exposed], forwarder: Forwarder | None = None) -> None:
        """From now on these services are answered; other methods do not exist, except those of the
        forwarder. Call it once.
        """
        self._forwarder = forwarder
        for exposed in services:
            for method in exposed.descriptor.methods:
                path = f"/{exposed.descriptor.full_name}/{method.name}"
                self._methods[path] = self._handler(exposed, method, path)
        self._starting = None

    def mount(self, path: str, handler: grpc.RpcMethodHandler) -> None:
        """Adds a method that does not belong to the service: it is not counted and not limited."""
        self._methods[path] = handler

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Called by gRPC for every call."""
        path: str = details.method
        if self._forwarder is not None:
            passed_on = self._forwarder.handler(details, self._gate, self._check_of(path))
            if passed_on is not None:
                return passed_on
        handler = self._methods.get(path)
        if handler is None and path.startswith(_OWN_PACKAGE):
            return self._starting
        return handler

    def _check_of(self, path: str) -> Check:
        return by_address if self._access is None else self._access.check_of(path)

    def _handler(
        self, exposed: Exposed, method: MethodDescriptor, path: str
    ) -> grpc.RpcMethodHandler:
        if method.client_streaming:
            raise InvariantViolation(f"{path} streams its requests, which nothing needs")
        call = _Call(
            path=path,
            parse=GetMessageClass(method.input_type).FromString,
            handle=getattr(exposed.handler, method_name(method.name)),
            gate=self._gate,
            check=self._check_of(path),
            metrics=self._metrics.method(exposed.descriptor.full_name, method.name),
            now=self._clock.monotonic_seconds,
        )
        # Bytes in, bytes out: decode here, where a failure becomes a typed error.
        if method.server_streaming:
            self.unary[path] = replace(call, handle=_first(call.handle)).unary
            return grpc.stream_stream_rpc_method_handler(call.stream)
        self.unary[path] = call.unary
        return grpc.stream_unary_rpc_method_handler(call.unary)


def _first(
    stream: Callable[[Message], AsyncGenerator[Message, None]],
) -> Callable[[Message], Awaitable[Message]]:
    """A handler that ends the stream after its first response."""

    async def handle(request: Message) -> Message:
        async with aclosing(stream(request)) as responses:
            async for response in responses:
                return response
        raise InvariantViolation("a stream has ended without a response")

    return handle


async def _refuse_starting(requests: Unreceived, context: grpc.aio.ServicerContext) -> bytes:
    error = NotReady("the service is starting", retry_after_seconds=_STARTING_RETRY_SECONDS)
    await _abort(error, context)
    raise error


async def _abort(error: PercolatorError, context: grpc.aio.ServicerContext) -> None:
    """Ends the call by raising gRPC's own exception."""
    await context.abort(*failure(error))


@dataclass(frozen=True, slots=True)
class _Call:
    """One method of one service; its two coroutines are what grpc.aio calls, and a connection for
    frames.

    Their common part is written twice: a context manager around it took 0.5 µs of each call, a
    third of the whole cost of this edge.
    """

    path: str
    parse: Callable[[bytes], Message]
    handle: Callable[[Message], Any]
    gate: Gate
    check: Check
    metrics: MethodMetrics
    now: Callable[[], float]

    async def unary(self, request: bytes | Unreceived, context: grpc.aio.ServicerContext) -> bytes:
        started = self.now()
        self.metrics.in_flight += 1
        admitted: CallerIdentity | None = None
        held: Held | None = None
        code = "CANCELLED"
        try:
            self.gate.require_open()
            caller = self.check(context)
            self.gate.enter(caller)
            admitted = caller
            _caller.set(caller)
            _remaining.set(context.time_remaining)
            if isinstance(request, bytes):
                held = self.gate.hold(request)
            else:
                held = await self.gate.receive(context, caller)
            answer: Awaitable[Message] = self.handle(self._decode(held.raw))
            encoded = (await answer).SerializeToString()
            code = "OK"
        except (asyncio.CancelledError, Exception) as error:
            told = self._told(error)
            if told is not None:
                code = status_code(told).name
                await _abort(told, context)
            raise
        else:
            return encoded
        finally:
            if held is not None:
                held.release()
            if admitted is not None:
                self.gate.leave(admitted)
            self.metrics.finished(code, self.now() - started)

    async def stream(
        self, request: Unreceived, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        started = self.now()
        self.metrics.in_flight += 1
        admitted: CallerIdentity | None = None
        held: Held | None = None
        code = "CANCELLED"
        try:
            self.gate.require_open()
            caller = self.check(context)
            self.gate.enter(caller, is_stream=True)
            admitted = caller
            _caller.set(caller)
            _remaining.set(context.time_remaining)
            held = await self.gate.receive(context, caller)
            checked = started
            # Close it at once when the caller is gone, not whenever it is garbage-collected.
            async with aclosing(self.handle(self._decode(held.raw))) as messages:
                async for message in messages:
                    now = self.now()
                    if now - checked > _CHECKED_AGAIN_SECONDS:
                        self._check_again(context)
                        checked = now
                    yield message.SerializeToString()
            code = "OK"
        except (asyncio.CancelledError, Exception) as error:
            told = self._told(error)
            if told is not None:
                code = status_code(told).name
                await _abort(told, context)
            raise
        finally:
            if held is not None:
                held.release()
            if admitted is not None:
                self.gate.leave(admitted, is_stream=True)
            self.metrics.finished(code, self.now() - started)

    def _check_again(self, context: grpc.aio.ServicerContext) -> None:
        """A stream may last for as long as the server runs, but a token may be withdrawn."""
        try:
            self.check(context)
        except (Unauthenticated, PermissionDenied) as error:
            # As it is, this error says that nothing was answered: with another token, clients would
            # begin from the start, and take what they have read already for something new.
            raise NotReady("the token that began this stream is no longer accepted") from error

    def _decode(self, raw: bytes) -> Message:
        try:
            return self.parse(raw)
        except DecodeError as error:
            raise InvalidArgument("request", f"is not a message of its type: {error}") from None

    def _told(self, error: BaseException) -> PercolatorError | None:
        """The error that the caller is told; None if it has gone."""
        if not isinstance(error, asyncio.CancelledError):
            return self._known(error)
        return None if cancelled_by_caller() else self._cut_off()

    def _cut_off(self) -> PercolatorError:
        """The error of a call that waited for something that was cancelled, but was not cancelled
        itself. To gRPC both look alike: it would send a caller who still waits no status at all."""
        _log.warning("what a call waited for was cancelled", rpc=self.path)
        return ExecutionUnknown("what it waited for was cancelled", where=self.path)

    def _known(self, error: BaseException) -> PercolatorError:
        if isinstance(error, PercolatorError):
            if isinstance(error, InvariantViolation):
                _log.error("an invariant is violated", rpc=self.path, error=str(error))
            return error
        _log.error("a call failed unexpectedly", rpc=self.path, exc_info=error)
        # The text of an unknown exception may hold stored values: it only goes to the log.
        return InvariantViolation(
            f"failed unexpectedly ({type(error).__name__}); see the server's log",
            where=self.path,
        )
