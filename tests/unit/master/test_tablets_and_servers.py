"""Which server serves which tablet, whatever happens to servers and masters.

The map remembers at which epoch each tablet was served last, and every order says so.

The next master knows who has left on purpose, as when a whole cluster is stopped and started.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import structlog

from percolator.errors import (
    DeadlineExceeded,
    NotReady,
    PercolatorError,
    SchemaError,
    Unavailable,
)
from percolator.services.chassis.coordinator import REASONS_MAX, Trouble
from percolator.services.master import tablet_changes
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.leader import Leader
from percolator.services.master.master import Master
from percolator.services.master.server_watch import (
    PROBATION_SECONDS_MAX,
    ServerState,
    ServerWatch,
    WatchTimes,
)
from percolator.v1 import cluster_pb2, oracle_pb2, tabletserver_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.wire import methods
from percolator.world import UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.master.cluster_world import (
    LEASE_SECONDS,
    ORACLE,
    SERVER,
    ModelCluster,
    addresses,
    cluster,
    create,
    created_and_filled,
    described,
    forget_that_it_is_served,
    has_tablets,
    is_complete,
    is_only_at,
    on_no_server,
    on_three_servers,
    on_two_servers,
    served,
)
from tests.unit.refusals import refused
from tests.unit.unary_network import UnaryNetwork


@on_three_servers
async def test_the_tablets_of_a_new_table_are_spread_over_all_servers(world: ModelCluster) -> None:
    assert await addresses(world, await create(world)) == {"a:1": 2, "b:1": 2, "c:1": 2}


@on_three_servers
async def test_a_killed_server_is_replaced_within_a_second(world: ModelCluster) -> None:
    table = await created_and_filled(world)
    world.kill_server("b:1")
    assert await world.until(lambda: is_complete(world, table)) < 1.0
    assert await addresses(world, table) == {"a:1": 3, "c:1": 3}


@on_two_servers
async def test_a_silent_server_is_replaced_when_its_lease_is_over_and_acknowledges_nothing(
    world: ModelCluster,
) -> None:
    table = await created_and_filled(world)
    old = await world.locate(table)
    silent = world.servers["b:1"]
    world.network.silent.add("b:1")
    # Clients that still reach it are served until another server owns the tablets.
    lost = [one for one in old if one.address == "b:1"]
    silent.write(lost[0], lost[0].range.start + b"x", b"acknowledged")

    seconds = await world.until(lambda: is_only_at(world, table, "a:1"))
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


@on_two_servers
@pytest.mark.parametrize("change", ["move", "split", "drain"])
async def test_a_server_that_falls_silent_while_its_tablets_change_is_replaced_as_soon(
    world: ModelCluster,
    change: str,
) -> None:
    """The change waits for its answer, and nobody else gives the tablet to a server meanwhile."""
    table = await created_and_filled(world, splits=[])
    (tablet,) = await world.locate(table)
    world.network.silent.add(tablet.address)
    changes: dict[str, Callable[[], Awaitable[object]]] = {
        "move": lambda: world.call(methods.MOVE_TABLET, tablet_id=tablet.tablet_id, seconds=60),
        "split": lambda: world.call(methods.SPLIT_TABLET, tablet_id=tablet.tablet_id, seconds=60),
        "drain": lambda: world.call(methods.DRAIN_SERVER, server=tablet.address, seconds=60),
    }
    changing = asyncio.ensure_future(changes[change]())

    async def moved() -> bool:
        return tablet.address not in await addresses(world, table)

    assert await world.until(moved) < LEASE_SECONDS + 1.5
    assert await world.until(lambda: is_complete(world, table)) < 1
    await asyncio.wait([changing])
    assert (changing.exception() is None) == (change != "split")


@on_three_servers
async def test_a_restarted_master_moves_nothing(world: ModelCluster) -> None:
    table = await create(world)
    before = await world.locate(table)
    world.kill_master(world.masters[0])
    await asyncio.sleep(5)
    world.start_master()
    await asyncio.sleep(10)
    assert await world.locate(table) == before


async def test_a_standby_locates_tablets_and_refers_changes_to_the_leader(
    world: ModelCluster,
) -> None:
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


async def test_a_server_that_restarts_at_its_address_gets_its_tablets_at_new_epochs(
    world: ModelCluster,
) -> None:
    table = await created_and_filled(world)
    world.kill_server("a:1")
    world.start_server("a:1")
    await world.until(lambda: is_complete(world, table))
    assert {one.epoch for one in await world.locate(table)} == {2}


@on_three_servers
async def test_when_all_servers_restart_they_share_the_tablets_whichever_is_first(
    world: ModelCluster,
) -> None:
    table = await created_and_filled(world)
    for address in ("a:1", "b:1", "c:1"):
        world.kill_server(address)
    await asyncio.sleep(2)
    for address in ("a:1", "b:1", "c:1"):
        world.start_server(address)
        await asyncio.sleep(0.05)
    await world.until(lambda: is_complete(world, table))
    assert await addresses(world, table) == {"a:1": 2, "b:1": 2, "c:1": 2}


@on_two_servers
async def test_a_tablet_that_cannot_be_opened_does_not_stop_others_from_being_moved(
    world: ModelCluster,
) -> None:
    table = await create(world)
    damaged = (await world.locate(table))[0]
    world.store.tablets[damaged.tablet_id].damaged = True
    world.kill_server(damaged.address)
    await asyncio.sleep(5)
    world.start_server("c:1")

    await world.until(lambda: has_tablets(world, table, "c:1", 2), 60)


@on_two_servers
async def test_epochs_in_the_store_far_above_those_of_the_map_are_overtaken_at_once(
    world: ModelCluster,
) -> None:
    """As after a damaged map, which is mended with that of an earlier leader."""
    table = await created_and_filled(world)
    for location in await world.locate(table):
        world.store.tablets[location.tablet_id].highest = 10_000
    world.kill_server("a:1")
    world.kill_server("b:1")
    world.start_server("c:1")
    await world.until(lambda: is_complete(world, table), LEASE_SECONDS + 2.0)
    assert {one.epoch for one in await world.locate(table)} == {10_001}


@on_two_servers
async def test_a_server_that_tells_of_an_epoch_beyond_all_does_not_end_the_master(
    world: ModelCluster,
) -> None:
    """The epoch after the highest number was to be written into the map, which cannot hold it."""
    table = await create(world, splits=[b"m"])
    wrong, right = await world.locate(table)
    world.store.tablets[wrong.tablet_id].highest = 2**64 - 1
    world.kill_server(wrong.address)
    await asyncio.sleep(LEASE_SECONDS + 5.0)
    still = (await world.locate(table))[1]
    assert still.tablet_id == right.tablet_id
    assert still.address in ("a:1", "b:1")
    await create(world, "another")  # the master leads, and assigns tablets


@on_three_servers
async def test_a_server_that_falls_silent_while_it_takes_over_is_replaced_in_time(
    world: ModelCluster,
) -> None:
    table = await created_and_filled(world)
    world.kill_server("a:1")
    # Orders for tablets that it is given now are never answered.
    world.network.silent.add("b:1")
    await world.until(lambda: is_complete(world, table), LEASE_SECONDS + 2.0)
    assert set(await addresses(world, table)) == {"c:1"}


@on_two_servers
@pytest.mark.parametrize(("lost", "seconds"), [(1, 2.0), (2, 4.0)])
async def test_an_order_to_open_that_is_lost_is_repeated_soon(
    world: ModelCluster, lost: int, seconds: float
) -> None:
    """Its server lives, so nobody else is given the tablet: clients wait for the next order."""
    table = await created_and_filled(world)
    world.network.losses["open_tablet"] = lost
    world.kill_server("b:1")
    assert await world.until(lambda: is_complete(world, table)) < seconds
    assert not world.network.losses["open_tablet"]


@on_two_servers
async def test_a_new_server_gets_its_share_and_then_nothing_more_moves(world: ModelCluster) -> None:
    table = await create(world, splits=[b"%02d" % n for n in range(1, 12)])
    world.start_server("c:1")

    await world.until(lambda: has_tablets(world, table, "c:1", 4), 60)
    assert await addresses(world, table) == {"a:1": 4, "b:1": 4, "c:1": 4}
    before = await world.locate(table)
    await asyncio.sleep(30)
    assert await world.locate(table) == before


@on_three_servers
async def test_the_tablets_of_a_server_that_can_dial_but_not_be_reached_move_once(
    world: ModelCluster,
) -> None:
    """It registers every second, is watched, and then does not answer."""
    table = await create(world)
    world.network.dial_out.add("a:1")
    world.network.silent.add("a:1")
    await asyncio.sleep(10)
    after = await world.locate(table)
    assert {one.address for one in after} == {"b:1", "c:1"}
    await asyncio.sleep(120)
    assert await world.locate(table) == after


@on_three_servers
async def test_a_server_that_comes_and_goes_is_given_tablets_less_and_less_often(
    world: ModelCluster,
) -> None:
    """Each time, clients would wait for the tablets that it had got."""
    table = await create(world)
    epochs = [6]
    for _ in range(20):
        world.network.silent.add("a:1")
        await asyncio.sleep(6)
        world.network.silent.discard("a:1")
        await asyncio.sleep(9)
        epochs.append(sum(one.epoch for one in await world.locate(table)))
    takeovers = [after - before for before, after in pairwise(epochs)]
    assert takeovers[0] > 0
    assert sum(map(bool, takeovers)) <= 5, takeovers
    # Once it is steady, it gets its share again.
    await asyncio.sleep(90)
    assert "a:1" in {one.address for one in await world.locate(table)}


async def test_a_server_that_comes_and_goes_is_used_if_there_is_no_other(
    world: ModelCluster,
) -> None:
    table = await create(world)
    for _ in range(5):
        world.network.silent.add("a:1")
        await asyncio.sleep(6)
        world.network.silent.discard("a:1")
        await world.until(lambda: served(world, table), 3)


@on_three_servers
async def test_a_drained_server_has_and_gets_no_tablets_until_the_drain_is_undone(
    world: ModelCluster,
) -> None:
    table = await created_and_filled(world)
    await world.call(methods.DRAIN_SERVER, server="b:1", seconds=30)
    assert await addresses(world, table) == {"a:1": 3, "c:1": 3}
    assert await is_complete(world, table)
    await create(world, "u")
    await asyncio.sleep(20)
    assert "b:1" not in await addresses(world, table)
    await world.call(methods.DRAIN_SERVER, server="b:1", undo=True)

    await world.until(lambda: has_tablets(world, table, "b:1", 1), 60)


@on_two_servers
@pytest.mark.parametrize("number", [1, 2])
async def test_drains_wait_for_tablets_that_are_just_being_split_or_moved_and_for_each_other(
    world: ModelCluster, number: int
) -> None:
    """One failed at once, and a server that was being stopped closed its tablets instead. So did
    two, as when an operator drains a server that is stopped: both took the same tablet."""
    table = await created_and_filled(world)
    leader = world.leader
    held = [one.tablet_id for one in await world.locate(table) if one.address == "b:1"]
    for tablet_id in held:
        leader.assignment.hold(tablet_id)
        asyncio.get_running_loop().call_later(2.0, leader.assignment.let_go, tablet_id)
    deadline = world.clock.monotonic_seconds() + 30
    drains = (leader.changes.drain("b:1", undo=False, deadline=deadline) for _ in range(number))
    await asyncio.gather(*drains)
    assert await addresses(world, table) == {"a:1": 6}


async def test_that_a_server_is_drained_is_forgotten_only_when_it_is_gone_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every server that is stopped is drained, so the map would grow with each restart."""
    monkeypatch.setattr(tablet_changes, "_LOOK_SECONDS", 1.0)  # an hour takes a minute
    async with cluster("a:1", "b:1", "c:1") as world:
        leader = world.leader
        for address in ("b:1", "c:1"):
            await world.call(methods.DRAIN_SERVER, server=address, seconds=30)
        returns = world.servers["b:1"].server_id
        world.kill_server("c:1")
        world.network.silent.add("b:1")
        await asyncio.sleep(40)
        assert len(leader.store.current.draining) == 2
        world.network.silent.discard("b:1")
        await asyncio.sleep(60)
        assert leader.store.current.draining == {returns}


