"""A round of collection: in the right order, with every tablet and session, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
import structlog

from percolator.aio import Snapshot, Transaction
from percolator.bigtable.admin import delete_table, has_table
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    SchemaError,
    Unavailable,
)
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.protocol.announcing import Announcement
from percolator.routing.cells import APPLIED, CellMutation
from percolator.rowstore.intents import Intent
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.services.master.cluster_map import Catalogue, Table
from percolator.services.master.collection import ClusterSafePoints, Collection, OracleTime
from percolator.services.master.row_term import RowCollecting, RowDrops
from percolator.services.master.tablet_collection import TabletCollecting
from percolator.testing.row_database import MODEL
from percolator.v1 import cells_pb2, cluster_pb2
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.cells_pb2 import SPACE_LOCK, SPACE_WRITE
from percolator.v1.master_pb2 import CreateTableRequest, DeleteTableRequest
from percolator.wire import methods
from percolator.wire.roles import Role
from tests.doubles.memory_files import MemoryFiles
from tests.simulation import planted_shared_bugs as bugs
from tests.unit.history.row_site import ONE, OTHER, REST, SECONDS, VALUE, Site, site
from tests.unit.master.cluster_world import (
    LOCK_SERVICE,
    RETENTION_SECONDS,
    ROOT,
    TIMES,
    TTL_SECONDS_MAX,
    HistoryWorld,
    ModelCluster,
    cluster,
    create,
    history_cluster,
)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[HistoryWorld]:
    """One master, which starts no round by itself."""
    return history_cluster(times=getattr(request, "param", TIMES))


@pytest.fixture
def models() -> AbstractAsyncContextManager[ModelCluster]:
    """One master, and tablet servers that know nothing of history."""
    return cluster("a:1", "b:1")


@pytest.fixture
def here() -> AbstractAsyncContextManager[Site]:
    """A client of a row store with two tables."""
    return site()


HELD_SECONDS_MAX = 300.0
LIMITED = replace(TIMES, client_held_seconds_max=HELD_SECONDS_MAX)
with_limit = pytest.mark.parametrize("world", [LIMITED], indirect=True)


def order_of(log: list[str]) -> list[str]:
    """The kinds of events in order, with repetitions in a row merged."""
    kinds = [entry.split()[0] for entry in log]
    return [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind]


async def failed_round(world: HistoryWorld, error: type[Exception], match: str) -> None:
    """Runs a round that fails before it raises any safe point."""
    with pytest.raises(error, match=match):
        await world.collect()
    assert order_of(world.log) in ([], ["sessions"])


async def test_sessions_are_read_twice_then_all_tablets_raised_settled_and_collected(
    world: HistoryWorld,
) -> None:
    tablets = await world.create("t", [b"m"]) + await world.create("u")
    await world.collect()
    assert order_of(world.log) == ["sessions", "raise", "resolve", "collect"]
    assert world.log.count("sessions") == 2
    for step in ("raise", "resolve", "collect"):
        assert {f"{step} {tablet}" for tablet in tablets} <= set(world.log)
    collected = {world.history.collected[tablet] for tablet in tablets}
    assert len(collected) == 1
    assert abs(collected.pop() - world.ago(RETENTION_SECONDS)) < world.ago(0) - world.ago(1)


async def test_each_table_keeps_its_retention_and_no_transaction_below_any_continues(
    world: HistoryWorld,
) -> None:
    (short,) = await world.create("short", retention_seconds=20)
    (long,) = await world.create("long", retention_seconds=500)
    await world.collect()
    assert world.history.reads[long] < world.ago(499) < world.history.reads[short]
    assert world.history.transactions[long] == world.history.reads[short]


async def test_history_that_a_session_needs_stays_and_the_session_is_named(
    world: HistoryWorld,
) -> None:
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


async def test_only_operators_are_told_the_id_with_which_a_session_can_be_ended(
    world: HistoryWorld,
) -> None:
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


async def test_a_session_that_needs_only_retained_history_holds_nothing_back(
    world: HistoryWorld,
) -> None:
    await world.create("t")
    world.lock_service.need(world.ago(RETENTION_SECONDS - 10), "recent")
    await world.collect()
    assert not (await world.describe()).held_by


async def test_a_pin_that_comes_after_the_decision_wins(world: HistoryWorld) -> None:
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


async def test_collection_stops_where_a_pin_came_too_late_and_continues_elsewhere(
    world: HistoryWorld,
) -> None:
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


async def test_nothing_is_raised_unless_all_sessions_are_known(world: HistoryWorld) -> None:
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


async def test_sessions_of_a_lost_lock_service_get_time_to_report_elsewhere(
    world: HistoryWorld,
) -> None:
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


async def test_a_new_leader_gives_sessions_of_an_unknown_lost_lock_service_time_to_report(
    world: HistoryWorld,
) -> None:
    await world.create("t")
    world.models.replace_master()

    async def leads() -> bool:
        return bool((await world.describe()).tables)

    await world.models.until(leads)
    await failed_round(world, NotReady, "just begun to lead")
    await asyncio.sleep(TTL_SECONDS_MAX)
    await world.collect()


async def test_a_tablet_that_has_not_acknowledged_stops_the_round_before_any_lock_is_settled(
    world: HistoryWorld,
) -> None:
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
                splitting.append(
                    asyncio.create_task(
                        world.models.call(methods.SPLIT_TABLET, tablet_id=whole, row=b"m")
                    )
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


async def test_an_old_lock_of_a_dead_owner_is_rolled_back_before_anything_is_collected(
    world: HistoryWorld,
) -> None:
    (tablet,) = await world.create("t")
    world.lock(tablet, 1, world.ago(RETENTION_SECONDS + 5), b"gone")
    await world.collect()
    assert not world.history.locks[tablet]
    assert world.collection.old_locks_resolved == 1


async def test_an_old_lock_is_rolled_back_although_its_owner_is_alive(world: HistoryWorld) -> None:
    """Otherwise, whoever keeps a session alive could stop the collection of the whole cluster."""
    (tablet,) = await world.create("t")
    world.lock(tablet, 1, world.ago(RETENTION_SECONDS + 5), b"alive", ttl_milliseconds=10**9)
    # Its owner does not say which history it needs.
    info = locks.SessionInfo(description="x", ttl_milliseconds=3_000)
    world.lock_service.sessions.append(locks.Session(session_id=b"alive", info=info))
    await world.collect()
    assert not world.history.locks[tablet]
    assert world.history.collected[tablet] > 0


@with_limit
async def test_old_history_is_held_back_for_so_long_and_no_longer(world: HistoryWorld) -> None:
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


@with_limit
async def test_the_limit_counts_from_the_longest_retention_of_all_tables(
    world: HistoryWorld,
) -> None:
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


async def test_a_transaction_that_began_at_the_safe_point_itself_is_left_alone(
    world: HistoryWorld,
) -> None:
    (tablet,) = await world.create("t")
    start = world.ago(RETENTION_SECONDS + 5)
    world.lock_service.need(start, "its owner")
    world.lock(tablet, 1, start, b"its owner")
    await world.collect()
    assert world.history.locks[tablet]
    assert world.history.collected[tablet] == start


async def test_a_new_leader_knows_the_safe_points_and_never_lowers_them(
    world: HistoryWorld,
) -> None:
    (tablet,) = await world.create("t")
    await world.collect()
    before = world.collection.safe_points
    world.models.replace_master()

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
        leader = models.leader
        registry = models.masters[0].master.registry
        oracle_time = OracleTime(models.world, registry)
        collecting = partial(TabletCollecting, models.world, leader.store)
        begun = Collection(models.world, leader.store, registry, oracle_time, TIMES, collecting)
        with pytest.raises(NotReady, match="just begun"):
            begun.safe_points.transactions  # noqa: B018


async def test_a_retention_below_the_minimum_is_refused_and_no_table_is_created(
    world: HistoryWorld,
) -> None:
    with pytest.raises(InvalidArgument, match="below 10000"):
        await world.create("t", retention_seconds=9.9)
    assert not (await world.models.call(methods.LIST_TABLES)).tables


# What deleted tables leave behind is removed, and what cannot be removed is told once.

TOLD = "a directory that is no longer needed cannot be removed"


async def deleted(world: ModelCluster, name: str) -> Path:
    """A deleted table, and the directory of its only tablet."""
    table = await create(world, name, splits=[])
    (tablet,) = await world.locate(table)
    directory = ROOT / str(table) / str(tablet.tablet_id)
    world.disk.make_durable_directory(directory / "e1")
    await world.call(methods.DELETE_TABLE, name=name)
    return directory


async def test_a_directory_that_cannot_be_removed_does_not_keep_those_of_other_tables(
    models: ModelCluster,
) -> None:
    """Such as one that belongs to another user, or into which somebody has put a file."""
    files = MemoryFiles(models.disk)
    kept = await deleted(models, "kept")
    await (await files.create(kept / "e1.tar")).close()
    gone = await deleted(models, "gone")
    with structlog.testing.capture_logs() as log:
        await asyncio.sleep(30)
    assert gone.parent.name not in await files.list(ROOT)
    told = [line for line in log if line["event"] == TOLD]
    assert [line["directory"] for line in told] == [str(kept)]
    leader = models.leader
    assert len(leader.store.current.retired) == 1
    await files.unlink(kept / "e1.tar")
    await asyncio.sleep(3)
    assert kept.parent.name not in await files.list(ROOT)


class Locks:
    """The locks that a tablet server finds in its tablets."""

    def __init__(self) -> None:
        self.primary_tables: dict[int, int] = {}
        """The table of a lock's primary, by the tablet of the lock."""

    async def scan_cells(
        self, request: tablets.ScanCellsRequest
    ) -> AsyncIterator[tablets.ScanCellsResponse]:
        table = self.primary_tables.get(request.target.tablet_id)
        if table is not None:
            lock = LockRecord(
                7, 0, 1000, RecordKind.PUT, b"", CellAddress(table, b"r", b"c")
            ).encode()
            cell = cells_pb2.Cell(row=b"r", column=b"c", value=lock)
            yield tablets.ScanCellsResponse(cells=[cell])


