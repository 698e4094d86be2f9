"""Reads and writes that indexes add to a commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from percolator import Limits, Table, TransactionTooLarge, codecs
from percolator.aio import Database, Transaction
from percolator.aio.transaction import Outcome
from tests.unit.connected import Cluster, put

people = Table("people")
city = people.column("city", codecs.text, indexed=True)
name = people.column("name", codecs.text)


async def find(tx: Transaction) -> None:
    assert [row.key async for row in tx.find(city, columns=[name])] == ["ann"]


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
