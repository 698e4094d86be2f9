"""A database for tests: no servers, no sockets, there in milliseconds, gone at the end.

    with percolator.testing.connect() as db:
        db.create_table(accounts)
        transfer(db, "bob", "joe", 7)

It is the real client over the real tablet; only what is between and below is replaced: the network
by calls, the disk by memory, the oracle by a counter. The same tests hold it and a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from types import TracebackType
from typing import Any

from percolator import aio
from percolator.aio.connecting import connect_to
from percolator.database import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import MachineClock, World


class Connecting:
    """Either awaited, or entered as a block at whose end the database is closed."""

    def __init__(self, limits: Limits | None, retry: RetryPolicy | None) -> None:
        self._limits = limits or Limits()
        self._retry = retry or RetryPolicy()
        self._database: aio.Database | None = None

    def __await__(self) -> Generator[Any, None, aio.Database]:
        return self._connect().__await__()

    async def _connect(self) -> aio.Database:
        clock = MachineClock()
        cluster = ClusterInMemory(clock)
        network = InProcessNetwork({ADDRESS: cluster})
        world = World(clock=clock, network=network, random=random.Random())  # noqa: S311
        return await connect_to(world, [ADDRESS], self._limits, self._retry)

    async def __aenter__(self) -> aio.Database:
        self._database = await self._connect()
        return self._database

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._database is not None:
            await self._database.close()


def connect_async(*, limits: Limits | None = None, retry: RetryPolicy | None = None) -> Connecting:
    """As `connect`, for asyncio."""
    return Connecting(limits, retry)


def connect(*, limits: Limits | None = None, retry: RetryPolicy | None = None) -> Database:
    """An empty database of its own, in this process."""

    async def start() -> aio.Database:
        return await Connecting(limits, retry)

    return Database.over(start)
