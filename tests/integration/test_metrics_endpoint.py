"""The endpoint of the metrics, and peers that mean no good."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from prometheus_client import CollectorRegistry, Gauge

from percolator.wire.addresses import HostPort
from percolator.wire.tls import Tls
from services.chassis.metrics_endpoint import served
from services.chassis.server_tls import ServerTls
from tests.unit.wire.certificates import Certificates, made

__all__ = ["made"]

pytestmark = pytest.mark.integration

SECONDS = 10.0


@contextmanager
def endpoint(tls: ServerTls | None) -> Iterator[HostPort]:
    registry = CollectorRegistry()
    Gauge("answer", "To everything.", registry=registry).set(42)
    context = tls.http_context if tls is not None else None
    with served(registry, HostPort("127.0.0.1", 0), context) as bound:
        assert bound is not None
        yield bound


def told(address: HostPort, files: Tls | None, authority: str = "") -> str:
    scheme, context = "http", None
    if files is not None:
        scheme = "https"
        context = ssl.create_default_context(cafile=authority or files.ca)
        context.check_hostname = False
        context.load_cert_chain(files.certificate, files.key)
    with urllib.request.urlopen(
        f"{scheme}://{address}/metrics", timeout=SECONDS, context=context
    ) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("secure", [False, True])
def test_whoever_connects_and_says_nothing_keeps_nobody_from_the_metrics_nor_from_stopping(
    certificates: Certificates, secure: bool
) -> None:
    files = certificates.client if secure else None
    tls = ServerTls(certificates.cluster) if secure else None
    # It is left before its peers are.
    with ExitStack() as silent, endpoint(tls) as address:
        for _ in range(5):
            peer = socket.create_connection((address.host, address.port))
            silent.enter_context(closing(peer))
        assert "answer 42.0" in told(address, files)


def test_more_connections_than_its_threads_are_hung_up_on(certificates: Certificates) -> None:
    with endpoint(ServerTls(certificates.cluster)) as address, ExitStack() as silent:
        peers = [socket.create_connection((address.host, address.port)) for _ in range(33)]
        for peer in peers:
            silent.enter_context(closing(peer))
        peers[-1].settimeout(SECONDS)
        assert peers[-1].recv(1) == b""


def test_only_a_certificate_of_the_authority_opens_it(certificates: Certificates) -> None:
    with endpoint(ServerTls(certificates.cluster)) as address:
        assert "answer 42.0" in told(address, certificates.client)
        expired, _, _ = certificates.bad["expired"]
        for files in (certificates.foreign, expired):
            with pytest.raises((urllib.error.URLError, OSError)):
                told(address, files, authority=certificates.client.ca)
        with pytest.raises((urllib.error.URLError, OSError)):
            told(address, None)
