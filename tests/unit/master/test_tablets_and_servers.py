"""Which server serves which tablet, whatever happens to servers and masters.

The map remembers at which epoch each tablet was served last, and every order says so.

The next master knows who has left on purpose, as when a whole cluster is stopped and started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PercolatorError,
    SchemaError,
)
from percolator.services.master import tablet_changes
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.leader import Leader
from percolator.services.master.master import Master
from percolator.v1 import cluster_pb2
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster
from tests.unit.master.tables_of_rows import (
    LEASE_SECONDS,
    addresses,
    create,
    fill,
    is_complete,
    served,
)


async def test_the_tablets_of_a_new_table_are_spread_over_all_servers() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        assert await addresses(world, await create(world)) == {"a:1": 2, "b:1": 2, "c:1": 2}


async def test_a_killed_server_is_replaced_within_a_second() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        await fill(world, table)
        world.kill_server("b:1")
        assert await world.until(lambda: is_complete(world, table)) < 1.0
        assert await addresses(world, table) == {"a:1": 3, "c:1": 3}


async def test_a_silent_server_is_replaced_when_its_lease_is_over_and_acknowledges_nothing() -> (
    None
):
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        await fill(world, table)
        old = await world.locate(table)
        silent = world.servers["b:1"]
        world.network.silent.add("b:1")
        # Clients that still reach it are served until another server owns the tablets.
        lost = [one for one in old if one.address == "b:1"]
        silent.write(lost[0], lost[0].range.start + b"x", b"acknowledged")

        async def moved() -> bool:
            return set(await addresses(world, table)) == {"a:1"}

        seconds = await world.until(moved)
        assert LEASE_SECONDS - 0.5 < seconds < LEASE_SECONDS + 1.5
        await world.until(lambda: is_complete(world, table))
        assert await world.read(table, lost[0].range.start + b"x") == b"acknowledged"
        for location in lost:
            with pytest.raises(PercolatorError):
                silent.write(location, location.range.start, b"late")
        # When it is back, it closes the tablets that it no longer owns.
        world.network.silent.clear()
        await asyncio.sleep(3)
        assert not [one for one in silent.open.values() if one.epoch == 1]


@pytest.mark.parametrize("change", ["move", "split", "drain"])
async def test_a_server_that_falls_silent_while_its_tablets_change_is_replaced_as_soon(
    change: str,
) -> None:
    """The change waits for its answer, and nobody else gives the tablet to a server meanwhile."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        (tablet,) = await world.locate(table)
        world.network.silent.add(tablet.address)
        changes: dict[str, Callable[[], Awaitable[object]]] = {
            "move": lambda: world.ask(
                methods.MOVE_TABLET, pb.MoveTabletRequest(tablet_id=tablet.tablet_id), 60
            ),
            "split": lambda: world.ask(
                methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=tablet.tablet_id), 60
            ),
            "drain": lambda: world.ask(
                methods.DRAIN_SERVER, pb.DrainServerRequest(server=tablet.address), 60
            ),
        }
        changing = asyncio.ensure_future(changes[change]())

        async def moved() -> bool:
            return tablet.address not in await addresses(world, table)

        assert await world.until(moved) < LEASE_SECONDS + 1.5
        assert await world.until(lambda: is_complete(world, table)) < 1
        await asyncio.wait([changing])
        assert (changing.exception() is None) == (change != "split")


async def test_a_restarted_master_moves_nothing() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        before = await world.locate(table)
        world.kill_master(world.masters[0])
        await asyncio.sleep(5)
        world.start_master()
        await asyncio.sleep(10)
        assert await world.locate(table) == before


async def test_a_standby_locates_tablets_and_refers_changes_to_the_leader() -> None:
    async with cluster("a:1") as world:
        table = await create(world)
        standby = world.start_master()
        await asyncio.sleep(1)
        known = await world.network.unary(standby.address, methods.LOCATE_TABLETS)(
            pb.LocateTabletsRequest(table_id=table), 1
        )
        assert list(known.locations) == await world.locate(table)
        with pytest.raises(NotReady, match="master-1"):
            await world.network.unary(standby.address, methods.CREATE_TABLE)(
                pb.CreateTableRequest(name="u"), 1
            )
        world.kill_master(world.masters[0])
        await asyncio.sleep(1)
        assert await create(world, "u") > table


async def test_a_server_that_restarts_at_its_address_gets_its_tablets_at_new_epochs() -> None:
    async with cluster("a:1") as world:
        table = await create(world)
        await fill(world, table)
        world.kill_server("a:1")
        world.start_server("a:1")
        await world.until(lambda: is_complete(world, table))
        assert {one.epoch for one in await world.locate(table)} == {2}


