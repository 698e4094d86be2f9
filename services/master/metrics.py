"""The metrics of the master, read when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Generic

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from percolator.services.master.leader import Leader
from percolator.services.master.map.catalogue import Catalogue
from percolator.services.master.map.cluster_map import ClusterMap
from percolator.services.master.map.map_store import MapT
from percolator.services.master.master import Master, TermT
from percolator.services.master.oracle_time import OracleTime
from percolator.services.master.registry import Registry
from percolator.services.master.rows.row_term import RowTerm
from percolator.timestamps import seconds_between
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.cluster_clock import majority

_KIND_PREFIX = "SERVICE_KIND_"


class MasterMetrics(Collector, Generic[MapT, TermT]):
    """Collects `percolator_master_*`, as far as it is alike for all masters."""

    def __init__(self, own_address: str, registry: Registry, master: Master[MapT, TermT]) -> None:
        self._own_address = own_address
        self._registry = registry
        self._master = master

    def collect(self) -> Iterator[Metric]:
        servers = GaugeMetricFamily(
            "percolator_master_servers", "Servers that reported recently.", labels=["kind"]
        )
        for kind, count in sorted(Counter(self._registry.kinds()).items()):
            name = ServiceKind.Name(kind).removeprefix(_KIND_PREFIX).lower()
            servers.add_metric([name], count)
        yield servers
        yield from self._leader_metrics()

    def _leader_metrics(self) -> Iterator[Metric]:
        leader = self._master.leader
        yield GaugeMetricFamily(
            "percolator_master_leading", "1 while this master leads.", int(leader is not None)
        )
        if leader is None:
            return
        tables = leader.stored.current.tables
        yield GaugeMetricFamily("percolator_master_tables", "Tables.", len(tables))
        yield CounterMetricFamily(
            "percolator_master_map_changes",
            "Durable changes of the map.",
            leader.stored.changes,
        )
        yield from _clock_metrics(self._own_address, self._registry, leader.oracle_time)
        yield from self._work_metrics(leader)

    def _work_metrics(self, leader: TermT) -> Iterator[Metric]:
        """What only masters of one kind do."""
        return iter(())


class TabletMasterMetrics(MasterMetrics[ClusterMap, Leader]):
    """The same for a master over tablets."""

    def _work_metrics(self, leader: Leader) -> Iterator[Metric]:
        tablets = leader.store.current.tablets
        served = sum(map(leader.assignment.is_served, tablets.values()))
        yield GaugeMetricFamily("percolator_master_tablets", "Tablets.", len(tablets))
        yield GaugeMetricFamily(
            "percolator_master_tablets_served",
            "Tablets that their servers report as served.",
            served,
        )
        yield from _collection_metrics(leader)


class RowMasterMetrics(MasterMetrics[Catalogue, RowTerm]):
    """The same for a master over a row store."""

    def _work_metrics(self, leader: RowTerm) -> Iterator[Metric]:
        yield from _collection_metrics(leader)


def _clock_metrics(
    own_address: str, registry: Registry, oracle_time: OracleTime
) -> Iterator[Metric]:
    """All compared with what most clocks say: this master's own may be the one that is wrong."""
    leads = {own_address: 0}
    for server in registry.servers():
        if server.HasField("clock_lead_milliseconds"):
            leads[server.address] = server.clock_lead_milliseconds
    agreed = majority(leads) or 0
    clocks = GaugeMetricFamily(
        "percolator_master_clock_lead_seconds",
        "How far a server's wall clock is ahead of most others; negative while it lags.",
        labels=["address"],
    )
    for address, lead in sorted(leads.items()):
        clocks.add_metric([address], (lead - agreed) / 1000)
    yield clocks
    timestamps = oracle_time.lead_milliseconds
    if timestamps is not None:
        yield GaugeMetricFamily(
            "percolator_master_timestamp_lead_seconds",
            "How far the oracle's timestamps are ahead of most clocks; negative while they lag.",
            (timestamps - agreed) / 1000,
        )


def _collection_metrics(leader: Leader | RowTerm) -> Iterator[Metric]:
    collection, now = leader.collection, leader.now()
    yield CounterMetricFamily(
        "percolator_master_collection_rounds", "Completed rounds of collection.", collection.rounds
    )
    yield CounterMetricFamily(
        "percolator_master_collection_failures",
        "Failed rounds of collection.",
        collection.failures,
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_age_seconds",
        "Since the last completed round of collection, or since this master began to lead.",
        now - (collection.finished_at or leader.began_at),
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_held",
        "1 while a session or pin holds back the collection of a table's history.",
        int(collection.held),
    )
    yield GaugeMetricFamily(
        "percolator_master_collection_held_seconds",
        "How much older the history is that a session or pin needs than what tables would keep.",
        collection.held_seconds,
    )
    yield CounterMetricFamily(
        "percolator_master_old_locks_settled",
        "Locks resolved before history was collected.",
        collection.old_locks_resolved,
    )
    ages = GaugeMetricFamily(
        "percolator_master_safe_point_age_seconds",
        "How much history could be read when the last round of collection began.",
        labels=["table"],
    )
    for table in leader.stored.current.tables.values():
        safe_point = collection.known_safe_point(table.table_id)
        if safe_point:
            ages.add_metric([table.name], seconds_between(safe_point, collection.now))
    yield ages
