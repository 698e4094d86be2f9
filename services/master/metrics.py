"""What the master tells Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from percolator.timestamps import seconds_between
from percolator.v1.cluster_pb2 import ServiceKind
from services.master.leader import Leader
from services.master.master import Master
from services.master.registry import Registry

_KIND_PREFIX = "SERVICE_KIND_"


class MasterMetrics(Collector):
    """Collects `percolator_master_*`."""

    def __init__(self, registry: Registry, master: Master) -> None:
        self._registry = registry
        self._master = master

    def collect(self) -> Iterator[Metric]:
        servers = GaugeMetricFamily(
            "percolator_master_servers", "Servers that reported lately.", labels=["kind"]
        )
        for kind, count in sorted(Counter(self._registry.kinds()).items()):
            name = ServiceKind.Name(kind).removeprefix(_KIND_PREFIX).lower()
            servers.add_metric([name], count)
        yield servers
        yield from self._of_the_leader()

    def _of_the_leader(self) -> Iterator[Metric]:
        leader = self._master.leader
        yield GaugeMetricFamily(
            "percolator_master_leading", "1 while this master leads.", int(leader is not None)
        )
        if leader is None:
            return
        current = leader.store.current
        served = sum(map(leader.assignment.is_served, current.tablets.values()))
        yield GaugeMetricFamily("percolator_master_tables", "Tables.", len(current.tables))
        yield GaugeMetricFamily("percolator_master_tablets", "Tablets.", len(current.tablets))
        yield GaugeMetricFamily(
            "percolator_master_tablets_served", "Tablets that a server has said to serve.", served
        )
        yield CounterMetricFamily(
            "percolator_master_map_changes",
            "Changes of the map made durable.",
            leader.store.changes,
        )
        yield from _of_collection(leader)


def _of_collection(leader: Leader) -> Iterator[Metric]:
    collection, now = leader.collection, leader.now()
    yield CounterMetricFamily(
        "percolator_master_collection_rounds", "Rounds of collection done.", collection.rounds
    )
    yield CounterMetricFamily(
        "percolator_master_collection_failures",
        "Rounds of collection that did not come to their end.",
        collection.failures,
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_age_seconds",
        "Since the last round of collection that was done, or since this master leads.",
        now - (collection.finished_at or leader.began_at),
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_held",
        "1 while a session or pin keeps history that a table would give up.",
        int(collection.held),
    )
    yield CounterMetricFamily(
        "percolator_master_old_locks_settled",
        "Locks settled before history was collected.",
        collection.old_locks_settled,
    )
    ages = GaugeMetricFamily(
        "percolator_master_safe_point_age_seconds",
        "How much of the past could be read when the last round of collection began.",
        labels=["table"],
    )
    for table in leader.store.current.tables.values():
        safe_point = collection.known_safe_point(table.table_id)
        if safe_point:
            ages.add_metric([table.name], seconds_between(safe_point, collection.now))
    yield ages
