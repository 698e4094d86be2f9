"""Commands take and show rows as the codec of the table's keys says, on a running cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

import percolator
from percolator import Database, Table, Ticket, Transaction, codecs, observes
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer
from percolator.backup.export_files import DamagedExport, ExportFormat
from percolator.errors import InvalidArgument, SchemaError
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine
from tests.integration.indexed_people import by_city, city, people

pytestmark = pytest.mark.integration

orders = Table("orders", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
state = orders.column("state", codecs.text)


@observes(state)
def count(tx: Transaction, row: tuple[str, int]) -> None:
    """It never runs here: its notifications wait."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as connected:
        connected.create_table(orders)
        connected.set_many((("ann", number), {state: "open"}) for number in (1, 2, 3))
        yield connected


@pytest.fixture
def command(cluster: LocalCluster) -> CommandLine:
    return CommandLine(cluster.address)


def test_the_lock_of_a_row_is_found_by_the_row_as_it_is_shown(
    db: Database, command: CommandLine
) -> None:
    with db.shared_transaction() as whole:
        lock(db, whole.ticket)
        (held,) = command.data("locks", "orders", '["ann", 2]')
        assert (held["row"], held["column"]) == (["ann", 2], "state")
        assert '["ann", 2]' in command.text("locks", "orders")
        assert command.data("locks", "orders", '["ann", 3]') == []
        whole.abort()
    assert "expected tuple_of(text" in command.error("locks", "orders", "ann", code=2)


def lock(db: Database, ticket: Ticket) -> None:
    with db.share(ticket, task="1") as share:
        share.set(("ann", 2), state, "held")
        share.finish()


def test_a_backfill_begins_and_ends_at_the_rows_that_are_named(
    db: Database, command: CommandLine
) -> None:
    db.register_observers([count])
    chosen = ("--from", '["ann", 2]', "--to", '["ann", 3]')
    done = command.data("observers", "backfill", "orders", "count", *chosen)
    assert done["cells"] == 1
    (waiting,) = command.data("notifications", "--table", "orders")
    assert waiting["row"] == ["ann", 2]
    assert '["ann", 2]' in command.text("notifications")
    wrong = ("observers", "backfill", "orders", "count", "--from", "ann")
    assert "--from: expected tuple_of(text" in command.error(*wrong, code=2)


def test_a_tablet_is_split_at_the_key_that_is_named(db: Database, command: CommandLine) -> None:
    (whole,) = command.data("tablets", "--table", "orders")
    assert (whole["start"], whole["end"]) == ("", None)
    split = ("tablets", "split", str(whole["tablet_id"]), "--row")
    assert "--row: expected tuple_of(text" in command.error(*split, "ann", code=2)
    made = command.data(*split, '["ann", 2]')
    assert (made["lower"]["end"], made["upper"]["start"]) == (["ann", 2], ["ann", 2])
    shown = command.data("tablets", "--table", "orders")
    assert [one["start"] for one in shown] == ["", ["ann", 2]]
    assert '["ann", 2]' in command.text("tablets", "--table", "orders")


def test_no_command_writes_a_row_that_programs_cannot_read(
    db: Database, command: CommandLine
) -> None:
    for row in ("", "ann", '["ann"]', '["ann", 1, 2]'):
        assert "row: expected tuple_of" in command.error("set", "orders", row, "state=x", code=2)
    with db.snapshot() as snapshot:
        assert [row.key for row in snapshot.scan(orders)] == [("ann", 1), ("ann", 2), ("ann", 3)]
    assert len(command.data("scan", "orders", "--start", "", "--end", "")) == 3


# Exports as lines of JSON: readable by people and programs, and imported as the same bytes.


