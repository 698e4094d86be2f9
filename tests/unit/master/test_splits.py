"""Tablets are split on demand and by themselves, and no row is lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import cluster
from tests.unit.master.tables_of_rows import (
    create,
    fill,
    is_complete,
)


async def test_a_split_loses_no_row_and_the_parent_is_forgotten() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        (whole,) = await world.locate(table)
        request = pb.SplitTabletRequest(tablet_id=whole.tablet_id)
        halves = await world.ask(methods.SPLIT_TABLET, request)
        assert await is_complete(world, table)
        found = await world.locate(table)
        assert [one.tablet_id for one in found] == [halves.lower.tablet_id, halves.upper.tablet_id]
        assert found[0].range.end == found[1].range.start == b"i"
        leader = world.masters[0].master.leader
        assert leader is not None
        await asyncio.sleep(3)
        assert [one.origin_tablet_id for one in leader.store.current.tablets.values()] == [0, 0]
        assert leader.store.current.retired == ()
        # After it was moved it still has all of its rows.
        await world.ask(methods.MOVE_TABLET, pb.MoveTabletRequest(tablet_id=found[0].tablet_id))
        assert await is_complete(world, table)


async def test_a_tablet_can_be_split_as_soon_as_it_is_served() -> None:
    """Also by a call that is faster than the note, in the map, that the tablet is served."""
    async with cluster("a:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        (whole,) = await world.locate(table)
        leader = world.masters[0].master.leader
        assert leader is not None
        store = leader.store
        unnoted = replace(store.current.tablets[whole.tablet_id], exists=False, served_epoch=0)
        store.current = store.current.with_tablets([unnoted])
        request = pb.SplitTabletRequest(tablet_id=whole.tablet_id)
        await world.ask(methods.SPLIT_TABLET, request)
        assert await is_complete(world, table)


@pytest.mark.parametrize("victim", ["a:1", "b:1"])
async def test_no_row_is_lost_when_a_server_is_killed_during_a_split(victim: str) -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        (whole,) = await world.locate(table)
        splitting = asyncio.create_task(
            world.ask(methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=whole.tablet_id))
        )
        await asyncio.sleep(0.008)
        world.kill_server(victim)
        await asyncio.gather(splitting, return_exceptions=True)
        await world.until(lambda: is_complete(world, table))


async def test_a_table_that_grows_is_split_automatically() -> None:
    async with cluster("a:1", "b:1") as world:
        request = pb.CreateTableRequest(name="t", options=pb.TableOptions(split_bytes=64 << 10))
        table = (await world.ask(methods.CREATE_TABLE, request)).table.table_id
        for number in range(40):
            await world.write(table, b"%03d" % number, bytes(4 << 10))
        await asyncio.sleep(20)
        found = await world.locate(table)
        assert len(found) >= 4
        assert {one.address for one in found} == {"a:1", "b:1"}
        assert all([await world.read(table, b"%03d" % n) == bytes(4 << 10) for n in range(40)])


async def test_a_tablet_that_cannot_be_split_stops_no_other_split_or_move() -> None:
    async with cluster("a:1", "b:1") as world:
        options = pb.TableOptions(split_bytes=64 << 10)
        tables = []
        for name in ("one row", "many rows"):
            request = pb.CreateTableRequest(name=name, options=options)
            tables.append((await world.ask(methods.CREATE_TABLE, request)).table.table_id)
        await world.write(tables[0], b"a", bytes(200 << 10))
        for number in range(40):
            await world.write(tables[1], b"%03d" % number, bytes(4 << 10))
        world.start_server("c:1")

        async def shared() -> bool:
            found = await world.locate(tables[1])
            return len(found) >= 4 and "c:1" in {one.address for one in found}

        await world.until(shared)
