"""Exports and imports that were interrupted, or damaged meanwhile, go on or start again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import percolator
from percolator import Table
from percolator.aio import Database
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer, part_files
from percolator.errors import InvalidArgument, PercolatorError, SchemaError, UsageError
from percolator.services.local.cluster import LocalCluster
from tests.integration.exports import (
    ROWS,
    Interrupted,
    break_off,
    copied,
    price,
    rows_of,
    shop,
    source_cluster,
    target_cluster,
    whole_export,
)

__all__ = ["source_cluster", "target_cluster", "whole_export"]

pytestmark = pytest.mark.integration


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


async def test_a_part_is_not_closed_while_it_is_being_written(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a cancelled export would end the whole process: the file's library aborts."""
    writing, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    class SlowFile:
        def __init__(self, *_arguments: object) -> None:
            pass

        def write(self, _piece: object) -> None:
            writing.set()
            assert go_on.wait(30)
            done.append("written")

        def close(self) -> None:
            done.append("closed")

    monkeypatch.setattr(part_files, "create", SlowFile)
    monkeypatch.setattr(exporter, "PARTS_AT_A_TIME", 1)
    async with connect(cluster.address) as db:
        export = asyncio.create_task(exporter.export(db, tmp_path / "copy", tables=[shop.name]))
        assert await asyncio.to_thread(writing.wait, 30)
        export.cancel()
        await asyncio.wait([export], timeout=0.3)  # as long as it might take to close it
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await export
    assert done == ["written", "closed"]


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
