"""Indexes of which the driver of a shared transaction adds the entries: unique ones, those of
several columns, and all of a row store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from percolator import ConflictError, SchemaError, codecs
from percolator.aio import Database
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, SharedTransaction
from percolator.errors import CellAddress, UniqueViolation
from percolator.protocol.cleanup import push_step
from percolator.protocol.conflicts import MetLock
from percolator.protocol.shared.entries import Entries
from percolator.routing.cells import RowRequest
from percolator.schema import Index
from percolator.timestamps import NEWEST, SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import RowRead
from tests.unit import connected
from tests.unit.aio.shared_attempts import dies, receipt_of, set_value, share_of, values_of
from tests.unit.connected import accounts, balance

owner = accounts.column("owner", codecs.text)
unique = Index(accounts, "unique", (balance,), unique=True)
several = Index(accounts, "several", (balance, owner))

pytestmark = pytest.mark.usefixtures("engine_of_cells")


async def pairs(db: Database, index: Index[str]) -> list[tuple[int, str]]:
    """Rows found by the index, in its order."""
    async with db.snapshot() as snapshot:
        return [(row[balance], row.key) async for row in snapshot.find(index)]


async def set_row(db: Database, row: str, value: int, name: str) -> None:
    async with db.transaction() as tx:
        await tx.set(row, balance, value)
        await tx.set(row, owner, name)


async def named(db: Database, shared: SharedTransaction, task: str, **names: str) -> Receipt:
    async with db.share(shared.ticket, task=task) as share:
        for row, name in names.items():
            await share.set(row, owner, name)
        return await share.finish()


async def test_entries_of_several_columns_follow_from_what_several_tasks_write(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    await set_row(db, "bob", 2, "x")
    async with db.share(shared.ticket, task="3") as share:
        await share.delete("bob", owner)
        third = await share.finish()
    receipts = [
        await receipt_of(db, shared.ticket, "1", ann=5, joe=3, zoe=4),
        await named(db, shared, "2", ann="y", joe="z"),
        third,
    ]
    await shared.commit(receipts)
    assert await pairs(db, several) == [(3, "joe"), (5, "ann")]
    assert await db.check_index(several) == []


async def test_a_column_that_the_job_does_not_write_is_kept_as_it_was_when_it_was_locked(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    receipt = await receipt_of(db, shared.ticket, "1", ann=2)
    async with db.transaction() as tx:
        await tx.set("bob", owner, "z")
        await tx.set("bob", balance, 9)
    await shared.commit([receipt])
    async with db.transaction() as tx:
        await tx.set("ann", owner, "y")
    assert await pairs(db, several) == [(2, "ann"), (9, "bob")]
    assert await db.check_index(several) == []


async def test_what_an_attempt_that_does_not_count_has_written_gets_no_entry(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(several)
    await db.create_index(unique)
    await set_row(db, "ann", 1, "x")
    dies(await share_of(db, shared.ticket, "1", ann=2, bob=3))
    await shared.commit([await receipt_of(db, shared.ticket, "1", ann=4)])
    assert await pairs(db, several) == [(4, "ann")]
    assert await pairs(db, unique) == [(4, "ann")]
    assert await db.check_index(several) == await db.check_index(unique) == []


async def test_unique_values_move_between_rows_of_different_tasks(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(unique)
    for row, value in (("ann", 1), ("bob", 2), ("joe", 3)):
        await set_value(db, row, value)
    async with db.share(shared.ticket, task="3") as share:
        await share.delete("joe", balance)
        third = await share.finish()
    first = await receipt_of(db, shared.ticket, "1", ann=2, zoe=3)
    await shared.commit([first, await receipt_of(db, shared.ticket, "2", bob=1), third])
    assert await pairs(db, unique) == [(1, "bob"), (2, "ann"), (3, "zoe")]
    assert await db.check_index(unique) == []


async def test_a_unique_value_that_another_row_keeps_fails_the_job_and_names_both(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(unique)
    await set_value(db, "ann", 1)
    receipt = await receipt_of(db, shared.ticket, "1", bob=1, joe=2)
    with pytest.raises(UniqueViolation, match="has the same value in 'balance'") as caught:
        await shared.commit([receipt])
    assert (caught.value.index, caught.value.rows) == ("unique", (b"bob", b"ann"))
    assert await values_of(db) == {"ann": 1}
    assert await db.check_index(unique) == []
    await set_value(db, "joe", 2)  # nothing is locked any more


async def test_two_tasks_that_give_one_value_to_two_rows_fail_the_job(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(unique)
    first = await receipt_of(db, shared.ticket, "1", ann=1)
    second = await receipt_of(db, shared.ticket, "2", zoe=1)
    with pytest.raises(UniqueViolation) as caught:
        await shared.commit([first, second])
    assert set(caught.value.rows) == {b"ann", b"zoe"}
    assert await values_of(db) == {}


async def test_a_value_that_another_transaction_takes_meanwhile_is_taken(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(unique)
    receipt = await receipt_of(db, shared.ticket, "1", ann=1)
    await set_value(db, "bob", 1)
    with pytest.raises(UniqueViolation) as caught:
        await shared.commit([receipt])
    assert caught.value.rows == (b"ann", b"bob")
    assert await values_of(db) == {"bob": 1}


async def test_a_table_that_is_overwritten_gives_the_values_of_its_old_rows_to_new_ones(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(unique)
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    await set_row(db, "bob", 2, "x")
    written = await receipt_of(db, shared.ticket, "1", joe=1, zoe=3)
    rest = await rest_deleted(
        db.internal, shared.ticket, [written], db.snapshot(), accounts, task="rest", timeout=3.0
    )
    await shared.commit([written, rest])
    assert await pairs(db, unique) == [(1, "joe"), (3, "zoe")]
    assert await pairs(db, several) == []
    assert await db.check_index(unique) == await db.check_index(several) == []


async def test_an_index_that_comes_when_the_tasks_have_finished_is_kept_or_built(
    db: Database, shared: SharedTransaction
) -> None:
    await set_row(db, "ann", 1, "x")
    receipt = await receipt_of(db, shared.ticket, "1", ann=2)
    engine = db.internal.engine
    await engine.catalog.change_indexes(
        accounts.name, add=[several.definition()], deadline=engine.now() + 10
    )
    await shared.commit([receipt])
    await db.create_index(several)
    assert await pairs(db, several) == [(2, "ann")]
    assert await db.check_index(several) == []


async def test_long_values_of_indexed_columns_are_found_and_too_long_ones_are_refused(
    db: Database, shared: SharedTransaction
) -> None:
    await db.create_index(several)
    long = "x" * 2_000
    receipts = [
        await receipt_of(db, shared.ticket, "1", ann=1, bob=2),
        await named(db, shared, "2", ann=long),
    ]
    await shared.commit(receipts)
    assert await pairs(db, several) == [(1, "ann")]
    async with db.shared_transaction() as other:
        receipt = await named(db, other, "1", bob="y" * 5_000)
        with pytest.raises(SchemaError, match=r"row 'bob', column 'owner' .* too long"):
            await other.commit([receipt])
    assert await db.check_index(several) == []


async def test_a_value_that_is_too_long_for_an_entry_is_written_to_a_row_that_has_none(
    db: Database, shared: SharedTransaction
) -> None:
    """As an ordinary transaction may do, too."""
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    async with db.share(shared.ticket, task="2") as share:
        await share.delete("ann", balance)
        await share.set("ann", owner, "y" * 5_000)
        await share.set("bob", owner, "y" * 5_000)
        receipt = await share.finish()
    await shared.commit([receipt])
    assert [await db.get(row, owner) for row in ("ann", "bob")] == ["y" * 5_000] * 2
    assert await pairs(db, several) == []
    assert await db.check_index(several) == []
    async with db.transaction() as tx:
        await tx.set("joe", owner, "y" * 5_000)


async def test_the_index_of_one_column_is_kept_whoever_adds_its_entries(
    db: Database, shared: SharedTransaction
) -> None:
    simple = Index(accounts, "balance", (balance,))
    await db.create_index(simple)
    await set_value(db, "ann", 1)
    await shared.commit([await receipt_of(db, shared.ticket, "1", ann=2, bob=1)])
    assert await pairs(db, simple) == [(1, "bob"), (2, "ann")]
    assert await db.check_index(simple) == []


async def test_locks_that_a_reader_pushes_while_the_driver_looks_for_them_are_found(
    db: Database, shared: SharedTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reader does that meets more locks in a row than it can name."""
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    receipt = await receipt_of(db, shared.ticket, "1", ann=2)
    engine = db.internal.engine
    cell = CellAddress(receipt.tables[0], b"ann", balance.name)
    read = RowRead(row=cell.row, columns=[cell.column], timestamp=NEWEST)
    (answer,) = await engine.env.cells.read([RowRequest(cell.table_id, read)], engine.now() + 10)
    (met,) = [MetLock.of(cell.table_id, lock) for lock in answer.locks]
    correct = shared._add_entries

    async def after_the_push(timeout: float | None) -> object:
        pushed = await db.timestamp() + (50 << SEQUENCE_BITS)
        await engine.env.cells.mutate([push_step(cell, met.lock, pushed)], engine.now() + 10)
        indexes = await correct(timeout)
        await asyncio.sleep(0.1)  # the commit is above the reader
        return indexes

    monkeypatch.setattr(shared, "_add_entries", after_the_push)
    await shared.commit([receipt])
    assert await pairs(db, several) == [(2, "ann")]
    assert await db.check_index(several) == []