async def test_when_all_servers_restart_they_share_the_tablets_whichever_is_first() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        await fill(world, table)
        for address in ("a:1", "b:1", "c:1"):
            world.kill_server(address)
        await asyncio.sleep(2)
        for address in ("a:1", "b:1", "c:1"):
            world.start_server(address)
            await asyncio.sleep(0.05)
        await world.until(lambda: is_complete(world, table))
        assert await addresses(world, table) == {"a:1": 2, "b:1": 2, "c:1": 2}


async def test_a_tablet_that_cannot_be_opened_does_not_stop_others_from_being_moved() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        damaged = (await world.locate(table))[0]
        world.store.tablets[damaged.tablet_id].damaged = True
        world.kill_server(damaged.address)
        await asyncio.sleep(5)
        world.start_server("c:1")

        async def shared() -> bool:
            return (await addresses(world, table))["c:1"] >= 2

        await world.until(shared, 60)


async def test_epochs_in_the_store_far_above_those_of_the_map_are_overtaken_at_once() -> None:
    """As after a damaged map, which is mended with that of an earlier leader."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        await fill(world, table)
        for location in await world.locate(table):
            world.store.tablets[location.tablet_id].highest = 10_000
        world.kill_server("a:1")
        world.kill_server("b:1")
        world.start_server("c:1")
        await world.until(lambda: is_complete(world, table), LEASE_SECONDS + 2.0)
        assert {one.epoch for one in await world.locate(table)} == {10_001}


async def test_a_server_that_tells_of_an_epoch_beyond_all_does_not_end_the_master() -> None:
    """The epoch after the highest number was to be written into the map, which cannot hold it."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[b"m"])
        wrong, right = await world.locate(table)
        world.store.tablets[wrong.tablet_id].highest = 2**64 - 1
        world.kill_server(wrong.address)
        await asyncio.sleep(LEASE_SECONDS + 5.0)
        still = (await world.locate(table))[1]
        assert still.tablet_id == right.tablet_id
        assert still.address in ("a:1", "b:1")
        await create(world, "another")  # the master leads, and assigns tablets


async def test_a_server_that_falls_silent_while_it_takes_over_is_replaced_in_time() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        await fill(world, table)
        world.kill_server("a:1")
        # Orders for tablets that it is given now are never answered.
        world.network.silent.add("b:1")
        await world.until(lambda: is_complete(world, table), LEASE_SECONDS + 2.0)
        assert set(await addresses(world, table)) == {"c:1"}


@pytest.mark.parametrize(("lost", "seconds"), [(1, 2.0), (2, 4.0)])
async def test_an_order_to_open_that_is_lost_is_repeated_soon(lost: int, seconds: float) -> None:
    """Its server lives, so nobody else is given the tablet: clients wait for the next order."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        await fill(world, table)
        world.network.losses["open_tablet"] = lost
        world.kill_server("b:1")
        assert await world.until(lambda: is_complete(world, table)) < seconds
        assert not world.network.losses["open_tablet"]


async def test_a_new_server_gets_its_share_and_then_nothing_more_moves() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[b"%02d" % n for n in range(1, 12)])
        world.start_server("c:1")

        async def balanced() -> bool:
            return await addresses(world, table) == {"a:1": 4, "b:1": 4, "c:1": 4}

        await world.until(balanced, 60)
        before = await world.locate(table)
        await asyncio.sleep(30)
        assert await world.locate(table) == before


async def test_the_tablets_of_a_server_that_can_dial_but_not_be_reached_move_once() -> None:
    """It registers every second, is watched, and then does not answer."""
    async with cluster("a:1", "b:1", "c:1") as at:
        table = await create(at)
        at.network.dial_out.add("a:1")
        at.network.silent.add("a:1")
        await asyncio.sleep(10)
        after = await at.locate(table)
        assert {one.address for one in after} == {"b:1", "c:1"}
        await asyncio.sleep(120)
        assert await at.locate(table) == after


async def test_a_server_that_comes_and_goes_is_given_tablets_less_and_less_often() -> None:
    """Each time, clients would wait for the tablets that it had got."""
    async with cluster("a:1", "b:1", "c:1") as at:
        table = await create(at)
        takeovers = []
        for _ in range(20):
            before = {one.tablet_id: one.epoch for one in await at.locate(table)}
            at.network.silent.add("a:1")
            await asyncio.sleep(6)
            at.network.silent.discard("a:1")
            await asyncio.sleep(9)
            after = {one.tablet_id: one.epoch for one in await at.locate(table)}
            takeovers.append(sum(after.values()) - sum(before.values()))
        assert takeovers[0] > 0
        assert sum(map(bool, takeovers)) <= 5, takeovers
        # Once it is steady, it gets its share again.
        await asyncio.sleep(90)
        assert "a:1" in {one.address for one in await at.locate(table)}


async def test_a_server_that_comes_and_goes_is_used_if_there_is_no_other() -> None:
    async with cluster("a:1") as at:
        table = await create(at)
        for _ in range(5):
            at.network.silent.add("a:1")
            await asyncio.sleep(6)
            at.network.silent.discard("a:1")
            await at.until(lambda: served(at, table), 3)


async def test_a_drained_server_has_and_gets_no_tablets_until_the_drain_is_undone() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        await fill(world, table)
        await world.ask(methods.DRAIN_SERVER, pb.DrainServerRequest(server="b:1"), 30)
        assert await addresses(world, table) == {"a:1": 3, "c:1": 3}
        assert await is_complete(world, table)
        await create(world, "u")
        await asyncio.sleep(20)
        assert "b:1" not in await addresses(world, table)
        await world.ask(methods.DRAIN_SERVER, pb.DrainServerRequest(server="b:1", undo=True))

        async def used_again() -> bool:
            return "b:1" in await addresses(world, table)

        await world.until(used_again, 60)


async def test_a_drain_waits_for_a_tablet_that_is_just_being_split_or_moved() -> None:
    """It failed at once, and a server that was being stopped closed its tablets instead."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        await fill(world, table)
        leader = world.masters[0].master.leader
        assert leader is not None
        held = next(one for one in await world.locate(table) if one.address == "b:1").tablet_id
        leader.assignment.hold(held)
        asyncio.get_running_loop().call_later(2.0, leader.assignment.let_go, held)
        await world.ask(methods.DRAIN_SERVER, pb.DrainServerRequest(server="b:1"), 30)
        assert await addresses(world, table) == {"a:1": 6}


