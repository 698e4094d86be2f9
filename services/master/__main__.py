"""python -m percolator.services.master: tables, and which server serves which tablet."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.services.chassis.host import Host
from percolator.services.chassis.lifecycle import run
from percolator.services.chassis.serving.rpc import Exposed
from percolator.services.chassis.settings.loading import load
from percolator.services.chassis.store_kinds.opening import opened
from percolator.services.master.service import master_service
from percolator.services.master.settings import MasterSettings
from percolator.v1.cluster_pb2 import ServiceKind


@asynccontextmanager
async def build(host: Host[MasterSettings]) -> AsyncIterator[list[Exposed]]:
    """A master on the store that its settings name."""
    async with opened(host) as store, master_service(host, store) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(MasterSettings), ServiceKind.SERVICE_KIND_MASTER, build))
