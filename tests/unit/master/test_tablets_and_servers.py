"""Who serves which tablet, through everything that may happen to servers and masters."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from percolator.errors import InvalidArgument, NotReady, PercolatorError, SchemaError
from percolator.v1 import master_pb2 as wire
from percolator.wire import methods
from tests.unit.master.cluster_world import ModelCluster, cluster

SPLITS = [b"c", b"f", b"i", b"l", b"o"]
LEASE_SECONDS = 3.0


async def create(world: ModelCluster, name: str = "t", splits: list[bytes] = SPLITS) -> int:
    request = wire.CreateTableRequest(name=name, splits=splits)
    return (await world.ask(methods.CREATE_TABLE, request)).table.table_id


async def addresses(world: ModelCluster, table: int) -> Counter[str]:
    return Counter(one.address for one in await world.locate(table))


async def fill(world: ModelCluster, table: int) -> None:
    for letter in b"abcdefghijklmnopq":
        await world.write(table, bytes([letter]), b"value")


async def is_complete(world: ModelCluster, table: int) -> bool:
    rows = [bytes([letter]) for letter in b"abcdefghijklmnopq"]
    return all([await world.read(table, row) == b"value" for row in rows])


async def test_a_new_table_is_served_by_all_servers_alike() -> None:
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
        # Clients that still reach it are served until somebody else owns the tablets.
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
        # When it is back, it lets go of what is not its own any more.
        world.network.silent.clear()
        await asyncio.sleep(3)
        assert not [one for one in silent.open.values() if one.epoch == 1]


async def test_a_restarted_master_moves_nothing() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        before = await world.locate(table)
        world.kill_master(world.masters[0])
        await asyncio.sleep(5)
        world.start_master()
        await asyncio.sleep(10)
        assert await world.locate(table) == before


async def test_a_standby_answers_where_tablets_are_and_sends_changes_on() -> None:
    async with cluster("a:1") as world:
        table = await create(world)
        standby = world.start_master()
        await asyncio.sleep(1)
        known = await world.network.unary(standby.address, methods.LOCATE_TABLETS)(
            wire.LocateTabletsRequest(table_id=table), 1
        )
        assert list(known.locations) == await world.locate(table)
        with pytest.raises(NotReady, match="master-1"):
            await world.network.unary(standby.address, methods.CREATE_TABLE)(
                wire.CreateTableRequest(name="u"), 1
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


async def test_servers_that_all_start_again_share_the_tablets_whoever_is_the_first() -> None:
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


async def test_a_split_loses_no_row_and_the_parent_is_forgotten() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        (whole,) = await world.locate(table)
        request = wire.SplitTabletRequest(tablet_id=whole.tablet_id)
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
        # Moved away, it still has everything.
        await world.ask(methods.MOVE_TABLET, wire.MoveTabletRequest(tablet_id=found[0].tablet_id))
        assert await is_complete(world, table)


@pytest.mark.parametrize("victim", ["a:1", "b:1"])
async def test_a_server_that_is_killed_during_a_split_costs_no_row(victim: str) -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world, splits=[])
        await fill(world, table)
        (whole,) = await world.locate(table)
        splitting = asyncio.create_task(
            world.ask(methods.SPLIT_TABLET, wire.SplitTabletRequest(tablet_id=whole.tablet_id))
        )
        await asyncio.sleep(0.008)
        world.kill_server(victim)
        await asyncio.gather(splitting, return_exceptions=True)
        await world.until(lambda: is_complete(world, table))


async def test_a_table_that_grows_is_split_by_itself() -> None:
    async with cluster("a:1", "b:1") as world:
        request = wire.CreateTableRequest(name="t", options=wire.TableOptions(split_bytes=64 << 10))
        table = (await world.ask(methods.CREATE_TABLE, request)).table.table_id
        for number in range(40):
            await world.write(table, b"%03d" % number, bytes(4 << 10))
        await asyncio.sleep(20)
        found = await world.locate(table)
        assert len(found) >= 4
        assert {one.address for one in found} == {"a:1", "b:1"}
        assert all([await world.read(table, b"%03d" % n) == bytes(4 << 10) for n in range(40)])


async def test_a_tablet_that_cannot_be_split_keeps_no_other_from_being_split_or_moved() -> None:
    async with cluster("a:1", "b:1") as world:
        options = wire.TableOptions(split_bytes=64 << 10)
        tables = []
        for name in ("one row", "many rows"):
            request = wire.CreateTableRequest(name=name, options=options)
            tables.append((await world.ask(methods.CREATE_TABLE, request)).table.table_id)
        await world.write(tables[0], b"a", bytes(200 << 10))
        for number in range(40):
            await world.write(tables[1], b"%03d" % number, bytes(4 << 10))
        world.start_server("c:1")

        async def shared() -> bool:
            found = await world.locate(tables[1])
            return len(found) >= 4 and "c:1" in {one.address for one in found}

        await world.until(shared)


async def test_a_tablet_that_cannot_be_opened_keeps_no_other_from_being_moved() -> None:
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


async def test_a_server_that_falls_silent_while_it_takes_over_is_itself_replaced_in_time() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        await fill(world, table)
        world.kill_server("a:1")
        # What it is given now is ordered, and never answered.
        world.network.silent.add("b:1")
        await world.until(lambda: is_complete(world, table), LEASE_SECONDS + 2.0)
        assert set(await addresses(world, table)) == {"c:1"}


async def test_a_new_server_gets_its_share_and_then_nothing_moves_any_more() -> None:
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
    """It registers every second, is watched, and is silent again."""
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
    """Each time somebody would wait for what it had got."""
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
        # Once it is steady it gets its share again.
        await asyncio.sleep(90)
        assert "a:1" in {one.address for one in await at.locate(table)}


async def test_a_server_that_comes_and_goes_is_better_than_none() -> None:
    async with cluster("a:1") as at:
        table = await create(at)
        for _ in range(5):
            at.network.silent.add("a:1")
            await asyncio.sleep(6)
            at.network.silent.discard("a:1")
            await at.until(lambda: served(at, table), 3)


async def served(at: ModelCluster, table: int) -> bool:
    for one in await at.locate(table):
        await at.read(table, one.range.start)
    return True


async def test_a_drained_server_has_nothing_and_gets_nothing_until_it_is_taken_back() -> None:
    async with cluster("a:1", "b:1", "c:1") as world:
        table = await create(world)
        await fill(world, table)
        await world.ask(methods.DRAIN_SERVER, wire.DrainServerRequest(server="b:1"), 30)
        assert await addresses(world, table) == {"a:1": 3, "c:1": 3}
        assert await is_complete(world, table)
        await create(world, "u")
        await asyncio.sleep(20)
        assert "b:1" not in await addresses(world, table)
        await world.ask(methods.DRAIN_SERVER, wire.DrainServerRequest(server="b:1", undo=True))

        async def used_again() -> bool:
            return "b:1" in await addresses(world, table)

        await world.until(used_again, 60)


async def test_the_last_server_cannot_be_drained() -> None:
    async with cluster("a:1", "b:1") as world:
        await create(world)
        await world.ask(methods.DRAIN_SERVER, wire.DrainServerRequest(server="b:1"), 30)
        with pytest.raises(InvalidArgument) as caught:
            await world.ask(methods.DRAIN_SERVER, wire.DrainServerRequest(server="a:1"))
        assert caught.value.field == "server"
        servers = (await world.ask(methods.LIST_SERVERS, wire.ListServersRequest())).servers
        assert [(one.address, one.tablets, one.draining) for one in servers] == [
            ("a:1", 6, False),
            ("b:1", 0, True),
        ]


async def test_a_damaged_tablet_is_reported_and_the_others_serve_on() -> None:
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        damaged = (await world.locate(table))[0]
        world.store.tablets[damaged.tablet_id].damaged = True
        world.kill_server(damaged.address)
        await asyncio.sleep(5)
        listed = (await world.ask(methods.LIST_TABLETS, wire.ListTabletsRequest())).tablets
        assert [one.location.tablet_id for one in listed if not one.serving] == [damaged.tablet_id]
        (broken,) = [one for one in listed if not one.serving]
        assert "nothing there" in broken.error.message
        for location in (await world.locate(table))[1:]:
            assert await world.read(table, location.range.start) is None
        world.store.tablets[damaged.tablet_id].damaged = False

        async def repaired() -> bool:
            return await world.read(table, b"a") is None

        await world.until(repaired)


async def test_registering_observers_returns_when_every_tablet_judges_under_the_new_schema() -> (
    None
):
    async with cluster("a:1", "b:1") as world:
        table = await create(world)
        observer = wire.Observer(name="index", columns=[b"body"])
        request = wire.ChangeObserversRequest(table="t", add=[observer])
        changed = (await world.ask(methods.CHANGE_OBSERVERS, request)).table
        assert changed.schema_version == 2
        open_tablets = [one for server in world.servers.values() for one in server.open.values()]
        assert [one.schema_version for one in open_tablets] == [2] * 6
        # Whoever takes over judges under it too.
        world.kill_server("a:1")

        async def moved() -> bool:
            return set(await addresses(world, table)) == {"b:1"}

        await world.until(moved)
        await asyncio.sleep(1)
        assert {one.schema_version for one in world.servers["b:1"].open.values()} == {2}


async def test_a_paused_observer_is_told_to_everybody_and_the_schema_stays() -> None:
    async with cluster("a:1") as world:
        table = await create(world)
        observer = wire.Observer(name="index", columns=[b"body"])
        add = wire.ChangeObserversRequest(table="t", add=[observer])
        await world.ask(methods.CHANGE_OBSERVERS, add)
        for pause, resume in ((["index"], []), ([], ["index"])):
            change = wire.ChangeObserversRequest(table="t", pause=pause, resume=resume)
            changed = (await world.ask(methods.CHANGE_OBSERVERS, change)).table
            observer.paused = bool(pause)
            assert (changed.schema_version, list(changed.observers)) == (2, [observer])
            describe = wire.DescribeTableRequest(name="t")
            described = (await world.ask(methods.DESCRIBE_TABLE, describe)).table
            locate = wire.LocateTabletsRequest(table_id=table)
            located = await world.ask(methods.LOCATE_TABLETS, locate)
            assert list(described.observers) == list(located.observers) == [observer]
            assert located.schema_version == 2


async def test_while_a_server_is_silent_a_registration_waits_for_its_tablets_to_be_taken_over() -> (
    None
):
    async with cluster("a:1", "b:1") as world:
        await create(world)
        world.network.silent.add("b:1")
        started = world.clock.monotonic_seconds()
        observer = wire.Observer(name="index", columns=[b"body"])
        request = wire.ChangeObserversRequest(table="t", add=[observer])
        await world.ask(methods.CHANGE_OBSERVERS, request, 20)
        assert world.clock.monotonic_seconds() - started > LEASE_SECONDS - 0.5
        assert {one.schema_version for one in world.servers["a:1"].open.values()} == {2}
        assert len(world.servers["a:1"].open) == 6


async def test_a_tablet_that_cannot_be_opened_keeps_no_other_table_from_going() -> None:
    async with cluster("a:1", "b:1") as world:
        damaged, other = await create(world, "damaged"), await create(world, "other")
        lost = (await world.locate(damaged))[0]
        world.store.tablets[lost.tablet_id].damaged = True
        world.kill_server(lost.address)
        for name in ("damaged", "other"):
            await world.ask(methods.DELETE_TABLE, wire.DeleteTableRequest(name=name))
        leader = world.masters[0].master.leader
        assert leader is not None

        async def cleared() -> bool:
            return other not in leader.store.current.tables

        await world.until(cleared)
        assert damaged in leader.store.current.tables


async def test_a_deleted_table_is_gone_at_once_and_its_name_is_free() -> None:
    async with cluster("a:1") as world:
        table = await create(world)
        await world.ask(methods.DELETE_TABLE, wire.DeleteTableRequest(name="t"))
        with pytest.raises(SchemaError):
            await world.locate(table)
        with pytest.raises(SchemaError):
            await world.ask(methods.DELETE_TABLE, wire.DeleteTableRequest(name="t"))
        again = wire.DeleteTableRequest(name="t", missing_ok=True)
        assert not (await world.ask(methods.DELETE_TABLE, again)).deleted
        assert await create(world) != table
        await asyncio.sleep(5)
        assert {one.table_id for one in world.servers["a:1"].open.values()} == {table + 7}