@on_two_servers
async def test_the_last_server_cannot_be_drained(world: ModelCluster) -> None:
    await create(world)
    await world.call(methods.DRAIN_SERVER, server="b:1", seconds=30)
    with refused("server"):
        await world.call(methods.DRAIN_SERVER, server="a:1")
    servers = (await world.call(methods.LIST_SERVERS)).servers
    assert [(one.address, one.tablets, one.draining) for one in servers] == [
        ("a:1", 6, False),
        ("b:1", 0, True),
    ]


@on_two_servers
async def test_a_damaged_tablet_is_reported_and_the_others_stay_served(world: ModelCluster) -> None:
    table = await create(world)
    damaged = (await world.locate(table))[0]
    world.store.tablets[damaged.tablet_id].damaged = True
    world.kill_server(damaged.address)
    await asyncio.sleep(5)
    listed = (await world.call(methods.LIST_TABLETS)).tablets
    (broken,) = [one for one in listed if not one.serving]
    assert broken.location.tablet_id == damaged.tablet_id
    assert "nothing there" in broken.error.message
    for location in (await world.locate(table))[1:]:
        assert await world.read(table, location.range.start) is None
    world.store.tablets[damaged.tablet_id].damaged = False

    await world.until(lambda: served(world, table))


@on_two_servers
async def test_a_tablet_that_one_server_cannot_open_is_opened_at_once_by_the_next(
    world: ModelCluster,
) -> None:
    """However long the pause has become after which the former one would be ordered again."""
    table = await create(world)
    world.servers["a:1"].opens_nothing = True
    await asyncio.sleep(60)
    moved = [one for one in await world.locate(table) if one.address == "a:1"]
    assert moved
    for tablet in moved:
        await world.call(methods.MOVE_TABLET, tablet_id=tablet.tablet_id, server="b:1", seconds=0.5)


