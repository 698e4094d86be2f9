"""python -m services.oracle: hands out the cluster's timestamps."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from percolator.errors import UsageError
from percolator.v1 import oracle_pb2
from percolator.v1.cluster_pb2 import ServiceKind
from services.chassis.cluster_identity import refuse_other_cluster
from services.chassis.host import Host
from services.chassis.lifecycle import run
from services.chassis.rpc import Exposed
from services.chassis.settings import load
from services.oracle.handler import OracleHandler
from services.oracle.ledger import Ledger
from services.oracle.metrics import OracleMetrics
from services.oracle.oracle import Oracle
from services.oracle.settings import OracleSettings

_STANDBY_SECONDS = 0.1
"""Between two looks at whether the store is free."""


@asynccontextmanager
async def build(host: Host[OracleSettings]) -> AsyncIterator[list[Exposed]]:
    """An oracle on its store, able to serve."""
    store = Path(host.settings.store)
    await refuse_other_cluster(host.files, store, host.cluster_id)
    ledger = await _open_ledger(host, store)
    try:
        oracle = Oracle(host.world.clock, ledger, ledger.is_still_ours, host.settings.limits())
        await oracle.extend()
        host.metrics_registry.register(OracleMetrics(oracle, ledger))
        extending = host.background("extend the mark", oracle.keep_extended())
        try:
            service = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]
            yield [Exposed(service, OracleHandler(oracle))]
        finally:
            extending.cancel()
    finally:
        await ledger.close()


async def _open_ledger(host: Host[OracleSettings], store: Path) -> Ledger:
    """Takes the store; a standby waits for it until the oracle before has ended, however it did."""
    said = False
    while True:
        try:
            return await Ledger.open(
                host.files,
                store,
                holder=f"process {os.getpid()} on {socket.gethostname()}",
                cluster_id=host.cluster_id,
            )
        except UsageError as error:
            if not host.settings.standby:
                raise
            if not said:
                host.log.info("standing by", reason=str(error))
                said = True
        await host.world.clock.sleep(_STANDBY_SECONDS)


if __name__ == "__main__":
    sys.exit(run(load(OracleSettings), ServiceKind.SERVICE_KIND_ORACLE, build))
