"""Prometheus metrics of calls, of the process and of its event loop.

Counting a call costs a few additions to plain integers, on the event loop's thread. They are
converted to what Prometheus expects when it asks.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import ssl
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import TCPServer, ThreadingMixIn
from typing import IO, Any
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
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from percolator.services.chassis.gate import Gate
from percolator.services.chassis.process import version
from percolator.wire.addresses import HostPort
from percolator.world import Clock

BUCKETS_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the latency histograms."""

_LAG_SAMPLE_SECONDS = 0.25


class MethodMetrics:
    """The figures of one method. Only the event loop changes them; any thread may read them."""

    __slots__ = ("buckets", "by_code", "in_flight", "method", "seconds", "service")

    def __init__(self, service: str, method: str) -> None:
        self.service = service
        self.method = method
        self.in_flight = 0
        # INTERNAL from the start: a counter that appears with its first event has not increased.
        self.by_code: dict[str, int] = {"OK": 0, "INTERNAL": 0}
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS_SECONDS) + 1)

    def finished(self, code: str, seconds: float) -> None:
        """Counts the end of a call that was counted in `in_flight`."""
        self.in_flight -= 1
        self.by_code[code] = self.by_code.get(code, 0) + 1
        self.seconds += seconds
        self.buckets[bisect_left(BUCKETS_SECONDS, seconds)] += 1


class RpcMetrics(Collector):
    """The figures of all methods."""

    def __init__(self) -> None:
        self._methods: list[MethodMetrics] = []

    def method(self, service: str, method: str) -> MethodMetrics:
        metrics = MethodMetrics(service, method)
        self._methods.append(metrics)
        return metrics

    def collect(self) -> Iterator[Metric]:
        labels = ["service", "method"]
        finished = CounterMetricFamily(
            "percolator_rpc_finished", "Calls answered, by status code.", labels=[*labels, "code"]
        )
        in_flight = GaugeMetricFamily(
            "percolator_rpc_in_flight", "Calls in progress.", labels=labels
        )
        seconds = HistogramMetricFamily(
            "percolator_rpc_seconds", "Time from a call to its answer.", labels=labels
        )
        for of in self._methods:
            names = [of.service, of.method]
            for code, count in tuple(of.by_code.items()):
                finished.add_metric([*names, code], count)
            in_flight.add_metric(names, of.in_flight)
            seconds.add_metric(names, _cumulative(of.buckets), sum_value=of.seconds)
        yield from (finished, in_flight, seconds)


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    bounds = [*map(str, BUCKETS_SECONDS), "+Inf"]
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(bounds, tuple(buckets), strict=True):
        total += count
        found.append((bound, total))
    return found


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
    """The HTTP endpoint of the metrics, on threads beside the event loop.

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