async def test_a_damaged_tablet_of_a_deleted_table_is_removed_unless_a_lock_points_into_it(
    models: ModelCluster,
) -> None:
    """Its owner has taken it over, so that nothing can begin there, whether it can be opened or
    not."""
    locks = Locks()
    for address, server in models.servers.items():
        models.network.handlers[address] = (server, locks)
    damaged, other = await create(models, "damaged"), await create(models, "other")
    lost = (await models.locate(damaged))[0]
    models.store.tablets[lost.tablet_id].unreadable = True
    locks.primary_tables[(await models.locate(other))[0].tablet_id] = damaged
    await models.call(methods.DELETE_TABLE, name="damaged")
    leader = models.leader
    await asyncio.sleep(30)
    assert damaged in leader.store.current.tables
    locks.primary_tables.clear()
    await asyncio.sleep(3)
    assert damaged not in leader.store.current.tables


async def test_a_deleted_table_stays_until_every_tablet_was_taken_over(
    models: ModelCluster,
) -> None:
    """Until then a former owner may still accept a transaction there."""
    table = await create(models, "t")
    lost = (await models.locate(table))[0]
    models.store.tablets[lost.tablet_id].damaged = True
    with pytest.raises(DeadlineExceeded, match=r"not in force everywhere yet.*nothing there"):
        await models.call(methods.DELETE_TABLE, name="t", seconds=90)
    leader = models.leader
    await asyncio.sleep(30)
    assert table in leader.store.current.tables


