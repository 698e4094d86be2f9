"""What the master tells Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from percolator.v1.cluster_pb2 import ServiceKind
from services.master.registry import Registry

_KIND_PREFIX = "SERVICE_KIND_"


class MasterMetrics(Collector):
    """Collects `percolator_master_*`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        servers = GaugeMetricFamily(
            "percolator_master_servers", "Servers that reported lately.", labels=["kind"]
        )
        for kind, count in sorted(Counter(self._registry.kinds()).items()):
            name = ServiceKind.Name(kind).removeprefix(_KIND_PREFIX).lower()
            servers.add_metric([name], count)
        yield servers
