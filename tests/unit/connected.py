"""A client of a cluster in memory that loses answers, or everything, when a test wants it to.

Its cells are in tablets, or in a model of Bigtable where `engine_of_cells` (conftest.py) says so.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from percolator import Column, Limits, RetryPolicy, Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.store import BigtableStore
from percolator.errors import DeadlineExceeded, Unavailable
from percolator.protocol.write_set import CommitPrimary, CommitSecondary, Prewrite
from percolator.routing.cells import ListedStep
from percolator.rowstore.layout import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, ClusterOverRows
from percolator.v1 import bigtable_pb2 as bigtable
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import World
from tests.simulation.virtual_time import WALL_MILLISECONDS, VirtualClock

TWO_PHASES = Limits(one_round_cells_max=0)

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


_STEPS: dict[int, type[ListedStep]] = {
    one.kind: one for one in (Prewrite, CommitPrimary, CommitSecondary)
}


def written_out(batch: pb.MutationBatch) -> list[pb.Mutation]:
    """The mutations of a batch, and those that its steps stand for."""
    steps = batch.steps
    observers = {one.column: tuple(one.observers) for one in steps.observed}
    found = [*batch.mutations]
    for kind, row, column, value, start, commit, min_commit in zip(
        steps.kinds,
        steps.rows,
        steps.columns,
        steps.values,
        steps.start_timestamps,
        steps.commit_timestamps,
        steps.min_commit_timestamps,
        strict=True,
    ):
        names = observers.get(column, ())
        step = _STEPS[kind](row, column, value, start, commit, min_commit, names)
        found.append(step.mutation())
    return found


class Cluster(ClusterInMemory):
    """Loses answers, or everything, while a test wants it to."""

    answers_lost = False
    silent = False

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        response = await super().mutate(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response

    async def mutate_together(self, request: pb.MutateTogetherRequest) -> pb.MutateTogetherResponse:
        if self.silent:
            await asyncio.sleep(1.0)
            raise DeadlineExceeded("silence")
        response = await super().mutate_together(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        response = await super().commit_transactions(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response


class DistantMaster(Cluster):
    """Answers later than the tablets."""

    async def describe_table(
        self, request: master_pb2.DescribeTableRequest
    ) -> master_pb2.DescribeTableResponse:
        await asyncio.sleep(0.01)
        return await super().describe_table(request)


async def put(db: Database, column: Column[Any], /, **values: object) -> None:
    """Sets cells of a column, by row, in one transaction."""
    async with db.transaction() as tx:
        for row, value in values.items():
            await tx.set(row, column, value)


ClusterT = TypeVar("ClusterT", bound=Cluster)


@asynccontextmanager
async def connected(
    limits: Limits = TWO_PHASES,
) -> AsyncIterator[tuple[Database, Cluster]]:
    async with connected_to(Cluster, limits) as (db, cluster):
        yield db, cluster


class RowStore(BigtableInMemory):
    """Loses answers, or everything, as its cluster says."""

    cluster: ClusterOnRows | None = None

    async def check_and_mutate_row(
        self, request: bigtable.BigtableCheckAndMutateRowRequest
    ) -> bigtable.BigtableCheckAndMutateRowResponse:
        assert self.cluster is not None
        if self.cluster.silent:
            await asyncio.sleep(1.0)
            raise DeadlineExceeded("silence")
        response = await super().check_and_mutate_row(request)
        if self.cluster.answers_lost:
            raise Unavailable("connection reset")
        return response


class ClusterOnRows(ClusterOverRows, Cluster):
    """Cluster whose cells are in a row store."""


over_rows = False
"""True if the next cluster has its cells in a row store."""


@asynccontextmanager
async def connected_to(
    kind: type[ClusterT], limits: Limits = TWO_PHASES
) -> AsyncIterator[tuple[Database, ClusterT]]:
    clock = VirtualClock(asyncio.get_running_loop())
    if over_rows:
        async with _connected_over_rows(clock, limits) as (db, on_rows):
            assert isinstance(on_rows, kind), "this test is about tablets"
            yield db, on_rows
        return
    cluster = kind(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    async with await connect_to(world, [ADDRESS], limits, RetryPolicy()) as db:
        await db.create_table(accounts, splits=["m"])
        yield db, cluster


@asynccontextmanager
async def _connected_over_rows(
    clock: VirtualClock, limits: Limits
) -> AsyncIterator[tuple[Database, ClusterOnRows]]:
    store = RowStore()
    network = InProcessNetwork({MODEL.address: store})
    cluster = store.cluster = ClusterOnRows(clock, network, MODEL)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    rows = Rows(BigtableStore(network, MODEL), Times(WALL_MILLISECONDS - 60_000))
    async with await connect_to(world, [ADDRESS], limits, RetryPolicy(), rows=rows) as db:
        await db.create_table(accounts)
        yield db, cluster