# Tables of a row store that are dropped: when they go, and what becomes of their locks.
#
# Mistakes in dropping tables of a row store, which the simulation finds, too: each makes the test
# of the rule that it breaks fail.
#
# The master's rounds over a row store: what they are told, and what they tell.


class Kept:
    """The catalogue of a leader."""

    def __init__(self, tables: Mapping[int, Table]) -> None:
        self.current = Catalogue(tables=tables)
        self.leads = True

    async def change(self, decide: Callable[[Catalogue], tuple[Catalogue, None]]) -> None:
        if not self.leads:
            raise NotReady("another one leads")
        self.current, _ = decide(self.current)


async def _scanned(snapshot: Snapshot) -> object:
    return [row async for row in snapshot.scan(ONE)]


READS: dict[str, Callable[[Snapshot], Awaitable[object]]] = {
    "get": lambda snapshot: snapshot.get("a", VALUE),
    "get_many": lambda snapshot: snapshot.get_many(ONE, ["a"]),
    "scan": _scanned,
}


class Dropping:
    """The first table of a site, which is being dropped: its store, and its oracle."""

    def __init__(self, here: Site, one: int, other: int) -> None:
        self.here = here
        self.one, self.other = one, other
        self.catalogue = Kept({one: Table(one, "one"), other: Table(other, "other")})
        world = here.database.internal.engine.world
        acting: Any = self
        self.drops = RowDrops(world.clock, cast("Any", self.catalogue), acting, acting)
        self.collecting = RowCollecting(
            here.history, lambda: list(self.catalogue.current.tables), self.drops
        )

    async def drop(self) -> None:
        """By another client: the one of the test still knows the table."""
        await self.here.cluster.delete_table(DeleteTableRequest(name=ONE.name))
        dropped = Table(self.one, "one", deleting=True)
        self.catalogue.current = self.catalogue.current.with_tables(dropped)

    async def collect(self) -> None:
        """One round, as far as it may go."""
        below = await self.here.now()
        reads = dict.fromkeys(self.catalogue.current.tables, below)
        await self.collecting.collect(ClusterSafePoints(reads, below))

    async def drop_for_good(self) -> None:
        """Drops the table, and collects until it is gone."""
        await self.drop()
        for _ in range(2):
            await self.collect()
        assert await self.is_gone()

    async def commit_lock(self, start: int) -> object:
        """The answer to the commit of a transaction that has locked row `a` of the table."""
        record = WriteRecord(start, RecordKind.PUT, b"3").encode()
        commit = await self.here.now()
        step = steps.commit_primary(b"a", VALUE.name, start, start + 1, commit, record, ())
        return await self.here.answer(CellMutation(self.one, step))

    async def begin_and_drop(self) -> Transaction:
        """A transaction that has written into both tables before the first was dropped."""
        tx = self.here.database.transaction()
        await tx.timestamp()
        await tx.set("a", VALUE, 1)
        await tx.set("a", REST, 1)
        await self.drop()
        return tx

    async def rest(self) -> int | None:
        """The value in the other table."""
        async with self.here.database.snapshot() as snapshot:
            return await snapshot.get("a", REST)

    async def is_gone(self) -> bool:
        is_known = self.one in self.catalogue.current.tables
        assert is_known == await self.has_table(self.one)
        return not is_known

    # ------------------------------------------------------------------ store and oracle

    async def has_table(self, table_id: int) -> bool:
        return await has_table(self.here.network, MODEL, table_id, SECONDS)

    async def delete_table(self, table_id: int) -> None:
        await delete_table(self.here.network, MODEL, table_id, SECONDS)

    async def raise_epoch(self, deadline: float) -> None:
        self.here.cluster.raise_epoch()

    def source(self) -> Any:
        return self.here.env.timestamps


