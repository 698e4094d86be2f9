"""Transactions, which do the same wherever their `Database` runs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

import percolator.testing
from percolator import (
    ConflictError,
    Database,
    InvalidArgument,
    Outcome,
    OutcomeUnknown,
    SchemaError,
    Table,
    Timestamp,
    Transaction,
    UsageError,
    aio,
    codecs,
    observes,
    transactional,
)
from percolator.errors import CellAddress
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit
from percolator.schema import Column
from percolator.testing import run_observers
from tests.contracts.conftest import Accounts, needs_tablets, put


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
    assert db.get("bob", accounts.balance) is None


def test_a_transaction_reads_its_own_writes(db: Database, accounts: Accounts) -> None:
    balance = accounts.balance
    put(db, balance, a=1, b=2)
    with db.transaction() as tx:
        tx.set("a", balance, 10)
        tx.delete("b", balance)
        tx.set("c", balance, 3)
        assert (tx.get("a", balance), tx.get("b", balance)) == (10, None)
        a, b, c = tx.get_many(accounts.table, ["a", "b", "c"])
        assert (a[balance], balance in b, c[balance]) == (10, False, 3)
        assert [(row.key, row[balance]) for row in tx.scan(accounts.table)] == [
            ("a", 10),
            ("c", 3),
        ]
        tx.rollback()
    assert db.get("a", balance) == 1


def test_a_snapshot_stays_as_it_was(db: Database, accounts: Accounts) -> None:
    balance = accounts.balance
    put(db, balance, a=1)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", balance) == 1
        put(db, balance, a=2, b=2)
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


def blamed(caught: pytest.ExceptionInfo[ConflictError]) -> CellAddress:
    """The cell because of which there is a conflict."""
    assert caught.value.cell is not None
    return caught.value.cell


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
    assert blamed(caught).row == b"a"
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


READS: dict[str, Callable[[Transaction, Accounts, str], object]] = {
    "get": lambda tx, of, row: tx.get(row, of.balance),
    "get_many of cells": lambda tx, of, row: tx.get_many([(row, of.balance)]),
    "get_many of rows": lambda tx, of, row: tx.get_many(of.table, [row], [of.balance]),
    "increment": lambda tx, of, row: tx.increment(row, of.balance),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("exists", [False, True])
def test_a_serializable_transaction_does_not_commit_on_what_has_changed(
    db: Database, accounts: Accounts, read: str, exists: bool
) -> None:
    if exists:
        put(db, accounts.balance, x=1, y=1)
    one, other = (db.transaction(serializable=True) for _ in range(2))
    for tx, reads, writes in ((one, "x", "y"), (other, "y", "x")):
        READS[read](tx, accounts, reads)
        tx.set(writes, accounts.balance, 2)
    one.commit()
    with pytest.raises(ConflictError):
        other.commit()


def test_serializable_transactions_share_what_they_only_read(
    db: Database, accounts: Accounts
) -> None:
    one, other = (db.transaction(serializable=True) for _ in range(2))
    for tx, writes in ((one, "x"), (other, "y")):
        tx.get("hub", accounts.balance)
        tx.set(writes, accounts.balance, 2)
    one.commit()
    other.commit()


def test_a_serializable_transaction_that_writes_nothing_takes_no_locks(
    db: Database, accounts: Accounts
) -> None:
    reader = db.transaction(serializable=True)
    assert reader.get("x", accounts.balance) is None
    put(db, accounts.balance, x=1)
    assert reader.commit() is None
    with db.transaction(serializable=True) as tx:
        assert tx.get("x", accounts.balance) == 1
        before = tx.statistics.round_trips
    assert tx.statistics.round_trips == before


UNLOCKABLE: dict[str, Callable[[Transaction, Accounts], object]] = {
    "cannot scan or count": lambda tx, of: list(tx.scan(of.table)),
    "scan or count": lambda tx, of: tx.count(of.table),
    "cannot delete_row": lambda tx, of: tx.delete_row(of.table, "x"),
    "reads columns by name": lambda tx, of: tx.get_many(of.table, ["x"]),
}


@pytest.mark.parametrize("why", UNLOCKABLE)
def test_a_serializable_transaction_refuses_reads_that_no_lock_can_keep(
    db: Database, accounts: Accounts, why: str
) -> None:
    with db.transaction(serializable=True) as tx:
        with pytest.raises(UsageError, match=why):
            UNLOCKABLE[why](tx, accounts)
        assert tx.get("x", accounts.balance) is None  # it may go on


def test_a_serializable_function_runs_again_and_joins_only_serializable_transactions(
    db: Database, accounts: Accounts
) -> None:
    runs = []

    @transactional(serializable=True)
    def copy(tx: Transaction, source: str, target: str) -> None:
        runs.append(tx.serializable)
        value = tx.get(source, accounts.balance, default=0)
        if len(runs) == 1:
            put(db, accounts.balance, **{source: 7})
        tx.set(target, accounts.balance, value)

    copy(db, "x", "y")
    assert (runs, db.get("y", accounts.balance)) == ([True, True], 7)
    with db.transaction(serializable=True) as tx:
        copy(tx, "y", "z")
    with db.transaction() as tx, pytest.raises(UsageError, match="copy is serializable, and"):
        copy(tx, "y", "z")


def test_serializable_is_true_or_false(db: Database) -> None:
    with pytest.raises(InvalidArgument, match="serializable"):
        db.transaction(serializable="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="serializable"):
        transactional(serializable=1)  # type: ignore[call-overload]


def test_nothing_is_sent_to_commit_what_was_only_read(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.get("a", accounts.balance)
        before = tx.statistics.round_trips
    assert (tx.commit_timestamp, tx.statistics.round_trips) == (None, before)


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

    def work(_: int) -> None:
        for _ in range(5):
            increment(db, "counter")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert db.get("counter", accounts.balance) == 30


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
    assert (put(db, "b", 2), put(db, row="c", amount=3)) == ("b", "c")
    assert [row.key for row in db.snapshot().scan(accounts.table)] == ["b", "c"]


def test_a_function_that_has_committed_is_not_run_again(db: Database, accounts: Accounts) -> None:
    def commit_and_lose(tx: Transaction) -> None:
        tx.increment("bob", accounts.balance)
        tx.commit()
        raise ConflictError("of another transaction, after the commit")

    async def commit_and_lose_under_asyncio(tx: aio.Transaction) -> None:
        await tx.increment("bob", accounts.balance)
        await tx.commit()
        raise ConflictError("of another transaction, after the commit")

    with pytest.raises(ConflictError, match=r"^of another"):
        db.run(commit_and_lose)
    with pytest.raises(ConflictError, match=r"^of another"):
        db._loop_thread.call(lambda: db._asynchronous.run(commit_and_lose_under_asyncio))
    assert db.get("bob", accounts.balance) == 2


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
    return blamed(caught).table_id


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
    tx = db.transaction()
    with (
        ThreadPoolExecutor(1) as another,
        pytest.raises(UsageError, match="thread"),
    ):
        another.submit(tx.set, "a", accounts.balance, 1).result()
    tx.rollback()


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
    assert db.get("all", total) == 30


# Reads and writes that another transaction's lock blocks until their time is up.

_SECONDS = 3.0
"""Enough for what follows the wait, on a busy machine as well: then the outcome is known."""


class Died(BaseException):
    """The client has gone no further."""


def test_one_handler_catches_a_read_and_a_write_that_a_lock_blocks(
    db: Database, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is that of a living client, which does not go on."""

    async def removes_nothing(*_: Any, **__: Any) -> set[int]:
        return set()

    holder = _with_locks_left(db, accounts, monkeypatch)
    monkeypatch.setattr(Cleanup, "resolve", removes_nothing)
    blocked: list[Callable[[], object]] = [
        lambda: db.snapshot().get("a", accounts.balance, timeout=_SECONDS),
        lambda: db.snapshot().get_many(accounts.table, ["a"], timeout=_SECONDS),
        lambda: list(db.snapshot().scan(accounts.table, timeout=_SECONDS)),
        lambda: _write(db, accounts),
    ]
    # Each waits for all of its time: they wait side by side.
    with ThreadPoolExecutor(len(blocked)) as threads:
        for refused in list(map(threads.submit, blocked)):
            with pytest.raises(ConflictError, match="is locked by transaction") as caught:
                refused.result()
            assert blamed(caught).row == b"a"
            assert caught.value.other_start_timestamp == holder
    monkeypatch.undo()


