"""The tablet server's metrics for Prometheus: read when it asks, at no cost to requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from percolator.services.chassis.metrics import ServiceMetrics
from percolator.services.tabletserver.history_collector import HistoryCollector
from percolator.services.tabletserver.storage import DiskSpace
from percolator.services.tabletserver.tablets import RequestCounts, Tablets
from percolator.v1.tabletserver_pb2 import TabletDescription, TabletStatistics

_PREFIX = "percolator_tabletserver_"

_PER_TABLET: list[
    tuple[
        type[GaugeMetricFamily] | type[CounterMetricFamily],
        str,
        str,
        Callable[[TabletStatistics], float],
    ]
] = [
    (GaugeMetricFamily, "cells", "Stored cells, estimated.", lambda s: s.cells),
    (GaugeMetricFamily, "bytes", "Stored bytes, estimated.", lambda s: s.bytes),
    (GaugeMetricFamily, "locks", "Locks held by transactions.", lambda s: s.locks),
    (GaugeMetricFamily, "notifications", "Live notifications.", lambda s: s.notifications),
    (GaugeMetricFamily, "queue_bytes", "Mutations waiting.", lambda s: s.queue_bytes),
    (
        GaugeMetricFamily,
        "turn_cells",
        "Cells with a queue of transactions.",
        lambda s: s.turn_cells,
    ),
    (
        GaugeMetricFamily,
        "turns_waiting",
        "Transactions that wait for their turn at a cell.",
        lambda s: s.turns_waiting,
    ),
    (CounterMetricFamily, "turns_granted", "Turns that came.", lambda s: s.turns_granted),
    (
        CounterMetricFamily,
        "turns_given_up",
        "Places in queues lost or given up before the turn came.",
        lambda s: s.turns_given_up,
    ),
    (
        CounterMetricFamily,
        "turns_timed_out",
        "Turns that lasted for as long as they may.",
        lambda s: s.turns_timed_out,
    ),
    (
        CounterMetricFamily,
        "mutations_applied",
        "Mutations made durable.",
        lambda s: s.mutations_applied,
    ),
    (
        CounterMetricFamily,
        "mutations_refused",
        "Mutations refused because a condition failed.",
        lambda s: s.mutations_refused,
    ),
    (CounterMetricFamily, "reads", "Rows read.", lambda s: s.reads),
    (CounterMetricFamily, "rows_scanned", "Rows scanned.", lambda s: s.rows_scanned),
    (
        CounterMetricFamily,
        "versions_skipped",
        "Versions stepped over by reads and scans.",
        lambda s: s.versions_skipped,
    ),
    (CounterMetricFamily, "batches_synced", "Group commits.", lambda s: s.batches_synced),
]


class TabletServerMetrics(ServiceMetrics):
    """Collects `percolator_tabletserver_*`."""

    prefix = "percolator_tabletserver_"

    def __init__(
        self, tablets: Tablets, collector: HistoryCollector, disk: DiskSpace, counts: RequestCounts
    ) -> None:
        self._tablets = tablets
        self._collector = collector
        self._disk = disk
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        descriptions = self._tablets.describe(())
        yield from self._of_tablets(descriptions)
        failed = sum(description.HasField("error") for description in descriptions)
        yield self.gauge("tablets", "Tablets of this server.", len(descriptions))
        yield self.gauge("tablets_failed", "Tablets that cannot be served.", failed)
        guard = self._tablets.guard
        yield self.counter(
            "timestamp_questions", "Timestamps about which the oracle was asked.", guard.requests
        )
        yield self.counter(
            "timestamps_refused", "Timestamps that the oracle had not handed out.", guard.refused
        )
        events = self._tablets.events
        yield self.counter(
            "tablets_reopened", "Tablets reopened after an I/O error.", events.reopened
        )
        yield self.counter("tablets_lost", "Tablets found to have a later owner.", events.lost)
        yield self.counter(
            "cells_trimmed",
            "Cells deleted that belong to other tablets since a split.",
            events.cells_trimmed,
        )
        yield self.gauge("process_queue_bytes", "Mutations in progress.", self._counts.queue_bytes)
        yield self.gauge(
            "disk_free_bytes", "Free bytes below the store root.", self._disk.bytes_free
        )
        yield self.gauge("disk_full", "1 while writes are refused.", self._disk.full is not None)
        yield self.gauge(
            "store_trouble",
            "1 while the store hangs or cannot be written.",
            bool(self._disk.store_trouble()),
        )
        yield self.counter("scan_pages", "Pages of scans.", self._counts.pages)
        yield self.counter("slow_requests", "Requests over the limit.", self._counts.slow)
        watch = self._tablets.watch
        yield self.gauge("notification_streams", "Open streams of notifications.", watch.streams)
        yield self.counter("notifications_told", "Notifications put into streams.", watch.told)
        yield self.counter(
            "notifications_left_out", "Not put into a stream that was full.", watch.left_out
        )
        collector = self._collector
        yield self.counter("collections", "Tablets walked to collect history.", collector.passes)
        yield self.counter("cells_collected", "Cells of history deleted.", collector.cells)
        yield self.counter("bytes_collected", "Bytes of history deleted.", collector.bytes)
        yield self.counters(
            "batches_refused",
            "Batches refused as a whole, by error.",
            "error",
            self._counts.refused,
        )

    def _of_tablets(self, descriptions: list[TabletDescription]) -> Iterator[Metric]:
        for family, name, documentation, value in _PER_TABLET:
            metric = family(
                f"{self.prefix}tablet_{name}", documentation, labels=["table", "tablet"]
            )
            for description in descriptions:
                labels = [str(description.table_id), str(description.tablet_id)]
                metric.add_metric(labels, value(description.statistics))
            yield metric
