"""The members of a cluster of containers, as described through its published port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from percolator.errors import PercolatorError
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, describe
from percolator.wire.credentials import client_credentials

START_SECONDS = 120.0

KINDS = {
    "master": ServiceKind.SERVICE_KIND_MASTER,
    "oracle": ServiceKind.SERVICE_KIND_ORACLE,
    "lockservice": ServiceKind.SERVICE_KIND_LOCK_SERVICE,
    "tabletserver": ServiceKind.SERVICE_KIND_TABLET_SERVER,
    "worker": ServiceKind.SERVICE_KIND_WORKER,
}


async def until_described(address: str, wanted: Mapping[str, int]) -> None:
    """Returns when at least the wanted number of each kind are there."""
    network = GrpcNetwork(client_credentials())
    deadline = time.monotonic() + START_SECONDS
    try:
        while True:
            missing: object
            try:
                cluster = await describe(network, [address], 1.0)
                missing = {
                    kind: count
                    for kind, count in wanted.items()
                    if len(addresses_of(cluster, KINDS[kind])) < count
                }
            except PercolatorError as error:
                missing = error
            if not missing:
                return
            assert time.monotonic() < deadline, f"not complete: {missing}"
            await asyncio.sleep(0.1)
    finally:
        await network.close()
