"""What every `Database` does: the one for tests in this process, and one over real servers."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import percolator
import percolator.testing
from percolator import (
    ConflictError,
    Database,
    InvalidArgument,
    Outcome,
    OutcomeUnknown,
    SchemaError,
    Table,
    Transaction,
    UsageError,
    codecs,
    transactional,
)
from percolator.errors import CellAddress
from percolator.schema import Column
from services.local.cluster import LocalCluster

IN_PROCESS = "in this process"
CLUSTER = "cluster"


@pytest.fixture(
    scope="module",
    params=[IN_PROCESS, pytest.param(CLUSTER, marks=pytest.mark.integration)],
)
def db(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    with ExitStack() as stack:
        if request.param == CLUSTER:
            cluster = LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2)
            stack.enter_context(cluster)
            yield stack.enter_context(percolator.connect(cluster.address))
        else:
            yield stack.enter_context(percolator.testing.connect())


class Accounts:
    """A table of its own for each test, in three tablets."""

    def __init__(self, db: Database) -> None:
        self.table = Table(f"accounts-{uuid.uuid4()}")
        self.balance: Column[int] = self.table.column("balance", codecs.integer)
        self.owner: Column[str] = self.table.column("owner", codecs.text)
        db.create_table(self.table, splits=["g", "p"])


@pytest.fixture
def accounts(db: Database) -> Accounts:
    return Accounts(db)


# ---------------------------------------------------------------------------- transactions


def test_what_was_committed_is_read_and_only_that(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 10)
        tx.set("zoe", accounts.owner, "")
    assert tx.outcome is Outcome.COMMITTED
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", accounts.balance) == 10
        assert snapshot.get("zoe", accounts.owner) == "", "a value of no bytes is a value"
        assert snapshot.get("bob", accounts.owner) is None
        assert snapshot.get("nobody", accounts.balance, default=0) == 0


def test_an_exception_rolls_everything_back(db: Database, accounts: Accounts) -> None:
    tx = db.transaction()

    def fail() -> None:
        with tx:
            tx.set("bob", accounts.balance, 10)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert tx.outcome is Outcome.ABORTED
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", accounts.balance) is None


def test_a_transaction_reads_its_own_writes(db: Database, accounts: Accounts) -> None:
    balance = accounts.balance
    with db.transaction() as tx:
        tx.set("a", balance, 1)
        tx.set("b", balance, 2)
    with db.transaction() as tx:
        tx.set("a", balance, 10)
        tx.delete("b", balance)
        tx.set("c", balance, 3)
        assert tx.get("a", balance) == 10
        assert tx.get("b", balance) is None
        a, b, c = tx.get_many(accounts.table, ["a", "b", "c"])
        assert (a[balance], balance in b, c[balance]) == (10, False, 3)
        assert [(row.key, row[balance]) for row in tx.scan(accounts.table)] == [
            ("a", 10),
            ("c", 3),
        ]
        tx.rollback()
    with db.snapshot() as snapshot:
        assert snapshot.get("a", balance) == 1


def test_a_snapshot_stays_as_it_was(db: Database, accounts: Accounts) -> None:
    balance = accounts.balance
    with db.transaction() as tx:
        tx.set("a", balance, 1)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", balance) == 1
        with db.transaction() as tx:
            tx.set("a", balance, 2)
            tx.set("b", balance, 2)
        assert snapshot.get("a", balance) == 1
        assert [row.key for row in snapshot.scan(accounts.table)] == ["a"]


def test_what_a_program_has_committed_its_next_transaction_sees(
    db: Database, accounts: Accounts
) -> None:
    for number in range(30):
        with db.transaction() as tx:
            assert tx.get("a", accounts.balance, default=0) == number
            assert tx.get("z", accounts.balance, default=0) == number
            tx.set("a", accounts.balance, number + 1)
            tx.set("z", accounts.balance, number + 1)


def test_of_two_that_write_one_cell_the_second_gets_a_conflict(
    db: Database, accounts: Accounts
) -> None:
    first, second = db.transaction(), db.transaction()
    for tx in (first, second):
        tx.set("a", accounts.balance, tx.get("a", accounts.balance, default=0) + 1)
    first.commit()
    with pytest.raises(ConflictError) as caught:
        second.commit()
    assert second.outcome is Outcome.ABORTED
    assert caught.value.cell is not None
    assert caught.value.cell.row == b"a"
    assert caught.value.other_commit_timestamp == first.commit_timestamp


def test_write_skew_is_possible_and_locking_rules_it_out(db: Database, accounts: Accounts) -> None:
    """Snapshot isolation, not serialisability: each reads what the other one writes."""
    balance = accounts.balance
    for locking in (False, True):
        one, other = db.transaction(), db.transaction()
        for tx, reads, writes in ((one, "x", "y"), (other, "y", "x")):
            tx.get(reads, balance)
            if locking:
                tx.lock(reads, balance)
            tx.set(writes, balance, 1)
        one.commit()
        if locking:
            with pytest.raises(ConflictError):
                other.commit()
        else:
            other.commit()


def test_nothing_is_sent_to_commit_what_was_only_read(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.get("a", accounts.balance)
        before = tx.statistics.round_trips
    assert tx.commit_timestamp is None
    assert tx.statistics.round_trips == before


def test_an_uncontended_transaction_takes_four_round_trips_and_five_with_a_read(
    db: Database, accounts: Accounts
) -> None:
    with db.transaction() as tx:
        tx.set("a", accounts.balance, 1)
        tx.set("z", accounts.balance, 1)
    assert tx.statistics.round_trips == 4
    with db.transaction() as tx:
        tx.set("n", accounts.balance, tx.get("n", accounts.balance, default=0) + 1)
    assert tx.statistics.round_trips == 5


def test_concurrent_increments_all_count(db: Database, accounts: Accounts) -> None:
    @transactional
    def increment(tx: Transaction, row: str) -> None:
        tx.set(row, accounts.balance, tx.get(row, accounts.balance, default=0) + 1)

    def work() -> None:
        for _ in range(5):
            increment(db, "counter")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with db.snapshot() as snapshot:
        assert snapshot.get("counter", accounts.balance) == 30


def test_a_transactional_function_joins_the_transaction_that_it_is_called_with(
    db: Database, accounts: Accounts
) -> None:
    @transactional
    def put(tx: Transaction, row: str, amount: int) -> str:
        tx.set(row, accounts.balance, amount)
        return row

    with db.transaction() as tx:
        assert put(tx, "a", 1) == "a"
        tx.rollback()
    assert put(db, "b", 2) == "b"
    assert put(db, row="c", amount=3) == "c"
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(accounts.table)] == ["b", "c"]


def test_an_error_of_the_program_is_not_run_again(db: Database, accounts: Accounts) -> None:
    runs = 0

    @transactional
    def fails(tx: Transaction) -> None:
        nonlocal runs
        runs += 1
        tx.set("a", accounts.balance, 1)
        raise LookupError

    with pytest.raises(LookupError):
        fails(db)
    assert runs == 1


def test_a_settled_transaction_is_resolved_by_anybody(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("a", accounts.balance, 1)
    assert tx.start_timestamp is not None
    assert tx.resolve() is Outcome.COMMITTED
    table_id = _table_id(db, accounts)
    primary = CellAddress(table_id, b"a", b"balance")
    unknown = OutcomeUnknown("?", start_timestamp=tx.start_timestamp, primary=primary)
    assert db.resolve(unknown) is Outcome.COMMITTED
    other = OutcomeUnknown("?", start_timestamp=int(db.timestamp()), primary=primary)
    assert db.resolve(other) is Outcome.ABORTED


def _table_id(db: Database, accounts: Accounts) -> int:
    """As an error would name it."""
    one, other = db.transaction(), db.transaction()
    for tx in (one, other):
        tx.get("conflict", accounts.balance)
        tx.set("conflict", accounts.balance, 0)
    one.commit()
    with pytest.raises(ConflictError) as caught:
        other.commit()
    assert caught.value.cell is not None
    return caught.value.cell.table_id


# ---------------------------------------------------------------------------- history, scans


def test_history_is_read_by_timestamp_and_by_time(db: Database, accounts: Accounts) -> None:
    commits = []
    for number in range(3):
        with db.transaction() as tx:
            tx.set("a", accounts.balance, number)
        assert tx.commit_timestamp is not None
        commits.append(tx.commit_timestamp)
    for number, commit in enumerate(commits):
        with db.snapshot(at=commit) as snapshot:
            assert snapshot.get("a", accounts.balance) == number
            assert snapshot.timestamp() == commit
    with db.snapshot(at=datetime.now(UTC) - timedelta(seconds=30)) as snapshot:
        assert snapshot.get("a", accounts.balance) is None


def test_the_future_cannot_be_read(db: Database, accounts: Accounts) -> None:
    with (
        pytest.raises(InvalidArgument, match="future"),
        db.snapshot(at=datetime.now(UTC) + timedelta(hours=1)) as snapshot,
    ):
        snapshot.get("a", accounts.balance)


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
        bob, nobody = snapshot.get_many(accounts.table, ["bob", "nobody"])
        assert (bob.key, bob[accounts.balance], bob[accounts.owner]) == ("bob", -5, "Røbert")
        assert accounts.owner not in nobody
        assert not nobody
        assert nobody.get(accounts.balance, 0) == 0
        with pytest.raises(KeyError):
            nobody[accounts.balance]
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
    column = table.column(b"\x00:\xff", codecs.raw)
    with db.transaction() as tx:
        for row in rows:
            tx.set(row, column, row)
    with db.snapshot() as snapshot:
        assert [(row.key, row[column]) for row in snapshot.scan(table)] == [
            (row, row) for row in rows
        ]


# ---------------------------------------------------------------------------- tables, bad input


def test_tables_are_created_listed_and_dropped(db: Database) -> None:
    table = Table(f"passing-{uuid.uuid4()}")
    column = table.column("c", codecs.text)
    db.create_table(table)
    assert table.name in db.tables()
    db.create_table(table, exist_ok=True)
    with pytest.raises(percolator.PercolatorError):
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


def test_an_ended_transaction_is_of_no_use(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("a", accounts.balance, 1)
    for use in (
        lambda: tx.get("a", accounts.balance),
        lambda: tx.set("a", accounts.balance, 2),
        lambda: tx.delete("a", accounts.balance),
        lambda: tx.lock("a", accounts.balance),
        lambda: list(tx.scan(accounts.table)),
        tx.commit,
    ):
        with pytest.raises(UsageError, match="committed"):
            use()
    with db.snapshot() as snapshot:
        snapshot.get("a", accounts.balance)
    with pytest.raises(UsageError, match="closed"):
        snapshot.get("a", accounts.balance)


def test_a_transaction_is_for_one_thread(db: Database, accounts: Accounts) -> None:
    problems: list[Exception] = []
    tx = db.transaction()

    def use() -> None:
        try:
            tx.set("a", accounts.balance, 1)
        except UsageError as error:
            problems.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    tx.rollback()
    assert "thread" in str(problems[0])


def test_notifying_a_column_that_nobody_watches_is_a_mistake(
    db: Database, accounts: Accounts
) -> None:
    with db.transaction() as tx:
        with pytest.raises(UsageError, match="no weak observer"):
            tx.notify("a", accounts.balance)
        tx.rollback()


def test_progress_of_bulk_writes_is_told(db: Database, accounts: Accounts) -> None:
    told: list[int] = []
    rows = ((f"{i:05}", {accounts.balance: i, accounts.owner: "x"}) for i in range(300))
    assert db.set_many(rows, in_flight_max=50, progress=told.append) == 300
    assert told[-1] == 300
    with db.snapshot() as snapshot:
        assert sum(1 for _ in snapshot.scan(accounts.table)) == 300
