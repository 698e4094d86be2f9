"""What a store or its contents make impossible is refused by its name, and nothing is half done."""

from __future__ import annotations

import pytest

from percolator import Database, InvalidArgument, Table
from percolator.bigtable.admin import require_table
from percolator.bigtable.store import BigtableStore
from percolator.codecs import raw
from percolator.errors import InvariantViolation, NotReady, SchemaError
from percolator.limits import Limits
from percolator.rowstore.collection import Bounds, Collected, RowCollector
from percolator.rowstore.layout import DATA, FAMILIES, KEY_BYTES_MAX
from percolator.rowstore.port import Check, RowChange, Selection, SetCell
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.testing.bigtable_in_memory import BigtableInMemory, ModelTable
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, connect_over_model
from percolator.v1 import bigtable_pb2 as pb
from percolator.world import MachineClock, World, machine_random
from tests.unit.rowstore import model_store
from tests.unit.rowstore.model_store import ModelStore

TABLE = Table("rows", key=raw)
COLUMN = TABLE.column("c", raw)
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
