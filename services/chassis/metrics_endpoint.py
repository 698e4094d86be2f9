"""The HTTP endpoint of the metrics, on threads beside the event loop.

Each connection has a thread of its own from its first byte on. The server of prometheus_client
shakes hands on the thread that takes connections: there, one peer that connects over TLS and says
nothing keeps everybody from the metrics, and this process from its end.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from percolator.wire.addresses import HostPort

_SILENCE_SECONDS = 5.0
"""Of a peer, before it is hung up on."""
_CONNECTIONS_MAX = 32
"""At once; Prometheus has one. Any further one is hung up on."""
_STOP_SECONDS = 0.1

_log = structlog.get_logger("percolator.metrics")

Context = Callable[[], ssl.SSLContext]
"""The certificate to show now, and the authority to trust: they may be renewed."""


@contextmanager
def served(
    registry: CollectorRegistry, listen: HostPort | None, context: Context | None = None
) -> Iterator[HostPort | None]:
    """Serves the metrics over HTTP, and tells the bound address.

    With TLS, to those alone who have a certificate of the cluster's authority.
    """
    if listen is None:
        yield None
        return
    with _Endpoint(listen, context) as server:
        server.set_app(make_wsgi_app(registry))
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
        """Who reads metrics is no event."""


class _Endpoint(ThreadingMixIn, WSGIServer):
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

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        request.settimeout(_SILENCE_SECONDS)
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context().wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)
            self.shutdown_request(secured)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        # Whoever hangs up, is silent, or shows no certificate: nothing that this service did.
        _log.debug("metrics were not told", peer=str(client_address[0]), exc_info=True)
