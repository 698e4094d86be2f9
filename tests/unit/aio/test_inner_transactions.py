"""A transaction that is run inside of another one warns; one that joins it does not."""

from __future__ import annotations

import asyncio
import warnings

import pytest

import percolator.testing
from percolator import transactional
from percolator.aio import Transaction
from tests.unit.connected import accounts, balance, connected

INNER = r"a transaction is run inside of another one.*Pass the transaction"


@transactional
async def add_one(tx: Transaction, row: str) -> None:
    await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


async def test_an_inner_call_with_the_database_warns_where_it_is_called() -> None:
    async with connected() as (db, _):

        async def outer(tx: Transaction) -> None:
            await add_one(db, "inner")

        with pytest.warns(RuntimeWarning, match=INNER) as shown:
            await db.run(outer)
        assert [one.filename for one in shown] == [__file__]
        assert await db.get("inner", balance) == 1


async def test_an_inner_call_with_the_transaction_joins_it_silently() -> None:
    async with connected() as (db, _):

        async def outer(tx: Transaction) -> None:
            await add_one(tx, "inner")
            await add_one(tx, "inner")

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await db.run(outer)
            await db.run(outer)
        assert await db.get("inner", balance) == 4


async def test_a_task_that_outlasts_the_transaction_that_started_it_is_not_inside() -> None:
    async with connected() as (db, _):
        tasks: list[asyncio.Task[None]] = []
        may_run = asyncio.Event()

        async def later() -> None:
            await may_run.wait()
            await add_one(db, "later")

        async def outer(tx: Transaction) -> None:
            tasks.append(asyncio.create_task(later()))

        await db.run(outer)
        may_run.set()
        await tasks[0]
        assert await db.get("later", balance) == 1


async def test_a_transaction_of_another_database_is_not_inside() -> None:
    async with connected() as (db, _), connected() as (other, _):

        async def outer(tx: Transaction) -> None:
            await add_one(other, "copy")

        await db.run(outer)
        assert await other.get("copy", balance) == 1


def test_an_inner_call_of_a_blocking_function_warns_where_it_is_called() -> None:
    with percolator.testing.connect() as db:
        db.create_table(accounts)

        def inner(tx: percolator.Transaction) -> None:
            tx.set("inner", balance, 1)

        def outer(tx: percolator.Transaction) -> None:
            db.run(inner)

        with pytest.warns(RuntimeWarning, match=INNER) as shown:
            db.run(outer)
        assert [one.filename for one in shown] == [__file__]
