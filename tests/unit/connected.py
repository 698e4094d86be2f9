"""A client of a cluster in memory that loses answers, or everything, when a test wants it to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from percolator import (
    Limits,
    RetryPolicy,
    Table,
    codecs,
)
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.errors import DeadlineExceeded, Unavailable
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.simulator.virtual_time import VirtualClock
from percolator.v1 import tabletserver_pb2 as wire
from percolator.world import World

TWO_PHASES = Limits(one_round_cells_max=0)

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


class Cluster(ClusterInMemory):
    """Loses answers, or everything, while a test wants it to."""

    takes_lists = False
    answers_lost = False
    silent = False

    async def mutate(self, request: wire.MutateRequest) -> wire.MutateResponse:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        response = await super().mutate(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response

    async def mutate_together(
        self, request: wire.MutateTogetherRequest
    ) -> wire.MutateTogetherResponse:
        if self.silent:
            await asyncio.sleep(1.0)
            raise DeadlineExceeded("silence")
        response = await super().mutate_together(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response

    async def commit_transactions(
        self, request: wire.CommitTransactionsRequest
    ) -> wire.CommitTransactionsResponse:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        response = await super().commit_transactions(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response


ClusterT = TypeVar("ClusterT", bound=Cluster)


@asynccontextmanager
async def connected(
    limits: Limits = TWO_PHASES,
) -> AsyncIterator[tuple[Database, Cluster]]:
    async with connected_to(Cluster, limits) as (db, cluster):
        yield db, cluster


@asynccontextmanager
async def connected_to(
    kind: type[ClusterT], limits: Limits = TWO_PHASES
) -> AsyncIterator[tuple[Database, ClusterT]]:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = kind(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    async with await connect_to(world, [ADDRESS], limits, RetryPolicy()) as db:
        await db.create_table(accounts, splits=["m"])
        yield db, cluster
