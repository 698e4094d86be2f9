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
from services.chassis.store.cluster_identity import refuse_other_cluster
from services.chassis.store.file_systems import refuse_network
from services.chassis.store.files import make_durable_directory
from services.oracle.service import oracle_service
from services.oracle.settings import OracleSettings


@asynccontextmanager
async def build(host: Host[OracleSettings]) -> AsyncIterator[list[Exposed]]:
    """An oracle on the store that its settings name."""
    store = host.settings.store_root
    await refuse_network(host.files, store, host.settings, host.log)
    await refuse_other_cluster(host.files, store, host.cluster_id)
    await make_durable_directory(host.files, store)
    async with oracle_service(host, store) as exposed:
        yield exposed


if __name__ == "__main__":
    sys.exit(run(load(OracleSettings), ServiceKind.SERVICE_KIND_ORACLE, build))
