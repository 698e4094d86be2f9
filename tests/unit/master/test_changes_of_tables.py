"""Changes of tables, and drops, return when every tablet has heard of them.

Tablets are split on demand and by themselves, and no row is lost.

A change of the map whose write failed may be stored all the same, where standbys read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest

from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    PercolatorError,
    SchemaError,
    StoreUnusable,
    TabletMoved,
)
from percolator.routing.catalog import Catalog, TabletMap
from percolator.routing.lanes import SchemaVersions
from percolator.services.master import cluster_map, table_changes
from percolator.services.master.cluster_map import DELETIONS_KEPT, Catalogue, ClusterMap
from percolator.services.master.map_store import StoredMap
from percolator.services.master.table_changes import REQUEST_ID_BYTES_MAX
from percolator.v1 import master_pb2 as pb
from percolator.v1.errors_pb2 import TabletLocation
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire import methods
from percolator.wire.table_options import by_column
from percolator.world import RequestT, ResponseT, UnaryMethod
from tests.simulation import planted_server_bugs as bugs
from tests.unit.master.cluster_world import (
    LEASE_SECONDS,
    SPLITS,
    ModelCluster,
    addresses,
    cluster,
    create,
    created_and_filled,
    described,
    forget_that_it_is_served,
    is_complete,
    is_only_at,
    on_no_server,
    on_three_servers,
    on_two_servers,
    served,
)
from tests.unit.refusals import refused

OBSERVER = pb.Observer(name="index", columns=[b"body"])


async def register(
    world: ModelCluster, observer: pb.Observer, seconds: float = 5.0, *, awaited: bool = False
) -> pb.Table:
    """Adds an observer of the table `t`; returns the changed table."""
    fields = {"table": "t", "add": [observer], "awaited": awaited}
    return (await world.call(methods.CHANGE_OBSERVERS, seconds, **fields)).table


@on_two_servers
async def test_registering_observers_returns_when_every_tablet_judges_under_the_new_schema(
    world: ModelCluster,
) -> None:
    table = await create(world)
    assert (await register(world, OBSERVER)).schema_version == 2
    assert [one.schema_version for one in world.open_tablets()] == [2] * 6
    # A server that takes over judges under it too.
    world.kill_server("a:1")

    await world.until(lambda: is_only_at(world, table, "b:1"))
    await asyncio.sleep(1)
    assert {one.schema_version for one in world.servers["b:1"].open.values()} == {2}


async def test_a_table_that_cannot_be_used_in_time_is_said_to_be_created(
    world: ModelCluster,
) -> None:
    """After `NotReady`, callers would try again, and be told that the table exists."""
    world.network.silent.add("a:1")
    await asyncio.sleep(10)
    with pytest.raises(DeadlineExceeded, match="table 't' was created") as caught:
        await world.call(methods.CREATE_TABLE, name="t", splits=[b"m"], seconds=120)
    assert "2 tablets" in caught.value.message


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_caller_with_more_patience_than_a_master_waits_for_its_change(
    world: ModelCluster,
    is_new: bool,
) -> None:
    """A master waits for a minute at most, and then says that the tablets are not served yet."""
    masters = [world.masters[0].address]
    catalog = Catalog(world.world, masters, TabletMap(), SchemaVersions())
    if not is_new:
        await create(world)
    world.network.losses["open_tablet"] = 10**6
    asyncio.get_running_loop().call_later(100, world.network.losses.clear)
    began = world.clock.monotonic_seconds()
    if is_new:
        await catalog.create("t", [b"m"], pb.TableOptions(), exist_ok=False, deadline=began + 300)
    else:
        await catalog.set_change_feed("t", on=True, deadline=began + 300)
    assert 100 < world.clock.monotonic_seconds() - began < 120


async def test_a_split_whose_halves_are_not_served_in_time_is_not_said_to_have_failed(
    world: ModelCluster,
) -> None:
    """After `NotReady`, callers would try again, and be told that there is no such tablet."""
    table = await create(world, splits=[])
    await asyncio.sleep(1)
    (whole,) = await world.locate(table)
    world.network.losses["open_tablet"] = 10**6
    with pytest.raises(DeadlineExceeded, match="opening continues"):
        await world.call(methods.SPLIT_TABLET, tablet_id=whole.tablet_id, row=b"m", seconds=120)
    assert len(await world.locate(table)) == 2


@on_two_servers
async def test_a_change_feed_is_switched_when_every_tablet_has_heard_of_it(
    world: ModelCluster,
) -> None:
    await create(world)
    for version, on in ((2, True), (2, True), (3, False), (4, True)):
        changed = (await world.call(methods.SET_CHANGE_FEED, table="t", change_feed=on)).table
        assert (changed.schema_version, changed.options.change_feed) == (version, on)
        told = [(one.schema_version, one.change_feed) for one in world.open_tablets()]
        assert told == [(version, on)] * 6
    with pytest.raises(SchemaError):
        await world.call(methods.SET_CHANGE_FEED, table="u", change_feed=True)


async def test_the_tablets_of_a_new_table_begin_with_its_change_feed(world: ModelCluster) -> None:
    options = pb.TableOptions(change_feed=True)
    table = (await world.call(methods.CREATE_TABLE, name="fed", options=options)).table
    assert table.options.change_feed
    assert [one.change_feed for one in world.open_tablets()] == [True]
    # What a later master reads of it.
    assert (await described(world, "fed")).options.change_feed


async def test_pausing_an_observer_is_visible_to_all_and_keeps_the_schema_version(
    world: ModelCluster,
) -> None:
    table = await create(world)
    observer = pb.Observer(name="index", columns=[b"body"])
    await register(world, observer)
    for pause, resume in ((["index"], []), ([], ["index"])):
        changed = (
            await world.call(methods.CHANGE_OBSERVERS, table="t", pause=pause, resume=resume)
        ).table
        observer.paused = bool(pause)
        assert (changed.schema_version, list(changed.observers)) == (2, [observer])
        located = await world.call(methods.LOCATE_TABLETS, table_id=table)
        assert list((await described(world)).observers) == list(located.observers) == [observer]
        assert located.schema_version == 2


@on_two_servers
async def test_a_registration_waits_for_the_tablets_of_a_silent_server_to_be_taken_over(
    world: ModelCluster,
) -> None:
    await create(world)
    world.network.silent.add("b:1")
    started = world.clock.monotonic_seconds()
    await register(world, OBSERVER, seconds=20)
    assert world.clock.monotonic_seconds() - started > LEASE_SECONDS - 0.5
    assert {one.schema_version for one in world.servers["a:1"].open.values()} == {2}
    assert len(world.servers["a:1"].open) == 6


def codecs_of(**columns: str) -> list[pb.ColumnCodec]:
    return [pb.ColumnCodec(column=name.encode(), codec=codec) for name, codec in columns.items()]


async def test_codecs_that_are_declared_survive_the_master_and_others_are_refused(
    world: ModelCluster,
) -> None:
    table = await create(world)
    declared = pb.DeclareCodecsRequest(
        table_id=table,
        codecs=pb.Codecs(key="text", columns=codecs_of(stock="integer")),
    )
    for _ in range(2):
        changed = (await world.ask(methods.DECLARE_CODECS, declared)).table
        assert (changed.schema_version, changed.codecs) == (1, declared.codecs)
    for codecs in (
        pb.Codecs(columns=codecs_of(name="text", stock="text")),
        pb.Codecs(key="uuid", columns=codecs_of(name="text")),
    ):
        with pytest.raises(SchemaError, match="the program declares"):
            await world.call(methods.DECLARE_CODECS, table_id=table, codecs=codecs)
    world.replace_master()
    assert (await described(world)).codecs == declared.codecs
    assert (await world.call(methods.LOCATE_TABLETS, table_id=table)).codecs == declared.codecs
    with pytest.raises(SchemaError, match="no table with the id 77"):
        await world.call(methods.DECLARE_CODECS, table_id=77)


@on_two_servers
async def test_a_codec_is_changed_when_every_tablet_has_heard_of_it(world: ModelCluster) -> None:
    await create(world)
    for version, codec in ((1, "integer"), (1, "integer"), (2, "text"), (3, "")):
        changed = (
            await world.call(methods.CHANGE_CODECS, table="t", columns=codecs_of(stock=codec))
        ).table
        assert changed.schema_version == version
        assert list(changed.codecs.columns) == (codecs_of(stock=codec) if codec else [])
        assert [one.schema_version for one in world.open_tablets()] == [version] * 6


@pytest.mark.parametrize(
    ("codecs", "field"),
    [
        (pb.Codecs(columns=[pb.ColumnCodec(codec="text")]), r"codecs.columns\[0\].column"),
        (pb.Codecs(columns=[pb.ColumnCodec(column=b"a")]), r"codecs.columns\[0\].codec"),
        (pb.Codecs(columns=codecs_of(a=" text")), r"codecs.columns\[0\].codec"),
        (pb.Codecs(columns=codecs_of(a="x") * 2), r"codecs.columns\[1\].column"),
        (pb.Codecs(columns=[pb.ColumnCodec(column=b"\0a", codec="x")]), "column"),
        (pb.Codecs(key="x" * 256), "codecs.key"),
        (pb.Codecs(key="x\n"), "codecs.key"),
    ],
)
async def test_a_declaration_that_makes_no_sense_is_refused_by_its_field(
    world: ModelCluster, codecs: pb.Codecs, field: str
) -> None:
    table = await create(world)
    with pytest.raises(InvalidArgument, match=field):
        await world.call(methods.DECLARE_CODECS, table_id=table, codecs=codecs)
    with pytest.raises(InvalidArgument, match=field):
        await world.call(methods.CREATE_TABLE, name="new", codecs=codecs)
    assert not (await described(world)).codecs.columns


@on_two_servers
async def test_times_to_live_are_changed_when_every_tablet_has_heard_of_them(
    world: ModelCluster,
) -> None:
    table = await create(world)
    for version, changes, ttls in (
        (2, {b"b": 5, b"a": 7}, {b"a": 7, b"b": 5}),
        (2, {b"a": 7}, {b"a": 7, b"b": 5}),
        (3, {b"b": 0, b"a": 9}, {b"a": 9}),
        (3, {b"unknown": 0}, {b"a": 9}),
    ):
        changed = (await world.call(methods.SET_TTLS, table="t", ttls=_ttls(changes))).table
        assert (changed.schema_version, by_column(changed.options.ttls)) == (version, ttls)
        told = [(one.schema_version, by_column(one.ttls)) for one in world.open_tablets()]
        assert told == [(version, ttls)] * 6
    located = await world.call(methods.LOCATE_TABLETS, table_id=table)
    assert by_column(located.ttls) == {b"a": 9}
    with pytest.raises(SchemaError):
        await world.call(methods.SET_TTLS, table="u")


async def test_the_tablets_of_a_new_table_begin_with_its_times_to_live(world: ModelCluster) -> None:
    options = pb.TableOptions(ttls=_ttls({b"z": 1, b"a": 2}))
    request = pb.CreateTableRequest(name="brief", options=options)
    table = (await world.ask(methods.CREATE_TABLE, request)).table
    assert [one.column for one in table.options.ttls] == [b"a", b"z"]
    assert [by_column(one.ttls) for one in world.open_tablets()] == [{b"z": 1, b"a": 2}]
    assert by_column((await described(world, "brief")).options.ttls) == {b"z": 1, b"a": 2}
    request.exist_ok = True
    assert not (await world.ask(methods.CREATE_TABLE, request)).created
    request.options.ttls[0].ttl_milliseconds = 3
    why = "exists with times to live a 2 ms, z 1 ms, not times to live z 3 ms, a 2 ms"
    with pytest.raises(InvalidArgument, match=why):
        await world.ask(methods.CREATE_TABLE, request)


@pytest.mark.parametrize(
    ("ttls", "field"),
    [
        ([ColumnTtl(column=b"a")], r"options.ttls\[0\].ttl_milliseconds"),
        ([ColumnTtl(column=b"a", ttl_milliseconds=1 << 60)], r"ttls\[0\].ttl_milliseconds"),
        ([ColumnTtl(ttl_milliseconds=1)], r"ttls\[0\].column"),
        ([ColumnTtl(column=b"\0a", ttl_milliseconds=1)], r"ttls\[0\].column"),
        ([ColumnTtl(column=b"c" * 256, ttl_milliseconds=1)], r"ttls\[0\].column"),
        (
            [ColumnTtl(column=b"a", ttl_milliseconds=1)] * 2,
            r"ttls\[1\].column: 'a' is named twice",
        ),
    ],
)
async def test_bad_times_to_live_are_refused(
    world: ModelCluster, ttls: list[ColumnTtl], field: str
) -> None:
    with pytest.raises(InvalidArgument, match=field):
        await world.call(methods.CREATE_TABLE, name="t", options=pb.TableOptions(ttls=ttls))
    await create(world)
    if any(one.ttl_milliseconds for one in ttls):
        with pytest.raises(InvalidArgument, match="ttls"):
            await world.call(methods.SET_TTLS, table="t", ttls=ttls)


def _ttls(by_name: dict[bytes, int]) -> list[ColumnTtl]:
    return [ColumnTtl(column=column, ttl_milliseconds=ttl) for column, ttl in by_name.items()]


# ---------------------------------------------------------------------- drops

PATIENCE = 70.0
"""Longer than a master waits for a change."""


async def drop(
    world: ModelCluster, *, name: str = "t", request_id: bytes = b"", missing_ok: bool = False
) -> bool:
    return (
        await world.call(
            methods.DELETE_TABLE,
            name=name,
            request_id=request_id,
            missing_ok=missing_ok,
            seconds=PATIENCE,
        )
    ).deleted


def still_served(world: ModelCluster, known: list[TabletLocation]) -> list[int]:
    """The tablets that can be read by a client that has found them before they were dropped."""
    found = []
    for one in known:
        try:
            world.servers[one.address].read(one, one.range.start)
        except TabletMoved:
            continue
        found.append(one.tablet_id)
    return found


@on_two_servers
async def test_a_drop_returns_within_milliseconds_when_every_owner_has_confirmed_it(
    world: ModelCluster,
) -> None:
    known = await world.locate(await create(world))
    assert len(still_served(world, known)) == 6
    began = world.clock.monotonic_seconds()
    assert await drop(world)
    assert not still_served(world, known)
    assert world.clock.monotonic_seconds() - began < 0.05


@on_two_servers
async def test_a_drop_waits_until_a_silent_owner_was_replaced(world: ModelCluster) -> None:
    known = await world.locate(await create(world))
    world.network.silent.add("a:1")
    began = world.clock.monotonic_seconds()
    assert await drop(world)
    assert not still_served(world, known)
    assert LEASE_SECONDS - 0.5 < world.clock.monotonic_seconds() - began < LEASE_SECONDS + 2


async def test_a_drop_that_waits_in_vain_says_so_and_succeeds_when_it_is_repeated(
    world: ModelCluster,
) -> None:
    """The owner is silent, and no other server could replace it."""
    known = await world.locate(await create(world))
    world.network.silent.add("a:1")
    for missing_ok in (False, True):
        with pytest.raises(DeadlineExceeded, match=r"'t' is dropped, but .* not in force") as of:
            await drop(world, missing_ok=missing_ok)
        assert "6 tablets may still be used" in of.value.message
    assert len(still_served(world, known)) == 6
    asyncio.get_running_loop().call_later(5, world.network.silent.clear)
    assert await drop(world)
    assert not still_served(world, known)
    with pytest.raises(SchemaError, match="no table 't'"):
        await drop(world)
    assert not await drop(world, missing_ok=True)


async def test_a_client_that_repeats_its_drop_is_not_told_that_there_is_no_table(
    world: ModelCluster,
) -> None:
    """By then, the drop may be in force, and nothing of the table left."""
    await create(world)
    masters = [world.masters[0].address]
    catalog = Catalog(world.world, masters, TabletMap(), SchemaVersions())

    async def dropped(seconds: float) -> bool:
        deadline = world.clock.monotonic_seconds() + seconds
        return await catalog.delete("t", missing_ok=False, deadline=deadline)

    world.network.silent.add("a:1")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await dropped(2.0)
    world.network.silent.clear()
    await asyncio.sleep(60)
    assert await dropped(2.0)
    with pytest.raises(SchemaError, match="no table 't'"):
        await dropped(2.0)


@on_two_servers
async def test_a_drop_begun_under_one_leader_is_waited_for_under_the_next(
    world: ModelCluster,
) -> None:
    known = await world.locate(await create(world))
    world.network.silent.update(("a:1", "b:1"))
    waiting = asyncio.create_task(drop(world, request_id=b"one"))
    await asyncio.sleep(1)
    world.replace_master()
    await asyncio.wait([waiting])
    asyncio.get_running_loop().call_later(10, world.network.silent.clear)

    await world.until(lambda: drop(world, request_id=b"one"))
    assert not still_served(world, known)
    with pytest.raises(DeadlineExceeded):
        await waiting


@on_two_servers
async def test_a_table_cannot_be_used_while_a_former_one_of_its_name_can(
    world: ModelCluster,
) -> None:
    known = await world.locate(await create(world, splits=[]))
    world.network.silent.add(known[0].address)
    dropping = asyncio.create_task(drop(world))
    await asyncio.sleep(0.5)
    creating = []
    for exist_ok in (False, True):
        asked = asyncio.create_task(
            world.call(methods.CREATE_TABLE, name="t", exist_ok=exist_ok, seconds=PATIENCE)
        )
        await asyncio.sleep(0.5)
        assert still_served(world, known)
        assert not asked.done()
        creating.append(asked)
    for asked in creating:
        await asked
        assert not still_served(world, known)
    assert await dropping


@on_no_server
async def test_a_table_without_any_server_can_be_dropped(world: ModelCluster) -> None:
    """No server was ever given one of its tablets: there is nobody to wait for."""
    with pytest.raises(DeadlineExceeded):
        await create(world)
    began = world.clock.monotonic_seconds()
    assert await drop(world)
    assert world.clock.monotonic_seconds() - began < 0.05
    world.start_server("a:1")
    await asyncio.sleep(5)
    leader = world.leader
    assert not leader.store.current.tables
    assert not world.servers["a:1"].open


@on_no_server
async def test_a_table_that_is_dropped_while_its_creation_waits_is_described_without_tablets(
    world: ModelCluster,
) -> None:
    creating = asyncio.create_task(
        world.call(methods.CREATE_TABLE, name="t", splits=[b"m"], seconds=PATIENCE)
    )
    await asyncio.sleep(0.5)
    assert await drop(world)
    assert (await creating).table.tablets == 0


async def changed(world: ModelCluster, change: str, tablet_id: int) -> object:
    if change == "split":
        return await world.call(methods.SPLIT_TABLET, tablet_id=tablet_id)
    return await world.call(methods.MOVE_TABLET, tablet_id=tablet_id)


@pytest.mark.parametrize("change", ["split", "move"])
async def test_a_table_whose_tablet_is_being_changed_is_dropped(change: str) -> None:
    """Whichever comes first, nobody can read the former tablet, or its halves, after the drop."""
    for seconds in (0.0, 0.002, 0.004, 0.006, 0.008, 0.011, 0.02):
        async with cluster("a:1", "b:1") as world:
            table = await created_and_filled(world, splits=[])
            known = await world.locate(table)
            tablet_id = known[0].tablet_id
            changing: asyncio.Task[object] = asyncio.create_task(changed(world, change, tablet_id))
            await asyncio.sleep(seconds)
            with suppress(PercolatorError):
                known += await world.locate(table)
            assert await drop(world)
            assert not still_served(world, known)
            await asyncio.wait([changing])
            with suppress(PercolatorError):
                changing.result()
            assert not still_served(world, known)


FOUND_BY: dict[Callable[[pytest.MonkeyPatch], None], Callable[[ModelCluster], Awaitable[None]]] = {
    bugs.drop_does_not_wait: (
        test_a_drop_returns_within_milliseconds_when_every_owner_has_confirmed_it
    ),
    bugs.report_of_an_earlier_epoch_confirms_a_drop: (
        test_a_drop_waits_until_a_silent_owner_was_replaced
    ),
    bugs.a_silent_owner_is_taken_for_gone: (
        test_a_drop_that_waits_in_vain_says_so_and_succeeds_when_it_is_repeated
    ),
    bugs.drop_waits_once: test_a_drop_that_waits_in_vain_says_so_and_succeeds_when_it_is_repeated,
    bugs.creation_does_not_wait_for_the_former_table: (
        test_a_table_cannot_be_used_while_a_former_one_of_its_name_can
    ),
}
ON_ONE_SERVER = (bugs.a_silent_owner_is_taken_for_gone, bugs.drop_waits_once)


@pytest.mark.parametrize("plant", FOUND_BY, ids=lambda plant: plant.__name__)
async def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    async with cluster(*(["a:1"] if plant in ON_ONE_SERVER else ["a:1", "b:1"])) as world:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await FOUND_BY[plant](world)


# ---------------------------------------------------------------------------- backfills

INDEX = pb.Observer(name="index", columns=[b"body"], backfill=True)


async def test_an_owed_backfill_and_its_progress_outlive_the_master(world: ModelCluster) -> None:
    table = await create(world)
    await register(world, INDEX)
    report = pb.ReportBackfillRequest(
        table_id=table, observer="index", version=2, row=b"m", cells=3
    )
    await world.ask(methods.REPORT_BACKFILL, report)
    world.replace_master()
    await asyncio.sleep(5)
    found = await described(world)
    owed = pb.OwedBackfill(version=2, columns=[b"body"], row=b"m", cells=3)
    assert [one.owed for one in found.observers] == [owed]
    assert found.schema_version == 2
    report.done = True
    done = (await world.ask(methods.REPORT_BACKFILL, report)).table
    assert not done.observers[0].HasField("owed")
    assert done.observers[0].backfill


@on_two_servers
async def test_a_backfill_begins_only_when_every_tablet_judges_under_the_registration(
    world: ModelCluster,
) -> None:
    """The program that has registered the observer may be gone before that."""
    table = await create(world)
    world.network.silent.add("a:1")
    with pytest.raises(PercolatorError):
        await register(world, INDEX, seconds=1)
    begin = pb.ReportBackfillRequest(table_id=table, observer="index", version=2)
    with pytest.raises(PercolatorError):
        await world.ask(methods.REPORT_BACKFILL, begin, 1)
    world.network.silent.discard("a:1")
    begun = (await world.ask(methods.REPORT_BACKFILL, begin, 60)).table
    assert begun.observers[0].owed.version == 2
    assert {one.schema_version for one in world.open_tablets()} == {2}


async def test_observers_of_a_table_that_does_not_exist_outlive_the_master_and_come_with_it(
    world: ModelCluster,
) -> None:
    await asyncio.sleep(5)
    answer = await register(world, INDEX, awaited=True)
    assert (answer.table_id, answer.name, list(answer.observers)) == (0, "t", [INDEX])
    world.replace_master()
    await asyncio.sleep(5)
    listed = await world.call(methods.LIST_TABLES)
    assert [(one.name, list(one.observers)) for one in listed.awaited] == [("t", [INDEX])]
    assert not listed.tables
    with pytest.raises(SchemaError):
        await described(world)
    await create(world)
    table = await described(world)
    assert (table.schema_version, list(table.observers)) == (1, [INDEX])
    assert not (await world.call(methods.LIST_TABLES)).awaited
    # From now on, it is a registration like any other.
    other = pb.Observer(name="other", columns=[b"body"], backfill=True)
    changed = await register(world, other, awaited=True)
    assert [one.HasField("owed") for one in changed.observers] == [False, True]


async def test_observers_stay_in_advance_until_they_are_registered_with_their_table(
    world: ModelCluster,
) -> None:
    """A table may be dropped and created again before the worker that waits has seen it."""
    await asyncio.sleep(5)
    await register(world, INDEX, awaited=True)

    async def created() -> list[str]:
        await create(world)
        return [one.name for one in (await described(world)).observers]

    for _ in range(2):
        assert await created() == ["index"]
        await drop(world)
    await created()
    await register(world, INDEX)
    await drop(world)
    assert await created() == []


async def test_only_so_many_tables_that_do_not_exist_have_observers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_changes, "AWAITED_MAX", 1)
    async with cluster("a:1") as world:
        await asyncio.sleep(5)
        for _ in range(2):
            await register(world, INDEX, awaited=True)
        with refused("table"):
            await world.call(methods.CHANGE_OBSERVERS, table="u", add=[INDEX], awaited=True)


@on_two_servers
async def test_a_split_loses_no_row_and_the_parent_is_forgotten(world: ModelCluster) -> None:
    table = await created_and_filled(world, splits=[])
    (whole,) = await world.locate(table)
    halves = await world.call(methods.SPLIT_TABLET, tablet_id=whole.tablet_id)
    assert await is_complete(world, table)
    found = await world.locate(table)
    assert [one.tablet_id for one in found] == [halves.lower.tablet_id, halves.upper.tablet_id]
    assert found[0].range.end == found[1].range.start == b"i"
    await asyncio.sleep(3)
    current = world.leader.store.current
    assert [one.origin_tablet_id for one in current.tablets.values()] == [0, 0]
    assert current.retired == ()
    # After it was moved it still has all of its rows.
    await world.call(methods.MOVE_TABLET, tablet_id=found[0].tablet_id)
    assert await is_complete(world, table)


async def test_a_tablet_can_be_split_as_soon_as_it_is_served(world: ModelCluster) -> None:
    """Also by a call that is faster than the note, in the map, that the tablet is served."""
    table = await created_and_filled(world, splits=[])
    (whole,) = await world.locate(table)
    forget_that_it_is_served(world, whole.tablet_id)
    await world.call(methods.SPLIT_TABLET, tablet_id=whole.tablet_id)
    assert await is_complete(world, table)


@pytest.mark.parametrize("victim", ["a:1", "b:1"])
@on_three_servers
async def test_no_row_is_lost_when_a_server_is_killed_during_a_split(
    world: ModelCluster,
    victim: str,
) -> None:
    table = await created_and_filled(world, splits=[])
    (whole,) = await world.locate(table)
    splitting = asyncio.create_task(world.call(methods.SPLIT_TABLET, tablet_id=whole.tablet_id))
    await asyncio.sleep(0.008)
    world.kill_server(victim)
    await asyncio.gather(splitting, return_exceptions=True)
    await world.until(lambda: is_complete(world, table))


SMALL_TABLETS = pb.TableOptions(split_bytes=64 << 10)


@on_two_servers
async def test_a_table_that_grows_is_split_automatically(world: ModelCluster) -> None:
    table = await create(world, splits=[], options=SMALL_TABLETS)
    for number in range(40):
        await world.write(table, b"%03d" % number, bytes(4 << 10))
    await asyncio.sleep(20)
    found = await world.locate(table)
    assert len(found) >= 4
    assert {one.address for one in found} == {"a:1", "b:1"}
    assert all([await world.read(table, b"%03d" % n) == bytes(4 << 10) for n in range(40)])


@on_two_servers
async def test_a_tablet_that_cannot_be_split_stops_no_other_split_or_move(
    world: ModelCluster,
) -> None:
    one_row = await create(world, "one row", [], SMALL_TABLETS)
    many_rows = await create(world, "many rows", [], SMALL_TABLETS)
    await world.write(one_row, b"a", bytes(200 << 10))
    for number in range(40):
        await world.write(many_rows, b"%03d" % number, bytes(4 << 10))
    world.start_server("c:1")

    async def shared() -> bool:
        found = await addresses(world, many_rows)
        return found.total() >= 4 and "c:1" in found

    await world.until(shared)


@asynccontextmanager
async def with_standby() -> AsyncIterator[ModelCluster]:
    async with cluster("a:1") as world:
        world.start_master()
        await asyncio.sleep(1)
        yield world


@pytest.fixture
def two_masters() -> AbstractAsyncContextManager[ModelCluster]:
    """A cluster with one tablet server, a leading master and another one."""
    return with_standby()


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


async def test_a_table_that_somebody_has_found_does_not_become_another_one(
    two_masters: ModelCluster,
) -> None:
    """Both had the same id: who had found the first wrote into the second."""
    await fails(two_masters, methods.CREATE_TABLE, pb.CreateTableRequest(name="first"))
    first = await shown(two_masters, "first")
    assert await create(two_masters, "second") != first.table_id
    assert await shown(two_masters, "first") == first


async def test_a_version_of_a_schema_that_somebody_has_found_does_not_become_another_one(
    two_masters: ModelCluster,
) -> None:
    """Who had found it wrote no notifications for the observers that the other one has."""
    await create(two_masters, "t")

    def adding(name: str) -> pb.ChangeObserversRequest:
        observer = pb.Observer(name=name, columns=[b"c"])
        return pb.ChangeObserversRequest(table="t", add=[observer])

    await fails(two_masters, methods.CHANGE_OBSERVERS, adding("first"))
    found = await shown(two_masters, "t")
    await two_masters.ask(methods.CHANGE_OBSERVERS, adding("second"))
    now = await shown(two_masters, "t")
    assert now.schema_version > found.schema_version
    assert [one.name for one in now.observers] == ["first", "second"]


async def test_a_table_that_was_created_all_the_same_can_be_used_without_another_change(
    two_masters: ModelCluster,
) -> None:
    """It could neither be created, since it existed, nor be found, until some other change."""
    await fails(two_masters, methods.CREATE_TABLE, pb.CreateTableRequest(name="t"))
    with pytest.raises(InvalidArgument, match="exists"):
        await create(two_masters, "t")
    table = await shown(two_masters, "t")
    await two_masters.until(lambda: served(two_masters, table.table_id), 5)
    await two_masters.write(table.table_id, b"row", b"value")


async def test_a_table_that_was_dropped_all_the_same_takes_no_more_writes(
    two_masters: ModelCluster,
) -> None:
    """It did until some other change, and then they were lost with it."""
    table = await create(two_masters, "t")
    await fails(two_masters, methods.DELETE_TABLE, pb.DeleteTableRequest(name="t"))
    await asyncio.sleep(2)
    with pytest.raises(PercolatorError):
        await two_masters.write(table, b"row", b"value")


async def test_on_a_full_disk_a_change_that_changes_nothing_succeeds(
    two_masters: ModelCluster,
) -> None:
    """As it does before any write has failed: many programs create their tables when they start."""
    before = await create(two_masters, "before")
    await asyncio.sleep(2)
    two_masters.masters[0].files.faults.fail("append", times=10_000)
    with pytest.raises(StoreUnusable):
        await create(two_masters, "lost")
    assert (
        await two_masters.call(methods.CREATE_TABLE, name="before", exist_ok=True, splits=SPLITS)
    ).table.table_id == before


async def test_a_change_that_was_not_stored_leaves_the_map_as_it_was(
    two_masters: ModelCluster,
) -> None:
    before = await create(two_masters, "before")
    await asyncio.sleep(2)
    two_masters.masters[0].files.faults.fail("append")
    with pytest.raises(StoreUnusable):
        await create(two_masters, "lost")
    await create(two_masters, "after")
    listed = (await two_masters.call(methods.LIST_TABLES)).tables
    assert [one.name for one in listed] == ["after", "before"]
    assert (await shown(two_masters, "before")).table_id == before


async def test_what_is_acknowledged_after_an_uncertain_write_outlasts_a_power_cut(
    two_masters: ModelCluster,
) -> None:
    """A repeated request changes nothing more, so what it found has to be written again."""
    await create(two_masters, "t")
    request = pb.SetChangeFeedRequest(table="t", change_feed=True)
    await fails(two_masters, methods.SET_CHANGE_FEED, request)
    acknowledged = (await two_masters.ask(methods.SET_CHANGE_FEED, request)).table
    for process in list(two_masters.masters):
        two_masters.kill_master(process)
    two_masters.disk.cut_power()
    two_masters.start_master()
    await asyncio.sleep(1)
    assert await described(two_masters) == acknowledged


async def test_a_master_that_took_what_can_be_read_for_durable_would_be_found(
    two_masters: ModelCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wrong(self: StoredMap[ClusterMap]) -> None:
        if not self._is_stored:
            self.current, self._is_stored = self._decode(await self._stored()), True

    monkeypatch.setattr(StoredMap, "_take_over", wrong)
    with pytest.raises(AssertionError):
        await test_what_is_acknowledged_after_an_uncertain_write_outlasts_a_power_cut(two_masters)


@pytest.mark.parametrize(
    "test",
    [
        test_a_table_that_somebody_has_found_does_not_become_another_one,
        test_a_version_of_a_schema_that_somebody_has_found_does_not_become_another_one,
    ],
)
async def test_a_master_that_continued_with_its_own_map_would_be_found(
    two_masters: ModelCluster,
    test: Callable[[ModelCluster], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def own(self: StoredMap[ClusterMap]) -> bytes:
        return cluster_map.encode(self.current)

    monkeypatch.setattr(StoredMap, "_stored", own)
    with pytest.raises(AssertionError):
        await test(two_masters)


# A request to create or delete a table whose answer was lost, repeated at another master.


async def ask_to_create(world: ModelCluster, request_id: bytes) -> pb.CreateTableResponse:
    return await world.call(
        methods.CREATE_TABLE, name="t", splits=[b"m"], request_id=request_id, seconds=30.0
    )


async def ask_to_delete(world: ModelCluster, request_id: bytes) -> pb.DeleteTableResponse:
    return await world.call(methods.DELETE_TABLE, name="t", request_id=request_id, seconds=30.0)


async def test_a_creation_repeated_at_the_next_master_finds_its_own_table(
    world: ModelCluster,
) -> None:
    first = await ask_to_create(world, b"one")
    world.replace_master()
    again = await ask_to_create(world, b"one")
    assert first.created
    assert again.created
    assert again.table.table_id == first.table.table_id
    for other in (b"two", b""):
        with pytest.raises(InvalidArgument, match="exists"):
            await ask_to_create(world, other)


async def test_a_table_without_an_id_of_its_creation_is_nobodys_own(world: ModelCluster) -> None:
    await ask_to_create(world, b"")
    with pytest.raises(InvalidArgument, match="exists"):
        await ask_to_create(world, b"")


async def test_a_deletion_repeated_at_the_next_master_spares_the_next_table_of_that_name(
    world: ModelCluster,
) -> None:
    await ask_to_create(world, b"one")
    assert (await ask_to_delete(world, b"two")).deleted
    world.replace_master()
    assert (await ask_to_delete(world, b"two")).deleted
    later = await ask_to_create(world, b"three")
    world.replace_master()
    assert (await ask_to_delete(world, b"two")).deleted
    assert await described(world) == later.table
    assert (await ask_to_delete(world, b"four")).deleted
    for other in (b"five", b""):
        with pytest.raises(SchemaError):
            await ask_to_delete(world, other)


async def test_ids_of_requests_are_short(world: ModelCluster) -> None:
    for ask in (ask_to_create, ask_to_delete):
        with pytest.raises(InvalidArgument, match="request_id"):
            await ask(world, bytes(REQUEST_ID_BYTES_MAX + 1))
    with pytest.raises(SchemaError):
        await described(world)


def test_a_catalogue_remembers_the_last_deletions_only() -> None:
    catalogue = Catalogue()
    ids = [b"%d" % number for number in range(DELETIONS_KEPT + 5)]
    for one in (*ids, b""):
        catalogue = catalogue.with_deletion(one)
    stored = cluster_map.decode_catalogue(cluster_map.encode_catalogue(catalogue))
    assert stored.deletions == tuple(ids[5:])
