"""When a table was created, by the oracle's time: above all that may have read its predecessor."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import NotReady, SchemaError
from percolator.v1 import master_pb2 as pb
from percolator.v1 import oracle_pb2
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster
from tests.unit.master.model_oracle import ORACLE


async def create(world: ModelCluster, *, exist_ok: bool = False) -> pb.Table:
    request = pb.CreateTableRequest(name="t", exist_ok=exist_ok)
    return (await world.ask(methods.CREATE_TABLE, request, 30.0)).table


async def drop(world: ModelCluster) -> None:
    await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="t"))


async def test_a_table_is_younger_than_all_snapshots_taken_before_its_creation() -> None:
    async with cluster("a:1") as world:
        before = world.oracle.now()
        created = await create(world)
        assert before < created.created_at <= world.oracle.now()
        described = await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name="t"))
        assert described.table.created_at == created.created_at
        assert (await create(world, exist_ok=True)).created_at == created.created_at


async def test_a_new_leader_knows_how_old_tables_are() -> None:
    async with cluster("a:1") as world:
        created = await create(world)
        world.kill_master(world.masters[0])
        world.start_master()

        async def is_known() -> bool:
            found = await world.ask(methods.LIST_TABLES, pb.ListTablesRequest())
            return [one.created_at for one in found.tables] == [created.created_at]

        await world.until(is_known)


async def test_a_timestamp_from_before_the_last_deletion_is_not_used() -> None:
    """While it was fetched, the table was created by another caller, used, and dropped again."""
    async with cluster("a:1") as world:
        answer = world.oracle.get_timestamps
        held, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(
            request: oracle_pb2.GetTimestampsRequest,
        ) -> oracle_pb2.GetTimestampsResponse:
            old = await answer(request)
            held.set()
            await go_on.wait()
            return old

        leader = world.masters[0].master.leader
        assert leader is not None
        world.oracle.get_timestamps = slowly  # type: ignore[method-assign]
        creating = asyncio.create_task(create(world))
        await held.wait()
        current, _ = leader.store.current.with_new_table("t", [], 0, 0)
        await leader.store.change(lambda _: (current, None))
        snapshot = world.oracle.now()
        await drop(world)
        world.oracle.get_timestamps = answer  # type: ignore[method-assign]
        go_on.set()
        assert (await creating).created_at > snapshot


async def test_without_an_oracle_no_table_is_created_but_an_existing_one_is_found() -> None:
    async with cluster("a:1") as world:
        created = await create(world)
        world.network.silent.add(ORACLE)
        assert (await create(world, exist_ok=True)).table_id == created.table_id
        await drop(world)
        request = pb.CreateTableRequest(name="t")
        with pytest.raises(NotReady, match="the oracle"):
            await world.network.unary(world.masters[0].address, methods.CREATE_TABLE)(request, 5.0)
        with pytest.raises(SchemaError):
            await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name="t"))
