"""The metrics of a gateway, read when they are asked for: no call pays for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from percolator.services.gateway.commits import Commits
from percolator.services.gateway.server_routes import ForwardedCalls

_PREFIX = "percolator_gateway_"


class GatewayMetrics(Collector):
    """Collects `percolator_gateway_*`."""

    def __init__(self, commits: Commits, forwarded: ForwardedCalls) -> None:
        self._commits = commits
        self._forwarded = forwarded

    def collect(self) -> Iterator[Metric]:
        commits, forwarded = self._commits, self._forwarded
        outcomes = CounterMetricFamily(
            _PREFIX + "commits", "Finished commits, by outcome.", labels=["outcome"]
        )
        for outcome, count in sorted(commits.outcomes.items()):
            outcomes.add_metric([outcome], count)
        yield outcomes
        yield _gauge("commits_in_progress", "Commits in progress.", commits.in_progress)
        yield _counter(
            "commits_joined",
            "Commits that found the same commit in progress or done.",
            commits.joined,
        )
        yield _counter(
            "commits_looked_up",
            "Commits that first looked at the cells for traces of earlier attempts.",
            commits.looked_up,
        )
        finished = CounterMetricFamily(
            _PREFIX + "forwarded", "Forwarded calls, by status code.", labels=["method", "code"]
        )
        for (method, code), count in tuple(forwarded.finished.items()):
            finished.add_metric([method, code], count)
        yield finished
        yield _gauge(
            "forwarded_in_flight",
            "Forwarded calls in progress, streams included.",
            forwarded.in_flight,
        )
        yield _counter(
            "forwarded_request_bytes", "Bytes forwarded to servers.", forwarded.request_bytes
        )
        yield _counter(
            "forwarded_answer_bytes", "Bytes forwarded back to callers.", forwarded.answer_bytes
        )


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, documentation, value=value)
