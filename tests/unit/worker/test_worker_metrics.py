"""What the worker service reports to Prometheus about its observers."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from prometheus_client import CollectorRegistry

from percolator.observers.watched import Counters
from percolator.services.worker.service import WorkerMetrics

OF_INDEX: dict[str, Any] = {"table": "docs", "observer": "index"}


def test_every_counter_of_every_observer_is_reported() -> None:
    counters = Counters()
    counters.runs, counters.conflicts, counters.hung = 7, 2, 1
    for seconds in (0.001, 0.004, 400.0, None):
        counters.committed(seconds)
    name = OF_INDEX["table"], OF_INDEX["observer"]
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(Mock(counters={name: counters}, backlog={name: 3})))

    def told(metric: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"percolator_observer_{metric}", {**OF_INDEX, **labels})

    assert told("runs_total") == 7
    assert told("commits_total") == 4
    assert told("conflicts_total") == 2
    assert told("failures_total") == 0
    assert told("hung_threads") == 1
    assert told("backlog") == 3
    assert told("latency_seconds_bucket", le="0.002") == 1
    assert told("latency_seconds_bucket", le="0.005") == 2
    assert told("latency_seconds_bucket", le="300.0") == 2
    assert told("latency_seconds_bucket", le="+Inf") == 3
    assert told("latency_seconds_count") == 3
    assert told("latency_seconds_sum") == 400.005
    assert counters.commits == 4
