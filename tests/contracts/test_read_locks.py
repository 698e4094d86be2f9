"""`tx.lock(row, column, shared=True)`: readers of a cell that must not change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import percolator.testing
from percolator import (
    ConflictError,
    Database,
    InvalidArgument,
    SchemaError,
    Table,
    Transaction,
    codecs,
    observes,
    transactional,
)
from percolator.testing import run_observers
from tests.contracts.conftest import Accounts, needs_tablets

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
    assert caught.value.cell is not None
    assert (caught.value.cell.row, caught.value.cell.column) == (b"hub", b"balance")
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
    assert caught.value.cell is not None
    assert (caught.value.cell.row, caught.value.cell.column) == (b"hub", b"balance")


def test_other_cells_of_the_row_are_free(db: Database, hub: Accounts) -> None:
    reader = db.transaction()
    reader.get("hub", hub.balance)
    with db.transaction() as tx:
        tx.set("hub", hub.owner, "Joe")
    reader.lock("hub", hub.balance, shared=True)
    reader.set("edge", hub.balance, 1)
    reader.commit()


def _conflicts_with_a_read_lock(db: Database, of: Accounts, tx: Transaction) -> bool:
    """Whether what `tx` has done excludes read locks: another one commits before it does."""
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
    with db.snapshot() as snapshot:
        value = {"set": 2, "delete": None, "lock": 1}[write]
        assert snapshot.get("hub", hub.balance) == value


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
    with db.transaction() as tx:
        tx.set("new", accounts.balance, 1)
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
    with db.snapshot() as snapshot:
        assert list(snapshot.scan(hub.table)) == []


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
    with db.transaction() as again:
        again.set("hub", value, 1)
    db.drop_table(table)


@needs_tablets
def test_changes_do_not_tell_of_read_locks(db: Database) -> None:
    table = Table("feed-with-read-locks")
    value = table.column("value", codecs.integer)
    db.create_table(table, change_feed=True)
    after = db.timestamp()
    with db.transaction() as tx:
        tx.set("hub", value, 1)
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
        assert sorted(woken) == ["a", "b", "hub"]
        assert db.get("a", note) == "hub: a"
