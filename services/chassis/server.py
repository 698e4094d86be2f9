"""The listening sockets of a service: gRPC with health and reflection, frames, and metrics.

The port is taken, and calls are answered (with `NotReady`), from the start of the process on. So a
port in use is reported at once, and callers do not have to wait for a time-out to learn that a
service is still starting.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2 import (
    HealthCheckRequest,
    HealthCheckResponse,
    HealthListRequest,
    HealthListResponse,
)
from grpc_reflection.v1alpha import reflection, reflection_pb2
from prometheus_client import CollectorRegistry

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    Overloaded,
    PercolatorError,
)
from percolator.services.chassis import metrics, rpc
from percolator.services.chassis.access import Access, CallerIdentity, Tokens, machine_of
from percolator.services.chassis.audit import Audit
from percolator.services.chassis.frames import FrameServer
from percolator.services.chassis.rpc import (
    FRAME_BYTES_MAX,
    LOOKAHEAD_BYTES,
    Arrivals,
    Exposed,
    Forwarder,
    Gate,
    NoMoreRequests,
    Quotas,
    RpcEdge,
    received_bytes_max,
)
from percolator.services.chassis.settings import FramedSettings, ServiceSettings
from percolator.wire import tls
from percolator.wire.addresses import HostPort
from percolator.wire.credentials import Credentials
from percolator.wire.renewal import Renewal
from percolator.wire.roles import Role
from percolator.wire.status import failure
from percolator.wire.tls import Tls, TlsMaterial
from percolator.world import Clock

# Calls without a token.

OPEN_STREAMS_MAX = 1_000
CONNECTION_STREAMS_MAX = 16
"""The streams of one connection among them. It may have as many calls that are no streams."""
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
        self._machines: Counter[str] = Counter()
        """Open streams, by machine: one may have half of them, through however many connections."""

    def unary(
        self,
        kind: type[MessageT],
        answer: Callable[[MessageT, Context], Awaitable[Message]],
    ) -> grpc.RpcMethodHandler:
        """Answers a request with a response."""

        async def call(requests: AsyncIterator[bytes], context: Context) -> bytes:
            try:
                self._require_few(self._calls[context.peer()], "calls")
                with _counted(self._calls, context.peer()):
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
        peer = context.peer()
        machine = machine_of(peer)
        self._require_few(self._streams[peer], "streams")
        if self._streams.total() >= self._streams_max:
            self._refuse(f"{self._streams_max} streams are open (open_streams_max)")
        if self._machines[machine] >= max(self._streams_max // 2, 1):
            text = f"{self._machines[machine]} streams of this machine are open"
            self._refuse(f"{text}, half of open_streams_max")
        with _counted(self._streams, peer), _counted(self._machines, machine):
            yield

    def _require_few(self, count: int, what: str) -> None:
        if count >= CONNECTION_STREAMS_MAX:
            self._refuse(f"{CONNECTION_STREAMS_MAX} {what} are open on this connection")

    def _refuse(self, text: str) -> NoReturn:
        self._arrivals.refused["streams"] += 1
        raise Overloaded(text, retry_after_seconds=_RETRY_SECONDS)


@contextmanager
def _counted(counts: Counter[str], owner: str) -> Iterator[None]:
    counts[owner] += 1
    try:
        yield
    finally:
        counts[owner] -= 1
        if not counts[owner]:
            del counts[owner]


async def _abort_call(error: PercolatorError, context: Context) -> NoReturn:
    """Ends the call by raising gRPC's own exception."""
    await context.abort(*failure(error))
    raise error


