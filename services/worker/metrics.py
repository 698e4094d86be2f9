"""The metrics of a worker, read from plain counters when asked for: no run pays for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from percolator.observers.counters import LATENCY_BOUNDS_SECONDS
from percolator.observers.worker import Worker

_PREFIX = "percolator_observer_"
_LABELS = ["table", "observer"]
_COUNTERS = {
    "runs": "Calls of the observer's function.",
    "commits": "Runs that committed.",
    "conflicts": "Runs that conflicted with another transaction, and are retried.",
    "postponed": "Attempts that the cluster did not answer in time, and that are retried.",
    "failures": "Runs that raised, wrote too much, or took too long.",
    "abandoned": "Failures because a run took too long.",
    "dead_letters": "Changes put aside as dead letters.",
    "acknowledged": "Notifications with nothing left to do: handled already, or unwanted deletes.",
    "rows_read": "Rows that runs have asked for or scanned.",
    "round_trips": "How often runs have waited for answers; parallel requests count once.",
    "cells_written": "Cells that runs have put, deleted or locked.",
}
_BOUNDS = [*map(str, LATENCY_BOUNDS_SECONDS), "+Inf"]


class WorkerMetrics(Collector):
    """Collects `percolator_observer_*`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        by_observer = self._worker.counters
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for labels, counters in by_observer.items():
                counter.add_metric(labels, getattr(counters, name))
            yield counter
        hung = GaugeMetricFamily(
            _PREFIX + "hung_threads",
            "Threads still held by runs that took too long.",
            labels=_LABELS,
        )
        backlog = GaugeMetricFamily(
            _PREFIX + "backlog",
            "Changes not yet handled that this worker knows of.",
            labels=_LABELS,
        )
        latency = HistogramMetricFamily(
            _PREFIX + "latency_seconds",
            "From the commit of a change to the commit of the run that handles it.",
            labels=_LABELS,
        )
        for labels, count in self._worker.backlog.items():
            backlog.add_metric(labels, count)
        for labels, counters in by_observer.items():
            hung.add_metric(labels, counters.hung)
            buckets = list(zip(_BOUNDS, accumulate(counters.latencies), strict=True))
            latency.add_metric(labels, buckets, sum_value=counters.latency_seconds)
        yield from (hung, backlog, latency)