@asynccontextmanager
async def dropping() -> AsyncIterator[Dropping]:
    async with site() as here:
        yield Dropping(here, await here.table_id(ONE), await here.table_id(OTHER))


@pytest.fixture
def at() -> AbstractAsyncContextManager[Dropping]:
    """Two tables of a row store, one of which a test drops."""
    return dropping()


async def test_a_dropped_table_goes_after_a_round_above_its_last_commits(at: Dropping) -> None:
    await at.here.set("a", 1)
    await at.drop()
    await at.collect()  # its safe point was decided before clients were told
    assert not await at.is_gone()
    await at.collect()
    assert await at.is_gone()
    assert await at.rest() == 1


async def test_a_round_that_resolved_less_does_not_finish(at: Dropping) -> None:
    before = await at.here.now()
    await at.drop()
    await at.drops.begin()
    await at.drops.finish(before)
    assert not await at.is_gone()
    await at.drops.finish(await at.here.now())
    assert await at.is_gone()


async def test_a_table_goes_after_what_was_committed_there_is_settled_elsewhere(
    at: Dropping,
) -> None:
    start = await at.here.lock(b"a", ttl_milliseconds=1)
    assert await at.commit_lock(start) is APPLIED
    await at.drop_for_good()
    assert not await at.here.cells(OTHER, SPACE_LOCK)
    assert await at.here.cells(OTHER, SPACE_WRITE) == 1


