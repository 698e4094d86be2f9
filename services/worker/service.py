"""`percolator serve worker`. A simulation runs `worker_service` without the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from percolator.observers.registry import loading
from percolator.observers.running.trace import trace_to
from percolator.observers.starting import start_when_ready
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.worker.metrics import WorkerMetrics
from percolator.services.worker.settings import WorkerSettings
from percolator.v1.cluster_pb2 import ServiceKind

_DRAIN_SHARE = 0.5
"""The share of the time to shut down that runs in progress may take."""


@asynccontextmanager
async def worker_service(host: Host[WorkerSettings]) -> AsyncIterator[list[Exposed]]:
    """Runs the observers that its settings name. Only the chassis answers calls."""
    settings = host.settings
    observers = [one for reference in settings.observers for one in loading.load(reference)]
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
