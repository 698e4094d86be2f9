"""A worker without its process, which a simulation can run too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.errors import ExecutionUnknown, NotExecuted, SchemaError
from percolator.observers.registry.loading import load
from percolator.observers.running.trace import trace_to
from percolator.observers.worker import Worker
from services.chassis.cluster_client import connected
from services.chassis.host import Host
from services.chassis.serving.rpc import Exposed
from services.worker.metrics import WorkerMetrics
from services.worker.settings import WorkerSettings

_AGAIN_SECONDS = 0.25
_DRAIN_SHARE = 0.5
"""The share of the time to shut down that runs in progress may take."""


@asynccontextmanager
async def worker_service(host: Host[WorkerSettings]) -> AsyncIterator[list[Exposed]]:
    """Runs the observers that its settings name. Only the chassis answers calls."""
    settings = host.settings
    observers = [one for reference in settings.observers for one in load(reference)]
    if settings.trace_file is not None:
        trace_to(settings.trace_file)
    database = await connected(host)
    drain_seconds = settings.drain_seconds * _DRAIN_SHARE
    try:
        worker = database.run_observers(
            observers, limits=settings.limits(), drain_seconds=drain_seconds
        )
        await _start(worker, host)

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


async def _start(worker: Worker, host: Host[WorkerSettings]) -> None:
    """Waits out what may pass: tables that do not exist yet, masters that do not answer."""
    said = ""
    while True:
        try:
            await worker.start()
        except (SchemaError, NotExecuted, ExecutionUnknown) as error:
            if str(error) != said:
                said = str(error)
                host.log.info("waiting", reason=said)
            await host.world.clock.sleep(_AGAIN_SECONDS)
        else:
            return
