"""The metrics of the oracle, read when they are asked for: no request pays for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from percolator.services.chassis.store.files import Files
from percolator.services.oracle.candidate import Candidate

_PREFIX = "percolator_oracle_"


class OracleMetrics(Collector):
    """Collects `percolator_oracle_*`."""

    def __init__(self, candidate: Candidate, files: Files) -> None:
        self._candidate = candidate
        self._files = files

    def collect(self) -> Iterator[Metric]:
        counts = self._candidate.counts
        yield _counter("timestamps", "Timestamps handed out.", counts.timestamps)
        yield _counter("mark_extensions", "Marks made durable.", counts.extensions)
        yield _counter(
            "mark_extension_failures",
            "Marks that could not be made durable.",
            counts.extension_failures,
        )
        yield _counter("fsyncs", "Waits for the disk.", self._files.fsyncs)
        yield _counter("waits", "Requests that had to wait for an extension.", counts.waits)
        refused = CounterMetricFamily(
            _PREFIX + "refused", "Requests refused, by error.", labels=["error"]
        )
        for error, count in tuple(counts.refused.items()):
            refused.add_metric([error], count)
        yield refused
        oracle = self._candidate.oracle
        yield GaugeMetricFamily(
            _PREFIX + "leading", "1 at the oracle that leads.", value=oracle is not None
        )
        if oracle is None:
            return
        yield GaugeMetricFamily(
            _PREFIX + "wall_clock_lead_seconds",
            "How far the wall clock is ahead of the timestamps; negative while it lags.",
            value=oracle.wall_lead_seconds,
        )
        yield GaugeMetricFamily(
            _PREFIX + "mark_timestamp_seconds",
            "The durable mark, in seconds since 1970.",
            value=oracle.mark_milliseconds / 1000,
        )


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, documentation, value=value)
