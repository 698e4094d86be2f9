"""What somebody has changed in the store itself is named at once, with what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from percolator import Database, Table, codecs
from percolator.errors import CellAddress, InvariantViolation, PercolatorError, SchemaError
from percolator.formats.records import LockRecord, RecordKind
from percolator.rowstore.layout import LOCKS, SPACING, WRITES
from percolator.rowstore.port import TIME_UNIT, RowChange, SetCell
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.row_database import connect_over_model
from tests.unit.bigtable.servers import TABLE as CONNECTED_TABLE
from tests.unit.bigtable.servers import connected

TABLE = Table("rows", key=codecs.raw)
COLUMN = TABLE.column("c", codecs.raw)
OTHER = Table("other", key=codecs.raw)
OTHER_COLUMN = OTHER.column("c", codecs.raw)
PATIENT = 600.0
"""Seconds that a caller would wait: an error that comes at once comes long before."""
SOON = 30.0
LIVE_MILLISECONDS = 1_000_000


class Store(NamedTuple):
    db: Database
    model: BigtableInMemory
    table: str
    other: str
    """The full names of the tables in the store."""
    commit: int
    """When both had their rows written."""


@pytest.fixture
def store() -> Iterator[Store]:
    model = BigtableInMemory()
    with connect_over_model(model=model) as db:
        for one in (TABLE, OTHER):
            db.create_table(one)
        with db.transaction() as tx:
            tx.set(b"row", COLUMN, b"value")
            tx.set(b"row", OTHER_COLUMN, b"value")
        _, table, other = model.tables  # the first one has the intents
        assert tx.commit_timestamp is not None
        yield Store(db, model, table, other, tx.commit_timestamp)


def _get(db: Database) -> None:
    db.get(b"row", OTHER_COLUMN, timeout=PATIENT)


def _scan(db: Database) -> None:
    with db.snapshot(timeout=PATIENT) as snapshot:
        list(snapshot.scan(OTHER))


def _set(db: Database) -> None:
    with db.transaction(timeout=PATIENT) as tx:
        tx.set(b"row", OTHER_COLUMN, b"later")


def _set_both(db: Database) -> None:
    with db.transaction(timeout=PATIENT) as tx:
        tx.set(b"new", COLUMN, b"later")
        tx.set(b"new", OTHER_COLUMN, b"later")


def _raises_soon(
    call: Callable[[Database], None], db: Database, kind: type[PercolatorError], says: str
) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=says):
        call(db)
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("call", [_get, _scan, _set, _set_both])
def test_a_table_that_was_deleted_is_named_with_what_to_do(
    store: Store, call: Callable[[Database], None]
) -> None:
    del store.model.tables[store.other]
    says = "it was dropped; but if `percolator tables list` shows it, somebody has deleted it in"
    _raises_soon(call, store.db, SchemaError, f"{store.other}: {says} .*table 'other'\\]$")


@pytest.mark.parametrize("call", [_get, _scan, _set])
def test_a_lock_that_a_deleted_table_decides_about_holds_nobody_up_without_a_word(
    store: Store, call: Callable[[Database], None]
) -> None:
    """The table may be restored, and then say that the lock's transaction is committed."""
    start = store.db.timestamp() // SPACING * SPACING
    primary = CellAddress(1, b"row", b"c")
    lock = LockRecord(start, start + 1, LIVE_MILLISECONDS, RecordKind.PUT, b"", primary, b"new")
    table = store.model.tables[store.other]
    ((_, column, committed),) = table.rows[b"row"]
    begun = committed + (start - store.commit) // SPACING * TIME_UNIT
    table.put(b"row", {**table.rows[b"row"], (LOCKS, column, begun): lock.encode()})
    del store.model.tables[store.table]
    says = "table 1 decides about a lock, and somebody has deleted it in the store itself: restore"
    _raises_soon(call, store.db, InvariantViolation, says)


def _set_long(db: Database) -> None:
    with db.transaction(timeout=PATIENT) as tx:
        tx.set(b"row", OTHER_COLUMN, bytes(10_000))


@pytest.mark.parametrize(
    ("call", "named"),
    [(_get, "lwg"), (_scan, "lwg"), (_set, "lwogr"), (_set_both, "lwogr"), (_set_long, "lwodgr")],
)
def test_a_family_that_was_removed_is_named_by_whoever_needs_it(
    store: Store, call: Callable[[Database], None], named: str
) -> None:
    families = store.model.tables[store.other].families
    name = store.other.rpartition("/")[2]
    for family in named:
        families.remove(family)
        says = f"the table {name} lacks the family {family}: .*/tables/{name}, table 'other'\\]$"
        _raises_soon(call, store.db, InvariantViolation, says)
        families.add(family)


@pytest.mark.real_time
async def test_the_service_does_not_say_which_family_and_the_table_is_asked() -> None:
    async with connected() as over:
        table = over.service.model.tables[over.place.table(CONNECTED_TABLE)]
        table.families.remove(WRITES)
        says = f"the table percolator-{CONNECTED_TABLE} lacks the family w: "
        with pytest.raises(InvariantViolation, match=says):
            await over.put(b"row")
        with pytest.raises(InvariantViolation, match=says):
            await over.rows()
        change = RowChange(b"row", (SetCell(WRITES, b"c", 1000, b"v"),))
        with pytest.raises(InvariantViolation, match=says):
            await over.store.write(CONNECTED_TABLE, [change], SOON)
