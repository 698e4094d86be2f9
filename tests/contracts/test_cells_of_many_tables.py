"""`get_many` with single cells, when a snapshot is taken, and what has ended for good."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from percolator import Column, Database, InvalidArgument, Table, UsageError, codecs
from tests.contracts.conftest import Accounts


@pytest.fixture
def orders(db: Database, accounts: Accounts) -> Iterator[Column[str]]:
    table: Table[int] = Table(f"orders-of-{accounts.table.name}", key=codecs.ordered_integer)
    db.create_table(table)
    yield table.column("state", codecs.text)
    db.drop_table(table)


def test_cells_of_several_tables_are_read_in_one_round_trip(
    db: Database, accounts: Accounts, orders: Column[str]
) -> None:
    balance, owner = accounts.balance, accounts.owner
    with db.transaction() as tx:
        tx.set("bob", balance, 10)
        tx.set("bob", owner, "Bob")
        tx.set("joe", balance, 20)
        tx.set(17, orders, "open")
    with db.snapshot() as snapshot:
        cells: list[tuple[object, Column[Any]]]
        cells = [(17, orders), ("joe", balance), ("bob", owner), ("zoe", balance), ("joe", balance)]
        snapshot.get_many(cells)  # past the locks that the commit may still have to remove
        before = snapshot.statistics.round_trips
        found = snapshot.get_many(cells)
        assert found == ["open", 20, "Bob", None, 20]
        assert snapshot.statistics.round_trips == before + 1
        assert snapshot.get_many([]) == []
        assert snapshot.get_many([(17, orders), ("bob", balance)]) == ["open", 10]


def test_cells_are_read_through_the_writes_of_the_transaction(
    db: Database, accounts: Accounts
) -> None:
    balance = accounts.balance
    with db.transaction() as tx:
        tx.set("bob", balance, 1)
        tx.set("joe", balance, 2)
    with db.transaction() as tx:
        tx.set("bob", balance, 5)
        tx.delete("joe", balance)
        tx.lock("zoe", balance)
        cells = ((name, balance) for name in ("bob", "joe", "zoe"))
        assert tx.get_many(cells) == [5, None, None]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["bob"], r"cells\[0\].*'bob' is not a row and a column"),
        ([("bob", "balance")], r"cells\[0\].* is not a row and a column"),
        ("bob", "expected pairs of a row and a column, or a Table, got str"),
        (7, "expected pairs of a row and a column, or a Table, got int"),
    ],
)
def test_what_is_no_list_of_cells_is_refused(
    db: Database, accounts: Accounts, cells: Any, said: str
) -> None:
    with db.snapshot() as snapshot, pytest.raises(InvalidArgument, match=said):
        snapshot.get_many(cells)


def test_rows_without_columns_are_empty(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 10)
    with db.snapshot() as snapshot:
        bob, zoe = snapshot.get_many(accounts.table, ["bob", "zoe"], [])
        assert (bob.key, list(bob), zoe.key, list(zoe)) == ("bob", [], "zoe", [])
        with pytest.raises(InvalidArgument, match="columns: is empty"):
            list(snapshot.scan(accounts.table, columns=[]))


def test_the_first_read_takes_the_snapshot_and_timestamp_counts_as_one(
    db: Database, accounts: Accounts
) -> None:
    balance = accounts.balance

    def change(value: int) -> None:
        with db.transaction() as other:
            other.set("bob", balance, value)

    for begin in (db.snapshot, db.transaction):
        change(1)
        with begin() as late, begin() as fixed:
            fixed.timestamp()
            change(2)
            assert (late.get("bob", balance), fixed.get("bob", balance)) == (2, 1)
            change(3)
            assert (late.get("bob", balance), fixed.get("bob", balance)) == (2, 1)


def test_the_last_of_several_writes_to_a_cell_counts(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        for value in (1, 2, 3):
            tx.set("bob", accounts.balance, value)
        tx.set("joe", accounts.balance, 1)
        tx.delete("joe", accounts.balance)
    with db.snapshot() as snapshot:
        cells = [("bob", accounts.balance), ("joe", accounts.balance)]
        assert snapshot.get_many(cells) == [3, None]


def test_what_has_ended_has_no_timestamp_to_ask_for(db: Database, accounts: Accounts) -> None:
    async def after_the_end() -> None:
        async with db._database.transaction() as tx:
            await tx.get("bob", accounts.balance)
            await tx.set("bob", accounts.balance, 1)
        with pytest.raises(UsageError, match="has committed"):
            await tx.timestamp()
        async with db._database.snapshot() as snapshot:
            await snapshot.timestamp()
        with pytest.raises(UsageError, match="is closed"):
            await snapshot.timestamp()

    db._loop_thread.call(after_the_end)
    with db.transaction() as tx:
        tx.get("bob", accounts.balance)
    with pytest.raises(UsageError, match="has committed"):
        tx.timestamp()
    undone = db.transaction()
    undone.timestamp()
    undone.rollback()
    with pytest.raises(UsageError, match="was rolled back"):
        undone.timestamp()
    with db.snapshot() as snapshot:
        snapshot.timestamp()
    with pytest.raises(UsageError, match="is closed"):
        snapshot.timestamp()
