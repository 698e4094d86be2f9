"""Replacing a table: what the tasks of a shared transaction write appears as the rest goes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from percolator import Timestamp
from percolator.aio import Database
from percolator.aio.replacing import rest_deleted
from percolator.aio.shared import Receipt, SharedTransaction
from percolator.errors import CellAddress, ConflictError, SchemaError
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.write_set import Write
from tests.unit.aio.shared_attempts import ROWS, receipt_of, set_value, share_of, values_of
from tests.unit.connected import accounts, balance, connected

on_both_engines = pytest.mark.usefixtures("engine_of_cells")

NOTE = accounts.column("note", balance.codec)


async def _rest(db: Database, whole: SharedTransaction, *receipts: Receipt) -> Receipt:
    async with db.snapshot() as snapshot:
        return await rest_deleted(
            db.internal,
            whole.ticket,
            receipts,
            snapshot,
            accounts,
            columns=(balance.name,),
            task="rest",
            timeout=10.0,
        )


async def _replaces(db: Database, **values: int) -> Timestamp | None:
    async with db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "0", **values)
        return await whole.commit([receipt, await _rest(db, whole, receipt)])


@on_both_engines
async def test_readers_see_the_old_rows_or_the_new_ones() -> None:
    async with connected() as (db, _):
        for row in ROWS:
            await set_value(db, row, 1)
        async with db.shared_transaction() as whole:
            receipts = [
                await receipt_of(db, whole.ticket, "0", ann=2),
                await receipt_of(db, whole.ticket, "1", mia=2, zoe=2),
            ]
            rest = await _rest(db, whole, *receipts)
            assert rest.cells == 2  # bob and joe; the others are written over
            assert await values_of(db) == dict.fromkeys(ROWS, 1)
            commit = await whole.commit([*receipts, rest])
        assert commit is not None
        assert await values_of(db, Timestamp(commit - 1)) == dict.fromkeys(ROWS, 1)
        assert await values_of(db, commit) == {"ann": 2, "mia": 2, "zoe": 2}


async def test_cells_that_the_job_writes_over_are_not_locked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would cost as much as one that goes, although it is only refused."""
    async with connected() as (db, _):
        for row in ROWS:
            await set_value(db, row, 1)
        async with db.shared_transaction() as whole:
            receipts = [
                await receipt_of(db, whole.ticket, "0", ann=2),
                await receipt_of(db, whole.ticket, "1", mia=2, zoe=2),
            ]
            asked: set[bytes] = set()
            prewrite = Attempt.prewrite

            async def noting(
                attempt: Attempt, writes: Mapping[CellAddress, Write], deadline: float
            ) -> None:
                asked.update(cell.row for cell in writes)
                await prewrite(attempt, writes, deadline)

            monkeypatch.setattr(Attempt, "prewrite", noting)
            rest = await _rest(db, whole, *receipts)
            assert asked == {b"bob", b"joe"}
            await whole.commit([*receipts, rest])
        assert await values_of(db) == {"ann": 2, "mia": 2, "zoe": 2}


@on_both_engines
async def test_a_table_is_replaced_again_and_again_and_emptied() -> None:
    async with connected() as (db, _):
        for number in range(4):
            values = {"mia": number, ROWS[number]: number}
            await _replaces(db, **values)
            assert await values_of(db) == values
        async with db.shared_transaction() as whole:
            await whole.commit([await _rest(db, whole)])
        assert await values_of(db) == {}


@on_both_engines
async def test_other_columns_stay() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await tx.set("bob", NOTE, 5)
            await tx.set("bob", balance, 1)
        await _replaces(db, ann=2)
        assert await db.get("bob", balance) is None
        assert await db.get("bob", NOTE) == 5


@on_both_engines
async def test_what_an_attempt_that_was_not_chosen_has_locked_is_deleted() -> None:
    """Its row is an old one, and would stay if its lock counted as the job's."""
    async with connected() as (db, _):
        await set_value(db, "bob", 1)
        await set_value(db, "joe", 1)
        async with db.shared_transaction() as whole:
            await share_of(db, whole.ticket, "0", joe=7)  # it still runs
            await receipt_of(db, whole.ticket, "0", bob=7)  # its receipt was lost
            chosen = await receipt_of(db, whole.ticket, "0", ann=2)
            await whole.commit([chosen, await _rest(db, whole, chosen)])
        assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_a_row_that_others_write_before_the_rest_is_read_goes_and_later_ones_stay() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "0", ann=2)
        await set_value(db, "bob", 1)
        rest = await _rest(db, whole, receipt)
        await set_value(db, "joe", 1)
        await whole.commit([receipt, rest])
        assert await values_of(db) == {"ann": 2, "joe": 1}


@on_both_engines
async def test_a_job_that_is_given_up_leaves_the_old_rows() -> None:
    async with connected() as (db, _):
        for row in ROWS:
            await set_value(db, row, 1)
        async with db.shared_transaction() as whole:
            receipt = await receipt_of(db, whole.ticket, "0", ann=2)
            rest = await _rest(db, whole, receipt)
            await whole.abort()
        assert await values_of(db) == dict.fromkeys(ROWS, 1)
        async with db.internal.shared_transaction(None, None, 1.0, whole.ticket) as again:
            with pytest.raises(ConflictError, match="none of it is committed"):
                await again.commit([receipt, rest])
        for row in ROWS:
            await set_value(db, row, 3)  # nothing is in the way


@on_both_engines
async def test_a_driver_that_dies_leaves_the_old_rows_and_its_locks_expire() -> None:
    async with connected() as (db, _):
        await set_value(db, "bob", 1)
        whole = db.shared_transaction()
        await whole.begin()
        await _rest(db, whole, await receipt_of(db, whole.ticket, "0", ann=2))
        whole._end("has died")
        assert await values_of(db) == {"bob": 1}
        await asyncio.sleep(20.0)
        await set_value(db, "bob", 3)
        assert await values_of(db) == {"bob": 3}


@on_both_engines
async def test_a_table_that_was_made_again_meanwhile_is_not_replaced() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        await db.drop_table(accounts)
        await db.create_table(accounts)
        await set_value(db, "bob", 1)
        with pytest.raises(SchemaError, match="younger"):
            await _rest(db, whole)
        assert await values_of(db) == {"bob": 1}
