"""What is sent to other processes: never a database, whose error says what to do there; receipts
also by programs of the release before."""

from __future__ import annotations

import pickle

import pytest

import percolator.testing
from percolator import UsageError
from percolator.aio import Receipt
from tests.unit.aio.shared_attempts import receipt_of, values_of
from tests.unit.connected import connected


async def test_a_database_of_asyncio_is_not_pickled() -> None:
    async with connected() as (db, _):
        with pytest.raises(UsageError, match=r"percolator\.connect\(\)"):
            pickle.dumps(db)


def test_a_database_that_a_function_for_spark_captures_names_the_one_to_use() -> None:
    with (
        percolator.testing.connect() as db,
        pytest.raises(UsageError, match=r"percolator\.spark\.database\(\)"),
    ):
        pickle.dumps({"captured": db})


async def test_a_receipt_that_was_pickled_by_an_earlier_release_is_committed() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
        earlier = object.__new__(Receipt)
        for name in ("row", "task", "parts", "cells"):  # all that 0.2.0 had
            earlier.__dict__[name] = getattr(receipt, name)
        assert await whole.commit([pickle.loads(pickle.dumps(earlier))])
        assert await values_of(db) == {"ann": 1}
