"""A change of the map whose write failed may be stored all the same, where standbys read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator.errors import InvalidArgument, PercolatorError, StoreUnusable
from percolator.services.master import cluster_map
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.map_store import StoredMap
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.world import RequestT, ResponseT, UnaryMethod
from tests.unit.master.cluster_world import ModelCluster, cluster
from tests.unit.master.tables_of_rows import SPLITS, create, served


@asynccontextmanager
async def with_standby() -> AsyncIterator[ModelCluster]:
    async with cluster("a:1") as world:
        world.start_master()
        await asyncio.sleep(1)
        yield world


async def fails(
    world: ModelCluster, method: UnaryMethod[RequestT, ResponseT], request: RequestT
) -> None:
    """A change that the leader has stored before its disk failed: it cannot tell."""
    await asyncio.sleep(2)  # until it has noted what is served
    leader = world.masters[0]
    leader.files.faults.fail("fsync_directory")
    with pytest.raises(StoreUnusable):
        await world.network.unary(leader.address, method)(request, 5.0)


async def shown(world: ModelCluster, name: str) -> pb.Table:
    """The table as clients find it at the standby."""
    describe = world.network.unary(world.masters[1].address, methods.DESCRIBE_TABLE)
    return (await describe(pb.DescribeTableRequest(name=name), 5.0)).table


async def test_a_table_that_somebody_has_found_does_not_become_another_one() -> None:
    """Both had the same id: who had found the first wrote into the second."""
    async with with_standby() as world:
        await fails(world, methods.CREATE_TABLE, pb.CreateTableRequest(name="first"))
        first = await shown(world, "first")
        assert await create(world, "second") != first.table_id
        assert await shown(world, "first") == first


async def test_a_version_of_a_schema_that_somebody_has_found_does_not_become_another_one() -> None:
    """Who had found it wrote no notifications for the observers that the other one has."""
    async with with_standby() as world:
        await create(world, "t")

        def adding(name: str) -> pb.ChangeObserversRequest:
            observer = pb.Observer(name=name, columns=[b"c"])
            return pb.ChangeObserversRequest(table="t", add=[observer])

        await fails(world, methods.CHANGE_OBSERVERS, adding("first"))
        found = await shown(world, "t")
        await world.ask(methods.CHANGE_OBSERVERS, adding("second"))
        now = await shown(world, "t")
        assert now.schema_version > found.schema_version
        assert [one.name for one in now.observers] == ["first", "second"]


async def test_a_table_that_was_created_all_the_same_can_be_used_without_another_change() -> None:
    """It could neither be created, since it existed, nor be found, until some other change."""
    async with with_standby() as world:
        await fails(world, methods.CREATE_TABLE, pb.CreateTableRequest(name="t"))
        with pytest.raises(InvalidArgument, match="exists"):
            await create(world, "t")
        table = await shown(world, "t")
        await world.until(lambda: served(world, table.table_id), 5)
        await world.write(table.table_id, b"row", b"value")


async def test_a_table_that_was_dropped_all_the_same_takes_no_more_writes() -> None:
    """It did until some other change, and then they were lost with it."""
    async with with_standby() as world:
        table = await create(world, "t")
        await fails(world, methods.DELETE_TABLE, pb.DeleteTableRequest(name="t"))
        await asyncio.sleep(2)
        with pytest.raises(PercolatorError):
            await world.write(table, b"row", b"value")


async def test_on_a_full_disk_a_change_that_changes_nothing_succeeds() -> None:
    """As it does before any write has failed: many programs create their tables when they start."""
    async with with_standby() as world:
        before = await create(world, "before")
        await asyncio.sleep(2)
        world.masters[0].files.faults.fail("append", times=10_000)
        with pytest.raises(StoreUnusable):
            await create(world, "lost")
        request = pb.CreateTableRequest(name="before", exist_ok=True, splits=SPLITS)
        assert (await world.ask(methods.CREATE_TABLE, request)).table.table_id == before


async def test_a_change_that_was_not_stored_leaves_the_map_as_it_was() -> None:
    async with with_standby() as world:
        before = await create(world, "before")
        await asyncio.sleep(2)
        world.masters[0].files.faults.fail("append")
        with pytest.raises(StoreUnusable):
            await create(world, "lost")
        await create(world, "after")
        listed = (await world.ask(methods.LIST_TABLES, pb.ListTablesRequest())).tables
        assert [one.name for one in listed] == ["after", "before"]
        assert (await shown(world, "before")).table_id == before


async def test_what_is_acknowledged_after_an_uncertain_write_outlasts_a_power_cut() -> None:
    """A repeated request changes nothing more, so what it found has to be written again."""
    async with with_standby() as world:
        await create(world, "t")
        request = pb.SetChangeFeedRequest(table="t", change_feed=True)
        await fails(world, methods.SET_CHANGE_FEED, request)
        acknowledged = (await world.ask(methods.SET_CHANGE_FEED, request)).table
        for process in list(world.masters):
            world.kill_master(process)
        world.disk.cut_power()
        world.start_master()
        await asyncio.sleep(1)
        found = await world.ask(methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name="t"))
        assert found.table == acknowledged


async def test_a_master_that_took_what_can_be_read_for_durable_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wrong(self: StoredMap[ClusterMap]) -> None:
        if not self._is_stored:
            self.current, self._is_stored = self._decode(await self._stored()), True

    monkeypatch.setattr(StoredMap, "_take_over", wrong)
    with pytest.raises(AssertionError):
        await test_what_is_acknowledged_after_an_uncertain_write_outlasts_a_power_cut()


async def test_a_master_that_continued_with_its_own_map_would_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def own(self: StoredMap[ClusterMap]) -> bytes:
        return cluster_map.encode(self.current)

    monkeypatch.setattr(StoredMap, "_stored", own)
    with pytest.raises(AssertionError):
        await test_a_table_that_somebody_has_found_does_not_become_another_one()
    with pytest.raises(AssertionError):
        await test_a_version_of_a_schema_that_somebody_has_found_does_not_become_another_one()
