"""python -m services.oracle: hands out the cluster's timestamps."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from percolator.v1.cluster_pb2 import ServiceKind
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.serving.rpc import Exposed
from services.chassis.settings.loading import load
from services.chassis.store_kinds.opening import opened
from services.oracle.service import oracle_service
from services.oracle.settings import OracleSettings


@asynccontextmanager
async def build(host: Host[OracleSettings]) -> AsyncIterator[list[Exposed]]:
    """An oracle on the store that its settings name."""
    async with opened(host) as store:
        await store.refuse_other_cluster(host.cluster_id)
        async with oracle_service(host, store) as exposed:
            yield exposed


if __name__ == "__main__":
    sys.exit(run(load(OracleSettings), ServiceKind.SERVICE_KIND_ORACLE, build))
