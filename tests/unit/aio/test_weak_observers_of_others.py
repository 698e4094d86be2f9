"""A weak observer that another client has registered hears of every later notification."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from percolator import RetryPolicy, Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.aio.observing import worker_context
from percolator.bigtable.store import BigtableStore
from percolator.errors import UsageError
from percolator.observers.context import WorkRequest
from percolator.rowstore.layout import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, ClusterOverRows
from percolator.v1 import master_pb2
from percolator.world import World
from tests.simulation.virtual_time import WALL_MILLISECONDS, VirtualClock
from tests.unit.connected import TWO_PHASES, accounts, balance, connected

orders = Table("orders")
price = orders.column("price", codecs.integer)


@asynccontextmanager
async def _over_rows() -> AsyncIterator[tuple[Database, ClusterInMemory]]:
    clock = VirtualClock(asyncio.get_running_loop())
    store = InProcessNetwork({MODEL.address: BigtableInMemory()})
    cluster = ClusterOverRows(clock, store, MODEL)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    rows = Rows(BigtableStore(store, MODEL), Times(WALL_MILLISECONDS - 1_000))
    async with await connect_to(world, [ADDRESS], TWO_PHASES, RetryPolicy(), rows=rows) as db:
        await db.create_table(accounts)
        yield db, cluster


async def _registered(cluster: ClusterInMemory, name: str) -> None:
    """By another client, so that this one is not told."""
    observer = master_pb2.Observer(name=name, columns=[balance.name], weak=True)
    await cluster.change_observers(
        master_pb2.ChangeObserversRequest(table="accounts", add=[observer])
    )


@pytest.mark.parametrize("writes", [True, False], ids=["with a write elsewhere", "alone"])
@pytest.mark.parametrize("store", [connected, _over_rows], ids=["tablets", "rows"])
async def test_a_notification_reaches_observers_that_this_client_has_not_heard_of(
    store: Callable[[], AbstractAsyncContextManager[tuple[Database, ClusterInMemory]]],
    writes: bool,
) -> None:
    async with store() as (db, cluster):
        await db.create_table(orders)
        await _registered(cluster, "known")
        engine = db.internal.engine
        info = await engine.catalog.table("accounts", engine.now() + 1.0)
        await engine.catalog.refresh(info.table_id, engine.now() + 1.0)
        await _registered(cluster, "new")
        async with db.transaction() as tx:
            await tx.notify("a", balance)
            if writes:
                await tx.set("one", price, 1)
        survey = worker_context(engine).notifications.survey(WorkRequest(info.table_id))
        waiting = [one async for answer in survey for one in answer.waiting]
        assert {one.observer for one in waiting} == {b"known", b"new"}
        assert {one.timestamps for one in waiting} == {(tx.commit_timestamp,)}


@pytest.mark.parametrize("store", [connected, _over_rows], ids=["tablets", "rows"])
async def test_the_first_observer_of_a_column_is_notified_by_a_client_that_ran_before(
    store: Callable[[], AbstractAsyncContextManager[tuple[Database, ClusterInMemory]]],
) -> None:
    """It had said that the column has no weak observer, for as long as it only notified."""
    async with store() as (db, cluster):
        async with db.transaction() as tx:
            with pytest.raises(UsageError, match="has no weak observer"):
                await tx.notify("a", balance)
        await _registered(cluster, "first")
        async with db.transaction() as tx:
            await tx.notify("a", balance)
        engine = db.internal.engine
        info = await engine.catalog.table("accounts", engine.now() + 1.0)
        survey = worker_context(engine).notifications.survey(WorkRequest(info.table_id))
        waiting = [one async for answer in survey for one in answer.waiting]
        assert {one.observer for one in waiting} == {b"first"}
