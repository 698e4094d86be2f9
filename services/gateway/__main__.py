"""python -m services.gateway: one front door, for other languages and other networks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.v1.cluster_pb2 import ServiceKind
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.serving.rpc import Exposed
from services.chassis.settings.loading import load
from services.gateway.service import gateway_service
from services.gateway.settings import GatewaySettings


@asynccontextmanager
async def build(host: Host[GatewaySettings]) -> AsyncIterator[list[Exposed]]:
    """A gateway, which stores nothing."""
    async with gateway_service(host) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(GatewaySettings), ServiceKind.SERVICE_KIND_GATEWAY, build))
