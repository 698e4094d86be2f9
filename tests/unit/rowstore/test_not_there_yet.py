"""What a database on a row store cannot do yet, it refuses with a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from percolator import Database, Table, Transaction, UsageError, codecs, observes
from percolator.testing.row_database import connect_over_model

TABLE = Table("accounts")
BALANCE = TABLE.column("balance", codecs.integer)


@pytest.fixture
def db() -> Iterator[Database]:
    with connect_over_model() as database:
        database.create_table(TABLE, change_feed=True)
        yield database


@observes(BALANCE, name="copy")
def copy(tx: Transaction, row: str) -> None:
    pytest.fail("no observer runs here")


USES: dict[str, Callable[[Database], object]] = {
    "observers": lambda db: db.run_observers([copy]),
    "changes": lambda db: list(db.changes(TABLE, after=db.timestamp())),
    "shared transactions": lambda db: db.shared_transaction(),
    "waiting": lambda db: db.wait_for_observers(timeout=5.0),
}


@pytest.mark.parametrize("use", USES)
def test_it_is_refused(db: Database, use: str) -> None:
    with pytest.raises(UsageError, match="in a row store, which has no observers, change feeds"):
        USES[use](db)


def test_a_transaction_of_one_row_takes_as_many_round_trips_as_any(db: Database) -> None:
    with db.transaction() as tx:
        tx.set("bob", BALANCE, tx.get("bob", BALANCE, default=0) + 1)
    assert tx.statistics.round_trips == 5
