"""Exports of tablets are imported into a row store, and those of a row store into another.

The way back, into tablet servers, is in tests/bigtable/test_imports.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import percolator.testing
from percolator import Table, Timestamp, aio, codecs
from percolator.aio.bulk_load import LoadedCell, LoadTimestamps
from percolator.aio.row_load import RowLoad
from percolator.backup import export_files, exporter, importer
from percolator.backup.export_files import ExportFormat
from percolator.errors import InvalidArgument, PercolatorError, SchemaError, Unavailable
from percolator.v1 import master_pb2
from tests.unit.rowstore.loading_cluster import Loading, loading

pytestmark = pytest.mark.real_time

ITEMS, EMPTY = Table("shop.items", key=codecs.text), Table("empty")
PRICE, LABEL = ITEMS.column("price", codecs.integer), ITEMS.column("label", codecs.text)
ROWS = 500


class NoPin:
    """A database in memory has no lock service to pin anything, and collects nothing."""

    def __init__(self, at: Timestamp) -> None:
        self.at = at

    async def __aenter__(self) -> NoPin:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


async def export(
    database: aio.Database, directory: Path, form: ExportFormat = ExportFormat.PARQUET
) -> None:
    now = NoPin(await database.timestamp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(database, "pin", lambda *_, **__: now)
        await exporter.export(database, directory, form=form)


class Interrupted(Exception):
    """Stands in for anything that ends a process."""


async def fill(database: aio.Database) -> None:
    await database.create_table(ITEMS, retention=timedelta(hours=2), splits=["g", "r"])
    await database.create_table(EMPTY)
    for first in range(0, ROWS, 100):
        async with database.transaction() as tx:
            for at in range(first, first + 100):
                await tx.set(f"{'abcxyz'[at % 6]}{at:05}", PRICE, at)
                await tx.set(f"{'abcxyz'[at % 6]}{at:05}", LABEL, "lö\u2028" * (at % 900))
    async with database.transaction() as tx:
        await tx.delete("a00000", PRICE)


async def contents(database: aio.Database) -> str:
    """A hash of all rows, columns and values."""
    digest = sha256()
    async with database.snapshot() as snapshot:
        async for page in snapshot.scan_cells(ITEMS):
            for cell in zip(page.rows, page.columns, page.values, strict=True):
                digest.update(repr(cell).encode())
    return digest.hexdigest()


@pytest.fixture(name="exported", scope="module", params=[*ExportFormat], ids=str)
def _exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """An export of tablets, and the hash of its contents."""
    directory = tmp_path_factory.mktemp("exports") / "tablets"

    async def make() -> str:
        async with percolator.testing.connect_async() as database:
            await fill(database)
            await export(database, directory, form=request.param)
            return await contents(database)

    return directory, asyncio.run(make())


async def test_tables_go_there_and_on(exported: tuple[Path, str], tmp_path: Path) -> None:
    directory, expected = exported
    form = export_files.read_manifest(directory).form
    seen: list[tuple[int, int]] = []
    async with loading() as at:
        made = await importer.import_tables(
            at.database, directory, progress=lambda *done: seen.append(done)
        )
        assert seen[-1] == (made.cells, made.cells)
        assert made.cells > ROWS
        assert await contents(at.database) == expected
        assert await at.database.tables() == ["empty", "shop.items"]
        items = at.cluster.kept.current.table("shop.items")
        assert items.retention_milliseconds == 7_200_000
        assert items.codecs.message().key == "text"
        again = tmp_path / "rows"
        await export(at.database, again, form=form)
    async with loading() as at:
        await importer.import_tables(at.database, again)
        assert await contents(at.database) == expected


REFUSED = "tables: 'shop.items' cannot be made as it was exported: "


async def test_a_row_store_that_refuses_an_option_names_the_table(
    exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with loading() as at:
        monkeypatch.setattr(at.cluster.loads, "_retention_min", 10_000_000)
        with pytest.raises(InvalidArgument, match=f"{REFUSED}retention_milliseconds: is 7200000"):
            await importer.import_tables(at.database, exported[0])
        assert await at.database.tables() == []
        assert not (exported[0] / "import.log").exists()


async def test_so_does_an_import_into_tablets_which_says_what_to_do(
    exported: tuple[Path, str],
) -> None:
    async with percolator.testing.connect_async() as database:

        async def refuse(*_: Any, **__: Any) -> None:
            raise InvalidArgument("options.retention_milliseconds", "is 7200000, below 7200001")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(database.internal.engine.catalog, "create", refuse)
            said = f"{REFUSED}retention_milliseconds: .* 7200001; or create it with other options"
            with pytest.raises(InvalidArgument, match=said):
                await importer.import_tables(database, exported[0], tables=["shop.items"])


async def interrupt(at: Loading, directory: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Interrupts an import after its first parts. Returns their names."""
    parts = 0

    def progress(_done: int, _all: int) -> None:
        nonlocal parts
        parts += 1
        if parts == 2:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(importer, "PARTS_AT_A_TIME", 1)
        with pytest.raises(Interrupted):
            await importer.import_tables(at.database, directory, progress=progress)
    with importer.open_log(directory) as log:
        done = set[str]().union(*(table.parts for table in log.tables.values()))
    return done


