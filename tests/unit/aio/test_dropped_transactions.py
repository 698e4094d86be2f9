"""A transaction that is dropped with writes in it warns: they are lost, and no error says so."""

from __future__ import annotations

import gc
import warnings

import pytest

from percolator import Database
from percolator.testing.pytest_plugin import percolator_db
from tests.unit.connected import accounts, balance, connected

__all__ = ["percolator_db"]


async def test_a_transaction_dropped_with_writes_warns() -> None:
    async with connected() as (db, _):
        tx = db.transaction()
        await tx.set("bob", balance, 1)
        with pytest.warns(RuntimeWarning, match=r"are lost \(cells: 1\): leave its block"):
            del tx
        assert await db.get("bob", balance) is None


async def test_transactions_that_ended_or_have_nothing_to_write_do_not_warn() -> None:
    async with connected() as (db, _):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            committed, rolled_back, reader = (db.transaction() for _ in range(3))
            await committed.set("bob", balance, 1)
            await committed.commit()
            await rolled_back.set("bob", balance, 1)
            rolled_back.rollback()
            assert await reader.get("bob", balance) == 1
            del committed, rolled_back, reader
            gc.collect()
        assert caught == []


def test_a_blocking_transaction_warns_too(percolator_db: Database) -> None:
    percolator_db.create_table(accounts)
    tx = percolator_db.transaction()
    tx.set("bob", balance, 1)
    with pytest.warns(RuntimeWarning, match="writes of a dropped transaction are lost"):
        del tx
