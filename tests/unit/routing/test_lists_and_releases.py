"""Rows travel in lists to servers that know them, and one by one to those of an older release."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator import Limits, RetryPolicy, Table, codecs
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

TWO_PHASES = Limits(one_round_cells_max=0)
ROWS = ("a", "b", "x", "y")

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


class Cluster(ClusterInMemory):
    """Servers of this release or, as long as it is `older`, of one that knows no lists: it reads
    nothing of them, and says nothing about them."""

    older = False
    steps_in_lists = 0
    cells_in_lists = 0

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        self.steps_in_lists += sum(len(batch.steps.rows) for batch in request.batches)
        if self.older:
            for batch in request.batches:
                batch.ClearField("steps")
        response = await super().mutate(request)
        response.takes_steps = not self.older
        return response

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        self.cells_in_lists += sum(len(batch.cells.rows) for batch in request.batches)
        if self.older:
            for batch in request.batches:
                batch.ClearField("cells")
        response = await super().read(request)
        response.takes_cells = not self.older
        return response

    def forget_lists(self) -> None:
        self.steps_in_lists = self.cells_in_lists = 0


@asynccontextmanager
async def _connected(*, older: bool) -> AsyncIterator[tuple[Database, Cluster]]:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = Cluster(clock)
    cluster.older = older
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    async with await connect_to(world, [ADDRESS], TWO_PHASES, RetryPolicy()) as db:
        await db.create_table(accounts, splits=["m"])
        yield db, cluster


async def _add_one(db: Database) -> list[int]:
    """Adds one to every account, in one transaction over two tablets; returns what is read then."""
    async with db.transaction() as tx:
        for row in ROWS:
            await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)
    async with db.snapshot() as snapshot:
        return [await snapshot.get(row, balance, default=0) for row in ROWS]


async def test_steps_and_cells_travel_in_lists_once_the_server_has_said_that_it_knows_them() -> (
    None
):
    async with _connected(older=False) as (db, cluster):
        assert await _add_one(db) == [1] * 4
        cluster.forget_lists()
        assert await _add_one(db) == [2] * 4
        assert cluster.steps_in_lists == 2 * len(ROWS)
        assert cluster.cells_in_lists == 2 * len(ROWS)


async def test_an_older_server_never_gets_lists() -> None:
    async with _connected(older=True) as (db, cluster):
        assert [await _add_one(db) for _ in range(3)] == [[1] * 4, [2] * 4, [3] * 4]
        assert (cluster.steps_in_lists, cluster.cells_in_lists) == (0, 0)


async def test_a_server_that_has_become_older_overlooks_lists_without_harm() -> None:
    """It finds no mutations, and no reads: neither is an answer."""
    async with _connected(older=False) as (db, cluster):
        await _add_one(db)
        cluster.older = True
        assert await _add_one(db) == [2] * 4
        cluster.forget_lists()
        assert await _add_one(db) == [3] * 4
        assert (cluster.steps_in_lists, cluster.cells_in_lists) == (0, 0)
        cluster.older = False
        assert await _add_one(db) == [4] * 4
        assert await _add_one(db) == [5] * 4
        assert cluster.steps_in_lists >= 2 * len(ROWS)


@pytest.mark.parametrize("older", [False, True])
async def test_many_transactions_survive_servers_that_change_their_release(*, older: bool) -> None:
    async with _connected(older=older) as (db, cluster):

        async def add(row: str) -> None:
            async def once(tx: Transaction) -> None:
                await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)

            for _ in range(5):
                await db.run(once)

        adding = [asyncio.ensure_future(add(row)) for row in ROWS * 3]
        for _ in range(20):
            await asyncio.sleep(0.01)
            cluster.older = not cluster.older
        await asyncio.gather(*adding)
        async with db.snapshot() as snapshot:
            assert [await snapshot.get(row, balance) for row in ROWS] == [15] * 4