async def test_failures_before_a_server_has_opened_a_tablet_by_itself_are_forgotten(
    world: ModelCluster,
) -> None:
    """As when its disk works again."""
    table = await create(world)
    leader = world.leader
    tablets, assignment = leader.store.current.of_tables[table], leader.assignment
    world.servers["a:1"].opens_nothing = True
    await asyncio.sleep(60)
    assert all(map(assignment.is_broken, tablets))
    world.servers["a:1"].opens_nothing = False
    await asyncio.sleep(1)
    assert not any(map(assignment.is_broken, tablets))
    assert not assignment.errors


@on_two_servers
async def test_a_tablet_that_cannot_be_opened_does_not_keep_other_tables_alive(
    world: ModelCluster,
) -> None:
    damaged, other = await create(world, "damaged"), await create(world, "other")
    lost = (await world.locate(damaged))[0]
    world.store.tablets[lost.tablet_id].damaged = True
    world.kill_server(lost.address)
    with pytest.raises(DeadlineExceeded):
        await world.call(methods.DELETE_TABLE, name="damaged", seconds=90)
    await world.call(methods.DELETE_TABLE, name="other")
    leader = world.leader

    async def cleared() -> bool:
        return other not in leader.store.current.tables

    await world.until(cleared)
    assert damaged in leader.store.current.tables


