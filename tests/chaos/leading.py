"""Finds the process that leads, among those of one kind."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from percolator.errors import PercolatorError
from percolator.v1 import master_pb2, oracle_pb2
from percolator.wire import methods
from percolator.world import Network
from tests.chaos.pulse import NoRecovery

RECOVERY_SECONDS_MAX = 30.0
_ASK_SECONDS = 1.0
_RETRY_SECONDS = 0.01


async def leader(network: Network, kind: str, addresses: Sequence[str]) -> str:
    """The one of them that answers a call that only a leader, or the active oracle, answers."""
    deadline = time.monotonic() + RECOVERY_SECONDS_MAX
    for address in itertools.cycle(addresses):
        try:
            if kind == "oracle":
                request = oracle_pb2.GetTimestampsRequest(count=1)
                await network.unary(address, methods.GET_TIMESTAMPS)(request, _ASK_SECONDS)
            else:
                servers = master_pb2.ListServersRequest()
                await network.unary(address, methods.LIST_SERVERS)(servers, _ASK_SECONDS)
        except PercolatorError as error:
            if time.monotonic() > deadline:
                raise NoRecovery(f"no {kind} leads; {address}: {error}") from error
            await asyncio.sleep(_RETRY_SECONDS)
        else:
            return address
    raise NoRecovery("there is no process that could lead")