async def test_a_table_goes_although_a_transaction_there_has_not_ended(at: Dropping) -> None:
    start = await at.here.lock(b"a", ttl_milliseconds=600_000)
    await at.drop_for_good()
    assert not await at.here.cells(OTHER, SPACE_LOCK)
    assert await at.commit_lock(start) is not APPLIED


async def test_who_gets_a_commit_timestamp_after_the_drop_does_not_commit(at: Dropping) -> None:
    """Its cells are still there: nothing else would refuse it."""
    tx = await at.begin_and_drop()
    with pytest.raises(SchemaError, match="'one' was dropped while it was in use"):
        await tx.commit()
    assert await at.rest() is None


@pytest.mark.parametrize("comes_first", ["the table", "the timestamp"])
@pytest.mark.parametrize("in_past", [False, True])
@pytest.mark.parametrize("read", READS)
async def test_whoever_begins_to_read_after_the_drop_reads_nothing_of_the_table(
    at: Dropping, read: str, comes_first: str, *, in_past: bool
) -> None:
    """Its cells are still there, and the store refuses no read of them."""
    await at.here.set("a", 1)
    database = at.here.database
    past = await database.timestamp() if in_past else None
    async with database.snapshot(past) as snapshot:
        if comes_first == "the table":
            await snapshot._reader.info(ONE, database.internal.deadline(None))
        await at.drop()
        if comes_first == "the timestamp":
            await snapshot.timestamp()
        with pytest.raises(SchemaError, match="'one'"):
            await READS[read](snapshot)
        assert await snapshot.get("a", REST) == 1


async def test_the_next_table_of_the_name_is_read_by_those_who_know_the_former_one(
    at: Dropping,
) -> None:
    await at.here.set("a", 1)
    database = at.here.database
    assert await database.get("a", VALUE) == 1
    await at.drop()
    await at.here.cluster.create_table(CreateTableRequest(name=ONE.name))
    assert await database.get("a", VALUE) is None
    async with database.snapshot() as snapshot:
        assert [row async for row in snapshot.scan(ONE)] == []


async def test_who_knows_nothing_of_a_dropped_table_is_told_at_once(at: Dropping) -> None:
    """And not at the deadline, as if the store were out of order."""
    engine = at.here.database.internal.engine
    began = engine.now()
    tx = await at.begin_and_drop()
    engine.catalog.forget(at.one)
    with pytest.raises(SchemaError, match="'one' was dropped while it was in use"):
        await tx.commit()
    assert engine.now() < began + engine.limits.call_seconds / 2
    assert await engine.env.background.drain(SECONDS)  # its other locks go after the answer
    assert not await at.here.cells(OTHER, SPACE_LOCK)