async def test_a_job_fails_if_an_index_that_its_driver_keeps_was_dropped(
    db: Database, shared: SharedTransaction, engine_of_cells: None
) -> None:
    if connected.over_rows:
        return  # there, the driver keeps the indexes that there are when it commits
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    receipt = await receipt_of(db, shared.ticket, "1", ann=2)
    await db.drop_index(accounts, "several")
    with pytest.raises(ConflictError, match="the indexes of table 'accounts' were changed"):
        await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1}


async def test_an_entry_that_comes_to_another_row_meanwhile_is_not_deleted(
    db: Database, shared: SharedTransaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a unique index is being built, two rows may have one value."""
    await set_value(db, "ann", 1)
    engine = db.internal.engine
    await engine.catalog.change_indexes(
        accounts.name, add=[unique.definition()], deadline=engine.now() + 10
    )
    receipt = await receipt_of(db, shared.ticket, "1", ann=2)
    correct = Entries._delete

    async def late(self: Entries, entries: Sequence[CellAddress]) -> None:
        lock = self._attempt.lock

        async def after_another(*arguments: object, **named: object) -> None:
            monkeypatch.setattr(self._attempt, "lock", lock)
            await set_value(db, "bob", 1)
            await lock(*arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(self._attempt, "lock", after_another)
        await correct(self, entries)

    monkeypatch.setattr(Entries, "_delete", late)
    with pytest.raises(ConflictError, match="was committed at"):
        await shared.commit([receipt])
    await set_value(db, "ann", 3)
    await db.create_index(unique)
    assert await pairs(db, unique) == [(1, "bob"), (3, "ann")]
    assert await db.check_index(unique) == []


@pytest.mark.parametrize("value", [1, 2], ids=["no entry changes", "entries change"])
async def test_a_driver_has_committed_if_another_one_did_with_entries_of_its_own(
    db: Database, shared: SharedTransaction, monkeypatch: pytest.MonkeyPatch, value: int
) -> None:
    """It missed its own entries, which had been replaced."""
    await db.create_index(unique)
    await set_value(db, "ann", 1)
    receipt = await receipt_of(db, shared.ticket, "1", ann=value)
    two = db.internal.shared_transaction(None, None, 30.0, shared.ticket)
    await two.begin()
    correct = two._add_entries
    commits: list[object] = []

    async def before_the_other_commits(timeout: float | None) -> object:
        indexes = await correct(timeout)
        commits.append(await shared.commit([receipt]))
        return indexes

    monkeypatch.setattr(two, "_add_entries", before_the_other_commits)
    assert [await two.commit([receipt])] == commits
    assert await two.abort() == commits[0]
    await two.told(10.0)
    assert await pairs(db, unique) == [(value, "ann")]
    assert await db.check_index(unique) == []


async def test_of_two_drivers_that_add_entries_the_later_one_replaces_the_earlier(
    db: Database, shared: SharedTransaction
) -> None:
    """It has died before its commit, or counts as if it had."""
    await db.create_index(unique)
    await db.create_index(several)
    await set_row(db, "ann", 1, "x")
    receipt = await receipt_of(db, shared.ticket, "1", ann=2, bob=1)
    first = db.internal.shared_transaction(None, None, 30.0, shared.ticket)
    await first.begin()
    first._named, first._tables = receipt.parts, frozenset(receipt.tables)
    first._unkept = receipt.left
    await first._add_entries(None)
    dies(first)
    assert await shared.commit([receipt])
    assert await pairs(db, unique) == [(1, "bob"), (2, "ann")]
    assert await pairs(db, several) == [(2, "ann")]
    assert await db.check_index(unique) == await db.check_index(several) == []
