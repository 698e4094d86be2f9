"""Every metric has a stable name and a text that explains it.

docs/metrics.md is the list. The dashboards and alerts in deploy/monitoring use no others.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

import percolator
from percolator.services.chassis.metrics import served
from percolator.services.chassis.server import ServerTls
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from percolator.wire.addresses import HostPort
from percolator.wire.tls import Tls
from tests.integration.observed_orders import orders
from tests.unit.repository.monitored import alerts, metrics_in, panels
from tests.unit.wire.certificates import Certificates, made

ROOT = Path(__file__).parents[2]
NOT_OURS = ("process_", "python_")
PROMETHEUS_OWN = {"up"}
SUFFIXES = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module", name="told")
def _told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """The type and help text of each metric, by name, from all services of a cluster with TLS."""
    root = tmp_path_factory.mktemp("metrics")
    make_all(root / "certificates")
    client = root / "certificates" / "client"
    files = files_in(client)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.check_hostname = False
    found: dict[str, tuple[str, str]] = {}
    with LocalCluster(
        root / "cluster",
        tablet_servers=1,
        gateways=1,
        workers=1,
        observers=["tests.integration.observed_orders:observers"],
        certificates=root / "certificates",
    ) as cluster:
        token = (client / "admin.token").read_text().strip()
        with percolator.connect(cluster.address, tls=files, token=token) as database:
            database.create_table(orders)
        cluster.wait_workers()
        for process in cluster.processes.values():
            ready = process.wait_ready(30)
            url = f"https://{ready.metrics_address}/metrics"
            with urllib.request.urlopen(url, context=context, timeout=10) as answer:
                text = answer.read().decode()
            for family in text_string_to_metric_families(text):
                kind = family.type
                name = f"{family.name}_total" if kind == "counter" else family.name
                if not name.endswith("_created"):
                    found[name] = (kind, family.documentation)
    return found


def own(told: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: about for name, about in told.items() if not name.startswith(NOT_OURS)}


def test_every_metric_is_listed_with_its_type_and_its_text(
    told: dict[str, tuple[str, str]],
) -> None:
    """A renamed metric breaks every dashboard that uses it."""
    rows = re.findall(
        r"^\| `([a-z0-9_]+)` \| (\w+) \| (.*) \|$",
        (ROOT / "docs" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    assert {name: (kind, text) for name, kind, text in rows} == own(told)
    assert all(text.endswith(".") for _, text in own(told).values())


def asked_for() -> dict[str, set[str]]:
    """The metrics that each panel or alert queries, by the place where it is defined."""
    queries = {f"panel {title!r}": asked for title, asked in panels().items()}
    queries |= {f"alert {name}": [asked] for name, asked in alerts().items()}
    assert len(queries) > 30
    return {
        where: set().union(*(metrics_in(query) for query in asked)) - PROMETHEUS_OWN
        for where, asked in queries.items()
    }


def test_panels_and_alerts_query_metrics_that_exist(told: dict[str, tuple[str, str]]) -> None:
    histograms = [name for name, (kind, _) in told.items() if kind == "histogram"]
    known = set(told) | {name + suffix for name in histograms for suffix in SUFFIXES}
    unknown = {where: sorted(names - known) for where, names in asked_for().items()}
    assert {where: names for where, names in unknown.items() if names} == {}


# The metrics endpoint with hostile peers.

__all__ = ["made"]


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
def test_silent_connections_block_neither_the_metrics_nor_stopping(
    certificates: Certificates, secure: bool
) -> None:
    files = certificates.client if secure else None
    tls = ServerTls(certificates.cluster) if secure else None
    # The endpoint is closed before its peers are.
    with ExitStack() as silent, endpoint(tls) as address:
        for _ in range(5):
            peer = socket.create_connection((address.host, address.port))
            silent.enter_context(closing(peer))
        assert "answer 42.0" in told(address, files)


def test_connections_beyond_the_number_of_threads_are_closed(certificates: Certificates) -> None:
    with endpoint(ServerTls(certificates.cluster)) as address, ExitStack() as silent:
        peers = [socket.create_connection((address.host, address.port)) for _ in range(33)]
        for peer in peers:
            silent.enter_context(closing(peer))
        peers[-1].settimeout(SECONDS)
        assert peers[-1].recv(1) == b""


def test_metrics_require_a_certificate_of_the_authority(certificates: Certificates) -> None:
    with endpoint(ServerTls(certificates.cluster)) as address:
        assert "answer 42.0" in told(address, certificates.client)
        expired, _, _ = certificates.bad["expired"]
        for files in (certificates.foreign, expired):
            with pytest.raises((urllib.error.URLError, OSError)):
                told(address, files, authority=certificates.client.ca)
        with pytest.raises((urllib.error.URLError, OSError)):
            told(address, None)


def test_no_name_server_is_asked_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer would hold up the start of every service for many seconds."""
    asked: list[str] = []

    def ask(name: str) -> str:
        asked.append(name)
        return name

    monkeypatch.setattr(socket, "getfqdn", ask)
    with endpoint(None) as address:
        assert "answer 42.0" in told(address, None)
    assert asked == []


class Waiting:
    """Metrics that are collected only once the peer that asked for them has gone."""

    def __init__(self) -> None:
        self.asked, self.gone = threading.Event(), threading.Event()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.asked.set()
        if not self.gone.wait(SECONDS):
            raise TimeoutError
        yield GaugeMetricFamily("long", "x" * 5_000_000, value=1)


def test_a_peer_that_hangs_up_before_its_answer_leaves_no_traceback_behind(
    certificates: Certificates, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any peer could fill the disk with them."""
    registry, waiting = CollectorRegistry(auto_describe=False), Waiting()
    tls = ServerTls(certificates.cluster)
    context = ssl.create_default_context(cafile=certificates.client.ca)
    context.check_hostname = False
    context.load_cert_chain(certificates.client.certificate, certificates.client.key)
    with served(registry, HostPort("127.0.0.1", 0), tls.http_context) as address:
        assert address is not None
        registry.register(waiting)
        with closing(socket.create_connection((address.host, address.port))) as plain:
            peer = context.wrap_socket(plain)
            peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert waiting.asked.wait(SECONDS)
            peer.close()
        waiting.gone.set()
        until(lambda: threads("process_request_thread") == 0)
    assert "Traceback" not in capfd.readouterr().err


def threads(name: str) -> int:
    return sum(name in one.name for one in threading.enumerate())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
