"""`percolator serve lockservice`: which processes are alive, and which rows they work on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.lockservice.handler import LockServiceHandler
from percolator.services.lockservice.metrics import LockServiceMetrics
from percolator.services.lockservice.settings import LockServiceSettings
from percolator.v1 import lockservice_pb2
from percolator.v1.cluster_pb2 import ServiceKind


@asynccontextmanager
async def build(host: Host[LockServiceSettings]) -> AsyncIterator[list[Exposed]]:
    """A lock service that knows no session yet."""
    handler = LockServiceHandler(
        host.world.clock, host.world.random, host.settings.limits(), host.quotas
    )
    host.metrics_registry.register(LockServiceMetrics(handler))
    host.background("expiry", handler.expire_forever())
    yield [Exposed(lockservice_pb2.DESCRIPTOR.services_by_name["LockService"], handler)]


def main(arguments: Sequence[str]) -> int:
    """`percolator serve lockservice`: returns the exit code."""
    return run(load(LockServiceSettings, arguments), ServiceKind.SERVICE_KIND_LOCK_SERVICE, build)
