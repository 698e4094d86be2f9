"""Indexes in a row store: each has a table of the store, which the master makes and deletes."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from percolator import Table, UniqueViolation, codecs
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.row_database import MODEL
from percolator.wire.table_indexes import entries_name
from tests.unit.rowstore.model_store import Loading
from tests.unit.rowstore.model_store import loading as loading_site


@pytest.fixture
def at() -> AbstractAsyncContextManager[Loading]:
    """A database whose tables are made as a master makes them."""
    return loading_site()


people = Table("people")
city = people.column("city", codecs.text, indexed=True)
email = people.column("email", codecs.text, unique=True)
by_both = people.index("by both", city, email)


async def set_both(at: Loading, row: str, where: str, mail: str) -> None:
    async with at.database.transaction() as tx:
        tx.set(row, city, where)
        tx.set(row, email, mail)


async def test_indexes_come_and_go_with_tables_of_the_store(at: Loading) -> None:
    db, kept = at.database, at.cluster.kept
    first = Table("people")
    first.column("city", codecs.text, indexed=True)
    first.column("email", codecs.text, unique=True)
    await db.create_table(first)
    await set_both(at, "ann", "Rome", "a@x")
    await set_both(at, "bob", "Bern", "b@x")
    assert await db.create_index(by_both) == 2
    with pytest.raises(UniqueViolation):
        await set_both(at, "kim", "Rome", "a@x")
    async with db.snapshot() as snapshot:
        assert [row.key async for row in snapshot.find(by_both, "Rome", "a@x")] == ["ann"]
    table = kept.current.table("people")
    entries = {one.name: one.table_id for one in table.indexes}
    used = {one.table_id for one in kept.current.tables.values() if one.is_used}
    assert used == {table.table_id, *entries.values()}
    assert len(used) == 4
    for name, table_id in entries.items():
        entry = kept.current.tables[table_id]
        assert (entry.name, entry.index_of) == (
            entries_name(table.table_id, name),
            table.table_id,
        )
    await db.drop_index(people, "city")
    await at.cluster.remove_dropped()
    assert there(at) == used - {entries["city"]}
    await set_both(at, "ann", "Oslo", "c@x")
    assert await db.create_index(city) == 2
    for index in (city, email, by_both):
        assert await db.check_index(index) == []
    await db.drop_table(people)
    await at.cluster.remove_dropped()
    assert there(at) == set()


def there(at: Loading) -> set[int]:
    """The ids of the tables that the store has."""
    model = at.network.handlers[MODEL.address]
    assert isinstance(model, BigtableInMemory)
    ids = (name.rpartition("-")[2] for name in model.tables)
    return {int(one) for one in ids if one.isdigit()}
