"""python -m percolator.services.gateway: one front door, for other languages and other networks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.gateway.service import gateway_service
from percolator.services.gateway.settings import GatewaySettings
from percolator.v1.cluster_pb2 import ServiceKind


@asynccontextmanager
async def build(host: Host[GatewaySettings]) -> AsyncIterator[list[Exposed]]:
    """A gateway, which stores nothing."""
    async with gateway_service(host) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(GatewaySettings), ServiceKind.SERVICE_KIND_GATEWAY, build))
