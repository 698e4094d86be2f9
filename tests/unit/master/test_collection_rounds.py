"""A round of collection: in the right order, with every tablet and session, or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from percolator.errors import InvalidArgument, NotReady, Unavailable
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.services.master.collection import Collection, OracleTime
from percolator.services.master.tablet_collection import TabletCollecting
from percolator.v1 import cluster_pb2
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.wire.roles import Role
from tests.unit.master.cluster_world import cluster
from tests.unit.master.history_world import (
    LOCK_SERVICE,
    RETENTION_SECONDS,
    TIMES,
    TTL_SECONDS_MAX,
    HistoryWorld,
    history_cluster,
)

HELD_SECONDS_MAX = 300.0
LIMITED = replace(TIMES, client_held_seconds_max=HELD_SECONDS_MAX)


def order_of(log: list[str]) -> list[str]:
    """The kinds of events in order, with repetitions in a row merged."""
    kinds = [entry.split()[0] for entry in log]
    return [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]


async def failed_round(world: HistoryWorld, error: type[Exception], match: str) -> None:
    """Runs a round that fails before it raises any safe point."""
    with pytest.raises(error, match=match):
        await world.collect()
    assert order_of(world.log) in ([], ["sessions"])


async def test_sessions_are_read_twice_then_all_tablets_raised_settled_and_collected() -> None:
    async with history_cluster() as world:
        tablets = await world.create("t", [b"m"]) + await world.create("u")
        await world.collect()
        assert order_of(world.log) == ["sessions", "raise", "resolve", "collect"]
        assert world.log.count("sessions") == 2
        for step in ("raise", "resolve", "collect"):
            assert {f"{step} {tablet}" for tablet in tablets} <= set(world.log)
        collected = {world.history.collected[tablet] for tablet in tablets}
        assert len(collected) == 1
        assert abs(collected.pop() - world.ago(RETENTION_SECONDS)) < world.ago(0) - world.ago(1)


async def test_each_table_keeps_its_retention_and_no_transaction_below_any_continues() -> None:
    async with history_cluster() as world:
        (short,) = await world.create("short", retention_seconds=20)
        (long,) = await world.create("long", retention_seconds=500)
        await world.collect()
        assert world.history.reads[long] < world.ago(499) < world.history.reads[short]
        assert world.history.transactions[long] == world.history.reads[short]


async def test_history_that_a_session_needs_stays_and_the_session_is_named() -> None:
    async with history_cluster() as world:
        (tablet,) = await world.create("t")
        needed = world.ago(RETENTION_SECONDS + 50)
        world.lock_service.need(needed, "a long report")
        world.lock_service.need(world.ago(1), "somebody else")
        await world.collect()
        assert world.history.collected[tablet] == needed
        told = await world.describe()
        assert (told.held_by, told.held_by_session_id) == ("a long report", b"a long report")
        assert told.held_at == needed
        assert [table.safe_point for table in told.tables] == [needed]
        world.lock_service.sessions.clear()
        await world.collect()
        assert not (await world.describe()).held_by
        assert world.history.collected[tablet] > needed


async def test_only_operators_are_told_the_id_with_which_a_session_can_be_ended() -> None:
    async with history_cluster() as world:
        await world.create("t")
        needed = world.ago(RETENTION_SECONDS + 50)
        world.lock_service.need(needed, "a long report")
        await world.collect()
        client = rpc._caller.set(CallerIdentity(Role.CLIENT))
        try:
            told = await world.describe()
        finally:
            rpc._caller.reset(client)
        assert (told.held_by, told.held_by_session_id) == ("a long report", b"")
        assert told.held_at == needed


async def test_a_session_that_needs_only_retained_history_holds_nothing_back() -> None:
    async with history_cluster() as world:
        await world.create("t")
        world.lock_service.need(world.ago(RETENTION_SECONDS - 10), "recent")
        await world.collect()
        assert not (await world.describe()).held_by


async def test_a_pin_that_comes_after_the_decision_wins() -> None:
    async with history_cluster() as world:
        (tablet,) = await world.create("t")
        pinned = world.ago(RETENTION_SECONDS + 50)

        def pin_at_the_second_look() -> None:
            if world.log.count("sessions") == 2:
                world.lock_service.need(pinned, "a pin")

        world.lock_service.before_answer = pin_at_the_second_look
        await failed_round(world, NotReady, "a pin needs history")
        assert tablet not in world.history.reads
        told = await world.describe()
        assert told.held_by == "a pin"
        # The pin also wins in later rounds, although the decision stands.
        await failed_round(world, NotReady, "a pin needs history")
        world.lock_service.sessions.clear()
        world.lock_service.before_answer = lambda: None
        await world.collect()
        assert world.history.collected[tablet] > pinned


async def test_collection_stops_where_a_pin_came_too_late_and_continues_elsewhere() -> None:
    async with history_cluster() as world:
        (short,) = await world.create("short", retention_seconds=20)
        (long,) = await world.create("long", retention_seconds=500)
        await world.collect()
        before = world.history.reads[short]
        world.lock_service.need(pinned := world.ago(60), "a pin")
        await asyncio.sleep(600)
        await world.collect()
        assert world.history.reads[short] == world.history.collected[short] == before
        assert world.history.collected[long] == pinned
        # Transactions that began after the pin can continue in all tables.
        assert world.history.transactions[long] <= max(before, pinned)


async def test_nothing_is_raised_unless_all_sessions_are_known() -> None:
    async with history_cluster() as world:
        await world.create("t")
        world.lock_service.settling = True
        await failed_round(world, NotReady, "sessions may still report")
        world.lock_service.settling = False
        world.models.network.silent.add(LOCK_SERVICE)
        with pytest.raises(Exception, match="does not answer"):
            await world.collect()
        assert "raise" not in order_of(world.log)


async def replace_lock_service(world: HistoryWorld) -> None:
    """The lock service is replaced by another one, to which the same sessions report."""
    other = cluster_pb2.Server(
        kind=cluster_pb2.SERVICE_KIND_LOCK_SERVICE,
        server_id="other",
        address="other:1",
        version="0.1.0",
    )
    world.models.network.handlers["other:1"] = (world.lock_service,)
    world.models.parts[-1] = other

    async def noticed() -> bool:
        registry = world.models.masters[0].master.registry
        registry.forget_silent()
        known = {one.address for one in registry.servers()}
        return "other:1" in known and LOCK_SERVICE not in known

    await world.models.until(noticed)


async def test_sessions_of_a_lost_lock_service_get_time_to_report_elsewhere() -> None:
    async with history_cluster() as world:
        await world.create("t")
        await world.collect()
        # Long after the last round, in which it was still registered.
        await asyncio.sleep(10 * TTL_SECONDS_MAX)
        await replace_lock_service(world)
        await failed_round(world, NotReady, "locks:1 is gone")
        await asyncio.sleep(TTL_SECONDS_MAX - 1)
        await failed_round(world, NotReady, "locks:1 is gone")
        await asyncio.sleep(1)
        await world.collect()


async def test_a_new_leader_gives_sessions_of_an_unknown_lost_lock_service_time_to_report() -> None:
    async with history_cluster() as world:
        await world.create("t")
        world.models.kill_master(world.models.masters[0])
        world.models.start_master()

        async def leads() -> bool:
            return bool((await world.describe()).tables)

        await world.models.until(leads)
        await failed_round(world, NotReady, "just begun to lead")
        await asyncio.sleep(TTL_SECONDS_MAX)
        await world.collect()


async def test_a_tablet_that_has_not_acknowledged_stops_the_round_before_any_lock_is_settled() -> (
    None
):
    async with history_cluster() as world:
        _, second = await world.create("t", [b"m"])
        world.history.failing.add(second)
        with pytest.raises(Unavailable):
            await world.collect()
        assert not {"resolve", "collect"} & set(order_of(world.log))
        world.history.failing.clear()
        await world.collect()
        assert second in world.history.collected


async def test_a_tablet_made_by_a_split_during_the_round_is_raised_and_settled_too() -> None:
    async with history_cluster("a:1") as world:
        (whole,) = await world.create("t")
        # The model splits in the middle of its rows.
        for row in (b"a", b"b", b"y", b"z"):
            await world.models.write(1, row, b"value")
        splitting: list[asyncio.Task[pb.SplitTabletResponse]] = []

        def split() -> None:
            if not splitting:
                request = pb.SplitTabletRequest(tablet_id=whole, row=b"m")
                splitting.append(
                    asyncio.create_task(world.models.ask(methods.SPLIT_TABLET, request))
                )

        world.history.after_raise = split
        try:
            await world.collect()
        except (NotReady, Unavailable):
            # Its tablets were not served yet: the next round succeeds.
            assert "collect" not in order_of(world.log)
        done = await splitting[0]
        await world.collect()
        for tablet in (done.lower.tablet_id, done.upper.tablet_id):
            at = [world.log.index(f"{step} {tablet}") for step in ("raise", "resolve", "collect")]
            assert at == sorted(at)


async def test_an_old_lock_of_a_dead_owner_is_rolled_back_before_anything_is_collected() -> None:
    async with history_cluster() as world:
        (tablet,) = await world.create("t")
        world.lock(tablet, 1, world.ago(RETENTION_SECONDS + 5), b"gone")
        await world.collect()
        assert not world.history.locks[tablet]
        assert world.collection.old_locks_resolved == 1


async def test_an_old_lock_is_rolled_back_although_its_owner_is_alive() -> None:
    """Otherwise, whoever keeps a session alive could stop the collection of the whole cluster."""
    async with history_cluster() as world:
        (tablet,) = await world.create("t")
        world.lock(tablet, 1, world.ago(RETENTION_SECONDS + 5), b"alive", ttl_milliseconds=10**9)
        # Its owner does not say which history it needs.
        info = locks.SessionInfo(description="x", ttl_milliseconds=3_000)
        world.lock_service.sessions.append(locks.Session(session_id=b"alive", info=info))
        await world.collect()
        assert not world.history.locks[tablet]
        assert world.history.collected[tablet] > 0


async def test_old_history_is_held_back_for_so_long_and_no_longer() -> None:
    async with history_cluster(times=LIMITED) as world:
        (tablet,) = await world.create("t")
        held = HELD_SECONDS_MAX
        world.lock_service.need(within := world.ago(RETENTION_SECONDS + held - 20), "within")
        await world.collect()
        assert world.history.collected[tablet] == within
        told = await world.describe()
        assert told.held_by == "within"
        assert abs(told.held_milliseconds / 1000 - (held - 20)) < 5
        assert abs(world.collection.held_seconds - (held - 20)) < 5
        world.lock_service.sessions.clear()
        world.lock_service.need(world.ago(RETENTION_SECONDS + held + 20), "beyond")
        await world.collect()
        assert world.history.collected[tablet] > world.ago(RETENTION_SECONDS + 10)
        told = await world.describe()
        assert (told.held_by, told.held_milliseconds) == ("", 0)


async def test_the_limit_counts_from_the_longest_retention_of_all_tables() -> None:
    async with history_cluster(times=LIMITED) as world:
        (tablet,) = await world.create("t")
        await world.create("long", retention_seconds=400)
        held = HELD_SECONDS_MAX
        world.lock_service.need(needed := world.ago(400 + held - 20), "a report")
        await world.collect()
        assert world.history.collected[tablet] == needed


async def test_a_pin_of_an_administrator_has_a_limit_of_its_own() -> None:
    async with history_cluster(times=LIMITED) as world:
        (tablet,) = await world.create("t")
        held = HELD_SECONDS_MAX
        world.lock_service.need(needed := world.ago(RETENTION_SECONDS + 2 * held), "an archive")
        world.lock_service.of_admins.add(b"an archive")
        await world.collect()
        assert world.history.collected[tablet] == needed, "there is none unless it is set"
    times = replace(LIMITED, admin_held_seconds_max=200.0)
    async with history_cluster(times=times) as world:
        (tablet,) = await world.create("t")
        world.lock_service.need(world.ago(RETENTION_SECONDS + 220), "an archive")
        world.lock_service.of_admins.add(b"an archive")
        await world.collect()
        assert world.history.collected[tablet] > world.ago(RETENTION_SECONDS + 10)


async def test_a_transaction_that_began_at_the_safe_point_itself_is_left_alone() -> None:
    async with history_cluster() as world:
        (tablet,) = await world.create("t")
        start = world.ago(RETENTION_SECONDS + 5)
        world.lock_service.need(start, "its owner")
        world.lock(tablet, 1, start, b"its owner")
        await world.collect()
        assert world.history.locks[tablet]
        assert world.history.collected[tablet] == start


async def test_a_new_leader_knows_the_safe_points_and_never_lowers_them() -> None:
    async with history_cluster() as world:
        (tablet,) = await world.create("t")
        await world.collect()
        before = world.collection.safe_points
        world.models.kill_master(world.models.masters[0])
        world.models.start_master()

        async def told_again() -> bool:
            told = await world.describe()
            return [one.safe_point for one in told.tables] == list(before.reads.values())

        await world.models.until(told_again)
        # A need for history that is gone already changes nothing.
        world.lock_service.need(world.ago(RETENTION_SECONDS + 500), "too late")
        await asyncio.sleep(TTL_SECONDS_MAX)
        await failed_round(world, NotReady, "too late needs history")
        assert world.collection.safe_points == before
        assert world.history.reads[tablet] == before.reads[1]


async def test_a_leader_that_has_not_read_the_safe_points_yet_does_not_report_them() -> None:
    async with cluster("a:1", times=TIMES) as models:
        leader = models.masters[0].master.leader
        assert leader is not None
        registry = models.masters[0].master.registry
        oracle_time = OracleTime(models.world, registry)
        collecting = partial(TabletCollecting, models.world, leader.store)
        begun = Collection(models.world, leader.store, registry, oracle_time, TIMES, collecting)
        with pytest.raises(NotReady, match="just begun"):
            begun.safe_points.transactions  # noqa: B018


async def test_a_retention_below_the_minimum_is_refused_and_no_table_is_created() -> None:
    async with history_cluster() as world:
        with pytest.raises(InvalidArgument, match="below 10000"):
            await world.create("t", retention_seconds=9.9)
        listed = await world.models.ask(methods.LIST_TABLES, pb.ListTablesRequest())
        assert not listed.tables