async def test_an_interrupted_import_shows_nothing_and_is_resumed(
    exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = exported
    async with loading() as at:
        done = await interrupt(at, directory, monkeypatch)
        assert done
        assert await at.database.tables() == []
        loaded: list[int] = []
        correct = RowLoad.load

        async def load(
            self: RowLoad, cells: Sequence[LoadedCell], timestamps: LoadTimestamps
        ) -> None:
            loaded.append(len(cells))
            await correct(self, cells, timestamps)

        monkeypatch.setattr(RowLoad, "load", load)
        made = await importer.import_tables(at.database, directory)
        of_parts = {part.file: part.cells for part in made.parts}
        assert sum(loaded) == made.cells - sum(of_parts[file] for file in done)
        assert await contents(at.database) == expected
        assert not (directory / importer.NAME).exists()


async def test_an_abandoned_import_leaves_nothing(
    exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = exported
    async with loading() as at:
        await interrupt(at, directory, monkeypatch)
        assert await importer.abandon(at.database, directory) == []
        await at.cluster.remove_dropped()
        assert not at.cluster.kept.current.tables
        await importer.import_tables(at.database, directory)
        assert await contents(at.database) == expected
        assert await importer.abandon(at.database, directory) == ["empty", "shop.items"]
        assert await contents(at.database) == expected


async def test_an_import_that_has_published_its_tables_is_resumed(
    exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ended before it could delete its log, and before it had its answer."""
    directory, expected = exported
    async with loading() as at:
        correct = at.cluster.publish_loads

        async def publish_loads(request: master_pb2.PublishLoadsRequest) -> None:
            await correct(request)
            raise PercolatorError("the process ended")

        monkeypatch.setattr(at.cluster, "publish_loads", publish_loads)
        with pytest.raises(PercolatorError, match="the process ended"):
            await importer.import_tables(at.database, directory)
        monkeypatch.setattr(at.cluster, "publish_loads", correct)
        assert (directory / importer.NAME).exists()
        await importer.import_tables(at.database, directory)
        assert await contents(at.database) == expected
        assert not (directory / importer.NAME).exists()


async def test_one_table_that_exists_keeps_all_from_being_imported(
    exported: tuple[Path, str],
) -> None:
    directory, _ = exported
    async with loading() as at:
        await at.database.create_table(ITEMS)
        with pytest.raises(PercolatorError, match=r"table 'shop\.items' exists: in a row store"):
            await importer.import_tables(at.database, directory)
        assert await at.database.tables() == ["shop.items"]
        assert not (directory / importer.NAME).exists()


@pytest.mark.parametrize("what", ["feed", "ttl"])
async def test_what_a_row_store_does_not_have_is_refused(what: str, tmp_path: Path) -> None:
    async with percolator.testing.connect_async() as database:
        ttl = {PRICE: timedelta(hours=1)} if what == "ttl" else None
        await database.create_table(ITEMS, change_feed=what == "feed", ttl=ttl)
        await export(database, tmp_path / "out")
    async with loading() as at:
        with pytest.raises(InvalidArgument, match=f"{REFUSED}(change_feed: tables|ttls: no value)"):
            await importer.import_tables(at.database, tmp_path / "out")
        assert not at.cluster.kept.current.tables
        with pytest.raises(SchemaError):
            await contents(at.database)


async def test_a_store_that_does_not_answer_leaves_the_import_to_be_resumed(
    exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = exported
    async with loading() as at:

        async def fail(*_: object) -> None:
            raise Unavailable("gone")

        with monkeypatch.context() as patch:
            patch.setattr("percolator.aio.row_load.PATIENCE_SECONDS", 0.01)
            patch.setattr(at.store, "write", fail)
            with pytest.raises(PercolatorError, match="gone"):
                await importer.import_tables(at.database, directory)
        assert await at.database.tables() == []
        await importer.import_tables(at.database, directory)
        assert await contents(at.database) == expected
