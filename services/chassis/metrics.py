"""Prometheus metrics of the process and of its event loop, and the port that serves them."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from socketserver import TCPServer, ThreadingMixIn
from typing import IO, Any, ClassVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from percolator.services.chassis.process import version
from percolator.services.chassis.rpc import BUCKETS_SECONDS, Gate
from percolator.wire.addresses import HostPort
from percolator.world import Clock

_LAG_SAMPLE_SECONDS = 0.25


def process_registry(service: str) -> CollectorRegistry:
    """A registry of this process alone: its memory, descriptors, CPU, interpreter and build."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    Gauge(
        "percolator_process_threads",
        "Threads of this process, including those of gRPC and LevelDB.",
        registry=registry,
    ).set_function(_threads)
    build = Info("percolator_build", "What runs here.", registry=registry)
    build.info({"service": service, "version": version()})
    return registry


def _threads() -> float:
    return float(len(os.listdir("/proc/self/task")))


def tell_expiry(registry: CollectorRegistry, expires_seconds: Callable[[], float]) -> None:
    """Reports when the certificate expires, which would stop the cluster at a known time."""
    Gauge(
        "percolator_tls_certificate_expires_seconds",
        "When this server's certificate expires, in seconds since 1970; absent without TLS.",
        registry=registry,
    ).set_function(expires_seconds)


class ServiceMetrics(Collector):
    """The metrics of one kind of service, whose names begin with `prefix`."""

    prefix: ClassVar[str]

    def gauge(self, name: str, documentation: str, value: float) -> Metric:
        return GaugeMetricFamily(self.prefix + name, documentation, value=value)

    def counter(self, name: str, documentation: str, value: float) -> Metric:
        return CounterMetricFamily(self.prefix + name, documentation, value=value)

    def counters(
        self, name: str, documentation: str, label: str, counts: Mapping[str, float]
    ) -> Metric:
        """A counter for each value of a label."""
        family = CounterMetricFamily(self.prefix + name, documentation, labels=[label])
        for value, count in tuple(counts.items()):
            family.add_metric([value], count)
        return family


class RequestMetrics(Collector):
    """The memory that requests take, and those that were refused because of it."""

    def __init__(self, gate: Gate) -> None:
        self._arrivals = gate.arrivals

    def collect(self) -> Iterator[Metric]:
        used = sum(one.used for one in self._arrivals)
        yield GaugeMetricFamily(
            "percolator_request_bytes",
            "Memory reserved for requests that arrive or are being answered.",
            value=used,
        )
        refused = CounterMetricFamily(
            "percolator_requests_refused",
            "Calls refused before they were executed: no memory for their request (budget), "
            "a request that did not arrive in time (late), too many streams without a token "
            "(streams).",
            labels=["reason"],
        )
        for reason in self._arrivals[0].refused:
            refused.add_metric([reason], sum(one.refused[reason] for one in self._arrivals))
        yield refused


class FrameConnections:
    """The figures of connections for frames. Their calls are counted as all others are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._open = Gauge(
            "percolator_frame_connections", "Connections for frames.", registry=registry
        )
        self._refused = Counter(
            "percolator_frame_connections_refused",
            "Connections for frames that were ended because they broke a rule or a limit.",
            registry=registry,
        )

    def follow(self, connections: Callable[[], int]) -> None:
        """Reports the number of connections, whenever it is asked for."""
        self._open.set_function(connections)

    def refuse(self) -> None:
        self._refused.inc()


async def watch_event_loop(registry: CollectorRegistry, clock: Clock) -> None:
    """Measures how late the event loop is: every call waits this long in addition to its work."""
    lag = Histogram(
        "percolator_event_loop_lag_seconds",
        "How late a timer of the event loop fires.",
        buckets=BUCKETS_SECONDS,
        registry=registry,
    )
    tasks = Gauge("percolator_event_loop_tasks", "Tasks that are not done.", registry=registry)
    while True:
        due = clock.monotonic_seconds() + _LAG_SAMPLE_SECONDS
        await clock.sleep(_LAG_SAMPLE_SECONDS)
        lag.observe(max(0.0, clock.monotonic_seconds() - due))
        tasks.set(len(asyncio.all_tasks()))


_SILENCE_SECONDS = 5.0
"""How long a peer may be silent before its connection is closed."""
_CONNECTIONS_MAX = 32
"""Connections at once; Prometheus has one. Any further one is closed."""
_STOP_SECONDS = 0.1

_log = structlog.get_logger("percolator.metrics")

Context = Callable[[], ssl.SSLContext]
"""Returns the current certificate and the authority to trust: both may be renewed."""


@contextmanager
def served(
    registry: CollectorRegistry, listen: HostPort | None, context: Context | None = None
) -> Iterator[HostPort | None]:
    """Serves the metrics over HTTP, and yields the bound address.

    With TLS, only clients with a certificate of the cluster's authority can read them.
    """
    if listen is None:
        yield None
        return
    with _Endpoint(listen, context) as server:
        server.set_app(_logging_failures(make_wsgi_app(registry)))
        thread = threading.Thread(
            target=server.serve_forever, args=(_STOP_SECONDS,), name="metrics", daemon=True
        )
        thread.start()
        try:
            yield listen.with_port(server.server_port)
        finally:
            server.shutdown()
            thread.join()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: reading metrics is not an event."""

    def get_stderr(self) -> IO[str]:
        """Where wsgiref prints a traceback when a peer hangs up: nowhere. Any peer could cause one
        as often as it likes."""
        return io.StringIO()


def _logging_failures(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    """The application; an error of its own, unlike one of the connection, is logged."""

    def logging(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception:
            _log.exception("metrics cannot be collected")
            raise

    return logging


class _Endpoint(ThreadingMixIn, WSGIServer):
    """The HTTP endpoint of the metrics, on threads of its own.

    Each connection has its own thread from the first byte on. The server of prometheus_client does
    the handshake on the thread that accepts connections: there, a single peer that connects over
    TLS and then stays silent would block all other readers of the metrics, and the end of this
    process.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, listen: HostPort, context: Context | None) -> None:
        self._context = context
        self._free = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        found = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self.address_family = found[0]
        super().__init__((listen.host, listen.port), _Handler)

    def server_bind(self) -> None:
        # As in WSGIServer, but without `getfqdn`, which asks name servers: while none answers, as
        # after a power cut, the process would stand still.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401 - wsgiref's
        return self._free.acquire(blocking=False)

    def process_request_thread(
        self,
        request: Any,  # noqa: ANN401 - wsgiref's
        client_address: Any,  # noqa: ANN401 - wsgiref's
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - wsgiref's
        request.settimeout(_SILENCE_SECONDS)
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)
            self.shutdown_request(secured)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - wsgiref's
        # The peer hung up, was silent, or showed no certificate: not an error of this service.
        _log.debug("metrics request failed", peer=str(client_address[0]), exc_info=True)