async def test_without_a_look_at_the_epoch_it_would_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the test above can fail."""

    async def wrong(self: Announcement, deadline: float) -> None:
        pass

    monkeypatch.setattr(Announcement, "renew", wrong)
    async with dropping() as at:
        tx = await at.begin_and_drop()
        await tx.commit()
        assert await at.rest() == 1


async def test_a_lock_that_comes_after_the_end_is_rolled_back(at: Dropping) -> None:
    """Its primary is in the table that is gone, so it never commits."""
    await at.here.set("a", 1)
    await at.drop_for_good()
    start = await at.here.now()
    primary = CellAddress(at.one, b"a", VALUE.name)
    lock = LockRecord(start, start + 1, 1, RecordKind.PUT, b"", primary, b"3").encode()
    late = steps.prewrite(b"a", REST.name, start, lock, None)
    assert await at.here.answer(CellMutation(at.other, late)) is APPLIED
    assert await at.rest() == 1
    assert not await at.here.cells(OTHER, SPACE_LOCK)


async def test_intents_of_a_table_that_is_gone_are_cleared(at: Dropping) -> None:
    await at.drop_for_good()
    late = Intent(at.one, b"a", VALUE.name, b"o", await at.here.now(), is_certain=False)
    await at.here.intents.write([late], at.here.env.now() + SECONDS)
    await at.collect()
    assert await at.here.all_intents() == []


async def test_who_could_not_say_any_more_that_a_table_is_gone_is_no_obstacle(at: Dropping) -> None:
    await at.drop()
    await at.collect()
    at.catalogue.leads = False
    with pytest.raises(NotReady, match="another one leads"):
        await at.collect()
    at.catalogue.leads = True
    await at.collect()
    assert await at.is_gone()


FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[Dropping], Awaitable[None]]] = {
    bugs.dropped_table_deleted_at_once: (
        test_a_dropped_table_goes_after_a_round_above_its_last_commits
    ),
    bugs.locks_resolved_below_any_timestamp_are_enough: (
        test_a_round_that_resolved_less_does_not_finish
    ),
}


@pytest.mark.parametrize("plant", FOUND_BY, ids=lambda plant: plant.__name__)
async def test_a_planted_mistake_is_found(
    at: Dropping, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        await FOUND_BY[plant](at)


async def test_what_was_committed_elsewhere_is_lost_with_a_table_that_goes_at_once(
    at: Dropping, monkeypatch: pytest.MonkeyPatch
) -> None:
    bugs.dropped_table_deleted_at_once(monkeypatch)
    with pytest.raises(AssertionError):
        await test_a_table_goes_after_what_was_committed_there_is_settled_elsewhere(at)


async def test_a_table_that_a_pin_keeps_is_told_to_keep_everything(here: Site) -> None:
    for value in (1, 2, 3):
        await here.set("a", value)
    one, other = await here.table_id(ONE), await here.table_id(OTHER)
    collecting = RowCollecting(here.history, lambda: (one, other), cast("Any", AsyncMock()))
    below = await here.now()
    # As `ClusterSafePoints.allowed_by` leaves it when a pin keeps the other table.
    await collecting.collect(ClusterSafePoints({one: below}, below))
    assert collecting.collected(one).cells == 2
    assert collecting.collected(one).below == below
    assert collecting.collected(other).cells == 0
    assert collecting.collected(other).below == 0
    assert collecting.locks_resolved == 0
    assert collecting.collected(99).below == 0, "a table that was created since"


async def test_a_table_that_is_gone_is_forgotten(here: Site) -> None:
    await here.set("a", 1)
    one, other = await here.table_id(ONE), await here.table_id(OTHER)
    tables = [one, other]
    collecting = RowCollecting(here.history, lambda: tables, cast("Any", AsyncMock()))
    below = await here.now()
    await collecting.collect(ClusterSafePoints({one: below, other: below}, below))
    assert collecting.collected(other).below == below
    tables.remove(other)
    await collecting.collect(ClusterSafePoints({one: below}, below))
    assert set(here.history.tables) == {one}
