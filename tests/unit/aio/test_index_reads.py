"""Reads and writes that indexes add to a commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from percolator import Index, Limits, Table, TransactionTooLarge, codecs
from percolator.aio import Database, Transaction
from percolator.aio import find as looking_up
from percolator.aio.transaction import Outcome
from tests.unit.connected import Cluster, put

people = Table("people")
city = people.column("city", codecs.text, indexed=True)
name = people.column("name", codecs.text)
email = people.column("email", codecs.text, unique=True)

houses = Table("houses")
town = houses.column("town", codecs.text)
street = houses.column("street", codecs.text)
by_place = houses.index("by place", town, street)


MANY = 300


async def look_up(tx: Transaction, index: Index[str], *values: str) -> int:
    """The number of rows that a look-up reads or scans."""
    before = tx.statistics.rows_read
    [row.key async for row in tx.find(index, *values, limit=5)]
    return tx.statistics.rows_read - before


async def test_a_look_up_reads_only_those_of_the_rows_written_that_may_match(db: Database) -> None:
    await db.create_table(people)
    await put(db, city, ann="Rome")
    await db.create_table(houses)
    by_city = people.indexes["city"]
    tx = db.transaction()
    for number in range(MANY):
        tx.set(f"{number:03}", city, "Oslo")
        tx.set(f"{number:03}", town, "Oslo")
    assert await look_up(tx, by_city, "Rome") < 5
    assert await look_up(tx, by_city) < 10  # of the first in order, no more than are wanted
    assert await look_up(tx, by_place, "Rome") < 5
    assert await look_up(tx, by_place, "Oslo") >= MANY  # any of them may have a street
    for number in range(MANY):
        tx.delete(f"{number:03}", street)
    assert await look_up(tx, by_place, "Oslo") < 5
    tx.rollback()


async def test_what_a_transaction_changes_while_it_looks_up_is_left_out(db: Database) -> None:
    await db.create_table(people)
    await put(db, city, **{f"row{number:03}": "Rome" for number in range(MANY)})
    tx = db.transaction()
    found = []
    async for row in tx.find(city, "Rome"):
        found.append(row.key)
        if len(found) == 1:
            tx.set(row.key, city, "Bern")
            tx.delete(f"row{MANY - 1}", city)
            tx.set(f"row{MANY - 2}", name, "Zoe")
    assert found == [f"row{number:03}" for number in range(MANY - 1)]
    tx.rollback()


async def find(tx: Transaction) -> None:
    assert [row.key async for row in tx.find(city, columns=[name])] == ["ann"]


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_row_that_gets_its_place_during_a_look_up_is_found_there_once(
    db: Database, reverse: bool
) -> None:
    await db.create_table(people)
    await put(db, city, **{f"row{number:04}": f"{number:04}" for number in range(MANY)})
    tx = db.transaction()
    found = []
    first, ahead = ("row0000", "row0299") if not reverse else ("row0299", "row0000")
    async for row in tx.find(city, reverse=reverse):
        found.append(row.key)
        if row.key == first:
            tx.set("new", city, "9999" if not reverse else "")
            tx.set(first, city, "9998" if not reverse else " ")  # it was shown
            tx.set(ahead, city, "0297" if not reverse else "0002")  # between two others
    assert [found.count(one) for one in ("new", first, ahead)] == [1, 1, 1]
    assert len(found) == len(set(found)) == MANY + 1
    assert found[-1] == "new"
    assert abs(found.index(ahead) - found.index("row0297" if not reverse else "row0002")) == 1
    tx.rollback()


@pytest.mark.parametrize("reverse", [False, True])
async def test_rows_that_have_one_unique_value_until_the_commit_are_all_found(
    db: Database, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    """Rows after one at which the transaction wrote more were left out."""
    monkeypatch.setattr(looking_up, "ROWS_AT_ONCE", 1)
    await db.create_table(people)
    await put(db, email, bob="x")
    tx = db.transaction()
    tx.set("ann", email, "x")
    tx.set("joe", email, "x")
    found = []
    async for row in tx.find(email, reverse=reverse):
        found.append(row.key)
        tx.set(f"other {len(found)}", email, "")
    assert [one for one in found if " " not in one] == sorted(
        ["ann", "bob", "joe"], reverse=reverse
    )
    tx.rollback()


@pytest.mark.parametrize(
    "read",
    [
        lambda tx: tx.get("ann", city),
        lambda tx: tx.get_many([("ann", city)]),
        lambda tx: tx.get_many(people, ["ann"], [city, name]),
        lambda tx: tx.get_many(people, ["ann"]),
        find,
    ],
    ids=["get", "cells", "columns", "rows", "find"],
)
async def test_a_commit_does_not_read_again_what_its_transaction_has_read(
    db: Database, read: Callable[[Transaction], Awaitable[object]]
) -> None:
    await db.create_table(people)
    await put(db, city, ann="Rome")
    tx = db.transaction()
    await read(tx)
    before = tx.statistics.rows_read
    tx.set("ann", city, "Bern")
    assert await tx.get("ann", city) == "Bern"  # which is not what is stored
    await tx.commit()
    assert tx.statistics.rows_read == before
    assert await db.check_index(city) == []


async def test_a_cell_without_a_value_is_not_read_again(db: Database) -> None:
    await db.create_table(people)
    tx = db.transaction()
    assert await tx.get("ann", city) is None
    assert await tx.get_many([("bob", city)]) == [None]
    before = tx.statistics.rows_read
    tx.set("ann", city, "Rome")
    tx.set("bob", city, "Rome")
    await tx.commit()
    assert tx.statistics.rows_read == before


async def test_a_snapshot_keeps_nothing_of_what_it_has_read(db: Database) -> None:
    await db.create_table(people)
    async with db.snapshot() as snapshot:
        await snapshot.get("ann", city)
        assert not snapshot._reader.seen


@pytest.mark.parametrize("limits", [Limits(transaction_bytes_max=1000)])
async def test_entries_count_towards_the_bytes_of_a_transaction(
    db: Database, cluster: Cluster
) -> None:
    await db.create_table(people)
    tx = db.transaction()
    tx.set("ann", city, "R" * 400)
    tx.set("bob", city, "R" * 190)
    cluster.silent = True  # nothing is sent
    with pytest.raises(TransactionTooLarge, match="at most 1000 bytes"):
        await tx.commit()
    assert tx.outcome is Outcome.ABORTED
    cluster.silent = False
    await put(db, city, ann="R" * 300)
