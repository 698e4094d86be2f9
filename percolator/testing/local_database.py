"""A database for tests: no servers, no sockets, there in milliseconds, gone at the end.

    with percolator.testing.connect() as db:
        db.create_table(accounts)
        transfer(db, "bob", "joe", 7)

It is the real client over the real tablet; only what is between and below is replaced: the network
by calls, the disk by memory, the oracle by a counter. The same tests hold it and a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

from percolator import aio
from percolator.aio.connecting import Connecting, connect_to
from percolator.database import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import MachineClock, World


def connect_async(*, limits: Limits | None = None, retry: RetryPolicy | None = None) -> Connecting:
    """As `connect`, for asyncio."""
    return Connecting(_starting(limits, retry))


def connect(*, limits: Limits | None = None, retry: RetryPolicy | None = None) -> Database:
    """An empty database of its own, in this process."""
    return Database.over(_starting(limits, retry))


def _starting(
    limits: Limits | None, retry: RetryPolicy | None
) -> Callable[[], Coroutine[Any, Any, aio.Database]]:
    async def start() -> aio.Database:
        clock = MachineClock()
        cluster = ClusterInMemory(clock)
        network = InProcessNetwork({ADDRESS: cluster})
        world = World(clock=clock, network=network, random=random.Random())  # noqa: S311
        return await connect_to(world, [ADDRESS], limits or Limits(), retry or RetryPolicy())

    return start