async def test_a_deleted_table_disappears_at_once_and_its_name_is_free(world: ModelCluster) -> None:
    table = await create(world)
    await world.call(methods.DELETE_TABLE, name="t")
    with pytest.raises(SchemaError):
        await world.locate(table)
    with pytest.raises(SchemaError):
        await world.call(methods.DELETE_TABLE, name="t")
    assert not (await world.call(methods.DELETE_TABLE, name="t", missing_ok=True)).deleted
    assert await create(world) != table
    await asyncio.sleep(5)
    assert {one.table_id for one in world.servers["a:1"].open.values()} == {table + 7}


NOTED_SECONDS = 2.0


async def moved(world: ModelCluster, table: int) -> int:
    """A tablet that was served at epoch 2, of which the map has taken note."""
    (only,) = await world.locate(table)
    await world.call(methods.MOVE_TABLET, tablet_id=only.tablet_id)
    await asyncio.sleep(NOTED_SECONDS)
    return only.tablet_id


@on_two_servers
async def test_a_tablet_whose_newest_epoch_is_lost_is_not_served_from_an_older_one(
    world: ModelCluster,
) -> None:
    table = await created_and_filled(world, splits=[])
    tablet = await moved(world, table)
    stored = world.store.tablets[tablet]
    stored.highest = 1
    (location,) = await world.locate(table)
    world.kill_server(location.address)
    await asyncio.sleep(5.0)
    with pytest.raises(PercolatorError):
        await served(world, table)
    (listed,) = (await world.call(methods.LIST_TABLETS)).tablets
    assert "only older epochs are there" in listed.error.message
    stored.highest = 2
    await world.until(lambda: is_complete(world, table))


