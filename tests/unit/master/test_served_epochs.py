"""The map remembers at which epoch each tablet was served last, and every order says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from percolator.errors import PercolatorError
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster
from tests.unit.master.tables_of_rows import create, fill, is_complete, served

NOTED_SECONDS = 2.0


async def moved(world: ModelCluster, table: int) -> int:
    """A tablet that was served at epoch 2, of which the map has taken note."""
    (only,) = await world.locate(table)
    await world.ask(methods.MOVE_TABLET, pb.MoveTabletRequest(tablet_id=only.tablet_id))
    await asyncio.sleep(NOTED_SECONDS)
    return only.tablet_id


async def test_a_tablet_whose_newest_epoch_is_lost_is_not_served_from_an_older_one() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        tablet = await moved(world, table)
        stored = world.store.tablets[tablet]
        stored.highest = 1
        (location,) = await world.locate(table)
        world.kill_server(location.address)
        await asyncio.sleep(5.0)
        with pytest.raises(PercolatorError):
            await served(world, table)
        (listed,) = (await world.ask(methods.LIST_TABLETS, pb.ListTabletsRequest())).tablets
        assert "only older epochs are there" in listed.error.message
        stored.highest = 2
        await world.until(lambda: is_complete(world, table))


async def test_the_next_master_knows_it_too() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[])
        tablet = await moved(world, table)
        world.kill_master(world.masters[0])
        world.store.tablets[tablet].highest = 1
        world.kill_server("a:1" if "b:1" in world.servers else "b:1")
        world.start_master()
        await asyncio.sleep(5.0)
        (location,) = await world.locate(table)
        with pytest.raises(PercolatorError):
            await served(world, table)
        assert location.epoch >= 2


async def test_a_move_keeps_what_is_noted_while_its_tablet_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[])
        (only,) = await world.locate(table)
        leader = world.masters[0].master.leader
        assert leader is not None
        store, assignment = leader.store, leader.assignment
        unnoted = replace(store.current.tablets[only.tablet_id], exists=False, served_epoch=0)
        store.current = store.current.with_tablets([unnoted])
        correct = assignment.closing.close

        async def close(address: str, tablet_id: int, epoch: int) -> None:
            await assignment.note_served()
            await correct(address, tablet_id, epoch)

        monkeypatch.setattr(assignment.closing, "close", close)
        world.network.losses["open_tablet"] = 1
        request = pb.MoveTabletRequest(tablet_id=only.tablet_id)
        moving = asyncio.create_task(world.ask(methods.MOVE_TABLET, request))
        await asyncio.sleep(0.1)
        given = store.current.tablets[only.tablet_id]
        assert given.epoch == only.epoch + 1
        assert (given.exists, given.served_epoch) == (True, only.epoch)
        await moving


async def test_many_tablets_of_a_dead_server_are_noted_with_few_changes_of_the_map() -> None:
    async with cluster("a:1", "b:1") as world:
        splits = [bytes([letter]) for letter in range(1, 100)]
        table = await create(world, splits=splits)
        await asyncio.sleep(NOTED_SECONDS)
        leader = world.masters[0].master.leader
        assert leader is not None
        before = leader.store.changes
        world.kill_server("a:1")
        await world.until(lambda: served(world, table))
        await asyncio.sleep(NOTED_SECONDS)
        tablets = leader.store.current.tablets.values()
        assert all(one.served_epoch == one.epoch for one in tablets)
        assert leader.store.changes - before <= 5