async def test_two_drains_of_a_server_do_not_fail_because_of_each_other() -> None:
    """An operator drains it, and it is stopped meanwhile. Both took the same tablet at a time."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        await fill(world, table)
        leader = world.masters[0].master.leader
        assert leader is not None
        held = [one.tablet_id for one in await world.locate(table) if one.address == "b:1"]
        for tablet_id in held:
            leader.assignment.hold(tablet_id)
            asyncio.get_running_loop().call_later(2.0, leader.assignment.let_go, tablet_id)
        deadline = world.clock.monotonic_seconds() + 30
        drains = (leader.changes.drain("b:1", undo=False, deadline=deadline) for _ in range(2))
        await asyncio.gather(*drains)
        assert await addresses(world, table) == {"a:1": 6}


async def test_that_a_server_is_drained_is_forgotten_only_when_it_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every server that is stopped is drained, so the map would grow with each restart."""
    monkeypatch.setattr(tablet_changes, "_LOOK_SECONDS", 1.0)  # an hour takes a minute
    async with cluster("a:1", "b:1", "c:1") as world:
        leader = world.masters[0].master.leader
        assert leader is not None
        for address in ("b:1", "c:1"):
            await world.ask(methods.DRAIN_SERVER, pb.DrainServerRequest(server=address), 30)
        returns = world.servers["b:1"].server_id
        world.kill_server("c:1")
        world.network.silent.add("b:1")
        await asyncio.sleep(40)
        assert len(leader.store.current.draining) == 2
        world.network.silent.discard("b:1")
        await asyncio.sleep(60)
        assert leader.store.current.draining == {returns}


async def test_the_last_server_cannot_be_drained() -> None:
    async with cluster("a:1", "b:1") as world:
        await create(world)
        await world.ask(methods.DRAIN_SERVER, pb.DrainServerRequest(server="b:1"), 30)
        with pytest.raises(InvalidArgument) as caught:
            await world.ask(methods.DRAIN_SERVER, pb.DrainServerRequest(server="a:1"))
        assert caught.value.field == "server"
        servers = (await world.ask(methods.LIST_SERVERS, pb.ListServersRequest())).servers
        assert [(one.address, one.tablets, one.draining) for one in servers] == [
            ("a:1", 6, False),
            ("b:1", 0, True),
        ]


async def test_a_damaged_tablet_is_reported_and_the_others_stay_served() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        damaged = (await world.locate(table))[0]
        world.store.tablets[damaged.tablet_id].damaged = True
        world.kill_server(damaged.address)
        await asyncio.sleep(5)
        listed = (await world.ask(methods.LIST_TABLETS, pb.ListTabletsRequest())).tablets
        assert [one.location.tablet_id for one in listed if not one.serving] == [damaged.tablet_id]
        (broken,) = [one for one in listed if not one.serving]
        assert "nothing there" in broken.error.message
        for location in (await world.locate(table))[1:]:
            assert await world.read(table, location.range.start) is None
        world.store.tablets[damaged.tablet_id].damaged = False

        async def repaired() -> bool:
            return await world.read(table, b"a") is None

        await world.until(repaired)


