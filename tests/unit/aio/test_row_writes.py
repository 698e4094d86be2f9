"""Several cells of a row, sums, single values and pages, each in one call."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import (
    ConflictError,
    Database,
    InvalidArgument,
    Limits,
    SchemaError,
    Table,
    TransactionTooLarge,
    UsageError,
    codecs,
)
from percolator.testing.pytest_plugin import percolator_db
from tests.unit.connected import accounts, balance, connected

__all__ = ["percolator_db"]

owner = accounts.column("owner", codecs.text)
other = Table("others").column("number", codecs.integer)


async def test_a_mapping_sets_several_columns_of_a_row() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await tx.set("bob", {balance: 1, owner: "Bob"})
            await tx.set("joe", {})
        async with db.snapshot() as snapshot:
            bob, joe = await snapshot.get_many(accounts, ["bob", "joe"], [owner, balance])
            assert bob.items() == [(owner, "Bob"), (balance, 1)]
            assert joe.items() == []


async def test_a_row_is_deleted_whole_or_not_at_all() -> None:
    """A program that commits what had room must not make half a row visible."""
    async with connected(Limits(transaction_cells_max=3)) as (db, _):
        async with db.transaction() as tx:
            await tx.set("bob", {balance: 1, owner: "Bob"})
        async with db.transaction() as tx:
            for row in ("joe", "zoe"):
                await tx.set(row, balance, 2)
            with pytest.raises(TransactionTooLarge):
                await tx.delete_row(accounts, "bob")
        async with db.snapshot() as snapshot:
            (bob,) = await snapshot.get_many(accounts, ["bob"], [balance, owner])
            assert bob.items() == [(balance, 1), (owner, "Bob")]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({balance: 1, owner: 2}, "column 'owner': expected str, got int"),
        ({balance: 1, "owner": "Bob"}, "expected a Column, got str"),
        ({balance: 1, other: 2}, "expected columns of one table"),
        (balance, r"value: is missing: expected set\(row, column, value\)"),
        ([(balance, 1)], "value: is missing"),
    ],
)
async def test_of_a_mapping_all_is_set_or_nothing(values: Any, says: str) -> None:
    async with connected() as (db, _):
        await db.create_table(other.table)
        tx = db.transaction()
        with pytest.raises((SchemaError, UsageError, InvalidArgument), match=says):
            await tx.set("bob", values)
        assert await tx.get("bob", balance) is None


async def test_a_deleted_row_has_no_cell_left_not_even_those_that_were_just_set() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await tx.set("bob", {balance: 1, owner: "Bob"})
            await tx.set("bobby", balance, 2)
        async with db.transaction() as tx:
            await tx.set("bob", accounts.column("new", codecs.raw), b"")
            await tx.delete_row(accounts, "bob")
            await tx.delete_row(accounts, "nothing")
            assert not (await tx.get_many(accounts, ["bob"]))[0]
        async with db.snapshot() as snapshot:
            assert [row.key async for row in snapshot.scan(accounts)] == ["bobby"]


async def test_a_row_that_is_too_large_to_be_read_at_once_is_deleted() -> None:
    picture = accounts.family("picture:", codecs.raw)
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await tx.set("joe", balance, 1)
            for number in range(5):
                await tx.set("bob", picture.column(f"{number}"), bytes(4 << 20))
        async with db.transaction() as tx:
            await tx.set("bob", balance, 1)
            await tx.delete_row(accounts, "bob")
        async with db.snapshot() as snapshot:
            assert [row.key async for row in snapshot.scan(accounts)] == ["joe"]


async def test_a_row_that_was_deleted_conflicts_with_a_writer_of_its_cells() -> None:
    async with connected() as (db, _):
        await db.set_many([("bob", {balance: 1})])
        tx = db.transaction()
        await tx.delete_row(accounts, "bob")
        await db.set_many([("bob", {balance: 2})])
        with pytest.raises(ConflictError):
            await tx.commit()


async def test_an_increment_returns_the_sum_and_begins_at_zero() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            assert await tx.increment("bob", balance) == 1
            assert await tx.increment("bob", balance, 10) == 11
            assert await tx.increment("bob", balance, -20) == -9
        assert await db.get("bob", balance) == -9


async def test_two_increments_of_one_cell_conflict() -> None:
    async with connected() as (db, _):
        first, second = db.transaction(), db.transaction()
        await first.increment("bob", balance)
        await second.increment("bob", balance)
        await first.commit()
        with pytest.raises(ConflictError):
            await second.commit()
        assert await db.get("bob", balance) == 1


async def test_only_integers_are_incremented() -> None:
    async with connected() as (db, _), db.transaction() as tx:
        await tx.set("bob", owner, "Bob")
        column: Any = owner
        with pytest.raises(SchemaError, match="only integers can be incremented, found str"):
            await tx.increment("bob", column)
        with pytest.raises(InvalidArgument, match="by: expected an int, got float"):
            await tx.increment("bob", balance, 0.5)  # type: ignore[arg-type]  # the mistake
        await tx.set("bob", balance, 2**63 - 1)
        with pytest.raises(SchemaError, match="does not fit into 64 bits"):
            await tx.increment("bob", balance)
        assert await tx.get("bob", balance) == 2**63 - 1


async def test_a_database_reads_one_value_as_it_is_now() -> None:
    async with connected() as (db, _):
        assert await db.get("bob", balance) is None
        assert await db.get("bob", balance, 7) == 7
        for number in (1, 2):
            await db.set_many([("bob", {balance: number})])
            assert await db.get("bob", balance) == number


async def test_a_row_read_without_columns_does_not_guess_their_types() -> None:
    async with connected() as (db, _):
        await db.set_many([("bob", {balance: 1})])
        async with db.snapshot() as snapshot:
            (row,) = await snapshot.get_many(accounts, ["bob"])
            with pytest.raises(UsageError, match=r"pass columns to get_many or scan, or use raw"):
                row.items()
            async for row in snapshot.scan(accounts, columns=(c for c in [balance, owner])):  # type: ignore[arg-type]  # consumed once
                assert row.items() == [(balance, 1)]


KEYS = ["a1", "b1", "b2", "b3", "b4", "c1"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"start": "b3"}, ["b3", "b4"]),
        ({"end": "b3"}, ["b1", "b2"]),
        ({"start": "b2", "end": "b4"}, ["b2", "b3"]),
        ({"start": "a1", "end": "z"}, ["b1", "b2", "b3", "b4"]),
        ({"start": "c"}, []),
        ({"end": "a5"}, []),
        ({"start": "b2", "limit": 2}, ["b2", "b3"]),
        ({"end": "b4", "limit": 2, "reverse": True}, ["b3", "b2"]),
    ],
)
async def test_a_scan_shows_what_is_in_the_prefix_and_in_the_bounds(
    bounds: Any, expected: list[str]
) -> None:
    async with connected() as (db, _):
        await db.set_many((key, {balance: 1}) for key in KEYS)
        async with db.snapshot() as snapshot:
            found = [row.key async for row in snapshot.scan(accounts, prefix="b", **bounds)]
            assert found == expected


async def test_tables_are_created_together_or_refused_before_the_first() -> None:
    async with connected() as (db, _):
        new = [Table("one"), Table("two")]
        for wrong, says in [
            ([*new, "three"], r"tables\[2\]: expected a Table, got str"),
            ([*new, Table("one")], r"tables\[2\]: 'one' is named twice"),
            ([*new, Table("percolator.x")], "'percolator.x' is internal"),
            ("one", "tables: expected a list of tables, got str"),
        ]:
            with pytest.raises(InvalidArgument, match=says):
                await db.create_tables(wrong)  # type: ignore[arg-type]  # the mistake
        assert await db.tables() == ["accounts"]
        await db.create_tables(new)
        await db.create_tables(iter([*new, Table("three")]), exist_ok=True)
        assert await db.tables() == ["accounts", "one", "three", "two"]


def test_the_blocking_twins_do_the_same(percolator_db: Database) -> None:
    db = percolator_db
    db.create_tables(table for table in [accounts, other.table])
    with db.transaction() as tx:
        tx.set("bob", {balance: 1, owner: "Bob"})
        assert tx.increment("bob", balance, 2) == 3
        tx.set("joe", balance, 1)
        tx.delete_row(accounts, "joe")
    assert db.get("bob", balance) == 3
    assert db.get("joe", balance, default=0) == 0
    with db.snapshot() as snapshot:
        (row,) = snapshot.scan(accounts, prefix="b", start="bob", columns=[owner, balance])
        assert row.items() == [(owner, "Bob"), (balance, 3)]
