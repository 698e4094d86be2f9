"""Tables are exported while they are written to, and imported completely or not at all."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import percolator
from percolator import Column, Table, Timestamp, codecs
from percolator.aio import Database
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer, part_files
from percolator.backup.export_files import DamagedExport, ExportedObserver
from percolator.errors import InvalidArgument, PercolatorError, SchemaError, UsageError
from percolator.services.local.cluster import LocalCluster
from percolator.v1.master_pb2 import ChangeObserversRequest, Observer
from tests.integration.command_line import CommandLine

__all__ = ["source_cluster", "target_cluster", "whole_export"]


async def test_an_export_during_writes_shows_one_moment_and_is_imported_unchanged(
    cluster: LocalCluster, target: LocalCluster, tmp_path: Path
) -> None:
    stop, writing = threading.Event(), threading.Event()

    def overwrite() -> None:
        with percolator.connect(cluster.address) as db:
            value = 0
            while not stop.is_set():
                with db.transaction() as tx:
                    # Equal at each moment: a copy taken at several moments would differ.
                    for row in ("a00000", "x00003", "long"):
                        tx.set(row, price, value)
                value += 1
                writing.set()

    writer = threading.Thread(target=overwrite)
    writer.start()
    assert writing.wait(20)
    try:
        async with connect(cluster.address) as db:
            made = await exporter.export(db, tmp_path / "copy")
            before = await scan_hash(db, Timestamp(made.at))
    finally:
        stop.set()
        writer.join()
    assert made.cells >= 2 * ROWS + 2
    assert [len(table.parts) for table in made.tables] == [1, 3]
    async with connect(target.address) as db:
        await db.drop_table(shop, missing_ok=True)
        await importer.import_tables(db, tmp_path / "copy")
        assert await scan_hash(db) == before
        assert await db.tables() == ["empty", "shop.items"]
        async with db.snapshot() as snapshot:
            torn = {await snapshot.get(row, price) for row in ("a00000", "x00003", "long")}
        assert len(torn) == 1
    tablets = await asyncio.to_thread(CommandLine(target.address).data, "tablets")
    starts = {one["start"] for one in tablets if one["table"] == "shop.items"}
    assert len(starts) == 3


def test_the_files_are_parquet_that_other_programs_can_read(exported: Path) -> None:
    files = sorted((exported / "shop%2Eitems").glob("*.parquet"))
    tables = [pq.read_table(file) for file in files]
    assert sum(map(len, tables)) >= 2 * ROWS + 1
    assert tables[0].schema.equals(part_files.cells_schema())
    asked_verify = importer.verify(exported)
    assert asked_verify.cells == sum(map(len, tables))


async def test_an_import_into_a_table_that_is_not_empty_is_refused_and_changes_nothing(
    cluster: LocalCluster, exported: Path
) -> None:
    async with connect(cluster.address) as db:
        before = await scan_hash(db)
        with pytest.raises(UsageError, match=r"'shop.items' is not empty .* there is row"):
            await importer.import_tables(db, exported)
        assert await scan_hash(db) == before
        # The other table, whose load began earlier, does not stay closed either.
        async with db.snapshot() as snapshot:
            assert [row async for row in snapshot.scan(Table("empty"))] == []
    command = CommandLine(cluster.address)
    refused = await asyncio.to_thread(command.error, "import", str(exported), code=2)
    assert "is not empty" in refused


@pytest.mark.parametrize(
    "harm", ["missing", "shorter", "changed", "one too many", "manifest", "no manifest"]
)
async def test_a_damaged_export_is_refused_by_file_name_and_nothing_is_imported(
    harm: str, cluster: LocalCluster, exported: Path, tmp_path: Path
) -> None:
    directory = copied(exported, tmp_path / "copy")
    part = directory / "shop%2Eitems" / "part-00001.parquet"
    named: Path = part
    error: type[PercolatorError] = DamagedExport
    if harm == "missing":
        part.unlink()
    elif harm == "shorter":
        part.write_bytes(part.read_bytes()[:-1])
    elif harm == "changed":
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    elif harm == "one too many":
        named = part.with_name("part-00007.parquet")
        named.write_bytes(part.read_bytes())
    elif harm == "manifest":
        named = directory / export_files.MANIFEST
        named.write_text(named.read_text().replace(": 2,", ": 3,", 1).replace('"at": 4', '"at": 5'))
    else:
        (directory / export_files.MANIFEST).unlink()
        named, error = directory, InvalidArgument
    with pytest.raises(error, match=str(named)):
        importer.verify(directory)
    verify = ("export", "verify", str(directory))
    code = 1 + (harm[:2] == "no")
    command = CommandLine(cluster.address)
    assert str(named) in await asyncio.to_thread(command.error, *verify, code=code)
    async with connect(cluster.address) as db:
        with pytest.raises(error, match=str(named)):
            await importer.import_tables(db, directory)


async def test_a_table_that_exists_keeps_its_own_retention(
    target: LocalCluster, exported: Path
) -> None:
    async with connect(target.address) as db:
        await db.drop_table(empty, missing_ok=True)
        await db.create_table(empty)
        await importer.import_tables(db, exported, tables=[empty.name])
        await db.create_table(empty, exist_ok=True)
        with pytest.raises(InvalidArgument, match="exists with the cluster's default"):
            await db.create_table(empty, exist_ok=True, retention=timedelta(hours=2))
        await db.drop_table(empty)
        await importer.import_tables(db, exported, tables=[empty.name])
        await db.create_table(empty, exist_ok=True, retention=timedelta(hours=2))


async def test_observers_that_an_existing_table_cannot_get_are_refused_before_a_row_is_imported(
    target: LocalCluster, exported: Path, tmp_path: Path
) -> None:
    watched = edited(copied(exported, tmp_path / "copy"), "watcher", price)
    async with connect(target.address) as db:
        engine = db.internal.engine
        await db.drop_table(shop, missing_ok=True)
        await db.create_table(shop)
        other = Observer(name="watcher", columns=[label.name])
        registered = ChangeObserversRequest(table=shop.name, add=[other])
        await engine.catalog.change_observers(registered, engine.now() + 20)
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=r"observers of 'shop\.items' cannot be"):
                await importer.import_tables(db, watched)
            async with db.snapshot() as snapshot:
                assert [row async for row in snapshot.scan(shop)] == []
        gone = ChangeObserversRequest(table=shop.name, remove=["watcher"])
        await engine.catalog.change_observers(gone, engine.now() + 20)
        await importer.import_tables(db, watched)
        found = await engine.catalog.describe(shop.name, engine.now() + 20)
        assert [(one.name, list(one.columns)) for one in found.observers] == [
            ("watcher", [price.name])
        ]
        await db.drop_table(shop)


def edited(directory: Path, observer: str, column: Column[int]) -> Path:
    """Makes this the export of a table with an observer."""
    whole = export_files.read_manifest(directory)
    added = ExportedObserver(observer, (column.name.hex(),), weak=False, paused=False)
    tables = tuple(
        replace(table, observers=(added,)) if table.name == column.table.name else table
        for table in whole.tables
    )
    export_files.write_export(directory / export_files.MANIFEST, replace(whole, tables=tables))
    return directory


async def test_tables_that_did_not_exist_then_are_left_out_unless_they_are_named(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    young = Table("young")
    async with connect(cluster.address) as db:
        at = await db.timestamp()
        await db.create_table(young)
        made = await exporter.export(db, tmp_path / "all", at=at)
        assert "young" not in {table.name for table in made.tables}
        assert "empty" in {table.name for table in made.tables}
        with pytest.raises(SchemaError, match="'young' is younger than the snapshot"):
            await exporter.export(db, tmp_path / "named", at=at, tables=["young"])
        made = await exporter.export(db, tmp_path / "named", tables=["young"])
        assert {table.name for table in made.tables} == {"young"}, "the directory was not used"
        await db.drop_table(young)


async def test_an_imported_table_knows_the_codecs_of_the_exported_one(
    cluster: LocalCluster, target: LocalCluster, tmp_path: Path
) -> None:
    typed = Table("typed", key=codecs.ordered_integer)
    stock = typed.column("stock", codecs.integer)
    async with connect(cluster.address) as db:
        await db.create_table(typed)
        async with db.transaction() as tx:
            await tx.set(-5, stock, 7)
        await exporter.export(db, tmp_path / "typed", tables=[typed.name])
        await db.drop_table(typed)
    async with connect(target.address) as db:
        await importer.import_tables(db, tmp_path / "typed")
        assert await db.get(-5, stock) == 7
        other = typed.column("stock", codecs.text)
        with pytest.raises(SchemaError, match="declares the codec text, but the table has integer"):
            await db.get(-5, other)
        await db.drop_table(typed)
        await db.create_table(Table(typed.name))
        with pytest.raises(SchemaError, match="declares the codec ordered_integer, but the table"):
            await importer.import_tables(db, tmp_path / "typed")
        await db.drop_table(typed)


async def test_bad_requests_to_export_name_what_is_wrong(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("something else")
    async with connect(cluster.address) as db:
        with pytest.raises(InvalidArgument, match="neither empty nor an interrupted export"):
            await exporter.export(db, tmp_path)
        with pytest.raises(SchemaError, match="no table 'nothing'"):
            await exporter.export(db, tmp_path / "new", tables=["nothing"])
        later = Timestamp(await db.timestamp() + (1 << 40))
        with pytest.raises(InvalidArgument, match="is in the future"):
            await exporter.export(db, tmp_path / "new", at=later)
    command = CommandLine(cluster.address)
    refused = await asyncio.to_thread(command.error, "export", "a", "b", code=2)
    assert "expected one directory" in refused


# Exports and imports that were interrupted, or damaged meanwhile, go on or start again.


async def test_an_interrupted_export_is_resumed_at_its_own_timestamp(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "copy"

    async with connect(cluster.address) as db:
        with pytest.raises(Interrupted):
            await exporter.export(db, directory, tables=["shop.items"], progress=break_off)
        assert not (directory / export_files.MANIFEST).exists()
        planned = export_files.read_export(directory / export_files.PLAN)
        done = {
            path: path.stat().st_mtime_ns
            for path in directory.rglob("*.parquet")
            if path.with_suffix(".json").exists()
        }
        assert done
        with pytest.raises(InvalidArgument, match="interrupted: finish it first"):
            importer.verify(directory)
        with pytest.raises(InvalidArgument, match="was started at"):
            await exporter.export(db, directory, at=await db.timestamp())
        await db.run(_change)
        made = await exporter.export(db, directory)
        assert made.at == planned.at
        assert {path: path.stat().st_mtime_ns for path in done} == done
        importer.verify(directory)
        with pytest.raises(InvalidArgument, match="already contains a complete export"):
            await exporter.export(db, directory)


async def _change(tx: percolator.aio.Transaction) -> None:
    await tx.set("zzz", price, 1)


async def interrupted_import(db: Database, exported: Path) -> set[str]:
    """Interrupts an import of one table after some parts are loaded. Returns their names.

    Parts come one after another: of several at a time, none may be noted as loaded yet.
    """

    def break_off(done: int, in_all: int) -> None:
        if done >= in_all - 1:
            raise Interrupted

    await db.drop_table(shop, missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "PARTS_AT_A_TIME", 1)
        with pytest.raises(Interrupted):
            await importer.import_tables(db, exported, tables=[shop.name], progress=break_off)
    with importer.open_log(exported) as log:
        return log.tables[shop.name].parts


async def require_closed(db: Database) -> None:
    with pytest.raises(PercolatorError, match="closed for the bulk load"):
        async with db.snapshot(timeout=2) as snapshot:
            await snapshot.get("a00000", price)


async def test_an_interrupted_import_shows_nothing_and_is_resumed(
    target: LocalCluster, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = copied(exported, tmp_path / "copy")
    read = []

    whole = part_files.cells_of

    def noted(directory: Path, *more: Any) -> Any:
        read.append(more[-1].file)
        return whole(directory, *more)

    async with connect(target.address) as db:
        done = await interrupted_import(db, exported)
        await require_closed(db)
        monkeypatch.setattr(part_files, "cells_of", noted)
        told: list[int] = []
        made = await importer.import_tables(
            db, exported, tables=[shop.name], progress=lambda cells, _: told.append(cells)
        )
        assert 0 < len(read) < 3
        assert not done & set(read)
        assert told[-1] == made.cells == await rows_of(db) > ROWS
        assert not (exported / importer.NAME).exists()


@pytest.mark.parametrize("harm", ["cut", "garbage", "lost", "another table"])
async def test_an_import_starts_again_if_its_log_cannot_be_relied_on(
    harm: str, target: LocalCluster, exported: Path, tmp_path: Path
) -> None:
    exported = copied(exported, tmp_path / "copy")
    noted = exported / importer.NAME
    async with connect(target.address) as db:
        await interrupted_import(db, exported)
        if harm == "cut":
            noted.write_bytes(noted.read_bytes()[:-1])
        elif harm == "garbage":
            noted.write_bytes(b"x" + noted.read_bytes())
        elif harm == "lost":
            noted.unlink()
        else:
            # As in another cluster: the log describes a table that no longer exists.
            await db.drop_table(shop)
        made = await importer.import_tables(db, exported, tables=[shop.name])
        assert await rows_of(db) == made.cells


async def test_an_abandoned_import_leaves_its_tables_open_and_empty(
    target: LocalCluster, exported: Path, tmp_path: Path
) -> None:
    exported = copied(exported, tmp_path / "copy")
    async with connect(target.address) as db:
        await interrupted_import(db, exported)
        assert await importer.abandon(db, exported) == []
        assert await rows_of(db) == 0
        made = await importer.import_tables(db, exported, tables=[shop.name])
        assert await rows_of(db) == made.cells


async def test_two_imports_of_one_export_cannot_run_at_the_same_time(
    target: LocalCluster, exported: Path, tmp_path: Path
) -> None:
    exported = copied(exported, tmp_path / "copy")
    async with connect(target.address) as db:
        with (
            importer.open_log(exported),
            pytest.raises(UsageError, match="another process is importing"),
        ):
            await importer.import_tables(db, exported)
        with pytest.raises(InvalidArgument, match="not in the export"):
            await importer.import_tables(db, exported, tables=["other"])


async def test_a_part_that_was_damaged_in_the_meantime_is_exported_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "copy"

    async with connect(cluster.address) as db:
        with pytest.raises(Interrupted):
            await exporter.export(db, directory, tables=["shop.items"], progress=break_off)
        done = next(directory.rglob("part-*.json")).with_suffix(".parquet")
        done.write_bytes(done.read_bytes()[:-1])
        await exporter.export(db, directory)
        importer.verify(directory)


async def test_an_interrupted_export_is_not_resumed_if_its_table_was_created_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    directory, passing = tmp_path / "copy", Table("passing")

    def break_off(*_: int) -> None:
        raise Interrupted

    async with connect(cluster.address) as db:
        await db.create_table(passing)
        with pytest.raises(Interrupted):
            await exporter.export(db, directory, tables=["passing"], progress=break_off)
        await db.drop_table(passing)
        await db.create_table(passing)
        with pytest.raises(SchemaError, match="deleted and created again"):
            await exporter.export(db, directory)
        await db.drop_table(passing)


# Two clusters and an export of the first, for tests of exports and imports.

ROWS = 1_500
shop = Table("shop.items", key=codecs.text)
price = shop.column("price", codecs.integer)
label = shop.column("label", codecs.text)
empty = Table("empty")


class Interrupted(Exception):
    """Stands in for anything that ends a process."""


def break_off(_cells: int, done: int, _all: int) -> None:
    """A progress callback that interrupts after two parts."""
    if done == 2:
        raise Interrupted


@pytest.fixture(scope="module", name="cluster")
def source_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("source"), tablet_servers=2) as started:
        with percolator.connect(started.address) as db:
            db.create_table(shop, splits=["g", "r"])
            db.create_table(empty, retention=timedelta(hours=2))
            rows = (
                (f"{'abcxyz'[at % 6]}{at:05}", {price: at, label: "l" * 50}) for at in range(ROWS)
            )
            db.set_many(rows)
            with db.transaction() as tx:
                tx.set("long", label, "v" * 5_000)
        yield started


@pytest.fixture(scope="module", name="target")
def target_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("target"), tablet_servers=1) as started:
        yield started


@pytest.fixture(scope="module", name="exported")
def whole_export(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an export that was never interrupted; tests damage copies of it."""
    directory = tmp_path_factory.mktemp("exports") / "whole"
    CommandLine(cluster.address).run("export", str(directory))
    return directory