products = Table("products", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
stock = products.column("stock", codecs.integer)
label = products.column("label", codecs.text)
photo = products.column("photo", codecs.raw)
ROWS = 40
HERE = "products/part-00000.jsonl"


@pytest.fixture
def records_db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        database.drop_table(products, missing_ok=True)
        database.create_table(products, splits=[("eu", 20)])
        database.set_many(
            (("eu", number), {stock: number, label: f"hex:{number}\nnext line", photo: b"\xff\x00"})
            for number in range(ROWS)
        )
        yield database


@pytest.fixture
def exported(cluster: LocalCluster, records_db: Database, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    table = ("--table", products.name)
    CommandLine(cluster.address).run("export", str(out), *table, "--format", "jsonl")
    return out


def _rows(records_db: Database) -> list[tuple[object, object]]:
    with records_db.snapshot() as snapshot:
        return [(row.key, row.raw()) for row in snapshot.scan(products)]


def _edited(exported: Path, old: str, new: str) -> None:
    """Changes the first file by hand, and makes all checksums agree."""
    path = exported / HERE
    path.write_text(path.read_text().replace(old, new, 1))
    record = export_files.read_record(exported / export_files.MANIFEST)
    changed = {
        "bytes": path.stat().st_size,
        "sha256": sha256(path.read_bytes()).hexdigest(),
    }
    for table in record["tables"]:
        for part in table["parts"]:
            if part["file"] == HERE:
                part.update(changed)
    export_files.write_record(exported / export_files.MANIFEST, record)


def test_a_line_is_a_row_as_scan_shows_it_and_all_of_them_are_the_table_again(
    cluster: LocalCluster, records_db: Database, exported: Path
) -> None:
    command, before = CommandLine(cluster.address), _rows(records_db)
    lines = (exported / HERE).read_text().splitlines()
    assert len(lines) == 20
    first = json.loads(lines[3])
    shown = command.data("scan", "products", "--column", "stock", "--column", "photo")[3]
    label_bytes = b"hex:3\nnext line".hex()
    assert first["row"] == shown["row"] == ["eu", 3]
    assert first["columns"] == {**shown["columns"], "label": f"hex:{label_bytes}"}
    assert first["columns"]["stock"] == 3
    assert command.data("export", "verify", str(exported))["cells"] == 3 * ROWS
    records_db.drop_table(products)
    assert command.data("import", str(exported))["tables"]["products"] == 3 * ROWS
    assert _rows(records_db) == before
    with (
        pytest.raises(SchemaError, match="the table has integer"),
        records_db.transaction() as tx,
    ):
        tx.set(("eu", 1), products.column("stock", codecs.text), "many")


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ('"stock": 3', '"stock": "3"', "line 4, table 'products': column 'stock': expected int"),
        ('["eu", 3]', '["eu", "3"]', r"line 4, table 'products': row: expected tuple_of\(text"),
        ('["eu", 3]', '["eu", 2]', "has rows out of order"),
    ],
)
async def test_what_does_not_fit_is_refused_and_nothing_of_it_is_there(
    old: str,
    new: str,
    wrong: str,
    cluster: LocalCluster,
    records_db: Database,
    exported: Path,
) -> None:
    records_db.drop_table(products)
    _edited(exported, old, new)
    with pytest.raises(DamagedExport, match=wrong):
        importer.verify(exported)
    async with connect(cluster.address) as database:
        with pytest.raises(DamagedExport, match=wrong):
            await importer.import_tables(database, exported)
    assert _rows(records_db) == []


async def test_what_was_edited_by_hand_is_damaged_and_an_interrupted_export_keeps_its_format(
    cluster: LocalCluster, records_db: Database, exported: Path, tmp_path: Path
) -> None:
    path = exported / HERE
    path.write_text(path.read_text().replace('"stock": 3', '"stock": 4', 1))
    with pytest.raises(DamagedExport, match="its checksum differs"):
        importer.verify(exported)

    def break_off(_cells: int, done: int, _all: int) -> None:
        if done == 1:
            raise KeyError

    async with connect(cluster.address) as database:
        with pytest.raises(KeyError):
            await exporter.export(
                database, tmp_path / "later", form=ExportFormat.JSONL, progress=break_off
            )
        with pytest.raises(InvalidArgument, match="was started as jsonl"):
            await exporter.export(database, tmp_path / "later", form=ExportFormat.PARQUET)
        done = await exporter.export(database, tmp_path / "later")
    assert done.form is ExportFormat.JSONL
    assert importer.verify(tmp_path / "later") == done


# `percolator index`, on a running cluster.


REFERENCE = "tests.integration.indexed_people:by_city"


def test_an_index_is_built_over_existing_data_and_checked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with (
        LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(people)
        db.set_many((f"person {number}", {city: f"city {number % 3}"}) for number in range(30))
        by_city.create(db)
        command = CommandLine(cluster.address)
        missing = command.text("index", "check", REFERENCE, code=1)
        assert "row 'person 0' is missing for 'city 0'" in missing
        assert command.data("index", "backfill", REFERENCE) == {
            "index": "people by city",
            "rows": 30,
        }
        assert "column and index agree" in command.text("index", "check", REFERENCE)
        wrong = command.error("index", "check", REFERENCE.replace("by_city", "people"), code=2)
        assert "index: tests.integration.indexed_people:people is Table('people'" in wrong
