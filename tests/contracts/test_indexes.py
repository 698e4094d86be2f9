"""Secondary indexes, in every kind of `Database`."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import pytest

from percolator import (
    Column,
    ConflictError,
    Database,
    Index,
    InvalidArgument,
    SchemaError,
    Table,
    UniqueViolation,
    UsageError,
    codecs,
)
from percolator.aio.find import declared_index
from percolator.protocol.indexes import DROPPED
from tests.contracts.conftest import needs_backward_scans

pytestmark = needs_backward_scans


@dataclass
class People:
    """A table with three indexes."""

    table: Table[str]
    city: Column[str]
    street: Column[str]
    email: Column[str]
    age: Column[int]
    by_place: Index[str]


def people(name: str = "") -> People:
    table = Table(name or f"people-{uuid.uuid4().hex}")
    city = table.column("city", codecs.text, indexed=True)
    street = table.column("street", codecs.text)
    email = table.column("email", codecs.text, unique=True)
    age = table.column("age", codecs.integer, indexed=True)
    return People(table, city, street, email, age, table.index("by place", city, street))


@pytest.fixture
def made(db: Database) -> People:
    found = people()
    db.create_table(found.table, ["g", "p"])
    return found


def keys(db: Database, index: Any, *values: object, **arguments: Any) -> list[str]:
    with db.snapshot() as snapshot:
        return [row.key for row in snapshot.find(index, *values, **arguments)]


def place(db: Database, made: People, row: str, city: str, street: str = "Main") -> None:
    with db.transaction() as tx:
        tx.set(row, made.city, city)
        tx.set(row, made.street, street)


def test_rows_are_found_by_value_in_its_order(db: Database, made: People) -> None:
    for row, age in {"zoe": 7, "ann": -3, "bob": 300, "kim": 7}.items():
        with db.transaction() as tx:
            tx.set(row, made.age, age)
    assert keys(db, made.age, 7) == ["kim", "zoe"]
    assert keys(db, made.age, 8) == []
    assert keys(db, made.age) == ["ann", "kim", "zoe", "bob"]
    assert keys(db, made.age, reverse=True, limit=2) == ["bob", "zoe"]
    assert keys(db, made.age, start=-3, end=300) == ["ann", "kim", "zoe"]
    assert keys(db, made.age, start=8) == ["bob"]
    assert keys(db, made.age, start=9, end=8) == []
    with db.snapshot() as snapshot:
        (bob,) = snapshot.find(made.age, 300, columns=[made.city, made.age])
        assert (bob.key, bob[made.age], bob.get(made.city)) == ("bob", 300, None)


def test_an_index_of_several_columns_is_in_their_order(db: Database, made: People) -> None:
    for row, city, street in (
        ("a", "Rome", "Via B"),
        ("h", "Rom", "X"),
        ("q", "Rome", "Via A"),
        ("b", "Bern", "Gasse"),
    ):
        place(db, made, row, city, street)
    with db.transaction() as tx:
        tx.set("alone", made.city, "Rome")  # has no street, and so no entry
    assert keys(db, made.by_place) == ["b", "h", "q", "a"]
    assert keys(db, made.by_place, "Rome") == ["q", "a"]
    assert keys(db, made.by_place, "Rome", "Via B") == ["a"]
    assert keys(db, made.by_place, "Rome", prefix="Via") == ["q", "a"]
    assert keys(db, made.by_place, prefix="Rom") == ["h", "q", "a"]
    assert keys(db, made.by_place, "Rome", start="Via AA") == ["a"]
    assert keys(db, made.city, "Rome") == ["a", "alone", "q"]


def test_entries_follow_every_kind_of_write(db: Database, made: People) -> None:
    place(db, made, "ann", "Rome")
    place(db, made, "zoe", "Rome")
    assert keys(db, made.city, "Rome") == ["ann", "zoe"]
    db.set_many([("ann", {made.city: "Bern"})])
    assert (keys(db, made.city, "Rome"), keys(db, made.city, "Bern")) == (["zoe"], ["ann"])
    with db.transaction() as tx:
        tx.delete("ann", made.street)
    assert (keys(db, made.by_place), keys(db, made.city)) == (["zoe"], ["ann", "zoe"])
    with db.transaction() as tx:
        tx.delete_row(made.table, "zoe")
    assert (keys(db, made.by_place), keys(db, made.city)) == ([], ["ann"])
    with db.transaction() as tx:
        tx.set("ann", made.city, "Bern")  # as it is
    assert keys(db, made.city, "Bern") == ["ann"]
    assert [db.check_index(one) for one in (made.city, made.by_place)] == [[], []]


def test_a_transaction_finds_what_it_has_written(db: Database, made: People) -> None:
    for row, city in (("a", "Rome"), ("c", "Rome"), ("t", "Rome"), ("u", "Bern")):
        place(db, made, row, city)
    with db.transaction() as tx:
        tx.set("b", made.city, "Rome")
        tx.set("c", made.city, "Oslo")
        tx.delete_row(made.table, "t")
        tx.set("z", made.city, "Rome")
        assert [row.key for row in tx.find(made.city, "Rome")] == ["a", "b", "z"]
        assert [row.key for row in tx.find(made.city, "Rome", limit=2)] == ["a", "b"]
        assert [row.key for row in tx.find(made.city)] == ["u", "c", "a", "b", "z"]
        reverse = [row.key for row in tx.find(made.city, reverse=True)]
        assert reverse == ["z", "b", "a", "c", "u"]
        tx.rollback()


def test_a_snapshot_finds_what_was_there(db: Database, made: People) -> None:
    place(db, made, "ann", "Rome")
    with db.snapshot() as before:
        before.timestamp()
        place(db, made, "ann", "Bern")
        assert [row.key for row in before.find(made.city, "Rome")] == ["ann"]
        assert [*before.find(made.city, "Bern")] == []


def test_a_unique_value_has_one_row(db: Database, made: People) -> None:
    with db.transaction() as tx:
        tx.set("ann", made.email, "a@x")
    taken = "row 'ann' has the same value in 'email'"
    with pytest.raises(UniqueViolation, match=taken) as caught:
        db.run(lambda tx: tx.set("bob", made.email, "a@x"))
    assert (caught.value.index, caught.value.rows) == ("email", (b"bob", b"ann"))
    twice = db.transaction()
    twice.set("bob", made.email, "b@x")
    twice.set("kim", made.email, "b@x")
    with pytest.raises(UniqueViolation):
        twice.commit()
    with db.transaction() as tx:
        tx.set("bob", made.email, "b@x")
    with db.transaction() as tx:  # they change values with each other
        tx.set("ann", made.email, "b@x")
        tx.set("bob", made.email, "a@x")
    with db.transaction() as tx:
        tx.delete("ann", made.email)
        tx.set("kim", made.email, "b@x")
    assert [(row, keys(db, made.email, row)) for row in ("a@x", "b@x")] == [
        ("a@x", ["bob"]),
        ("b@x", ["kim"]),
    ]


def test_of_two_that_claim_a_unique_value_at_once_one_wins(db: Database, made: People) -> None:
    first, second = db.transaction(), db.transaction()
    for tx, row in ((first, "ann"), (second, "zoe")):
        tx.timestamp()
        tx.set(row, made.email, "a@x")
    first.commit()
    with pytest.raises(ConflictError):
        second.commit()
    with pytest.raises(UniqueViolation):
        db.run(lambda tx: tx.set("zoe", made.email, "a@x"))
    assert keys(db, made.email, "a@x") == ["ann"]


def test_writers_of_two_columns_of_one_index_conflict(db: Database, made: People) -> None:
    place(db, made, "ann", "Rome", "Via A")
    first, second = db.transaction(), db.transaction()
    first.timestamp(), second.timestamp()
    first.set("ann", made.city, "Bern")
    second.set("ann", made.street, "Via B")
    first.commit()
    with pytest.raises(ConflictError):
        second.commit()
    assert keys(db, made.by_place, "Bern", "Via A") == ["ann"]
    assert db.check_index(made.by_place) == []


def test_an_index_is_added_to_a_table_with_rows(db: Database) -> None:
    table = Table(f"old-{uuid.uuid4().hex}")
    city = table.column("city", codecs.text)
    db.create_table(table, ["g"])
    db.set_many(
        (f"{letter}{number}", {city: f"city {number % 3}"})
        for letter in "akz"
        for number in range(90)
    )
    with db.snapshot() as early:
        early.timestamp()
        with pytest.raises(SchemaError, match="no index 'city'"):
            keys(db, city, "city 1")
        indexed = Table(table.name).column("city", codecs.text, indexed=True)
        assert db.create_index(indexed) == 270
        with pytest.raises(SchemaError, match=r"'city' was completed after the snapshot, .* newer"):
            [*early.find(indexed, "city 1")]
    assert len(keys(db, indexed, "city 1")) == 90
    assert db.create_index(indexed) == 270  # once more
    assert db.check_index(indexed) == []
    with pytest.raises(SchemaError, match="is over 'city'"):
        keys(db, table.index("city", table.column("street", codecs.text)))


def test_a_unique_index_is_refused_by_rows_that_contradict_it(db: Database) -> None:
    table = Table(f"doubles-{uuid.uuid4().hex}")
    plain = table.column("email", codecs.text)
    db.create_table(table)
    db.set_many([("ann", {plain: "a@x"}), ("bob", {plain: "a@x"})])
    email = Table(table.name).column("email", codecs.text, unique=True)
    with pytest.raises(UniqueViolation, match=r"rows '(ann|bob)' and '(ann|bob)'"):
        db.create_index(email)
    with pytest.raises(SchemaError, match="not complete"):
        keys(db, email, "a@x")
    with db.transaction() as tx:
        tx.set("bob", email, "b@x")
    db.create_index(email)
    assert keys(db, email, "a@x") == ["ann"]


def test_an_index_that_a_program_declares_otherwise_is_not_checked(
    db: Database, made: People
) -> None:
    table = Table(made.table.name)
    city, street = table.column("city", codecs.text), table.column("street", codecs.text)
    otherwise = table.index("by place", street, city)
    with pytest.raises(SchemaError, match=r"'by place' is over 'city' .*, and .* over 'street'"):
        db.check_index(otherwise)
    with pytest.raises(SchemaError, match=r"'email' is unique over .*, and .* declares one over"):
        db.check_index(Index(table, "email", (table.column("email", codecs.text),)))
    assert db.check_index(table.column("email", codecs.text)) == [], "it does not say: not unique"


def test_rows_with_tuples_as_keys_are_named_as_people_write_them(db: Database) -> None:
    key = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    table = Table(f"pairs-{uuid.uuid4().hex}", key=key)
    plain = table.column("email", codecs.text)
    db.create_table(table)
    db.set_many([(("ann", 1), {plain: "a@x"}), (("bob", 2), {plain: "a@x"})])
    email = Table(table.name, key=key).column("email", codecs.text, unique=True)
    with pytest.raises(UniqueViolation, match=r'rows \["bob", 2\] and \["ann", 1\]'):
        db.create_index(email)
    assert [one for one in db.check_index(email) if '["ann", 1]' in one]
    with db.transaction() as tx:
        tx.delete(("bob", 2), email)
    db.create_index(email)
    with pytest.raises(UniqueViolation, match=r'row \["ann", 1\] has the same value'):
        db.run(lambda tx: tx.set(("kim", 3), email, "a@x"))


def begin_index(db: Database, column: Column[str]) -> None:
    """Adds an index that is not built yet."""

    async def add() -> None:
        engine = db._asynchronous._engine
        definition = declared_index(column).definition()
        await engine.catalog.change_indexes(
            column.table.name, add=[definition], deadline=engine.now() + 10.0
        )

    db._loop_thread.call(add)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_row_leaves_the_entry_of_another_with_the_same_value(db: Database, leaves: bool) -> None:
    table = Table(f"shared-{uuid.uuid4().hex}")
    plain = table.column("email", codecs.text)
    db.create_table(table)
    with db.transaction() as tx:
        tx.set("ann", plain, "a@x")
    email = Table(table.name).column("email", codecs.text, unique=True)
    begin_index(db, email)
    with db.transaction() as tx:
        tx.set("kim", email, "a@x")  # the entry of "ann" is not there yet
    with db.transaction() as tx:
        if leaves:
            tx.delete("ann", email)
        else:
            tx.set("ann", email, "b@x")
    assert db.check_index(email) == []
    with pytest.raises(UniqueViolation):
        db.run(lambda tx: tx.set("bob", email, "a@x"))


def test_a_value_that_is_too_long_for_an_index_can_be_replaced(db: Database) -> None:
    table = Table(f"long-{uuid.uuid4().hex}")
    plain = table.column("city", codecs.text)
    db.create_table(table)
    db.set_many((row, {plain: "x" * 5000}) for row in ("ann", "bob"))
    city = Table(table.name).column("city", codecs.text, indexed=True)
    too_long = "index 'city': the entry has 5005 bytes, at most 4096 allowed"
    with pytest.raises(SchemaError, match=f"row 'ann': {too_long}"):
        db.create_index(city)
    cause, *problems = db.check_index(city)
    assert cause.startswith("index 'city' is not complete: it is being built")
    assert ["the entry has 5005 bytes" in one for one in problems] == [True, True]
    with db.transaction() as tx:
        tx.set("ann", city, "Rome")
        tx.delete("bob", city)
    assert db.create_index(city) == 1
    assert keys(db, city, "Rome") == ["ann"]


def test_a_dropped_index_finds_nothing_and_can_be_made_again(db: Database, made: People) -> None:
    place(db, made, "ann", "Rome")
    db.drop_index(made.table, "city")
    with pytest.raises(SchemaError, match="no index 'city'"):
        keys(db, made.city, "Rome")
    place(db, made, "bob", "Rome")
    with pytest.raises(SchemaError, match="no index 'country'"):
        db.drop_index(made.table, "country")
    db.create_index(made.city)
    assert keys(db, made.city, "Rome") == ["ann", "bob"]


def test_an_index_whose_drop_was_interrupted_is_not_built_again(db: Database, made: People) -> None:
    async def interrupted() -> None:
        engine = db._asynchronous._engine
        info = await engine.catalog.table(made.table.name, engine.now() + 10.0)
        await db._asynchronous._index(info, "city", None).mark(DROPPED)

    db._loop_thread.call(interrupted)
    with pytest.raises(SchemaError, match="index 'city' was dropped"):
        keys(db, made.city)
    with pytest.raises(SchemaError, match="index 'city' is being dropped; drop it again"):
        db.create_index(made.city)
    db.drop_index(made.table, "city")
    assert db.create_index(made.city) == 0


def test_what_an_index_cannot_do_is_refused(db: Database, made: People) -> None:
    place(db, made, "ann", "Rome")
    serializable = db.transaction(serializable=True)
    with pytest.raises(UsageError, match="serializable transaction cannot look up an index"):
        [*serializable.find(made.city, "Rome")]
    serializable.rollback()
    with pytest.raises(InvalidArgument, match="values: index 'city' has 1 column, got 2 values"):
        keys(db, made.city, "Rome", "Main")
    with pytest.raises(InvalidArgument, match="start"):
        keys(db, made.city, "Rome", start="a")
    with pytest.raises(InvalidArgument, match="no prefixes"):
        keys(db, made.age, prefix=1)
    with pytest.raises(InvalidArgument, match="limit"):
        keys(db, made.city, limit=-1)
    with pytest.raises(SchemaError, match="expected int"):
        keys(db, made.age, "seven")
    with pytest.raises(
        SchemaError, match=r"index 'by place': the entry has 70011 bytes, at most 4096 allowed"
    ):
        place(db, made, "bob", "x" * 70_000)
    with pytest.raises(InvalidArgument, match="expected an Index or an indexed Column"):
        keys(db, "city", "Rome")
    assert keys(db, made.city) == ["ann"]