def _write(db: Database, accounts: Accounts) -> None:
    with db.transaction(timeout=_SECONDS) as tx:
        tx.set("a", accounts.balance, 2)


def _with_locks_left(db: Database, accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> int:
    """Leaves a lock behind; returns its transaction's start timestamp."""

    async def dies(*_: Any) -> int:
        raise Died

    with monkeypatch.context() as patch:
        # In one round, no lock would be stored.
        patch.setattr(aio.Transaction, "_only_two_phases", True)
        patch.setattr(Commit, "commit_primary", dies)
        tx = db.transaction()
        tx.set("a", accounts.balance, 1)
        with pytest.raises(Died):
            tx.commit()
    assert tx.start_timestamp is not None
    return tx.start_timestamp


# `tx.lock(row, column, shared=True)`: readers of a cell that must not change.

FAR = "z"
"""A row in another tablet than the hub: what is written there takes two phases."""
NEAR = "hub-edge"


@pytest.fixture(params=[NEAR, FAR])
def edge(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def hub(db: Database, accounts: Accounts) -> Accounts:
    with db.transaction() as tx:
        tx.set("hub", accounts.balance, 1)
        tx.set("hub", accounts.owner, "Bob")
    return accounts


def test_readers_of_a_cell_share_it(db: Database, hub: Accounts, edge: str) -> None:
    first, second = db.transaction(), db.transaction()
    for number, tx in enumerate((first, second)):
        assert tx.get("hub", hub.balance) == 1
        tx.lock("hub", hub.balance, shared=True)
        tx.set(f"{edge}{number}", hub.balance, 1)
    first.commit()
    second.commit()


def test_adders_at_one_hub_run_once_each(db: Database, hub: Accounts) -> None:
    runs = []

    @transactional
    def add(tx: Transaction, number: int) -> None:
        runs.append(number)
        tx.lock("hub", hub.balance, shared=True)
        assert tx.get("hub", hub.balance) == 1
        tx.set(f"edge-{number}", hub.balance, number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: add(db, number), range(40)))
    assert len(runs) == 40


Write = Callable[[Transaction, Accounts], None]
WRITES: dict[str, Write] = {
    "set": lambda tx, of: tx.set("hub", of.balance, 2),
    "delete": lambda tx, of: tx.delete("hub", of.balance),
    "lock": lambda tx, of: tx.lock("hub", of.balance),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_read_lock_that_committed_since_it_began_stops_a_writer(
    db: Database, hub: Accounts, write: str, edge: str
) -> None:
    writer, reader = db.transaction(), db.transaction()
    for tx in (writer, reader):
        assert tx.get("hub", hub.balance) == 1
    reader.lock("hub", hub.balance, shared=True)
    reader.set(edge, hub.balance, 1)
    reader.commit()
    WRITES[write](writer, hub)
    with pytest.raises(
        ConflictError, match=r"row 'hub', column 'balance' .* was read-locked"
    ) as caught:
        writer.commit()
    assert blamed(caught)[1:] == (b"hub", b"balance")
    assert caught.value.other_start_timestamp == reader.start_timestamp
    with db.transaction() as tx:
        WRITES[write](tx, hub)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_committed_since_it_began_stops_a_read_lock(
    db: Database, hub: Accounts, write: str, edge: str
) -> None:
    reader = db.transaction()
    assert reader.get("hub", hub.balance) == 1
    with db.transaction() as tx:
        WRITES[write](tx, hub)
    reader.lock("hub", hub.balance, shared=True)
    reader.set(edge, hub.balance, 1)
    with pytest.raises(
        ConflictError, match=r"row 'hub', column 'balance' .* was committed"
    ) as caught:
        reader.commit()
    assert blamed(caught)[1:] == (b"hub", b"balance")


def test_other_cells_of_the_row_are_free(db: Database, hub: Accounts) -> None:
    reader = db.transaction()
    reader.get("hub", hub.balance)
    put(db, hub.owner, hub="Joe")
    reader.lock("hub", hub.balance, shared=True)
    reader.set("edge", hub.balance, 1)
    reader.commit()


def _conflicts_with_a_read_lock(db: Database, of: Accounts, tx: Transaction) -> bool:
    """True if the writes of `tx` exclude read locks: another one commits before it does."""
    tx.timestamp()
    with db.transaction() as other:
        other.lock("hub", of.balance, shared=True)
    try:
        tx.commit()
    except ConflictError:
        return True
    return False


@pytest.mark.parametrize("write", WRITES)
def test_any_other_write_of_the_cell_replaces_a_read_lock(
    db: Database, hub: Accounts, write: str
) -> None:
    before, after = db.transaction(), db.transaction()
    WRITES[write](before, hub)
    before.lock("hub", hub.balance, shared=True)
    assert _conflicts_with_a_read_lock(db, hub, before)
    after.lock("hub", hub.balance, shared=True)
    after.lock("hub", hub.balance, shared=True)
    WRITES[write](after, hub)
    assert _conflicts_with_a_read_lock(db, hub, after)
    with db.transaction() as tx:
        tx.lock("hub", hub.balance, shared=True)
        WRITES[write](tx, hub)
    assert db.get("hub", hub.balance) == {"set": 2, "delete": None, "lock": 1}[write]


def test_a_transaction_of_read_locks_alone_commits(db: Database, hub: Accounts) -> None:
    tx, other = db.transaction(), db.transaction()
    for one in (tx, other):
        one.get("hub", hub.balance)
        one.lock("hub", hub.balance, shared=True)
        one.lock(FAR, hub.balance, shared=True)
    assert tx.commit() is not None
    assert other.commit() is not None
    assert not _conflicts_with_a_read_lock(db, hub, db.transaction())


def test_a_row_that_does_not_exist_can_be_read_locked(db: Database, accounts: Accounts) -> None:
    """It stays absent while the lock is held, and afterwards."""
    reader = db.transaction()
    assert reader.get("new", accounts.balance) is None
    put(db, accounts.balance, new=1)
    reader.lock("new", accounts.balance, shared=True)
    with pytest.raises(ConflictError):
        reader.commit()
    with db.transaction() as tx:
        tx.lock("never", accounts.balance, shared=True)
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(accounts.table)] == ["new"]
        (never,) = snapshot.get_many(accounts.table, ["never"])
        assert not never


def test_reads_see_nothing_of_read_locks(db: Database, hub: Accounts) -> None:
    """Not those of others, and not the transaction's own."""
    with db.transaction() as tx:
        tx.lock("hub", hub.balance, shared=True)
    with db.transaction() as tx:
        tx.lock("hub", hub.balance, shared=True)
        tx.lock("new", hub.balance, shared=True)
        assert tx.get("hub", hub.balance) == 1
        assert tx.get_many([("hub", hub.balance), ("new", hub.balance)]) == [1, None]
        row, new = tx.get_many(hub.table, ["hub", "new"])
        assert (sorted(row), list(new)) == ([b"balance", b"owner"], [])
        assert [(row.key, sorted(row)) for row in tx.scan(hub.table)] == [
            ("hub", [b"balance", b"owner"])
        ]
        tx.delete_row(hub.table, "hub")
        assert list(tx.scan(hub.table)) == []


def test_a_row_is_deleted_after_it_was_read_locked(db: Database, hub: Accounts) -> None:
    @transactional
    def remove(tx: Transaction) -> None:
        tx.delete_row(hub.table, "hub")

    with db.transaction() as tx:
        tx.lock("hub", hub.balance, shared=True)
    remove(db)
    assert list(db.snapshot().scan(hub.table)) == []


def test_a_table_that_was_dropped_takes_its_read_locks_with_it(db: Database) -> None:
    table = Table("dropped-with-read-locks")
    value = table.column("value", codecs.integer)
    db.create_table(table)
    tx = db.transaction()
    tx.get("hub", value)
    tx.lock("hub", value, shared=True)
    with db.transaction() as other:
        other.lock("hub", value, shared=True)
    db.drop_table(table)
    with pytest.raises(SchemaError):
        tx.commit()
    db.create_table(table)
    put(db, value, hub=1)
    db.drop_table(table)


@needs_tablets
def test_changes_do_not_tell_of_read_locks(db: Database) -> None:
    table = Table("feed-with-read-locks")
    value = table.column("value", codecs.integer)
    db.create_table(table, change_feed=True)
    after = db.timestamp()
    put(db, value, hub=1)
    with db.transaction() as tx:
        tx.lock("hub", value, shared=True)
        tx.set("edge", value, 2)
    until = db.timestamp()
    changes = list(db.changes(table, after=after, until=until))
    assert [change.key for change in changes] == ["hub", "edge"]
    db.drop_table(table)


def test_shared_is_true_or_false(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx, pytest.raises(InvalidArgument, match="shared: expected a bool"):
        tx.lock("hub", accounts.balance, shared=1)  # type: ignore[arg-type]


def test_observers_hold_read_locks_and_are_not_woken_by_them() -> None:
    table = Table("observed-hubs")
    name, note = table.column("name", codecs.text), table.column("note", codecs.text)
    woken = []

    @observes(name)
    def label(tx: Transaction, row: str) -> None:
        woken.append(row)
        tx.lock("hub", name, shared=True)
        tx.set(row, note, f"{tx.get('hub', name)}: {tx.get(row, name)}")

    with percolator.testing.connect() as db:
        db.create_table(table)
        with db.transaction() as tx:
            for row in ("hub", "a", "b"):
                tx.set(row, name, row)
        run_observers(db, [label])
        with db.transaction() as tx:
            tx.lock("a", name, shared=True)
        run_observers(db, [label])
        assert (sorted(woken), db.get("a", note)) == (["a", "b", "hub"], "hub: a")


# Columns whose values expire, as programs use them.

BRIEF = timedelta(milliseconds=1_500)
HOUR = timedelta(hours=1)


class Sessions:
    """A table with one column whose values expire, and one whose values stay."""

    def __init__(self, db: Database, ttl: timedelta, **options: Any) -> None:
        self.table = Table(f"sessions-{uuid.uuid4()}")
        self.token: Column[str] = self.table.column("token", codecs.text)
        self.seen: Column[int] = self.table.column("seen", codecs.integer)
        db.create_table(self.table, splits=["m"], ttl={self.token: ttl}, **options)


def _expiring_write(db: Database, sessions: Sessions, row: str, token: str) -> Timestamp:
    with db.transaction() as tx:
        tx.set(row, sessions.token, token)
        tx.set(row, sessions.seen, 1)
    assert tx.commit_timestamp is not None
    return tx.commit_timestamp


def _written_and_read(db: Database, sessions: Sessions, row: str) -> Timestamp:
    """Writes a value, and reads it before its end, however slow the machine is."""
    while True:
        commit = _expiring_write(db, sessions, row, "t1")
        found = db.get(row, sessions.token)
        if db.timestamp() < _end(commit):
            assert found == "t1"
            return commit


def _end(commit: Timestamp) -> Timestamp:
    """The first timestamp at which a value is no longer seen."""
    return Timestamp.of(commit.physical_milliseconds + BRIEF // timedelta(milliseconds=1))


def _after(commit: Timestamp, ttl: timedelta) -> None:
    """Waits until a snapshot that begins now is surely past the value's end."""
    end = commit.to_datetime().timestamp() + ttl.total_seconds() + 0.05
    time.sleep(max(0.0, end - time.time()))


@needs_tablets
def test_every_way_of_reading_stops_showing_a_value_at_the_same_timestamp(db: Database) -> None:
    sessions = Sessions(db, BRIEF)
    commit = _written_and_read(db, sessions, "ann")
    _after(commit, BRIEF)
    for at, token in ((Timestamp(_end(commit) - 1), "t1"), (_end(commit), None)):
        with db.snapshot(at=at) as snapshot:
            assert snapshot.get("ann", sessions.token) == token
            assert snapshot.get("ann", sessions.seen) == 1
            (row,) = snapshot.get_many(sessions.table, ["ann"])
            assert (sessions.token.name in row.raw()) == (token is not None)
            assert snapshot.get_many([("ann", sessions.token)]) == [token]
            scanned = list(snapshot.scan(sessions.table, columns=[sessions.token]))
            assert [row[sessions.token] for row in scanned] == ([token] if token else [])
            family = sessions.table.family("tok", codecs.text)
            families = list(snapshot.scan(sessions.table, columns=[family]))
            assert [row.family(family) for row in families] == ([{"en": token}] if token else [])
    assert (db.get("ann", sessions.token), db.get("ann", sessions.seen)) == (None, 1)


@needs_tablets
def test_the_value_before_an_expired_one_does_not_come_back(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    _expiring_write(db, sessions, "bob", "old")
    with db.transaction() as tx:
        tx.set("bob", sessions.token, "new")
    db.set_ttl(sessions.token, BRIEF)
    assert tx.commit_timestamp is not None
    _after(tx.commit_timestamp, BRIEF)
    with db.transaction() as tx:
        assert tx.get("bob", sessions.token) is None
        tx.set("bob", sessions.token, "fresh")
    assert db.snapshot(at=tx.commit_timestamp).get("bob", sessions.token) == "fresh"


@needs_tablets
def test_a_transaction_sees_what_its_snapshot_saw_for_as_long_as_it_runs(db: Database) -> None:
    sessions = Sessions(db, BRIEF)
    while True:
        commit = _expiring_write(db, sessions, "eve", "t1")
        tx = db.transaction()
        found = tx.get("eve", sessions.token)
        assert tx.start_timestamp is not None
        if tx.start_timestamp < _end(commit):
            break
        tx.rollback()  # the machine was too slow
    assert found == "t1"
    _after(commit, BRIEF)
    assert tx.get_many([("eve", sessions.token)]) == ["t1"]
    tx.set("eve", sessions.token, "t2")
    assert db.snapshot(at=tx.commit()).get("eve", sessions.token) == "t2"


@needs_tablets
def test_a_changed_ttl_applies_to_values_that_are_there(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    commit = _expiring_write(db, sessions, "zoe", "t1")
    db.set_ttl(sessions.seen, BRIEF)
    _after(commit, BRIEF)
    assert (db.get("zoe", sessions.token), db.get("zoe", sessions.seen)) == ("t1", None)
    db.set_ttl(sessions.token, BRIEF)
    db.set_ttl(sessions.seen, None)
    assert db.get("zoe", sessions.token) is None
    assert db.get("zoe", sessions.seen) == 1, "it was not collected, and does not expire"


@needs_tablets
def test_a_client_that_does_not_know_of_the_ttl_yet_reads_as_the_others(db: Database) -> None:
    """It still asks for the newest value, and is told to take a timestamp."""
    sessions = Sessions(db, BRIEF)
    _expiring_write(db, sessions, "kim", "t1")
    catalog = db._asynchronous._engine.catalog
    info = catalog.known(sessions.table.name)
    assert info is not None
    assert info.schema.expiring == {b"token"}
    object.__setattr__(info.schema, "expiring", frozenset())
    _after(_written_and_read(db, sessions, "kim"), BRIEF)
    assert db.get("kim", sessions.token) is None


@needs_tablets
def test_followers_see_the_value_and_nothing_when_it_expires(db: Database) -> None:
    sessions = Sessions(db, BRIEF, change_feed=True)
    commit = _expiring_write(db, sessions, "leo", "t1")
    _after(commit, BRIEF)
    second = _expiring_write(db, sessions, "leo", "t2")
    with db.changes(sessions.table, after=Timestamp(commit - 1), before=True) as changes:
        found = []
        for change in changes:
            if change.column == sessions.token.name:
                found.append((change.before(sessions.token), change.value(sessions.token)))
            if change.commit_timestamp == second and change.ends_commit:
                break
    assert found == [(None, "t1"), (None, "t2")]


@needs_tablets
def test_an_observer_is_not_told_of_the_end_and_sees_no_value_after_it(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    runs: list[str | None] = []

    @observes(sessions.token)
    def look(tx: Any, row: str) -> None:
        runs.append(tx.get(row, sessions.token))

    with db.run_observers([look]):
        commit = _expiring_write(db, sessions, "max", "t1")
        db.wait_for_observers(timeout=20)
        db.set_ttl(sessions.token, BRIEF)
        _after(commit, BRIEF)
        db.wait_for_observers(timeout=20)
    assert runs == ["t1"]
    commit = _expiring_write(db, sessions, "max", "t2")
    _after(commit, BRIEF)
    with db.run_observers([look]):
        db.wait_for_observers(timeout=20)
    assert runs == ["t1", None], "it was late, and ran once"


# ---------------------------------------------------------------------------- arguments


@needs_tablets
def test_an_existing_table_must_have_the_ttl_that_is_asked_for(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    db.create_table(sessions.table, exist_ok=True)
    db.create_table(sessions.table, exist_ok=True, ttl={sessions.token: HOUR})
    with pytest.raises(InvalidArgument, match=r"^ttl: table .* exists with times to live token"):
        db.create_table(sessions.table, exist_ok=True, ttl={sessions.token: BRIEF})


@needs_tablets
@pytest.mark.parametrize(
    ("ttl", "reason"),
    [
        (timedelta(0), "expected at least a millisecond"),
        (30, "expected a timedelta, got int"),
        (timedelta(days=365 * 101), "100 years"),
    ],
)
def test_a_bad_ttl_is_refused(db: Database, ttl: Any, reason: str) -> None:
    table = Table(f"t-{uuid.uuid4()}")
    column = table.column("c", codecs.text)
    with pytest.raises(InvalidArgument, match=f"^ttl: .*{reason}"):
        db.create_table(table, ttl={column: ttl})
    db.create_table(table)
    with pytest.raises(InvalidArgument, match=f"^ttl: .*{reason}"):
        db.set_ttl(column, ttl)


@needs_tablets
def test_only_columns_of_the_table_have_a_ttl(db: Database) -> None:
    table = Table(f"t-{uuid.uuid4()}")
    other = Table("other").column("c", codecs.text)
    untyped: Any = [other]
    with pytest.raises(SchemaError, match="is not a column of table"):
        db.create_table(table, ttl={other: HOUR})
    with pytest.raises(InvalidArgument, match="ttl: expected a timedelta for each"):
        db.create_table(table, ttl=untyped)
    family: Any = table.family("f", codecs.text)
    with pytest.raises(InvalidArgument, match="is a family; only single columns"):
        db.create_table(table, ttl={family: HOUR})
    with pytest.raises(SchemaError, match="there is no table"):
        db.set_ttl(table.column("c", codecs.text), HOUR)
