"""python -m services.master: tables, who serves which tablet, and who is there."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.v1.cluster_pb2 import ServiceKind
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.rpc import Exposed
from services.chassis.settings import load
from services.master.service import master_service
from services.master.settings import MasterSettings


@asynccontextmanager
async def build(host: Host[MasterSettings]) -> AsyncIterator[list[Exposed]]:
    """A master on its store root."""
    root = host.settings.store_root.absolute()
    async with master_service(host, root) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(MasterSettings), ServiceKind.SERVICE_KIND_MASTER, build))