class Health:
    """The standard gRPC health service: per service name, and "" for the whole process.

    This is not the one from grpcio-health-checking: there, when one watcher leaves, all the others
    lose their notifications, and open watches keep a server from stopping.
    """

    def __init__(self) -> None:
        self._names = {""}
        self._serving = False
        self._finished = False
        self._changed = asyncio.Event()

    def add(self, names: Iterable[str]) -> None:
        """Adds services that share the status of the process."""
        self._names.update(names)
        self._tell()

    def set_serving(self, serving: bool) -> None:
        """Changes the status of every service."""
        self._serving = serving
        self._tell()

    def finish(self) -> None:
        """Reports NOT_SERVING for good, and ends the watches."""
        self._finished = True
        self.set_serving(False)

    async def check(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        """The current status."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return HealthCheckResponse(status=self._status(request.service))

    async def list(self, request: HealthListRequest, _: Context) -> HealthListResponse:
        """The current status of every service."""
        return HealthListResponse(
            statuses={name: HealthCheckResponse(status=self._status(name)) for name in self._names}
        )

    async def watch(
        self, requests: AsyncIterator[HealthCheckRequest], _: Context
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        """The current status of one service, and the new one each time it changes."""
        async for request in requests:
            told = None
            while True:
                # Take all three at once: a change while the response leaves is sent next.
                changed, finished = self._changed, self._finished
                status = self._status(request.service)
                if status != told:
                    told = status
                    yield HealthCheckResponse(status=status)
                if finished:
                    return
                await changed.wait()

    def handler(self, calls: OpenCalls) -> grpc.GenericRpcHandler:
        """The handler for the calls. Handlers that are added in gRPC's own way come before all
        others, even before those that forward calls to other servers."""
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                "Check": calls.unary(HealthCheckRequest, self.check),
                "List": calls.unary(HealthListRequest, self.list),
                "Watch": calls.stream(HealthCheckRequest, self.watch),
            },
        )

    def _status(self, name: str) -> int:
        if name not in self._names:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._serving and not self._finished:
            return int(health_pb2.HealthCheckResponse.SERVING)
        return int(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _tell(self) -> None:
        # A new event for the next change: those that wait for this one keep it, however late they
        # look.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class ServerTls:
    """The certificate of one server. `InvalidArgument` names the setting of a file that is wrong at
    the start.

    The certificate of a server, renewed in operation: read once for everything that presents it.

    Each handshake checks whether the files have changed; open connections are not checked again.
    """

    def __init__(self, files: Tls) -> None:
        self._renewal = Renewal(
            lambda: Credentials(tls.load(files, "tls_{}".format, serves=True)),
            [files.ca, files.certificate, files.key],
        )
        self._shown = self.material()

    def material(self) -> TlsMaterial:
        """The content of the files now, or when they were last valid."""
        material = self._renewal.current().tls
        if material is None:
            raise InvariantViolation("a server with TLS has lost its certificate")
        return material

    def as_caller(self) -> Credentials:
        """The credentials with which this server identifies itself to others."""
        return replace(self._renewal.current(), renewal=self._renewal)

    def expires_seconds(self) -> float:
        """When the certificate expires, for the metrics."""
        return self.material().expires_seconds

    def http_context(self) -> ssl.SSLContext:
        """The TLS context for an HTTP connection."""
        context = self.material().server_context
        if context is None:
            raise InvariantViolation("certificate files were not validated")
        return context

    def stream_context(self) -> ssl.SSLContext:
        """The TLS context for a port that has one for all its connections: each handshake uses the
        certificate that is valid then."""
        context = self.http_context()

        def renewed(connection: ssl.SSLObject, name: str, of: ssl.SSLContext) -> None:
            connection.context = self.http_context()

        context.sni_callback = renewed
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The credentials for the gRPC port."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._shown), self._changed, require_client_authentication=True
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before every handshake, in one of its threads; None means no change."""
        material = self.material()
        if material is self._shown:
            return None
        self._shown = material
        return _configuration(material)


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca
    )


_REFLECTION_PATH = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"


class CannotListen(Exception):
    """An address cannot be listened on; the text says which setting, which address and why."""


_HANDSHAKE_MILLISECONDS = 10_000
_PENDING_CALLS_MAX = 100_000
"""Calls that were received, but not examined yet. Examining one takes about ten microseconds."""


