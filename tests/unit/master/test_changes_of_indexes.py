"""A table's indexes are part of its schema, and their entries are in tables of their own.

No commit misses an index that is there, and no table of entries goes while one may write it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from percolator.codecs.indexes import INDEX_COLUMNS_MAX, INDEXES_MAX, IndexDefinition
from percolator.errors import DeadlineExceeded, InvalidArgument, PercolatorError, SchemaError
from percolator.routing.catalog import Catalog, TabletMap
from percolator.routing.lanes import SchemaVersions
from percolator.services.master.cluster_map import Table
from percolator.services.master.leader import Tables
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire import methods
from percolator.wire.table_indexes import entries_name
from percolator.world import UnaryMethod
from tests.unit.master.cluster_world import (
    LEASE_SECONDS,
    ModelCluster,
    cluster,
    create,
    described,
    on_two_servers,
)

PATIENCE = 70.0
"""Longer than a master waits for a change."""


def index(name: str = "by city", /, *, unique: bool = False, **columns: str) -> pb.Index:
    listed = columns or {"city": "text"}
    return pb.Index(
        name=name,
        columns=[pb.ColumnCodec(column=one.encode(), codec=codec) for one, codec in listed.items()],
        unique=unique,
    )


async def change(
    world: ModelCluster, *add: pb.Index, remove: tuple[str, ...] = (), seconds: float = 5.0
) -> pb.Table:
    table = await described(world)
    known = {one.name: one.table_id for one in table.indexes}
    removed = [pb.RemovedIndex(name=name, table_id=known.get(name, 0)) for name in remove]
    request = pb.ChangeIndexesRequest(table="t", add=add, remove=removed)
    return (await world.ask(methods.CHANGE_INDEXES, request, seconds)).table


def tables(world: ModelCluster) -> dict[str, Table]:
    return {one.name: one for one in world.leader.store.current.tables.values() if one.is_used}


def versions(world: ModelCluster, table: pb.Table) -> set[int]:
    """Versions of the schema under which its tablets judge."""
    return {one.schema_version for one in world.open_tablets() if one.table_id == table.table_id}


async def test_a_table_is_created_with_complete_indexes_and_tables_for_their_entries(
    world: ModelCluster,
) -> None:
    request = pb.CreateTableRequest(
        name="t",
        splits=[b"m"],
        indexes=[index(), index("a", unique=True, name="text", age="integer")],
        options=pb.TableOptions(retention_milliseconds=10**7),
    )
    table = (await world.ask(methods.CREATE_TABLE, request)).table
    assert [one.name for one in table.indexes] == ["a", "by city"]
    assert [one.ready_at for one in table.indexes] == [table.created_at] * 2
    assert {one.column: one.codec for one in table.codecs.columns} == {
        b"age": "integer",
        b"city": "text",
        b"name": "text",
    }
    for one in table.indexes:
        entries = await described(world, entries_name(table.table_id, one.name))
        assert entries.table_id == one.table_id
        assert entries.index_of == table.table_id
        assert entries.options.retention_milliseconds == 10**7
        assert (entries.created_at, entries.tablets) == (table.created_at, 1)
        assert versions(world, entries) == {1}
    # What a later master reads of it.
    world.replace_master()
    assert await described(world) == table
    located = await world.call(methods.LOCATE_TABLETS, table_id=table.table_id, knows_indexes=True)
    assert located.indexes == table.indexes


async def test_a_table_that_exists_has_to_have_the_indexes_that_are_asked_for(
    world: ModelCluster,
) -> None:
    request = pb.CreateTableRequest(name="t", indexes=[index()], exist_ok=True)
    await create(world)
    with pytest.raises(SchemaError) as caught:
        await world.ask(methods.CREATE_TABLE, request)
    assert caught.value.message == (
        "table 't' exists without the index 'by city': create it with db.create_index(...) or "
        "percolator index create"
    )
    await change(world, index(), index("other", name="text"))
    assert not (await world.ask(methods.CREATE_TABLE, request)).created
    request.indexes[0].unique = True
    with pytest.raises(SchemaError, match="another index 'by city', over 'city'") as caught:
        await world.ask(methods.CREATE_TABLE, request)
    assert "not unique over 'city' (text): drop that one, and create it" in caught.value.message


@on_two_servers
async def test_an_index_is_added_when_every_tablet_has_heard_of_it(world: ModelCluster) -> None:
    await create(world)
    table = await change(world, index())
    assert table.schema_version == 2
    assert [(one.name, one.ready_at) for one in table.indexes] == [("by city", 0)]
    assert versions(world, table) == {2}
    assert await change(world, index()) == table
    assert len(tables(world)) == 2
    with pytest.raises(SchemaError, match="another index 'by city', over 'city'"):
        await change(world, index(town="text"))
    with pytest.raises(SchemaError, match="the program declares the codec integer"):
        await change(world, index("by age"), index("again", city="integer"))
    assert await described(world) == table


@on_two_servers
async def test_a_removed_index_keeps_its_entries_until_every_tablet_has_heard_of_it(
    world: ModelCluster,
) -> None:
    await create(world)
    table = await change(world, index())
    entries = entries_name(table.table_id, "by city")
    world.network.silent.add("a:1")
    with pytest.raises(DeadlineExceeded):
        await change(world, remove=("by city",), seconds=2.0)
    assert not tables(world)["t"].indexes
    assert entries in tables(world)
    # Nobody else uses what is left, and another call takes it away, under another leader as well.
    world.network.silent.clear()
    world.replace_master()
    removed = await change(world, remove=("by city",))
    assert (removed.schema_version, list(removed.indexes)) == (3, [])
    assert list(tables(world)) == ["t"]
    assert versions(world, table) == {3}


@on_two_servers
async def test_an_index_that_was_removed_half_way_is_made_anew(world: ModelCluster) -> None:
    await create(world)
    before = await change(world, index())
    world.network.silent.add("a:1")
    with pytest.raises(DeadlineExceeded):
        await change(world, remove=("by city",), seconds=2.0)
    world.network.silent.clear()
    after = await change(world, index(city="text", unique=True), seconds=20.0)
    assert after.indexes[0].table_id > before.indexes[0].table_id
    assert {one.table_id for one in tables(world).values()} == {
        after.table_id,
        after.indexes[0].table_id,
    }


@on_two_servers
async def test_a_late_copy_of_a_removal_leaves_what_was_made_since(world: ModelCluster) -> None:
    await create(world)
    (before,) = (await change(world, index())).indexes
    removed = pb.RemovedIndex(name=before.name, table_id=before.table_id)
    request = pb.ChangeIndexesRequest(table="t", remove=[removed])
    await world.ask(methods.CHANGE_INDEXES, request)
    answer = await world.ask(methods.CHANGE_INDEXES, request)  # its first answer was lost
    assert not answer.table.indexes
    table = await change(world, index())
    for table_id in (before.table_id, 0):  # or from who has seen that it is in no schema
        request.remove[0].table_id = table_id
        assert (await world.ask(methods.CHANGE_INDEXES, request)).table == table
    assert table.indexes[0].table_id in {one.table_id for one in tables(world).values()}


@on_two_servers
async def test_indexes_are_replaced_in_one_call_unless_they_have_one_name(
    world: ModelCluster,
) -> None:
    await create(world)
    await change(world, index("a"))
    table = await change(world, index("b"), remove=("a",))
    assert [one.name for one in table.indexes] == ["b"]
    with pytest.raises(InvalidArgument, match=r"remove\[0\]: index 'b' is to be added, too"):
        await change(world, index("b"), remove=("b",))
    with pytest.raises(SchemaError, match="table 't' has no index 'c'"):
        await change(world, index("d"), remove=("c",))
    assert await described(world) == table


@on_two_servers
async def test_entries_go_with_their_table(world: ModelCluster) -> None:
    request = pb.CreateTableRequest(name="t", indexes=[index(), index("b", name="text")])
    await world.ask(methods.CREATE_TABLE, request)
    await world.call(methods.DELETE_TABLE, name="t")
    assert not tables(world)
    await asyncio.sleep(10)
    assert not world.leader.store.current.tables
    assert not world.open_tablets()


@on_two_servers
async def test_a_drop_waits_until_the_entries_are_out_of_use(world: ModelCluster) -> None:
    request = pb.CreateTableRequest(name="t", indexes=[index()])
    table = (await world.ask(methods.CREATE_TABLE, request)).table
    (rows,) = await world.locate(table.table_id)
    (entries,) = await world.locate(table.indexes[0].table_id)
    assert rows.address != entries.address
    world.network.silent.add(entries.address)
    began = world.clock.monotonic_seconds()
    assert (await world.call(methods.DELETE_TABLE, name="t", seconds=PATIENCE)).deleted
    assert world.clock.monotonic_seconds() - began > LEASE_SECONDS - 0.5


async def test_only_its_table_changes_the_entries_of_an_index(world: ModelCluster) -> None:
    await create(world)
    table = await change(world, index())
    name = entries_name(table.table_id, "by city")
    before = tables(world)
    refused = "has the entries of an index"
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.DELETE_TABLE, name=name)
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.SET_TTLS, table=name, ttls=[])
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.SET_CHANGE_FEED, table=name, change_feed=True)
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.CHANGE_CODECS, table=name, key="text")
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.CHANGE_OBSERVERS, table=name)
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.CHANGE_INDEXES, table=name)
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.DECLARE_CODECS, table_id=table.indexes[0].table_id)
    with pytest.raises(InvalidArgument, match="internal tables only"):
        await world.call(methods.CREATE_TABLE, name=name, exist_ok=True)
    assert tables(world) == before


LONG = "n" * 65


@pytest.mark.parametrize(
    ("indexes", "kind", "reason"),
    [
        ([index("")], InvalidArgument, r"\[0\].name: expected 1 to 64 bytes"),
        ([index(), index(LONG)], InvalidArgument, r"\[1\].name: expected 1 to 64 bytes"),
        ([index("a\nb")], InvalidArgument, r"\[0\].name: .*unprintable"),
        ([index("a "), index()], InvalidArgument, r"\[0\].name: .*a space at either end"),
        ([index(), index()], InvalidArgument, r"\[1\].name: 'by city' is given twice"),
        ([pb.Index(name="a")], InvalidArgument, r"\[0\].columns: 0 columns; expected 1 to 16"),
        (
            [pb.Index(name="a", columns=[pb.ColumnCodec()] * (INDEX_COLUMNS_MAX + 1))],
            InvalidArgument,
            r"\[0\].columns: 17 columns; expected 1 to 16",
        ),
        (
            [pb.Index(name="a", columns=[pb.ColumnCodec(column=b"c", codec="text")] * 2)],
            InvalidArgument,
            r"\[0\].columns\[1\].column: 'c' appears twice",
        ),
        (
            [pb.Index(name="a", columns=[pb.ColumnCodec(codec="text")])],
            InvalidArgument,
            r"\[0\].columns\[0\].column: expected 1 to 255 bytes",
        ),
        ([index(city="")], SchemaError, "column 'city' has no codec"),
        ([index(city="json")], SchemaError, "column 'city': values of codec json have no order"),
        ([index(str(n)) for n in range(INDEXES_MAX + 1)], InvalidArgument, "at most 64 allowed"),
    ],
)
async def test_an_index_that_makes_no_sense_is_refused_by_its_field(
    world: ModelCluster, indexes: list[pb.Index], kind: type[PercolatorError], reason: str
) -> None:
    await create(world)
    with pytest.raises(kind, match=reason):
        await change(world, *indexes)
    with pytest.raises(kind, match=reason):
        await world.call(methods.CREATE_TABLE, name="new", indexes=indexes)
    assert list(tables(world)) == ["t"]


async def test_a_table_has_so_many_indexes_at_most(world: ModelCluster) -> None:
    listed = [index(str(number)) for number in range(INDEXES_MAX)]
    await world.call(methods.CREATE_TABLE, name="t", indexes=listed)
    with pytest.raises(InvalidArgument, match="add: 't' would have more than 64 indexes"):
        await change(world, index("one more"))
    assert len((await change(world, index("another"), remove=("7",))).indexes) == INDEXES_MAX


def lives(**columns: int) -> list[ColumnTtl]:
    return [ColumnTtl(column=one.encode(), ttl_milliseconds=ttl) for one, ttl in columns.items()]


async def test_entries_live_as_long_as_the_column_that_expires_first(world: ModelCluster) -> None:
    request = pb.CreateTableRequest(
        name="t",
        indexes=[index(), index("both", city="text", name="text"), index("none", age="integer")],
        options=pb.TableOptions(ttls=lives(city=2000, name=1000, other=5)),
    )
    await world.ask(methods.CREATE_TABLE, request)
    table = await change(world, index("later", name="text", age="integer"))
    for one, ttls in {
        "by city": lives(row=2000),
        "both": lives(row=1000),
        "none": [],
        "later": lives(row=1000),
    }.items():
        entries = await described(world, entries_name(table.table_id, one))
        assert list(entries.options.ttls) == ttls


async def test_an_indexed_column_keeps_its_time_to_live(world: ModelCluster) -> None:
    await create(world)
    await world.call(methods.SET_TTLS, table="t", ttls=lives(city=1000))
    await change(world, index(), index("by age", age="integer"))
    for column, changed in (
        ("city", lives(city=0)),
        ("city", lives(city=1)),
        ("age", lives(age=1)),
    ):
        refused = (
            f"the time to live of column '{column}' cannot be changed, .* drop the index first"
        )
        with pytest.raises(SchemaError, match=refused):
            await world.call(methods.SET_TTLS, table="t", ttls=changed)
    await world.call(methods.SET_TTLS, table="t", ttls=lives(city=1000, name=1, age=0))
    await change(world, remove=("by city",))
    await world.call(methods.SET_TTLS, table="t", ttls=lives(city=0))


@on_two_servers
async def test_an_index_is_added_when_every_tablet_judges_by_the_times_to_live(
    world: ModelCluster,
) -> None:
    table_id = await create(world)
    world.network.silent.add("a:1")
    with pytest.raises(DeadlineExceeded):
        await world.call(methods.SET_TTLS, 1.0, table="t", ttls=lives(city=1000))
    with pytest.raises(DeadlineExceeded):
        await change(world, index(), seconds=1.0)
    assert list(tables(world)["t"].indexes) == []
    world.network.silent.clear()
    table = await change(world, index())
    assert {one.name for one in table.indexes} == {"by city"}
    assert [one.ttls for one in world.open_tablets() if one.table_id == table_id] == (
        [lives(city=1000)] * table.tablets
    )


async def test_an_indexed_column_keeps_its_codec(world: ModelCluster) -> None:
    await create(world)
    await change(world, index())
    columns = [pb.ColumnCodec(column=b"city", codec="integer")]
    refused = "the index 'by city' needs the codec text of column 'city'; drop the index first"
    with pytest.raises(SchemaError, match=refused):
        await world.call(methods.CHANGE_CODECS, table="t", columns=columns)
    await change(world, remove=("by city",))
    await world.call(methods.CHANGE_CODECS, table="t", columns=columns)


async def test_a_client_that_does_not_keep_indexes_learns_nothing_of_a_table_that_has_some(
    world: ModelCluster,
) -> None:
    table_id = await create(world)
    await change(world, index())
    calls: list[tuple[UnaryMethod[Any, Any], dict[str, Any]]] = [
        (methods.DESCRIBE_TABLE, {"name": "t"}),
        (methods.DESCRIBE_TABLE, {"table_id": table_id}),
        (methods.LOCATE_TABLETS, {"table_id": table_id}),
        (methods.CREATE_TABLE, {"name": "t", "exist_ok": True}),
    ]
    for method, request in calls:
        with pytest.raises(SchemaError, match=r"has indexes, .* upgrade the client"):
            await world.call(method, **request)
        await world.call(method, **request, knows_indexes=True)


async def test_a_client_learns_of_indexes_with_the_version_of_the_schema(
    world: ModelCluster,
) -> None:
    masters = [world.masters[0].address]
    catalog = Catalog(world.world, masters, TabletMap(), SchemaVersions())
    other = Catalog(world.world, masters, TabletMap(), SchemaVersions())
    deadline = world.clock.monotonic_seconds() + 60
    table_id = await create(world)
    await other.table("t", deadline)
    wanted = replace(IndexDefinition.of(index()), table_id=5, ready_at=7)  # which a master decides
    info = await catalog.change_indexes("t", add=[wanted], deadline=deadline)
    (added,) = info.schema.indexes
    assert (added.ready_at, added.declares_same(wanted)) == (0, True)
    assert added.table_id not in (0, 5)
    assert await catalog.change_indexes("t", add=[wanted], deadline=deadline) == info
    await other.find(table_id, b"")
    learnt = other.get(table_id)
    assert learnt is not None
    assert learnt.indexes == info.schema.indexes
    await world.call(methods.SET_CHANGE_FEED, table="t", change_feed=True)
    later = await other.refresh(table_id, deadline)
    assert later.version == learnt.version + 1
    assert later.indexes is learnt.indexes
    gone = pb.RemovedIndex(name=added.name, table_id=added.table_id)
    removed = await catalog.change_indexes("t", remove=[gone], deadline=deadline)
    assert removed.schema.indexes == ()


async def test_entries_that_are_deleted_too_early_are_found_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted mistake."""

    async def wrong(self: Tables, table: Table, deadline: float) -> None:
        return None

    monkeypatch.setattr(Tables, "_until_current", wrong)
    async with cluster("a:1", "b:1") as world:
        with pytest.raises(AssertionError):
            await test_a_removed_index_keeps_its_entries_until_every_tablet_has_heard_of_it(world)