async def scan_hash(db: Database, at: Timestamp | None = None) -> str:
    """A hash of all rows, columns and values."""
    digest = sha256()
    async with db.snapshot(at) as snapshot:
        async for page in snapshot.scan_cells(shop):
            for cell in zip(page.rows, page.columns, page.values, strict=True):
                digest.update(repr(cell).encode())
    return digest.hexdigest()


def copied(exported: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(exported), str(to)], check=True)
    return to


async def rows_of(db: Database) -> int:
    async with db.snapshot() as snapshot:
        return sum([len(page.rows) async for page in snapshot.scan_cells(shop)])


async def test_rows_that_are_loaded_in_bulk_are_found_by_indexes_once_the_load_has_ended(
    cluster: LocalCluster,
) -> None:
    people = Table("people with an index")
    city = people.column("city", codecs.text, indexed=True)
    load_plan = LoadPlan(people.name, "load", b"b", b"f", notify=False)
    async with connect(cluster.address) as db:
        await db.create_table(people, ["d"])
        await db.set_many([("ann", {city: "Rome"})])
        async with db.snapshot() as before:
            await before.timestamp()
            load = BulkLoad(db, load_plan)
            timestamps = await load.begin()
            rows = ((b"bob", b"Rome"), (b"eve", b"Bern"))
            await load.load([(row, b"city", value) for row, value in rows], timestamps)
            await load.finish(timestamps)
            assert [row.key async for row in before.find(city)] == ["ann"]
        async with db.snapshot() as after:
            assert [row.key async for row in after.find(city)] == ["eve", "ann", "bob"]
        assert await db.check_index(city) == []
        await db.drop_table(people)  # other tests export all tables of this cluster