class Server:
    """The servers of one process: gRPC, and frames if its settings have them."""

    def __init__(
        self,
        settings: ServiceSettings,
        gate: Gate,
        registry: CollectorRegistry,
        clock: Clock,
        tls: ServerTls | None = None,
        tokens: Tokens | None = None,
        quotas: Quotas | None = None,
        audit: Audit | None = None,
    ) -> None:
        """Without TLS callers cannot be identified, and any caller may call everything."""
        self._listen = settings.listen_address
        self._tls = tls
        calls = rpc.RpcMetrics()
        registry.register(calls)
        registry.register(metrics.RequestMetrics(gate))
        any_is_admin = settings.any_certificate_is_admin
        access = (
            Access(tokens, clock, any_certificate_is_admin=any_is_admin, audit=audit)
            if tls is not None
            else None
        )
        self._edge = RpcEdge(gate, calls, clock, access, audit)
        self.health = Health()
        self._open = OpenCalls(gate.open, settings.open_streams_max)
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", received_bytes_max(settings.request_bytes_max)),
                ("grpc.max_send_message_length", -1),  # responses have their own limits
                # What a stream may send before a call receives it. gRPC would raise it to megabytes
                # for a caller that seems far away.
                ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
                ("grpc.http2.bdp_probe", 0),
                ("grpc.max_concurrent_streams", settings.connection_streams_max),
                ("grpc.max_allowed_incoming_connections", settings.connections_max),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MILLISECONDS),
                # gRPC drops calls that wait to be examined, some above 1,000 and all above 3,000,
                # and says that they were cancelled. The gate refuses with a reason, and says when
                # to come back.
                ("grpc.server.max_pending_requests", _PENDING_CALLS_MAX),
                ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS_MAX),
                # Otherwise a second process could take the same port, and half of the calls.
                ("grpc.so_reuseport", 0),
                # Clients look for dead connections every 10 s (percolator/wire/channels.py).
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ]
        )
        self._server.add_generic_rpc_handlers((self._edge, self.health.handler(self._open)))
        self._frames: FrameServer | None = None
        if isinstance(settings, FramedSettings) and settings.frames_address is not None:
            context = tls.stream_context() if tls is not None else None
            counts = metrics.FrameConnections(registry)
            self._frames = FrameServer(
                settings.frames_address,
                min(settings.request_bytes_max, FRAME_BYTES_MAX),
                context,
                counts.refuse,
                (quotas or Quotas()).of(
                    "connections for frames",
                    "frame_connections_max",
                    settings.frame_connections_max,
                ),
                settings.frames_unknown_max,
                settings.request_bytes_total_max // 8,
            )
            counts.follow(self._frames.connections)

    async def start(self) -> HostPort:
        """Listens; returns the address with the port that was taken."""
        check_free(self._listen, "listen")
        try:
            port = self._take_port()
        except RuntimeError as error:
            raise CannotListen(f"listen {self._listen}: {error}") from None
        if self._frames is not None:
            check_free(self._frames.listen, "frames_listen")
            try:
                await self._frames.start(near=self._listen.with_port(port))
            except OSError as error:
                reason = f"frames_listen {self._frames.listen}: {error.strerror}"
                raise CannotListen(reason) from None
        await self._server.start()
        return self._listen.with_port(port)

    def _take_port(self) -> int:
        address = str(self._listen)
        if self._tls is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, self._tls.grpc_credentials()))

    @property
    def frames_address(self) -> HostPort | None:
        """Where frames are taken, once started; None if they are not."""
        return self._frames.listen if self._frames is not None else None

    def expose(
        self, services: list[Exposed], server_id: str, forwarder: Forwarder | None = None
    ) -> None:
        """The service is built: from now on its calls are answered, and others forwarded."""
        if self._frames is not None:
            services = [*services, self._frames.offer(server_id)]
        names = [exposed.descriptor.full_name for exposed in services]
        self.health.add(names)
        passed_on = forwarder.services if forwarder is not None else ()
        listed = [*names, *passed_on, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._edge.mount(_REFLECTION_PATH, reflection_handler(listed, self._open))
        self._edge.expose(services, forwarder)
        if self._frames is not None:
            self._frames.answer(self._edge.unary)

    async def stop(self, grace_seconds: float) -> None:
        """Closes all connections; cancels calls that are still in progress after the grace."""
        self.health.finish()
        if self._frames is not None:
            await asyncio.gather(self._frames.stop(grace_seconds), self._server.stop(grace_seconds))
        else:
            await self._server.stop(grace_seconds)


def reflection_handler(names: list[str], calls: OpenCalls) -> grpc.RpcMethodHandler:
    """The reflection service. gRPC's own way would need the names before the start; this handler is
    mounted when they are known."""
    answer = reflection.aio.ReflectionServicer(names).ServerReflectionInfo
    return calls.stream(reflection_pb2.ServerReflectionRequest, answer)


@contextmanager
def listening_metrics(
    registry: CollectorRegistry, settings: ServiceSettings, tls: ServerTls | None
) -> Iterator[HostPort | None]:
    """Serves the metrics; yields the address with the port that was taken, or None."""
    listen = settings.metrics_address
    if listen is not None:
        check_free(listen, "metrics_listen")
    context = tls.http_context if tls is not None else None
    with metrics.served(registry, listen, context) as bound:
        yield bound


def check_free(address: HostPort, field: str) -> None:
    """Raises `CannotListen` with the system's own reason, which gRPC and others do not report."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise CannotListen(f"{field} {address}: {error.strerror}") from None
    failures = [reason for reason in map(_bind_error, found) if reason]
    # A name may resolve to an address of a family that this machine does not have.
    if len(failures) == len(found) or errno.EADDRINUSE in failures:
        raise CannotListen(f"{field} {address}: {os.strerror(failures[0]).lower()}")


def _bind_error(
    found: tuple[
        int, int, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
    ],
) -> int:
    family, kind, protocol, _, where = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: lingering connections of a former process are no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
