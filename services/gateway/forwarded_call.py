"""One forwarded call: its bytes pass unread between a client and a server.

Metadata, deadline and bytes go to the server; the bytes of the answer come back, or the status with
its trailers. A message is read only when the one before it has been taken. Otherwise the messages
for a slow reader would pile up in this process. When the caller goes away, the call to the server
is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvariantViolation,
    NotReady,
    PercolatorError,
    Unavailable,
    UnknownServer,
)
from percolator.services.chassis.access import CallerIdentity, Check, machine_of
from percolator.services.chassis.rpc import Gate, Held, NoMoreRequests, Unreceived
from percolator.services.gateway.servers import Servers
from percolator.services.gateway.shutdown import gateway_leaves
from percolator.v1.cluster_pb2 import SERVICE_KIND_MASTER, Server
from percolator.v1.master_pb2 import DESCRIPTOR as MASTER_PROTO
from percolator.wire import methods
from percolator.wire.channels import (
    FORWARDED_METADATA,
    SERVER_METADATA,
    GrpcNetwork,
    Line,
    cancelled_by_caller,
    closed_meanwhile,
    left_at_once,
)
from percolator.wire.status import failure, from_rpc_error, status_code, too_large
from percolator.world import StreamMethod, UnaryMethod

_OF_THE_CONNECTION = frozenset(("user-agent", "content-type", "te", SERVER_METADATA))
"""Metadata that belongs to a connection, and is not forwarded."""

Context = Any
"""`grpc.aio.ServicerContext`: grpc has no types."""


class ForwardedCall:
    """One call. grpc.aio calls its coroutines."""

    def __init__(
        self,
        routes: ServerRoutes,
        path: str,
        counted_as: str,
        names: Sequence[object],
        gate: Gate,
        check: Check,
        *,
        is_stream: bool,
    ) -> None:
        self._routes = routes
        self._path = path
        self._counted_as = counted_as
        self._names = names
        self._gate = gate
        self._check = check
        self._code = "CANCELLED"
        self._is_stream = is_stream
        self._admitted: CallerIdentity | None = None
        self._held: Held | None = None
        self._problem: PercolatorError | None = None
        """Why a further message of the caller was refused."""

    async def unary(self, request: Unreceived, context: Context) -> bytes:
        calls = self._routes.calls
        with self._counted():
            try:
                targets = await self._enter(context)
                raw = await self._received(context)
            except PercolatorError as problem:
                await self._fail(problem, context)
            answer, trailers = await self._ask(targets, raw, context)
            if trailers:
                context.set_trailing_metadata(tuple(trailers))
            calls.answer_bytes += len(answer)
            self._code = "OK"
            return answer

    async def _ask(
        self, targets: list[Server], raw: bytes, context: Context
    ) -> tuple[bytes, grpc.aio.Metadata]:
        while True:
            server = targets.pop(0)
            line = self._routes.line(server)
            call = line.channel.unary_unary(self._path)(
                raw, timeout=context.time_remaining(), metadata=_metadata(context, server)
            )
            try:
                with line:
                    answer: bytes = await call
            except grpc.aio.AioRpcError as error:
                meaning = from_rpc_error(error, self._path)
                self._routes.answered(server, meaning)
                # A standby has done nothing, so another master is asked.
                if not targets or not isinstance(meaning, NotReady):
                    await self._fail_alike(error, context)
            except asyncio.CancelledError:
                if cancelled_by_caller():
                    raise
                await self._fail(closed_meanwhile(self._path), context)
            else:
                self._routes.answered(server, None)
                return answer, await call.trailing_metadata()

    async def stream(self, request: Unreceived, context: Context) -> AsyncIterator[bytes]:
        async def begin(channel: grpc.aio.Channel, server: Server) -> grpc.aio.Call:
            raw = await self._received(context)
            return channel.unary_stream(self._path)(
                raw, timeout=context.time_remaining(), metadata=_metadata(context, server)
            )

        async for message in self._answers(begin, context):
            yield message

    async def any_stream(self, requests: Unreceived, context: Context) -> AsyncIterator[bytes]:
        """Streams in both directions; also unknown methods, since one message is a stream too."""

        async def begin(channel: grpc.aio.Channel, server: Server) -> grpc.aio.Call:
            return channel.stream_stream(self._path)(
                self._all_received(context),
                timeout=context.time_remaining(),
                metadata=_metadata(context, server),
            )

        async for message in self._answers(begin, context):
            yield message

    async def _answers(
        self,
        begin: Callable[[grpc.aio.Channel, Server], Awaitable[grpc.aio.Call]],
        context: Context,
    ) -> AsyncIterator[bytes]:
        routes = self._routes
        with self._counted():
            try:
                server = (await self._enter(context))[0]
                line = routes.line(server)
                call = await begin(line.channel, server)
            except PercolatorError as problem:
                await self._fail(problem, context)
            is_endless = routes.is_endless(self._path)
            if is_endless:
                routes.endless[call] = None
            try:
                with line:
                    async with left_at_once(call) as messages:
                        async for message in messages:
                            routes.calls.answer_bytes += len(message)
                            yield message
                trailers = await call.trailing_metadata()
                if trailers:
                    context.set_trailing_metadata(tuple(trailers))
                self._code = "OK"
            except grpc.aio.AioRpcError as error:
                await self._fail_alike(error, context)
            except asyncio.CancelledError:
                if self._problem is not None:
                    await self._fail(self._problem, context)
                if routes.draining and is_endless:
                    await self._fail(gateway_leaves(), context)
                if cancelled_by_caller():
                    raise
                await self._fail(closed_meanwhile(self._path), context)
            finally:
                routes.endless.pop(call, None)

    async def _enter(self, context: Context) -> list[Server]:
        self._gate.require_open()
        caller = self._check(context)
        self._gate.enter(caller, is_stream=self._is_stream)
        self._admitted = caller
        if self._routes.draining and self._routes.is_endless(self._path):
            raise gateway_leaves()
        _require_not_forwarded(context, self._names)
        return await self._routes.targets(self._names)

    async def _received(self, context: Context) -> bytes:
        """The next message of the caller, in place of the one before it."""
        self._release()
        if self._admitted is None:
            raise InvariantViolation("a request is received before its call is admitted")
        self._held = await self._gate.receive(context, self._admitted)
        self._routes.calls.request_bytes += len(self._held.raw)
        return self._held.raw

    async def _all_received(self, context: Context) -> AsyncIterator[bytes]:
        while True:
            try:
                yield await self._received(context)
            except NoMoreRequests:
                return
            except PercolatorError as problem:
                # Ends the call to the server, and so the call of the caller.
                self._problem = problem
                raise

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    async def _fail(self, problem: PercolatorError, context: Context) -> NoReturn:
        """Ends the call with this error, by raising gRPC's own exception."""
        self._code = status_code(problem).name
        await context.abort(*failure(problem))
        raise problem

    async def _fail_alike(self, error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
        """Ends the call with the status and trailers of the server's failure."""
        self._routes.failed(error)
        problem = too_large(error, self._path)
        if problem is not None:
            # gRPC's own refusal has no details, and its text would be ours: "CLIENT".
            await self._fail(problem, context)
        self._code = error.code().name
        trailers = tuple(error.trailing_metadata() or ())
        await context.abort(error.code(), error.details() or "", trailers)
        raise error

    @contextmanager
    def _counted(self) -> Iterator[None]:
        calls = self._routes.calls
        calls.in_flight += 1
        try:
            yield
        finally:
            self._release()
            if self._admitted is not None:
                self._gate.leave(self._admitted, is_stream=self._is_stream)
            calls.finish(self._counted_as, self._code)


def _metadata(context: Context, server: Server) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata from the caller; the name of the server, which shows that the call is forwarded; and
    the caller's machine, so that the server does not take all callers of a gateway for one."""
    kept = [
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if key not in _OF_THE_CONNECTION and not key.startswith(("grpc-", ":"))
    ]
    return (
        *kept,
        (SERVER_METADATA, server.server_id),
        (FORWARDED_METADATA, machine_of(context.peer())),
    )


def _require_not_forwarded(context: Context, names: Sequence[object]) -> None:
    if any(key == FORWARDED_METADATA for key, _ in context.invocation_metadata() or ()):
        name = str(names[0]) if names else ""
        raise UnknownServer(
            f"calls to server {name!r} reach this gateway instead",
            server=name,
        )


_MASTER_SERVICE = MASTER_PROTO.services_by_name["MasterService"].full_name
_MASTER_PATHS = f"/{_MASTER_SERVICE}/"

_KNOWN = [one for one in vars(methods).values() if isinstance(one, UnaryMethod | StreamMethod)]
_UNARY = {method.path for method in _KNOWN if isinstance(method, UnaryMethod)}
_STREAMS = {method.path for method in _KNOWN if isinstance(method, StreamMethod)}

_NO_MASTER_RETRY_SECONDS = 0.5


class ForwardedCalls:
    """The figures of forwarded calls."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.finished: dict[tuple[str, str], int] = {}
        """By method and status code."""
        self.request_bytes = 0
        self.answer_bytes = 0

    def finish(self, method: str, code: str) -> None:
        self.in_flight -= 1
        key = method, code
        self.finished[key] = self.finished.get(key, 0) + 1


class ServerRoutes:
    """Decides which calls are forwarded, and to which server, for clients that reach only a
    gateway.

    A `percolator.services.chassis.rpc.Forwarder`.

    A call whose metadata has `percolator-server` goes to the server with that id or advertised
    address. Only servers of this cluster are dialled: otherwise a gateway would be an open proxy
    into its network. A call to `MasterService` needs no such metadata: it goes to any master.
    """

    def __init__(self, network: GrpcNetwork, servers: Servers, own: Server) -> None:
        self.calls = ForwardedCalls()
        self.draining = False
        self.endless: dict[grpc.aio.Call, None] = {}
        """Streams in progress that end only when their callers end them."""
        self._network = network
        self._servers = servers
        self._own = ([own.server_id], [own.address])
        self._first_master = ""
        """The id of the master that answered last."""
        self._silent: list[str] = []
        """The ids of masters that gave no answer at all, the latest at the end. A master that was
        killed stays listed for seconds, and would otherwise fail every call until then."""

    @property
    def services(self) -> Sequence[str]:
        """Services that are reached without naming a server: any master answers."""
        return (_MASTER_SERVICE,)

    def handler(
        self, details: grpc.HandlerCallDetails, gate: Gate, check: Check
    ) -> grpc.RpcMethodHandler | None:
        path = details.method
        names = [value for key, value in details.invocation_metadata if key == SERVER_METADATA]
        if names in self._own or (not names and not path.startswith(_MASTER_PATHS)):
            return None
        if path in _UNARY:
            call = ForwardedCall(self, path, path, names, gate, check, is_stream=False)
            return grpc.stream_unary_rpc_method_handler(call.unary)
        if path in _STREAMS:
            call = ForwardedCall(self, path, path, names, gate, check, is_stream=True)
            return grpc.stream_stream_rpc_method_handler(call.stream)
        call = ForwardedCall(self, path, "other", names, gate, check, is_stream=True)
        return grpc.stream_stream_rpc_method_handler(call.any_stream)

    async def targets(self, names: Sequence[object]) -> list[Server]:
        """Where a call may go: one server, or the masters, one after another."""
        if names:
            if len(names) > 1 or not isinstance(names[0], str):
                raise InvalidArgument(SERVER_METADATA, f"expected one server, found {names!r}")
            return [await self._servers.find(names[0])]
        if not self._servers.masters:
            await self._servers.refresh()
        found = sorted(self._servers.masters, key=self._rank)
        if not found:
            raise NotReady("no master is known", retry_after_seconds=_NO_MASTER_RETRY_SECONDS)
        return found

    def _rank(self, master: Server) -> tuple[bool, int]:
        """Servers that have answered come before others, of which the latest is last."""
        name = master.server_id
        silent = self._silent.index(name) + 1 if name in self._silent else 0
        return name != self._first_master, silent

    def answered(self, server: Server, problem: PercolatorError | None) -> None:
        """Remembers the master that leads, which is asked first, and those that are silent."""
        if server.kind != SERVICE_KIND_MASTER:
            return
        if problem is None:
            self._first_master = server.server_id
        elif server.server_id == self._first_master:
            self._first_master = ""
        listed = {one.server_id for one in self._servers.masters} - {server.server_id}
        self._silent = [name for name in self._silent if name in listed]
        if isinstance(problem, Unavailable | DeadlineExceeded):
            self._silent.append(server.server_id)

    def line(self, server: Server) -> Line:
        return self._network.line(server.address)

    def failed(self, error: grpc.aio.AioRpcError) -> None:
        """Lets the network read this gateway's certificate again, in case it was renewed."""
        self._network.failed(error)

    @staticmethod
    def is_endless(path: str) -> bool:
        """True if only its caller ends the stream. Unknown streams are assumed to be endless."""
        return path not in _STREAMS or path.rpartition("/")[2].startswith("Watch")

    async def end_watches(self) -> None:
        """To be called at shutdown: callers that watch are asked to reconnect later."""
        self.draining = True
        for call in tuple(self.endless):
            call.cancel()
