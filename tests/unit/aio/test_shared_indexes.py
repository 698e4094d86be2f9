"""Indexes of tables that shared transactions write: each attempt locks the entries of its cells."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from percolator import ConflictError, SchemaError, Table, codecs
from percolator.aio import Database
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import SharedTransaction
from percolator.errors import UniqueViolation, WrittenTwice
from percolator.schema import Index
from tests.unit.aio.shared_attempts import dies, receipt_of, set_value, share_of, values_of
from tests.unit.connected import accounts, balance

owner = accounts.column("owner", codecs.text)


async def found(db: Database, value: int) -> list[str]:
    async with db.snapshot() as snapshot:
        return [row.key async for row in snapshot.find(balance, value)]


async def test_entries_go_and_come_with_the_commit(db: Database, shared: SharedTransaction) -> None:
    await db.create_index(balance)
    for row, value in (("ann", 1), ("bob", 1), ("joe", 3)):
        await set_value(db, row, value)
    first = await receipt_of(db, shared.ticket, "1", ann=2, joe=3)
    async with db.share(shared.ticket, task="2") as share:
        await share.delete("bob", balance)
        await share.set("zoe", balance, 1)
        second = await share.finish()
    assert (first.cells, second.cells) == (2, 2), "entries are not counted"
    await shared.commit([first, second])
    assert [await found(db, value) for value in (1, 2, 3)] == [["zoe"], ["ann"], ["joe"]]
    assert await db.check_index(balance) == []


async def test_what_others_commit_before_a_cell_is_locked_leaves_no_entry(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(balance)
    await set_value(db, "ann", 1)
    share = await share_of(db, shared.ticket, "1", bob=5)
    await set_value(db, "ann", 2)
    await share.set("ann", balance, 3)
    await shared.commit([await share.finish()])
    assert len(share._attempt.participants) > 1
    assert [await found(db, value) for value in (1, 2, 3)] == [[], [], ["ann"]]
    assert await db.check_index(balance) == []


async def test_entries_of_an_attempt_that_does_not_count_are_never_seen(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(balance)
    await set_value(db, "ann", 1)
    dies(await share_of(db, shared.ticket, "1", ann=2, bob=2))
    await receipt_of(db, shared.ticket, "2", joe=2)
    counted = [
        await receipt_of(db, shared.ticket, "1", ann=3),
        await receipt_of(db, shared.ticket, "2", zoe=3),
    ]
    await shared.commit(counted)
    assert await values_of(db) == {"ann": 3, "zoe": 3}
    assert [await found(db, value) for value in (1, 2, 3)] == [[], [], ["ann", "zoe"]]
    assert await db.check_index(balance) == []


async def test_a_table_that_is_overwritten_keeps_the_entries_of_what_was_written(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(balance)
    for row, value in (("ann", 1), ("bob", 1), ("joe", 1)):
        await set_value(db, row, value)
    written = await receipt_of(db, shared.ticket, "1", ann=2, bob=1)
    rest = await rest_deleted(
        db.internal, shared.ticket, [written], db.snapshot(), accounts, task="rest", timeout=3.0
    )
    await shared.commit([written, rest])
    assert await values_of(db) == {"ann": 2, "bob": 1}
    assert [await found(db, value) for value in (1, 2)] == [["bob"], ["ann"]]
    assert await db.check_index(balance) == []


@pytest.mark.parametrize("second", ["y" * 2_000, "short"])
async def test_a_second_value_of_an_indexed_cell_gets_no_entry_however_long_the_first(
    db: Database, shared: SharedTransaction, second: str
) -> None:
    """The lock does not tell one long value from another."""
    await db.create_index(owner)
    async with db.share(shared.ticket, task="1") as share:
        await share.set("ann", owner, "x" * 2_000)
        await share._flush()
        await share.set("ann", owner, "x" * 2_000)
        await share._flush()
        await share.set("ann", owner, second)
        with pytest.raises(WrittenTwice, match=r"task '1' writes .*ann.* twice"):
            await share.finish()


async def test_an_index_that_comes_while_a_task_writes_fails_its_attempt(
    db: Database, shared: SharedTransaction
) -> None:
    share = await share_of(db, shared.ticket, "1", ann=1)
    engine = db.internal.engine
    index = Index(accounts, "balance", (balance,))
    await engine.catalog.change_indexes(
        accounts.name, add=[index.definition()], deadline=engine.now() + 10
    )
    await share.set("bob", balance, 1)
    with pytest.raises(ConflictError, match="the indexes of 'accounts' were changed while task"):
        await share.finish()
    await share.abandon()
    await shared.commit([await receipt_of(db, shared.ticket, "1", ann=2)])
    await db.create_index(balance)
    assert await found(db, 2) == ["ann"]
    assert await db.check_index(balance) == []


async def test_an_entry_that_a_build_has_added_since_does_not_count_as_a_change(
    db: Database,
) -> None:
    await set_value(db, "ann", 1)
    async with db.shared_transaction(unchanged_since=await db.timestamp()) as shared:
        await db.create_index(balance)
        await shared.commit([await receipt_of(db, shared.ticket, "1", ann=2)])
    assert [await found(db, value) for value in (1, 2)] == [[], ["ann"]]
    assert await db.check_index(balance) == []


async def test_a_lock_from_before_an_index_keeps_out_writers_of_its_other_columns(
    db: Database, shared: SharedTransaction
) -> None:
    """The entry that they would write has the value that goes with this lock."""
    index = Index(accounts, "it", (balance, owner))
    async with db.transaction() as tx:
        await tx.set("ann", balance, 1)
        await tx.set("ann", owner, "x")
    receipt = await receipt_of(db, shared.ticket, "1", ann=2)
    engine = db.internal.engine
    await engine.catalog.change_indexes(
        accounts.name, add=[index.definition()], deadline=engine.now() + 10
    )
    with pytest.raises(ConflictError, match=r"row 'ann', column 'balance' .* is locked"):
        async with db.transaction() as tx:
            await tx.set("ann", owner, "y")
    await shared.commit([receipt])
    async with db.transaction() as tx:
        await tx.set("ann", owner, "y")
    await db.create_index(index)
    assert await db.check_index(index) == []


async def test_a_table_that_is_gone_keeps_no_other_from_being_told_of_the_commit(
    db: Database, shared: SharedTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an index which is dropped just then."""
    await db.create_index(balance)
    receipt = await receipt_of(db, shared.ticket, "1", ann=1)
    told = []

    async def tell(_: object, table_id: int, *__: object) -> None:
        told.append(table_id)
        raise SchemaError("there is no such table")

    monkeypatch.setattr("percolator.aio.shared.tell_of_commits", tell)
    await shared.commit([receipt])
    await shared.told(1.0)
    assert told == sorted(receipt.tables)
    assert len(told) == 2


