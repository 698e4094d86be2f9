"""What is sent to other processes: tables, columns and rows arrive there, and so do receipts by
programs of the release before. A database cannot be sent, and its error says what to do there."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import percolator.testing
from percolator import Column, Table, UsageError, codecs
from percolator.v1 import master_pb2 as pb
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


@dataclass
class Price:
    amount: Decimal


sales = Table(
    "sales", key=codecs.tuple_of(codecs.hashed(codecs.text), codecs.ordered_date, codecs.uuid)
)
SALE = ("ann", date(2026, 3, 1), UUID(int=7))
COLUMNS: dict[Column[Any], Any] = {
    sales.column("amount", codecs.decimal(10, 2)): Decimal("-1.50"),
    sales.column("price", codecs.model(Price)): Price(Decimal(3)),
    sales.column("table", codecs.message(pb.Table)): pb.Table(name="a"),
    sales.column("at", codecs.timestamp): datetime(2026, 3, 1, tzinfo=UTC),
    sales.family("f:", codecs.integer).column("x"): 1,
}


@pytest.mark.parametrize("sent", [lambda one: pickle.loads(pickle.dumps(one)), deepcopy])
def test_tables_columns_and_rows_can_be_sent_to_another_process(sent: Callable[[Any], Any]) -> None:
    with percolator.testing.connect() as db:
        db.create_table(sent(sales))
        with db.transaction() as tx:
            tx.set(SALE, sent(COLUMNS))
        with db.snapshot() as snapshot:
            (row,) = snapshot.scan(sales, columns=list(COLUMNS))
        assert dict(sent(row).items()) == dict(row.items()) == COLUMNS
        assert sent(row).key == SALE
        assert [sent(row)[column] for column in COLUMNS] == list(COLUMNS.values())
        assert [db.get(SALE, sent(column)) for column in COLUMNS] == list(COLUMNS.values())


def test_codecs_of_which_there_is_one_are_still_that_one() -> None:
    for codec in (codecs.ordered_integer, codecs.ordered_timestamp, codecs.ordered_date):
        assert pickle.loads(pickle.dumps(codec)) is codec
