"""python -m percolator.services.worker --observers module:name: runs observers."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.worker.service import worker_service
from percolator.services.worker.settings import WorkerSettings
from percolator.v1.cluster_pb2 import ServiceKind


@asynccontextmanager
async def build(host: Host[WorkerSettings]) -> AsyncIterator[list[Exposed]]:
    """A worker. All of its state is in the store."""
    async with worker_service(host) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(WorkerSettings), ServiceKind.SERVICE_KIND_WORKER, build))
