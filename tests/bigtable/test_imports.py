"""Tables go from tablet servers into Google's emulator, and back: the same bytes, whatever the
format."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import pytest

import percolator
from percolator import Table, codecs
from percolator.backup import importer
from percolator.bigtable.place import EMULATOR_VARIABLE
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator
from tests.integration.command_line import CommandLine

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(300)]

ITEMS, EMPTY = Table("shop.items", key=codecs.text), Table("empty")
PRICE, LABEL = ITEMS.column("price", codecs.integer), ITEMS.column("label", codecs.text)
ROWS = 3_000


@pytest.fixture(scope="module", name="on_rows")
def _on_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with emulator() as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv(EMULATOR_VARIABLE, address)
        store = f"bigtable://imports/i{uuid.uuid4().hex[:20]}"
        data = tmp_path_factory.mktemp("rows")
        with LocalCluster(data, store=store, tablet_servers=0, start_seconds=60.0) as started:
            yield started


@pytest.fixture(scope="module", name="on_tablets")
def _on_tablets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("tablets"), tablet_servers=1) as started:
        with percolator.connect(started.address) as db:
            db.create_table(ITEMS, splits=["g", "r"], retention=timedelta(hours=2))
            db.create_table(EMPTY)
            db.set_many(
                (f"{'abcxyz'[at % 6]}{at:05}", {PRICE: at, LABEL: "lö\u2028" * (at % 700)})
                for at in range(ROWS)
            )
            with db.transaction() as tx:
                tx.delete("a00000", PRICE)
        yield started


def contents(cluster: LocalCluster) -> str:
    """A hash of all rows, columns and values."""
    digest = sha256()
    with percolator.connect(cluster.address) as db, db.snapshot() as snapshot:
        for row in snapshot.scan(ITEMS):
            digest.update(repr((row.key, sorted(row.raw().items()))).encode())
    return digest.hexdigest()


def drop_all(cluster: LocalCluster) -> None:
    with percolator.connect(cluster.address) as db:
        for table in (ITEMS, EMPTY):
            db.drop_table(table, missing_ok=True)


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_tables_go_there_and_back(
    form: str, on_tablets: LocalCluster, on_rows: LocalCluster, tmp_path: Path
) -> None:
    tablets, rows = CommandLine(on_tablets.address), CommandLine(on_rows.address)
    expected = contents(on_tablets)
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    tablets.run("export", there, "--format", form)
    drop_all(on_rows)
    rows.run("import", there)
    assert contents(on_rows) == expected
    refused = rows.error("import", there, code=2)
    assert "exists: in a row store, a bulk load creates its table" in refused
    rows.run("export", back, "--format", form)
    drop_all(on_tablets)
    tablets.run("import", back)
    assert contents(on_tablets) == expected
    with percolator.connect(on_rows.address) as db:
        with db.transaction() as tx:
            tx.set("a00000", PRICE, tx.get("b00001", PRICE, default=0) + 1)
        with db.snapshot() as snapshot:
            assert snapshot.get("a00000", PRICE) == 2


def test_an_import_that_was_killed_shows_nothing_and_is_resumed(
    on_tablets: LocalCluster, on_rows: LocalCluster, tmp_path: Path
) -> None:
    expected, directory = contents(on_tablets), tmp_path / "export"
    CommandLine(on_tablets.address).run("export", str(directory))
    drop_all(on_rows)
    command = ["-m", "percolator.cli", "--address", on_rows.address, "import", str(directory)]
    process = subprocess.Popen([sys.executable, *command])
    try:
        log = directory / importer.NAME
        deadline = time.monotonic() + 60.0
        # A table is begun: all that is loaded until the kill is known to nobody.
        while not log.exists() or b'"begun"' not in log.read_bytes():
            assert process.poll() is None
            assert time.monotonic() < deadline
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with percolator.connect(on_rows.address) as db:
        assert db.tables() == []
    CommandLine(on_rows.address).run("import", str(directory))
    assert contents(on_rows) == expected