@on_two_servers
async def test_the_next_master_knows_it_too(world: ModelCluster) -> None:
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


@on_two_servers
async def test_a_move_keeps_what_is_noted_while_its_tablet_is_closed(
    world: ModelCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = await create(world, splits=[])
    (only,) = await world.locate(table)
    store, assignment = world.leader.store, world.leader.assignment
    forget_that_it_is_served(world, only.tablet_id)
    correct = assignment.close

    async def close(address: str, tablet_id: int, epoch: int) -> None:
        await assignment.note_served()
        await correct(address, tablet_id, epoch)

    monkeypatch.setattr(assignment, "close", close)
    world.network.losses["open_tablet"] = 1
    moving = asyncio.create_task(world.call(methods.MOVE_TABLET, tablet_id=only.tablet_id))
    await asyncio.sleep(0.1)
    given = store.current.tablets[only.tablet_id]
    assert given.epoch == only.epoch + 1
    assert (given.exists, given.served_epoch) == (True, only.epoch)
    await moving


@on_two_servers
async def test_many_tablets_of_a_dead_server_are_noted_with_few_changes_of_the_map(
    world: ModelCluster,
) -> None:
    splits = [bytes([letter]) for letter in range(1, 100)]
    table = await create(world, splits=splits)
    await asyncio.sleep(NOTED_SECONDS)
    store = world.leader.store
    before = store.changes
    world.kill_server("a:1")
    await world.until(lambda: served(world, table))
    await asyncio.sleep(NOTED_SECONDS)
    assert all(one.served_epoch == one.epoch for one in store.current.tablets.values())
    assert store.changes - before <= 5


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


@on_no_server
async def test_who_has_left_on_purpose_is_not_missed_by_the_next_master(
    world: ModelCluster,
) -> None:
    """Masters are stopped last, right after the others have said that they leave."""
    leaves, dies = gateway("leaves"), gateway("dies")
    world.parts += [leaves, dies]
    await asyncio.sleep(5)
    world.parts.remove(leaves)
    world.parts.remove(dies)
    leaves.leaving = True
    await world.masters[0].master.registered(leaves, 0)
    assert await missed_by_the_next_master(world) == ["dies"]


@on_no_server
async def test_who_has_come_back_and_then_dies_is_missed_by_the_next_master(
    world: ModelCluster,
) -> None:
    returns = gateway("returns")
    returns.leaving = True
    await world.masters[0].master.registered(returns, 0)
    returns.leaving = False
    world.parts.append(returns)
    await asyncio.sleep(5)
    world.parts.remove(returns)
    assert await missed_by_the_next_master(world) == ["returns"]


@on_no_server
async def test_the_next_master_leads_even_if_it_may_list_fewer_servers_than_there_are(
    world: ModelCluster,
) -> None:
    """Its `--servers-max` was lowered: each master that began to lead ended with an error."""
    world.parts += [gateway("a"), gateway("b")]
    await asyncio.sleep(5)
    world.kill_master(world.masters[0])
    master = world.start_master(servers_max=2).master
    await world.until(lambda: _leads(master))
    await asyncio.sleep(5)
    assert len(master.registry.servers()) == 2


async def _leads(master: Master[ClusterMap, Leader]) -> bool:
    return master.leader is not None and not master.leader.is_over


# The watch over tablet servers, whatever they do and however long.

LOSSES = 1_100
"""With so many doublings, a number does not fit into a float."""


class OneServer(UnaryNetwork):
    """A tablet server that refuses connections while it is down."""

    up = True

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> tabletserver_pb2.ReportResponse:
        if not self.up:
            raise Unavailable("refused", where=address)
        return tabletserver_pb2.ReportResponse(server_id="a")


async def test_a_server_that_was_lost_a_thousand_times_is_still_put_on_probation() -> None:
    network = OneServer()
    world = World(VirtualClock(asyncio.get_running_loop()), network, Random(1))
    watch = ServerWatch(world, WatchTimes(), lambda: None, newest_timestamp=lambda: 0)

    async def until(state: ServerState) -> None:
        while watch.servers["a"].state is not state:
            watch.tick()
            await asyncio.sleep(0.1)

    for _ in range(LOSSES):
        network.up = True
        watch.watch("a", "a:1")
        await until(ServerState.ALIVE)
        network.up = False
        await until(ServerState.DEAD)
    network.up = True
    watch.watch("a", "a:1")
    await until(ServerState.ALIVE)
    assert watch.steady() == []
    for _ in range(int(PROBATION_SECONDS_MAX / 0.1) + 2):
        watch.tick()
        await asyncio.sleep(0.1)
    assert [one.server_id for one in watch.steady()] == ["a"]
    await watch.close()


async def test_a_call_that_fails_as_its_caller_is_cancelled_is_not_reported_as_unheard() -> None:
    world = World(VirtualClock(asyncio.get_running_loop()), OneServer(), Random(1))
    watch = ServerWatch(world, WatchTimes(), lambda: None, newest_timestamp=lambda: 0)
    call = asyncio.get_running_loop().create_future()
    caller = asyncio.ensure_future(watch.answer("a", call))
    await asyncio.sleep(0)
    call.set_exception(NotReady("this process no longer leads"))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await watch.close()


# What goes wrong again and again is logged when it begins and when it ends, not each time.


def events(log: Sequence[Mapping[str, object]]) -> Counter[object]:
    return Counter(entry["event"] for entry in log)


def test_a_trouble_is_logged_with_each_new_reason_and_when_it_comes_back() -> None:
    trouble = Trouble(structlog.get_logger(), "broken", "works", part="a")
    with structlog.testing.capture_logs() as log:
        trouble.is_over()
        for reason in ("full", "full", "gone", "full", "gone"):
            trouble.lasts(OSError(reason))
        trouble.is_over()
        trouble.is_over()
        trouble.lasts(OSError("gone"))
    assert [(entry["event"], entry.get("error"), entry["part"]) for entry in log] == [
        ("broken", "full", "a"),
        ("broken", "gone", "a"),
        ("works", None, "a"),
        ("broken", "gone", "a"),
    ]


def test_a_trouble_whose_reason_is_another_each_time_does_not_fill_the_log() -> None:
    trouble = Trouble(structlog.get_logger(), "broken")
    with structlog.testing.capture_logs() as log:
        for attempt in range(1_000):
            trouble.lasts(f"no answer to attempt {attempt}")
    assert len(log) == REASONS_MAX


async def test_a_master_without_an_oracle_names_each_of_two_once(world: ModelCluster) -> None:
    """Whichever it has asked last when its time is up: it wrote a line every few seconds."""
    other = cluster_pb2.Server(server_id="oracle:2", address="oracle:2")
    other.MergeFrom(cluster_pb2.Server(kind=SERVER.kind, version=SERVER.version))
    world.parts.append(other)
    await asyncio.sleep(3)
    del world.network.handlers[ORACLE]
    with structlog.testing.capture_logs() as log:
        await asyncio.sleep(600)
    assert events(log)["the oracle does not answer this master"] == 2


async def test_masters_on_a_full_disk_do_not_fill_it_with_their_logs(world: ModelCluster) -> None:
    """Each of them tries to lead, and to show that it lives, several times a second."""
    world.start_master()
    table = await create(world)
    await asyncio.sleep(3)
    for process in world.masters:
        for operation in ("append", "create"):
            process.files.faults.fail(operation, times=10**9, number=errno.ENOSPC)
    with structlog.testing.capture_logs() as log:
        await asyncio.sleep(60)
        found = events(log)
        assert found["this master cannot lead"] == 2
        assert found.total() < 10, found
        for process in world.masters:
            process.files.faults.heal()
        await world.until(lambda: served(world, table))
        await asyncio.sleep(1)
    assert events(log)["session renewed again"] == 2


async def test_one_master_on_a_full_disk_does_not_fill_it_with_its_logs(
    world: ModelCluster,
) -> None:
    """It leads on, since no other one does, and servers come and go meanwhile."""
    await create(world)
    await asyncio.sleep(3)
    faults = world.masters[0].files.faults
    for operation in ("append", "create"):
        faults.fail(operation, times=10**9, number=errno.ENOSPC)
    with structlog.testing.capture_logs() as log:
        world.start_server("b:1")
        await asyncio.sleep(600)
    assert events(log)["the list of servers for standbys was not stored"] == 1


async def test_a_tablet_that_cannot_be_opened_is_logged_once_and_when_it_is_open(
    world: ModelCluster,
) -> None:
    """It is tried again every few seconds, for as long as it takes to repair it."""
    table = await create(world)
    with structlog.testing.capture_logs() as log:
        for stored in world.store.tablets.values():
            stored.unreadable = True
        world.kill_server("a:1")
        world.start_server("a:1")
        await asyncio.sleep(60)
        assert events(log)["tablet not opened"] == len(world.store.tablets)
        for stored in world.store.tablets.values():
            stored.unreadable = False
        await world.until(lambda: served(world, table))
        await asyncio.sleep(1)
    assert events(log)["tablet opened"] == len(world.store.tablets)


# When a table was created, by the oracle's time: above all that may have read its predecessor.


async def create_once(world: ModelCluster, *, exist_ok: bool = False) -> pb.Table:
    return (await world.call(methods.CREATE_TABLE, name="t", exist_ok=exist_ok, seconds=30.0)).table


async def drop(world: ModelCluster) -> None:
    await world.call(methods.DELETE_TABLE, name="t")


async def test_a_table_is_younger_than_all_snapshots_taken_before_its_creation(
    world: ModelCluster,
) -> None:
    before = world.oracle.now()
    created = await create_once(world)
    assert before < created.created_at <= world.oracle.now()
    assert (await described(world)).created_at == created.created_at
    assert (await create_once(world, exist_ok=True)).created_at == created.created_at


async def test_a_new_leader_knows_how_old_tables_are(world: ModelCluster) -> None:
    created = await create_once(world)
    world.replace_master()

    async def is_known() -> bool:
        found = await world.call(methods.LIST_TABLES)
        return [one.created_at for one in found.tables] == [created.created_at]

    await world.until(is_known)


async def test_a_timestamp_from_before_the_last_deletion_is_not_used(world: ModelCluster) -> None:
    """While it was fetched, the table was created by another caller, used, and dropped again."""
    answer = world.oracle.get_timestamps
    held, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(
        request: oracle_pb2.GetTimestampsRequest,
    ) -> oracle_pb2.GetTimestampsResponse:
        old = await answer(request)
        held.set()
        await go_on.wait()
        return old

    leader = world.leader
    world.oracle.get_timestamps = slowly  # type: ignore[method-assign]
    creating = asyncio.create_task(create_once(world))
    await held.wait()
    current, _ = leader.store.current.with_new_table("t", [], 0, 0)
    await leader.store.change(lambda _: (current, None))
    snapshot = world.oracle.now()
    await drop(world)
    world.oracle.get_timestamps = answer  # type: ignore[method-assign]
    go_on.set()
    assert (await creating).created_at > snapshot


async def test_without_an_oracle_no_table_is_created_but_an_existing_one_is_found(
    world: ModelCluster,
) -> None:
    created = await create_once(world)
    world.network.silent.add(ORACLE)
    assert (await create_once(world, exist_ok=True)).table_id == created.table_id
    await drop(world)
    request = pb.CreateTableRequest(name="t")
    with pytest.raises(NotReady, match="the oracle"):
        await world.network.unary(world.masters[0].address, methods.CREATE_TABLE)(request, 5.0)
    with pytest.raises(SchemaError):
        await described(world)


# The leading master asks the oracle for the time, and passes it on to the tablet servers.

SECOND = 1_000 << 18


def reports_heard(world: ModelCluster) -> list[int]:
    """The timestamp of each report that some server is asked for from now on."""
    heard: list[int] = []
    for server in world.servers.values():
        report = server.report

        async def listening(
            request: tablets.ReportRequest, report: Any = report
        ) -> tablets.ReportResponse:
            heard.append(request.newest_timestamp)
            answer: tablets.ReportResponse = await report(request)
            return answer

        server.report = listening  # type: ignore[method-assign]
    return heard


@on_two_servers
async def test_every_report_carries_a_timestamp_that_is_hardly_older_than_a_second(
    world: ModelCluster,
) -> None:
    heard = reports_heard(world)
    await asyncio.sleep(5)
    assert len(heard) >= 20
    assert min(heard) >= world.oracle.now() - 7 * SECOND
    assert max(heard) >= world.oracle.now() - 2 * SECOND


@on_two_servers
async def test_the_leader_describes_how_far_timestamps_are_from_its_clock(
    world: ModelCluster,
) -> None:
    master = world.masters[0].master
    clock = world.clock
    lead = master.timestamp_lead_milliseconds
    assert lead is not None
    assert abs((world.oracle.now() >> 18) - clock.wall_milliseconds() - lead) < 100
    clock.set_wall_back(3_600_000)
    after = master.timestamp_lead_milliseconds
    assert after is not None
    assert abs(after - lead - 3_600_000) < 100


@on_two_servers
async def test_while_the_oracle_is_silent_servers_are_told_what_was_heard_last(
    world: ModelCluster,
) -> None:
    world.parts[:] = [one for one in world.parts if one.kind != cluster_pb2.SERVICE_KIND_ORACLE]
    world.network.handlers.pop("oracle:1")
    await asyncio.sleep(3)
    heard = reports_heard(world)
    await asyncio.sleep(1)
    assert len(set(heard)) == 1
    assert heard[0] > 0


@on_two_servers
async def test_the_epoch_is_raised_above_what_any_client_has_seen(world: ModelCluster) -> None:
    """Also above what this master has not heard of: another may have led meanwhile."""
    world.oracle.epoch, world.oracle.refusals = 41, 2
    await world.leader.oracle_time.raise_epoch(world.clock.monotonic_seconds() + 10)
    assert (world.oracle.epoch, world.oracle.refusals) == (42, 0)


@on_two_servers
async def test_whoever_waits_for_the_epoch_is_told_that_it_was_not_raised(
    world: ModelCluster,
) -> None:
    world.oracle.refusals = 1_000
    with pytest.raises(NotReady, match=r"not told of the change: .*another oracle leads"):
        await world.leader.oracle_time.raise_epoch(world.clock.monotonic_seconds() + 3)
    assert world.oracle.epoch == 0
