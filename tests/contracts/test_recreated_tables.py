"""What a transaction or snapshot sees of a table that is dropped, and created again, under it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from percolator import Database, SchemaError, Snapshot, Transaction
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.protocol.environment import Verdicts
from tests.contracts.conftest import Accounts, needs_tablets

READS: dict[str, Callable[[Snapshot | Transaction, Accounts], object]] = {
    "get": lambda reads, accounts: reads.get("bob", accounts.balance),
    "get_many": lambda reads, accounts: reads.get_many(accounts.table, ["bob"]),
    "scan": lambda reads, accounts: list(reads.scan(accounts.table)),
}
WRITES: dict[str, Callable[[Transaction, Accounts], None]] = {
    "set": lambda tx, accounts: tx.set("joe", accounts.balance, 2),
    "delete": lambda tx, accounts: tx.delete("joe", accounts.balance),
    "lock": lambda tx, accounts: tx.lock("joe", accounts.balance),
}
DROPPED = "dropped|younger|no table"


@pytest.fixture
def others(db: Database) -> Accounts:
    """Another table, which stays."""
    return Accounts(db)


@pytest.fixture
def bob(db: Database, accounts: Accounts) -> Accounts:
    """A table with one row."""
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 1)
    return accounts


def _create_again(db: Database, accounts: Accounts) -> None:
    db.drop_table(accounts.table)
    db.create_table(accounts.table)


def _is_empty(db: Database, accounts: Accounts) -> bool:
    with db.snapshot() as snapshot:
        return not list(snapshot.scan(accounts.table))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
@needs_tablets
def test_what_was_read_from_a_table_is_never_committed_into_its_successor(
    db: Database, bob: Accounts, others: Accounts, read: str, write: str
) -> None:
    with pytest.raises(SchemaError), db.transaction() as tx:  # noqa: PT012 - as programs do it
        READS[read](tx, bob)
        _create_again(db, bob)
        WRITES[write](tx, bob)
        tx.set("seen", others.balance, 1)
    assert tx.commit_timestamp is None
    assert _is_empty(db, bob)
    assert _is_empty(db, others), "nothing of the transaction is visible"


@pytest.mark.parametrize("again", READS)
@pytest.mark.parametrize("first", READS)
@needs_tablets
def test_a_table_that_was_read_does_not_become_empty(
    db: Database, bob: Accounts, first: str, again: str
) -> None:
    with db.snapshot() as snapshot:
        READS[first](snapshot, bob)
        _create_again(db, bob)
        for _ in range(2):
            with pytest.raises(SchemaError, match=DROPPED):
                READS[again](snapshot, bob)


@pytest.mark.parametrize("read", READS)
@needs_tablets
def test_a_table_younger_than_the_snapshot_cannot_be_read(
    db: Database, bob: Accounts, others: Accounts, read: str
) -> None:
    """It was not read before, but another table was: so the snapshot is older."""
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", others.balance) is None
        _create_again(db, bob)
        with pytest.raises(SchemaError, match=f"{bob.table.name}.* is younger than the snapshot"):
            READS[read](snapshot, bob)
        assert snapshot.get("bob", others.balance) is None, "the other table is as it was"


@pytest.mark.parametrize("write", WRITES)
@needs_tablets
def test_a_table_younger_than_the_transaction_cannot_be_written(
    db: Database, bob: Accounts, others: Accounts, write: str
) -> None:
    with db.transaction() as tx:
        tx.get("bob", others.balance)
        _create_again(db, bob)
        with pytest.raises(SchemaError, match="is younger than the snapshot"):
            WRITES[write](tx, bob)
        tx.set("seen", others.balance, 1)
    assert tx.commit_timestamp is not None, "it goes on without the table that it could not use"
    assert _is_empty(db, bob)


@pytest.mark.parametrize("write", WRITES)
@needs_tablets
def test_writes_stay_with_the_table_that_they_were_made_for(
    db: Database, bob: Accounts, write: str
) -> None:
    """Nothing was read, so the transaction has no timestamp yet."""
    tx = db.transaction()
    WRITES[write](tx, bob)
    _create_again(db, bob)
    WRITES[write](tx, bob)
    with pytest.raises(SchemaError, match=DROPPED):
        tx.commit()
    assert _is_empty(db, bob)


@pytest.mark.parametrize("read", READS)
@needs_tablets
def test_the_past_of_a_table_ends_at_its_creation(db: Database, bob: Accounts, read: str) -> None:
    with db.snapshot() as snapshot:
        before = snapshot.timestamp()
        assert snapshot.get("bob", bob.balance) == 1
    _create_again(db, bob)
    for at in (before, datetime.now(UTC) - timedelta(seconds=30)):
        with (
            db.snapshot(at=at) as snapshot,
            pytest.raises(SchemaError, match="is younger than the snapshot"),
        ):
            READS[read](snapshot, bob)


@needs_tablets
def test_the_next_transaction_uses_the_new_table(db: Database, bob: Accounts) -> None:
    with db.snapshot() as snapshot:
        snapshot.get("bob", bob.balance)
        _create_again(db, bob)
    with db.transaction() as tx:
        assert tx.get("bob", bob.balance) is None
        tx.set("bob", bob.balance, 2)
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", bob.balance) == 2


@needs_tablets
def test_a_table_created_in_the_middle_of_a_transaction_is_younger(db: Database) -> None:
    with db.snapshot() as snapshot:
        snapshot.timestamp()
        accounts = Accounts(db)
        with pytest.raises(SchemaError, match="begin a new transaction or snapshot"):
            snapshot.get("bob", accounts.balance)


# Transactions across two tables whose client dies, and whose primary's table is then dropped.


class Died(BaseException):
    """The client has gone no further."""


async def _dies(*_: Any) -> int:
    raise Died


async def _never_comes(*_: Any) -> None:
    pass


def _write_to_both(db: Database, first: Accounts, second: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("a", first.balance, 1)
        tx.set("a", second.balance, 1)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The client that comes afterwards knows no verdict, as if it were another one."""
    monkeypatch.setattr(Verdicts, "put", lambda *_: None)
    return monkeypatch


def test_what_was_committed_is_completed(db: Database, forgetful: pytest.MonkeyPatch) -> None:
    first, second = Accounts(db), Accounts(db)  # the first has the primary, since its id is lower
    forgetful.setattr(commit, "commit_secondaries", _never_comes)
    _write_to_both(db, first, second)
    forgetful.undo()
    db.drop_table(first.table)
    for _ in range(2):
        with db.snapshot() as snapshot:
            assert snapshot.get("a", second.balance) == 1
    with db.transaction() as tx:
        tx.set("a", second.balance, 2)


def test_what_was_not_committed_is_rolled_back(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Accounts(db), Accounts(db)
    monkeypatch.setattr(commit, "roll_back_all", _never_comes)
    monkeypatch.setattr(Commit, "commit_primary", _dies)
    with pytest.raises(Died):
        _write_to_both(db, first, second)
    monkeypatch.undo()
    db.drop_table(first.table)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", second.balance) is None
    with db.transaction() as tx:
        tx.set("a", second.balance, 2)
