"""Every metric has a stable name and a text that explains it.

docs/metrics.md is the list. The dashboards and alerts in deploy/monitoring use no others.
"""

from __future__ import annotations

import re
import ssl
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import percolator
from percolator.services.local.authority import files_in, make_all
from percolator.services.local.cluster import LocalCluster
from tests.integration.observed_orders import orders
from tests.unit.repository.monitored import alerts, metrics_in, panels

pytestmark = pytest.mark.integration

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
