"""`percolator serve worker`. A simulation runs `worker_service` without the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Annotated, ClassVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from pydantic import Field, field_validator

from percolator.observers import definition
from percolator.observers.trace import trace_to
from percolator.observers.watched import LATENCY_BOUNDS_SECONDS
from percolator.observers.worker import Worker, WorkerLimits, start_when_ready
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.rpc import Exposed
from percolator.services.chassis.settings import (
    DialAddress,
    ListenAddress,
    Seconds,
    ServiceSettings,
    load,
)
from percolator.v1.cluster_pb2 import ServiceKind

_DEFAULTS = WorkerLimits()


class WorkerSettings(ServiceSettings):
    """The settings of a worker."""

    service: ClassVar[str] = "worker"

    listen: ListenAddress = "127.0.0.1:7104"
    """host:port to serve health on; port 0 is any free one."""

    observers: tuple[str, ...] = ()
    """Lists of observers, as module:name, separated by commas."""

    observer_concurrency_max: Annotated[int, Field(ge=1, le=100_000)] = _DEFAULTS.concurrency_max
    """Runs in progress at once, for all observers together."""

    observer_threads_max: Annotated[int, Field(ge=1, le=10_000)] = _DEFAULTS.threads_max
    """Threads for blocking observers."""

    queue_rows_max: Annotated[int, Field(ge=1, le=10_000_000)] = _DEFAULTS.queue_rows_max
    """How many changes may wait that were found but not yet handled."""

    queue_bytes_max: Annotated[int, Field(ge=1_024, le=1 << 34)] = _DEFAULTS.queue_bytes_max
    """About how much memory these waiting changes may take."""

    scan_pause_seconds_max: Seconds = _DEFAULTS.scan_pause_seconds_max
    """The pause between two passes over all tablets when the last passes found nothing."""

    trace_file: Path | None = None
    """Where to append a line for each run, for `percolator observers trace`."""

    @field_validator("masters")
    @classmethod
    def _has_a_cluster(cls, masters: tuple[DialAddress, ...]) -> tuple[DialAddress, ...]:
        if not masters:
            raise ValueError("is missing: a worker needs the address of at least one master")
        return masters

    @field_validator("observers")
    @classmethod
    def _has_observers(cls, observers: tuple[str, ...]) -> tuple[str, ...]:
        if not observers:
            raise ValueError("is missing: expected module:name")
        return observers

    def limits(self) -> WorkerLimits:
        """The bounds as the library takes them."""
        return WorkerLimits(
            concurrency_max=self.observer_concurrency_max,
            threads_max=self.observer_threads_max,
            queue_rows_max=self.queue_rows_max,
            queue_bytes_max=self.queue_bytes_max,
            scan_pause_seconds_max=self.scan_pause_seconds_max,
        )


_PREFIX = "percolator_observer_"
_LABELS = ["table", "observer"]
_COUNTERS = {
    "runs": "Calls of the observer's function; of a batch, its rows.",
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


_DRAIN_SHARE = 0.5
"""The share of the time to shut down that runs in progress may take."""


@asynccontextmanager
async def worker_service(host: Host[WorkerSettings]) -> AsyncIterator[list[Exposed]]:
    """Runs the observers that its settings name. Only the chassis answers calls."""
    settings = host.settings
    observers = [one for reference in settings.observers for one in definition.load(reference)]
    if settings.trace_file is not None:
        trace_to(settings.trace_file)
    database = await connected(host)
    drain_seconds = settings.drain_seconds * _DRAIN_SHARE
    try:
        worker = database.run_observers(
            observers, limits=settings.limits(), drain_seconds=drain_seconds
        )
        await start_when_ready(
            worker, host.world.clock, lambda reason: host.log.info("waiting", reason=reason)
        )

        async def drain() -> None:
            if not await worker.stop():
                host.log.warning("some runs were given up; they will be run again")

        host.on_drain(drain)
        host.metrics_registry.register(WorkerMetrics(worker))
        # If a part of it fails, work would be found late or never: the process ends instead.
        host.background("observers", worker.wait())
        for observer in observers:
            host.log.info("running an observer", observer=observer.name, table=observer.table.name)
        yield []
        await worker.stop()
    finally:
        await database.close()


def main(arguments: Sequence[str]) -> int:
    """`percolator serve worker`: returns the exit code."""
    return run(load(WorkerSettings, arguments), ServiceKind.SERVICE_KIND_WORKER, worker_service)
