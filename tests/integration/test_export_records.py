"""Exports as lines of JSON: readable by people and programs, and imported as the same bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

import percolator
from percolator import Database, Table, codecs
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer
from percolator.backup.export_files import DamagedExport, ExportFormat
from percolator.errors import InvalidArgument, SchemaError
from percolator.services.local.cluster import LocalCluster
from tests.integration.command_line import CommandLine

pytestmark = pytest.mark.integration

products = Table("products", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
stock = products.column("stock", codecs.integer)
label = products.column("label", codecs.text)
photo = products.column("photo", codecs.raw)
ROWS = 40
HERE = "products/part-00000.jsonl"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


@pytest.fixture
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        database.drop_table(products, missing_ok=True)
        database.create_table(products, splits=[("eu", 20)])
        database.set_many(
            (("eu", number), {stock: number, label: f"hex:{number}\nnext line", photo: b"\xff\x00"})
            for number in range(ROWS)
        )
        yield database


@pytest.fixture
def exported(cluster: LocalCluster, db: Database, tmp_path: Path) -> Path:
    CommandLine(cluster.address).run("export", str(tmp_path / "out"), "--format", "jsonl")
    return tmp_path / "out"


def _rows(db: Database) -> list[tuple[object, object]]:
    with db.snapshot() as snapshot:
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
    cluster: LocalCluster, db: Database, exported: Path
) -> None:
    command, before = CommandLine(cluster.address), _rows(db)
    lines = (exported / HERE).read_text().splitlines()
    assert len(lines) == 20
    first = json.loads(lines[3])
    shown = command.data("scan", "products", "--column", "stock", "--column", "photo")[3]
    label_bytes = b"hex:3\nnext line".hex()
    assert first["row"] == shown["row"] == ["eu", 3]
    assert first["columns"] == {**shown["columns"], "label": f"hex:{label_bytes}"}
    assert first["columns"]["stock"] == 3
    assert command.data("export", "verify", str(exported))["cells"] == 3 * ROWS
    db.drop_table(products)
    assert command.data("import", str(exported))["tables"]["products"] == 3 * ROWS
    assert _rows(db) == before
    with pytest.raises(SchemaError, match="the table has integer"), db.transaction() as tx:
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
    old: str, new: str, wrong: str, cluster: LocalCluster, db: Database, exported: Path
) -> None:
    db.drop_table(products)
    _edited(exported, old, new)
    with pytest.raises(DamagedExport, match=wrong):
        importer.verify(exported)
    async with connect(cluster.address) as database:
        with pytest.raises(DamagedExport, match=wrong):
            await importer.import_tables(database, exported)
    assert _rows(db) == []


async def test_what_was_edited_by_hand_is_damaged_and_an_interrupted_export_keeps_its_format(
    cluster: LocalCluster, db: Database, exported: Path, tmp_path: Path
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
