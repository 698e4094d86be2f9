"""What every `Database` does with tables, rows, values and history; scans and bad input."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from percolator import (
    Database,
    InvalidArgument,
    SchemaError,
    Table,
    Timestamp,
    UsageError,
    codecs,
)
from tests.contracts.conftest import Accounts, needs_backward_scans


def test_history_is_read_by_timestamp_and_by_time(db: Database, accounts: Accounts) -> None:
    commits: list[Timestamp] = []
    # At least until a millisecond begins: a time means what is before its millisecond.
    while len(commits) < 3 or commits[-1].to_datetime() == commits[0].to_datetime():
        with db.transaction() as tx:
            tx.set("a", accounts.balance, len(commits))
        assert tx.commit_timestamp is not None
        commits.append(tx.commit_timestamp)
    for number, commit in enumerate(commits):
        with db.snapshot(at=commit) as snapshot:
            assert snapshot.get("a", accounts.balance) == number
            assert snapshot.timestamp() == commit
    time = commits[-1].to_datetime()
    shown = [commit for commit in commits if commit < Timestamp.from_datetime(time)]
    with db.snapshot(at=time) as snapshot:
        assert snapshot.get("a", accounts.balance) == len(shown) - 1


def test_the_future_cannot_be_read(db: Database, accounts: Accounts) -> None:
    with (
        pytest.raises(InvalidArgument, match="future"),
        db.snapshot(at=datetime.now(UTC) + timedelta(hours=1)) as snapshot,
    ):
        snapshot.get("a", accounts.balance)


@needs_backward_scans
def test_scans_cross_tablets_in_both_directions(db: Database, accounts: Accounts) -> None:
    keys = [f"{letter}{number}" for letter in "afgoptz" for number in range(3)]
    assert db.set_many((key, {accounts.balance: i}) for i, key in enumerate(keys)) == len(keys)

    def scan(**arguments: Any) -> list[str]:
        with db.snapshot() as snapshot:
            return [row.key for row in snapshot.scan(accounts.table, **arguments)]

    assert scan() == keys
    assert scan(reverse=True) == keys[::-1]
    assert scan(start="f1", end="p0") == [key for key in keys if "f1" <= key < "p0"]
    assert scan(prefix="g") == ["g0", "g1", "g2"]
    assert scan(prefix="g", reverse=True, limit=2) == ["g2", "g1"]
    assert scan(limit=4) == keys[:4]
    assert scan(limit=0) == []
    assert scan(start="x", end="b") == []
    assert scan(columns=[accounts.owner]) == []


def test_a_limit_counts_what_is_left_after_the_own_deletions(
    db: Database, accounts: Accounts
) -> None:
    db.set_many((f"{i:02}", {accounts.balance: i}) for i in range(20))
    with db.transaction() as tx:
        for i in range(10):
            tx.delete(f"{i:02}", accounts.balance)
        tx.set("1050", accounts.balance, 7)
        found = [row.key for row in tx.scan(accounts.table, limit=3)]
        assert found == ["10", "1050", "11"]
        tx.rollback()


def test_rows_are_typed_by_column(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, -5)
        tx.set("bob", accounts.owner, "Røbert")
    with db.snapshot() as snapshot:
        bob, missing = snapshot.get_many(accounts.table, ["bob", "missing"])
        assert (bob.key, bob[accounts.balance], bob[accounts.owner]) == ("bob", -5, "Røbert")
        assert accounts.owner not in missing
        assert not missing
        assert missing.get(accounts.balance, 0) == 0
        with pytest.raises(KeyError):
            missing[accounts.balance]
        (only,) = snapshot.get_many(accounts.table, ["bob"], [accounts.owner])
        assert list(only) == [b"owner"]


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 1_000_000])
def test_values_of_every_size_come_back(db: Database, accounts: Accounts, size: int) -> None:
    blob = accounts.table.column("blob", codecs.raw)
    value = bytes(i % 251 for i in range(size))
    with db.transaction() as tx:
        tx.set("a", blob, value)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", blob) == value


def test_rows_and_columns_are_any_bytes(db: Database) -> None:
    table = Table(f"bytes-{uuid.uuid4()}", key=codecs.raw)
    db.create_table(table)
    rows = [b"", b"\x00", b"\x00\x00", b"\x00\xff", b"a", b"a\x00", b"\xff", b"\xff\xff"]
    column = table.column(b"\xff:\x00", codecs.raw)
    with db.transaction() as tx:
        for row in rows:
            tx.set(row, column, row)
    with db.snapshot() as snapshot:
        assert [(row.key, row[column]) for row in snapshot.scan(table)] == [
            (row, row) for row in rows
        ]


def test_a_new_table_has_a_name_on_one_line_and_a_retention_that_ends(db: Database) -> None:
    with pytest.raises(InvalidArgument, match="unprintable characters, or a space at either end"):
        db.create_table(Table(f"two\nlines-{uuid.uuid4()}"))
    with pytest.raises(InvalidArgument, match=r"retention: is .* 100 years"):
        db.create_table(Table(f"kept-{uuid.uuid4()}"), retention=timedelta(days=365 * 101))


def test_tables_are_created_listed_and_dropped(db: Database) -> None:
    table = Table(f"passing-{uuid.uuid4()}")
    column = table.column("c", codecs.text)
    db.create_table(table)
    assert table.name in db.tables()
    db.create_table(table, exist_ok=True)
    with pytest.raises(InvalidArgument, match="exists; pass exist_ok=True to use it"):
        db.create_table(table)
    with db.transaction() as tx:
        tx.set("a", column, "old")
    db.drop_table(table)
    assert table.name not in db.tables()
    db.drop_table(table, missing_ok=True)
    with pytest.raises(SchemaError):
        db.drop_table(table)
    db.create_table(table)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", column) is None


def test_an_unknown_table_is_said_so_at_once(db: Database) -> None:
    column = Table("nowhere").column("c", codecs.text)
    with pytest.raises(SchemaError, match="nowhere"), db.transaction() as tx:
        tx.set("a", column, "b")
    with pytest.raises(SchemaError, match="nowhere"), db.snapshot() as snapshot:
        snapshot.get("a", column)


def test_values_that_do_not_fit_their_column_are_refused(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        with pytest.raises(SchemaError, match="expected int, got str"):
            tx.set("a", accounts.balance, "10")  # type: ignore[misc]
        with pytest.raises(SchemaError, match="64 bits"):
            tx.set("a", accounts.balance, 2**63)
        with pytest.raises(SchemaError, match="expected str, got int"):
            tx.set(5, accounts.balance, 5)
        with pytest.raises(InvalidArgument, match="row"):
            tx.set("x" * 5000, accounts.balance, 5)
        with pytest.raises(UsageError):
            tx.get("a", "balance")  # type: ignore[call-overload]
    assert tx.commit_timestamp is None, "nothing was written"


def test_progress_of_bulk_writes_is_told(db: Database, accounts: Accounts) -> None:
    told: list[int] = []
    rows = ((f"{i:05}", {accounts.balance: i, accounts.owner: "x"}) for i in range(300))
    assert db.set_many(rows, in_flight_max=50, progress=told.append) == 300
    assert told[-1] == 300
    with db.snapshot() as snapshot:
        assert sum(1 for _ in snapshot.scan(accounts.table)) == 300
