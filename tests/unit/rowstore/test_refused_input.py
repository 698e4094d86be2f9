"""Refusals, by name, of calls that a store or its contents make impossible; none is half done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NamedTuple

import pytest

from percolator import Database, InvalidArgument, Table, UsageError, codecs
from percolator.bigtable.admin import require_table
from percolator.bigtable.store import BigtableStore
from percolator.errors import (
    CellAddress,
    InvariantViolation,
    NotReady,
    PercolatorError,
    SchemaError,
)
from percolator.formats.records import LockRecord, RecordKind
from percolator.limits import Limits
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.layout import DATA, FAMILIES, KEY_BYTES_MAX, LOCKS, SPACING, WRITES
from percolator.rowstore.port import TIME_UNIT, Check, RowChange, Selection, SetCell
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.testing.bigtable_in_memory import BigtableInMemory, ModelTable
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, connect_over_model
from percolator.v1 import bigtable_pb2 as pb
from percolator.world import MachineClock, World, machine_random
from tests.unit.bigtable.servers import TABLE as CONNECTED_TABLE
from tests.unit.bigtable.servers import connected
from tests.unit.rowstore import model_store
from tests.unit.rowstore.model_store import ModelStore

TABLE = Table("rows", key=codecs.raw)
COLUMN = TABLE.column("c", codecs.raw)
SECONDS = 5.0
TIME = 1_000_000
ABSENT = Check((Selection(DATA),), found=False)
VALUE_BYTES_MAX = 100 * 1024 * 1024


class ChangedByHand:
    """A table to which somebody has given a garbage-collection rule."""

    async def get_table(self, request: pb.BigtableGetTableRequest) -> pb.BigtableTable:
        found = pb.BigtableTable(name=request.name)
        for family in FAMILIES:
            found.column_families[family].SetInParent()
        found.column_families["w"].gc_rule.SetInParent()
        return found


async def test_a_table_that_the_service_would_collect_is_refused() -> None:
    network = InProcessNetwork({MODEL.address: ChangedByHand()})
    with pytest.raises(
        SchemaError, match="family w of the table percolator-7 has a garbage-collection rule"
    ):
        await require_table(network, MODEL, 7, SECONDS)


class CreatedByAnother(BigtableInMemory):
    """Another master creates each table at the same moment."""

    async def create_table(self, request: pb.BigtableCreateTableRequest) -> pb.BigtableTable:
        await super().create_table(request)
        raise NotReady("Table is being created")


async def test_of_two_that_create_a_table_at_the_same_moment_both_have_it() -> None:
    network = InProcessNetwork({MODEL.address: CreatedByAnother()})
    await require_table(network, MODEL, 7, SECONDS)
    await require_table(network, MODEL, 7, SECONDS)


async def test_a_table_in_which_another_program_has_written_is_refused() -> None:
    model = BigtableInMemory()
    table = model.tables[MODEL.table(7)] = ModelTable(MODEL.table(7), FAMILIES)
    table.put(b"row", {("d", b"c", TIME): b"value"})
    world = World(MachineClock(), InProcessNetwork(), machine_random())
    store = RowClusterStore(InProcessNetwork({MODEL.address: model}), MODEL, world)
    await store.create_table(7)
    with pytest.raises(SchemaError, match="percolator-7 was made by another program: it has rows"):
        await store.require_empty(7)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (b"k" * (KEY_BYTES_MAX + 1), b"", "row: has 4,097 bytes, and Bigtable accepts at most"),
        (b"k", bytes(VALUE_BYTES_MAX + 1), "value: has 104,857,601 bytes, and Bigtable accepts"),
    ],
)
async def test_a_key_or_value_above_the_limits_of_the_service_is_not_sent(
    key: bytes, value: bytes, says: str
) -> None:
    store = BigtableStore(InProcessNetwork(), MODEL)  # where nothing answers
    with pytest.raises(InvalidArgument, match=says):
        await store.check_and_mutate(7, key, ABSENT, [SetCell(DATA, b"c", TIME, value)], SECONDS)


def _write(db: Database, row: bytes) -> None:
    """A transaction with this row, and another one."""
    with db.transaction() as tx:
        tx.set(b"other", COLUMN, b"value")
        tx.set(row, COLUMN, b"value")


@pytest.mark.parametrize("row", [bytes(KEY_BYTES_MAX), b"k" * (KEY_BYTES_MAX + 1)])
def test_a_transaction_with_a_key_above_the_limit_locks_nothing(row: bytes) -> None:
    """Nobody could ask such a primary for the outcome: the other cell would be locked for ever. A
    row of zero bytes is stored under a key with one more. A program may raise the limit."""
    with connect_over_model(Limits(row_bytes_max=2 * KEY_BYTES_MAX)) as db:
        db.create_table(TABLE)
        _write(db, b"k" * KEY_BYTES_MAX)
        with pytest.raises(InvalidArgument, match="row: has 4097 bytes, at most 4096"):
            _write(db, row)
        with db.transaction(timeout=SECONDS) as tx:
            assert tx.get(b"other", COLUMN) == b"value"
            tx.set(b"other", COLUMN, b"later")
        assert db.get(b"other", COLUMN) == b"later"


@pytest.mark.parametrize("family", ["l", "w"])
def test_a_cell_of_another_program_is_an_error_that_names_its_row(family: str) -> None:
    model = BigtableInMemory()
    with connect_over_model(model=model) as db:
        db.create_table(TABLE)
        _write(db, b"row")
        table = model.tables[MODEL.table(1)]
        (time,) = (time for at, _, time in table.rows[b"row"] if at == "w")
        table.put(b"row", {(family, b"cc", time): b"junk"})
        says = "row 'row' has a cell that no transaction writes"
        with pytest.raises(InvariantViolation, match=says):
            db.get(b"row", COLUMN)
        with pytest.raises(InvariantViolation, match=says), db.snapshot() as snapshot:
            list(snapshot.scan(TABLE))
        assert db.get(b"other", COLUMN) == b"value"


async def test_whoever_collects_names_it_too() -> None:
    rows = await ModelStore().opened()
    await rows.store.write(
        model_store.TABLE, [RowChange(b"row", (SetCell("w", b"cc", TIME, b"junk"),))], SECONDS
    )
    collector = RowCollector(rows.store, model_store.TIMES, rows.world, rows.limits)
    bounds = Bounds(model_store.at(5), model_store.at(5))
    with pytest.raises(InvariantViolation, match="row 'row' has a cell that no transaction"):
        await collector.collect(model_store.TABLE, bounds, Collected())


# What somebody has changed in the store itself is named at once, with what to do about it.

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
        over.service.model.tables[over.place.table(CONNECTED_TABLE)].families.remove(WRITES)
        says = f"the table percolator-{CONNECTED_TABLE} lacks the family w: "
        for call in (over.put(b"row"), over.rows()):
            with pytest.raises(InvariantViolation, match=says):
                await call
        change = RowChange(b"row", (SetCell(WRITES, b"c", 1000, b"v"),))
        with pytest.raises(InvariantViolation, match=says):
            await over.store.write(CONNECTED_TABLE, [change], SOON)


# What a database on a row store cannot do yet, it refuses with a sentence.

ACCOUNTS = Table("accounts")
BALANCE = ACCOUNTS.column("balance", codecs.integer)


@pytest.fixture
def db() -> Iterator[Database]:
    with connect_over_model() as database:
        database.create_table(ACCOUNTS, change_feed=True)
        yield database


def test_no_changes_are_followed(db: Database) -> None:
    with pytest.raises(UsageError, match="in a row store, which has no change feeds"):
        list(db.changes(ACCOUNTS, after=db.timestamp()))


def test_no_value_expires(db: Database) -> None:
    ttl = {BALANCE: timedelta(hours=1)}
    with pytest.raises(UsageError, match="in a row store, in which no value expires yet"):
        db.create_table(ACCOUNTS, ttl=ttl, exist_ok=True)
    with pytest.raises(UsageError, match="in a row store, in which no value expires yet"):
        db.set_ttl(BALANCE, timedelta(hours=1))


def test_a_transaction_of_one_row_takes_as_many_round_trips_as_any(db: Database) -> None:
    with db.transaction() as tx:
        tx.set("bob", BALANCE, tx.get("bob", BALANCE, default=0) + 1)
    assert tx.statistics.round_trips == 5
