"""What every transaction does, wherever its `Database` runs."""

from __future__ import annotations

import threading

import pytest

from percolator import (
    ConflictError,
    Database,
    Outcome,
    OutcomeUnknown,
    Transaction,
    UsageError,
    aio,
    codecs,
    observes,
    transactional,
)
from percolator.errors import CellAddress
from percolator.schema import Column
from tests.contracts.conftest import Accounts, needs_tablets


def test_what_was_committed_is_read_and_only_that(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("bob", accounts.balance, 10)
        tx.set("zoe", accounts.owner, "")
    assert tx.outcome is Outcome.COMMITTED
    with db.snapshot() as snapshot:
        assert snapshot.get("bob", accounts.balance) == 10
        assert snapshot.get("zoe", accounts.owner) == "", "a value of no bytes is a value"
        assert snapshot.get("bob", accounts.owner) is None
        assert snapshot.get("missing", accounts.balance, default=0) == 0


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


@needs_tablets
def test_an_uncontended_transaction_takes_four_round_trips_and_three_with_a_read_in_one_tablet(
    db: Database, accounts: Accounts
) -> None:
    with db.transaction() as tx:
        tx.set("a", accounts.balance, 1)
        tx.set("z", accounts.balance, 1)
    assert tx.statistics.round_trips == 4
    with db.transaction() as tx:
        tx.set("n", accounts.balance, tx.get("n", accounts.balance, default=0) + 1)
    assert tx.statistics.round_trips == 3
    with db.transaction() as tx:
        tx.set("n", accounts.balance, tx.get("n", accounts.balance, default=0) + 1)
        tx.set("z", accounts.balance, 2)
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


def test_a_settled_transaction_is_resolved_by_any_client(db: Database, accounts: Accounts) -> None:
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
    """The table's id, as an error would name it."""
    one, other = db.transaction(), db.transaction()
    for tx in (one, other):
        tx.get("conflict", accounts.balance)
        tx.set("conflict", accounts.balance, 0)
    one.commit()
    with pytest.raises(ConflictError) as caught:
        other.commit()
    assert caught.value.cell is not None
    return caught.value.cell.table_id


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


def test_notifying_a_column_that_no_observer_watches_is_a_mistake(
    db: Database, accounts: Accounts
) -> None:
    with db.transaction() as tx:
        with pytest.raises(UsageError, match="no weak observer"):
            tx.notify("a", accounts.balance)
        tx.rollback()


@needs_tablets
def test_observers_answer_changes_and_each_other(db: Database, accounts: Accounts) -> None:
    copied: Column[int] = accounts.table.column("copied", codecs.integer)
    total: Column[int] = accounts.table.column("total", codecs.integer)

    @observes(accounts.balance, name="copy")
    async def copy(tx: aio.Transaction, row: str) -> None:
        await tx.set(row, copied, await tx.get(row, accounts.balance) or 0)

    @observes(copied, name="add")
    def add(tx: Transaction, row: str) -> None:
        tx.set("all", total, tx.get("all", total, default=0) + tx.get(row, copied, default=0))

    with db.run_observers([copy, add]):
        db.set_many((row, {accounts.balance: 10}) for row in ("bob", "joe", "zoe"))
        db.wait_for_observers(timeout=30.0)
    with db.snapshot() as snapshot:
        assert snapshot.get("all", total) == 30
