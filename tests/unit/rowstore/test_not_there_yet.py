"""What a database on a row store cannot do yet, it refuses with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from percolator import Database, Table, UsageError, codecs
from percolator.testing.row_database import connect_over_model

TABLE = Table("accounts")
BALANCE = TABLE.column("balance", codecs.integer)


@pytest.fixture
def db() -> Iterator[Database]:
    with connect_over_model() as database:
        database.create_table(TABLE, change_feed=True)
        yield database


def test_no_changes_are_followed(db: Database) -> None:
    with pytest.raises(UsageError, match="in a row store, which has no change feeds"):
        list(db.changes(TABLE, after=db.timestamp()))


def test_no_value_expires(db: Database) -> None:
    ttl = {BALANCE: timedelta(hours=1)}
    with pytest.raises(UsageError, match="in a row store, in which no value expires yet"):
        db.create_table(TABLE, ttl=ttl, exist_ok=True)
    with pytest.raises(UsageError, match="in a row store, in which no value expires yet"):
        db.set_ttl(BALANCE, timedelta(hours=1))


def test_a_transaction_of_one_row_takes_as_many_round_trips_as_any(db: Database) -> None:
    with db.transaction() as tx:
        tx.set("bob", BALANCE, tx.get("bob", BALANCE, default=0) + 1)
    assert tx.statistics.round_trips == 5