async def test_entries_of_values_that_expire_are_added_by_the_driver(db: Database) -> None:
    table = Table("sessions")
    token = table.column("token", codecs.text, unique=True)
    user = table.column("user", codecs.text)
    by_user = table.index("by user", user, token)
    await db.create_table(table, ttl={token: timedelta(seconds=20)})
    async with db.transaction() as tx:
        for row, value in (("a", "1"), ("b", "2")):
            await tx.set(row, token, value)
            await tx.set(row, user, "ann")
    async with db.shared_transaction() as shared:
        async with db.share(shared.ticket, task="1") as share:
            await share.set("a", token, "1")
            await share.set("c", token, "3")
            receipt = await share.finish()
        await shared.commit([receipt])
    await asyncio.sleep(15.0)
    async with db.shared_transaction() as shared:
        async with db.share(shared.ticket, task="1") as share:
            await share.set("d", token, "3")
            receipt = await share.finish()
        with pytest.raises(UniqueViolation):
            await shared.commit([receipt])
    await asyncio.sleep(10.0)
    async with db.shared_transaction() as shared:
        async with db.share(shared.ticket, task="1") as share:
            await share.set("d", token, "3")
            await share.set("b", token, "1")
            receipt = await share.finish()
        await shared.commit([receipt])
    async with db.snapshot() as snapshot:
        assert [row.key async for row in snapshot.find(token)] == ["b", "d"]
        assert [row.key async for row in snapshot.find(by_user, "ann")] == ["b"]
    assert await db.check_index(by_user) == await db.check_index(token) == []