async def test_a_tablet_that_one_server_cannot_open_is_opened_at_once_by_the_next() -> None:
    """However long the pause has become after which the former one would be ordered again."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        world.servers["a:1"].opens_nothing = True
        await asyncio.sleep(60)
        moved = [one for one in await world.locate(table) if one.address == "a:1"]
        assert moved
        for tablet in moved:
            request = pb.MoveTabletRequest(tablet_id=tablet.tablet_id, server="b:1")
            await world.ask(methods.MOVE_TABLET, request, seconds=0.5)


async def test_failures_before_a_server_has_opened_a_tablet_by_itself_are_forgotten() -> None:
    """As when its disk works again."""
    async with cluster("a:1") as world:
        table = await create(world)
        leader = world.masters[0].master.leader
        assert leader is not None
        tablets, assignment = leader.store.current.of_tables[table], leader.assignment
        world.servers["a:1"].opens_nothing = True
        await asyncio.sleep(60)
        assert all(map(assignment.is_broken, tablets))
        world.servers["a:1"].opens_nothing = False
        await asyncio.sleep(1)
        assert not any(map(assignment.is_broken, tablets))
        assert not assignment.errors


async def test_a_tablet_that_cannot_be_opened_does_not_keep_other_tables_alive() -> None:
    async with cluster("a:1", "b:1") as world:
        damaged, other = await create(world, "damaged"), await create(world, "other")
        lost = (await world.locate(damaged))[0]
        world.store.tablets[lost.tablet_id].damaged = True
        world.kill_server(lost.address)
        with pytest.raises(DeadlineExceeded):
            await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="damaged"), 90)
        await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="other"))
        leader = world.masters[0].master.leader
        assert leader is not None

        async def cleared() -> bool:
            return other not in leader.store.current.tables

        await world.until(cleared)
        assert damaged in leader.store.current.tables


async def test_a_deleted_table_disappears_at_once_and_its_name_is_free() -> None:
    async with cluster("a:1") as world:
        table = await create(world)
        await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="t"))
        with pytest.raises(SchemaError):
            await world.locate(table)
        with pytest.raises(SchemaError):
            await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="t"))
        again = pb.DeleteTableRequest(name="t", missing_ok=True)
        assert not (await world.ask(methods.DELETE_TABLE, again)).deleted
        assert await create(world) != table
        await asyncio.sleep(5)
        assert {one.table_id for one in world.servers["a:1"].open.values()} == {table + 7}


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
        correct = assignment.close

        async def close(address: str, tablet_id: int, epoch: int) -> None:
            await assignment.note_served()
            await correct(address, tablet_id, epoch)

        monkeypatch.setattr(assignment, "close", close)
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


def gateway(name: str) -> cluster_pb2.Server:
    return cluster_pb2.Server(
        kind=cluster_pb2.SERVICE_KIND_GATEWAY, server_id=name, address=f"{name}:1", version="0.1.0"
    )


async def missed_by_the_next_master(model: ModelCluster) -> list[str]:
    """The leading master dies at this moment, and another one takes its place."""
    model.kill_master(model.masters[0])
    registry = model.start_master().master.registry
    await asyncio.sleep(60)
    registry.forget_silent()
    return [one.server_id for one in registry.missed()]


async def test_who_has_left_on_purpose_is_not_missed_by_the_next_master() -> None:
    """Masters are stopped last, right after the others have said that they leave."""
    async with cluster() as model:
        leaves, dies = gateway("leaves"), gateway("dies")
        model.parts += [leaves, dies]
        await asyncio.sleep(5)
        model.parts.remove(leaves)
        model.parts.remove(dies)
        leaves.leaving = True
        await model.masters[0].master.registered(leaves, 0)
        assert await missed_by_the_next_master(model) == ["dies"]


async def test_who_has_come_back_and_then_dies_is_missed_by_the_next_master() -> None:
    async with cluster() as model:
        returns = gateway("returns")
        returns.leaving = True
        await model.masters[0].master.registered(returns, 0)
        returns.leaving = False
        model.parts.append(returns)
        await asyncio.sleep(5)
        model.parts.remove(returns)
        assert await missed_by_the_next_master(model) == ["returns"]


async def test_the_next_master_leads_even_if_it_may_list_fewer_servers_than_there_are() -> None:
    """Its `--servers-max` was lowered: each master that began to lead ended with an error."""
    async with cluster() as model:
        model.parts += [gateway("a"), gateway("b")]
        await asyncio.sleep(5)
        model.kill_master(model.masters[0])
        master = model.start_master(servers_max=2).master
        await model.until(lambda: _leads(master))
        await asyncio.sleep(5)
        assert len(master.registry.servers()) == 2


async def _leads(master: Master[ClusterMap, Leader]) -> bool:
    return master.leader is not None and not master.leader.is_over
