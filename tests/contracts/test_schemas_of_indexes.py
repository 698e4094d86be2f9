"""A table has the indexes that were declared for it, whose entries are in tables of their own."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from percolator import Column, Database, InvalidArgument, SchemaError, Table, codecs
from percolator.codecs.indexes import IndexDefinition
from percolator.v1 import master_pb2
from percolator.v1.master_pb2 import RemovedIndex
from tests.contracts.conftest import needs_tablets
from tests.contracts.test_tables import alter, described, kept

pytestmark = needs_tablets


@dataclass
class Indexed:
    """A table with two declared indexes."""

    table: Table[str]
    city: Column[str]
    email: Column[str]


@pytest.fixture
def indexed(db: Database) -> Indexed:
    table = Table(f"indexed-{uuid.uuid4().hex}")
    city = table.column("city", codecs.text, indexed=True)
    email = table.column("email", codecs.text, unique=True)
    db.create_table(table, ["m"])
    return Indexed(table, city, email)


def entries_of(db: Database, table: master_pb2.Table) -> list[master_pb2.Table]:
    """The tables of its entries."""

    async def describe() -> list[master_pb2.Table]:
        engine = db._asynchronous.internal.engine
        found = await engine.catalog.describe_all(engine.now() + 10.0)
        return [one for one in found if one.index_of == table.table_id and not one.deleting]

    return db._loop_thread.call(describe)


def test_a_table_is_created_with_the_indexes_that_were_declared(
    db: Database, indexed: Indexed
) -> None:
    table = described(db, indexed.table)
    assert [(one.name, one.unique) for one in table.indexes] == [("city", False), ("email", True)]
    assert [one.ready_at for one in table.indexes] == [table.created_at] * 2
    assert kept(db, indexed.table) == {b"city": "text", b"email": "text"}
    entries = {one.table_id: one for one in entries_of(db, table)}
    assert entries.keys() == {one.table_id for one in table.indexes}
    for one in table.indexes:
        assert entries[one.table_id].name == f"percolator.index/{table.table_id}/{one.name}"
        assert entries[one.table_id].name not in db.tables()


def test_a_table_that_exists_is_refused_if_it_lacks_an_index(
    db: Database, indexed: Indexed
) -> None:
    same = Table(indexed.table.name)
    same.column("email", codecs.text, unique=True)
    db.create_table(same, exist_ok=True)
    same.column("town", codecs.text, indexed=True)
    with pytest.raises(SchemaError) as caught:
        db.create_table(same, exist_ok=True)
    assert caught.value.message == (
        f"table {same.name!r} exists without the index 'town': create it with "
        "db.create_index(...) or percolator index create"
    )
    other = Table(indexed.table.name)
    other.column("city", codecs.text, unique=True)
    with pytest.raises(SchemaError, match="exists with another index 'city', over 'city'"):
        db.create_table(other, exist_ok=True)


def test_entries_come_and_go_with_their_index_and_table(db: Database, indexed: Indexed) -> None:
    before = described(db, indexed.table)
    place = indexed.table.index("place", indexed.city, indexed.email)
    change_indexes(db, indexed, add=[place.definition()], remove=["city"])
    table = described(db, indexed.table)
    assert table.schema_version > before.schema_version
    assert [(one.name, one.ready_at) for one in table.indexes] == [
        ("email", before.created_at),
        ("place", 0),
    ]
    assert {one.table_id for one in entries_of(db, table)} == {
        one.table_id for one in table.indexes
    }
    change_indexes(db, indexed, add=[place.definition()])
    assert described(db, indexed.table) == table
    with pytest.raises(SchemaError, match="has another index 'place', over 'city'"):
        change_indexes(db, indexed, add=[replace(place.definition(), unique=True)])
    with pytest.raises(SchemaError, match="has no index 'never'"):
        change_indexes(db, indexed, remove=["never"])
    db.drop_table(indexed.table)
    assert entries_of(db, table) == []


def test_an_indexed_column_keeps_its_codec_and_its_time_to_live(
    db: Database, indexed: Indexed
) -> None:
    with pytest.raises(SchemaError, match="the index 'city' needs the codec text of column 'city'"):
        alter(db, indexed.table, city="raw")
    with pytest.raises(SchemaError, match="the time to live of column 'city' cannot be changed"):
        db.set_ttl(indexed.city, timedelta(hours=1))
    again = Table(f"{indexed.table.name}-again")
    city = again.column("city", codecs.text, indexed=True)
    db.create_table(again, ttl={city: timedelta(hours=1)})
    (entries,) = entries_of(db, described(db, again))
    assert [one.ttl_milliseconds for one in entries.options.ttls] == [3_600_000]
    db.set_ttl(city, timedelta(hours=1))
    with pytest.raises(SchemaError, match="the time to live of column 'city' cannot be changed"):
        db.set_ttl(city, None)


def test_entries_go_with_values_that_expire(db: Database) -> None:
    table = Table(f"brief-{uuid.uuid4().hex}")
    city = table.column("city", codecs.text, indexed=True)
    token = table.column("token", codecs.text, unique=True)
    db.create_table(table, ttl={city: timedelta(hours=1), token: timedelta(milliseconds=1)})
    with db.transaction() as tx:
        tx.set("ann", city, "Rome")
        tx.set("ann", token, "5f3a")
    while True:  # until the next millisecond, in the oracle's time
        with db.snapshot() as snapshot:
            assert [row.key for row in snapshot.find(city, "Rome")] == ["ann"]
            if not [*snapshot.find(token, "5f3a")]:
                break
    with db.transaction() as tx:
        tx.set("bob", token, "5f3a")
    assert [db.check_index(one) for one in (city, token)] == [[], []]


def test_the_entries_of_an_index_are_not_changed_by_name(db: Database, indexed: Indexed) -> None:
    (entries, _) = entries_of(db, described(db, indexed.table))
    with pytest.raises(InvalidArgument, match="is internal"):
        db.drop_table(Table(entries.name))
    for call in (
        lambda: db.set_change_feed(Table(entries.name), on=True),
        lambda: alter(db, Table(entries.name), row="raw"),
        lambda: change_indexes(db, Indexed(Table(entries.name), indexed.city, indexed.email)),
    ):
        with pytest.raises(SchemaError, match="has the entries of an index"):
            call()
    assert entries in entries_of(db, described(db, indexed.table))


def change_indexes(
    db: Database,
    indexed: Indexed,
    add: Sequence[IndexDefinition] = (),
    remove: Sequence[str] = (),
) -> None:
    """Without building what is added."""

    async def change() -> None:
        engine = db._asynchronous.internal.engine
        deadline = engine.now() + 10.0
        info = await engine.catalog.table(indexed.table.name, deadline)
        known = {one.name: one.table_id for one in info.schema.indexes}
        removed = [RemovedIndex(name=name, table_id=known.get(name, 0)) for name in remove]
        await engine.catalog.change_indexes(indexed.table.name, add, removed, deadline=deadline)

    db._loop_thread.call(change)
