"""A database cannot be sent to another process, and its error says what to do there."""

from __future__ import annotations

import pickle

import pytest

import percolator.testing
from percolator import UsageError
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
