"""A bad argument is refused by name, and nothing is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

import percolator
from percolator import codecs
from percolator.errors import InvalidArgument, PercolatorError, SchemaError, UsageError
from percolator.schema import Table
from percolator.testing import connect
from tests.unit.connected import connected

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)

Call = Callable[[Any, Any], object]

untyped: Any = percolator
"""An argument for calls that a type checker would refuse."""


@pytest.fixture(scope="module")
def db() -> Iterator[percolator.Database]:
    with connect() as database:
        database.create_table(accounts)
        yield database


NO_SECONDS = [0, -1.0, math.nan, math.inf, 10**400, "1", True]

TIMED: dict[str, Call] = {
    "transaction": lambda db, seconds: db.transaction(timeout=seconds),
    "snapshot": lambda db, seconds: db.snapshot(timeout=seconds),
    "get": lambda db, seconds: db.snapshot().get("a", balance, timeout=seconds),
    "get_many": lambda db, seconds: db.snapshot().get_many(accounts, ["a"], timeout=seconds),
    "scan": lambda db, seconds: list(db.snapshot().scan(accounts, timeout=seconds)),
    "commit": lambda db, seconds: db.transaction().commit(timeout=seconds),
    "resolve": lambda db, seconds: db.transaction().resolve(timeout=seconds),
    "tables": lambda db, seconds: db.tables(timeout=seconds),
    "changes": lambda db, seconds: db.changes(accounts, timeout=seconds),
    "connect": lambda db, seconds: percolator.connect("127.0.0.1:1", timeout=seconds),
}


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize("seconds", NO_SECONDS, ids=lambda seconds: repr(seconds)[:9])
def test_a_time_out_is_a_positive_number(
    db: percolator.Database, name: str, seconds: object
) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        TIMED[name](db, seconds)


WRONG: dict[str, tuple[type[PercolatorError], Call]] = {
    "observer: expected an Observer": (InvalidArgument, lambda db, tx: db.backfill("count")),
    "tables: expected a list": (InvalidArgument, lambda db, tx: db.pin(tables=accounts)),
    "rows": (InvalidArgument, lambda db, tx: tx.get_many(accounts, None)),
    "row keys": (InvalidArgument, lambda db, tx: tx.get_many(accounts, "ab")),
    "at once": (
        InvalidArgument,
        lambda db, tx: tx.get_many(accounts, map(str, itertools.count())),
    ),
    "list of columns": (InvalidArgument, lambda db, tx: tx.get_many(accounts, ["a"], balance)),
    "found str": (InvalidArgument, lambda db, tx: tx.get_many(accounts, ["a"], ["balance"])),
    "limit": (InvalidArgument, lambda db, tx: list(tx.scan(accounts, limit="1"))),
    "whole number": (InvalidArgument, lambda db, tx: list(tx.scan(accounts, limit=1.5))),
    "a Table": (UsageError, lambda db, tx: db.create_table("accounts")),
    "Table, got": (UsageError, lambda db, tx: db.drop_table("accounts")),
    "at least a millisecond": (
        InvalidArgument,
        lambda db, tx: db.create_table(Table("other"), retention=timedelta(days=-1)),
    ),
    "timedelta": (InvalidArgument, lambda db, tx: db.create_table(Table("other"), retention=5)),
    "pairs": (InvalidArgument, lambda db, tx: db.set_many([1])),
    "mapping": (InvalidArgument, lambda db, tx: db.set_many([("a", [1])])),
    "expected pairs, got dict": (InvalidArgument, lambda db, tx: db.set_many({"a": {}})),
    "in_flight_max": (InvalidArgument, lambda db, tx: db.set_many([("a", {})], in_flight_max="5")),
    "OutcomeUnknown": (UsageError, lambda db, tx: db.resolve(ValueError())),
    "codec": (SchemaError, lambda db, tx: untyped.Table("t").column("other", int)),
    "before every commit": (
        InvalidArgument,
        lambda db, tx: db.snapshot(at=percolator.Timestamp(0)),
    ),
    "address": (InvalidArgument, lambda db, tx: untyped.connect(5)),
    "^progress: expected a function, got int": (
        InvalidArgument,
        lambda db, tx: db.set_many([("a", {balance: 1})], progress=3),
    ),
    "at most 100000": (
        InvalidArgument,
        lambda db, tx: db.set_many([("a", {})], in_flight_max=10**9),
    ),
    "columns: expected at most": (
        InvalidArgument,
        lambda db, tx: tx.get_many(accounts, ["a"], itertools.repeat(balance)),
    ),
    "reverse": (InvalidArgument, lambda db, tx: list(tx.scan(accounts, reverse="yes"))),
    "splits: expected a list of row keys, got str": (
        InvalidArgument,
        lambda db, tx: db.create_table(Table("other"), splits="abc"),
    ),
    "^exist_ok: expected a bool, got int": (
        InvalidArgument,
        lambda db, tx: db.create_table(accounts, exist_ok=1),
    ),
    "^change_feed: expected a bool": (
        InvalidArgument,
        lambda db, tx: db.create_table(Table("other"), change_feed="no"),
    ),
    "^retention: table 'accounts' exists with the cluster's default, not 60000 ms": (
        InvalidArgument,
        lambda db, tx: db.create_table(accounts, exist_ok=True, retention=timedelta(minutes=1)),
    ),
    "^missing_ok: expected a bool": (
        InvalidArgument,
        lambda db, tx: db.drop_table(Table("other"), missing_ok=1),
    ),
    "^on: expected a bool, got NoneType": (
        InvalidArgument,
        lambda db, tx: db.set_change_feed(accounts, on=None),
    ),
    "^before: expected a bool": (
        InvalidArgument,
        lambda db, tx: db.changes(accounts, before="yes"),
    ),
    "expected a Table": (UsageError, lambda db, tx: db.changes("accounts")),
    "^until: .* is before after, ": (
        InvalidArgument,
        lambda db, tx: db.changes(accounts, until=percolator.Timestamp(1)),
    ),
    "^table: 'accounts' has no change feed: switch it on": (
        InvalidArgument,
        lambda db, tx: db.changes(accounts),
    ),
    "got a coroutine function": (UsageError, lambda db, tx: db.run(_never_begun)),
    "^function: expected a function, got int": (InvalidArgument, lambda db, tx: db.run(5)),
    "^keywords: expected a mapping from names to values, got int": (
        InvalidArgument,
        lambda db, tx: db.run(print, keywords=5),
    ),
    "^function: expected a function, got NoneType": (
        InvalidArgument,
        lambda db, tx: db.run(None),
    ),
    "^function: expected a function, got RetryPolicy": (
        InvalidArgument,
        lambda db, tx: untyped.transactional(percolator.RetryPolicy()),
    ),
    "^function: expected a function, got str": (
        InvalidArgument,
        lambda db, tx: untyped.transactional(retry=percolator.RetryPolicy())("f"),
    ),
    "^function: expected a function, got float": (
        InvalidArgument,
        lambda db, tx: untyped.observes(balance)(0.5),
    ),
}


async def _never_begun(tx: percolator.Transaction) -> None:
    raise AssertionError(tx)


@pytest.mark.parametrize("message", WRONG)
def test_an_error_names_the_bad_argument(db: percolator.Database, message: str) -> None:
    kind, call = WRONG[message]
    with db.transaction() as tx, pytest.raises(kind, match=message):
        call(db, tx)
    assert db.tables() == ["accounts"]
    assert not list(db.snapshot().scan(accounts))


async def test_what_cannot_be_called_is_refused_by_name_under_asyncio() -> None:
    five: Any = 5
    async with connected() as (db, _):
        with pytest.raises(InvalidArgument, match=r"^function: expected a function, got int$"):
            await db.run(five)
        with pytest.raises(InvalidArgument, match=r"^progress: expected a function, got int$"):
            await db.set_many([], progress=five)


def test_columns_may_come_from_a_generator_and_a_limit_may_be_as_large_as_it_likes(
    db: percolator.Database,
) -> None:
    columns: list[Any] = [(one for one in [balance]), iter([balance])]
    with db.transaction() as tx:
        tx.set("a", balance, 1)
        (row,) = tx.get_many(accounts, ["a"], columns[0])
        scanned = list(tx.scan(accounts, columns=columns[1], limit=2**70))
        tx.rollback()
    assert [row[balance], *(one[balance] for one in scanned)] == [1, 1]
