"""Exports and imports are killed at every step, and resumed: nothing is lost, and no part is seen
before the whole."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import percolator
from percolator import Table, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect
from percolator.backup import exporter, importer
from percolator.errors import NotReady, PercolatorError, SchemaError
from percolator.services.local.cluster import LocalCluster
from tests.chaos.killed_backup import EXPORT, IMPORT, PIN_TTL

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

first = Table("first", key=codecs.raw)
second = Table("second", key=codecs.raw)
value = first.column("value", codecs.raw)
other = second.column("other", codecs.raw)
ROWS = 300

Content = list[tuple[bytes, bytes, bytes]]


@pytest.fixture(scope="module", name="cluster")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX", "4000")
        with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
            fill(started.address)
            yield started


@pytest.fixture(scope="module", name="target")
def _target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("target"), tablet_servers=1) as started:
        yield started


@pytest.fixture(name="exported")
def _exported(cluster: LocalCluster, tmp_path: Path) -> Path:
    directory = tmp_path / "whole"

    async def whole() -> None:
        async with connect(cluster.address) as db:
            await exporter.export(db, directory, pin_ttl_seconds=PIN_TTL)

    asyncio.run(whole())
    return directory


def fill(address: str) -> None:
    with percolator.connect(address) as db:
        db.create_table(first, splits=[b"\x40", b"\x80", b"\xc0"])
        db.create_table(second, splits=[b"\x80"])
        for column in (value, other):
            db.set_many(
                (bytes([row % 256, row // 256]), {column: b"v" * row}) for row in range(ROWS)
            )


async def content(db: Database, table: Table[bytes]) -> Content:
    found: Content = []
    async with db.snapshot(timeout=1.0) as snapshot:
        async for page in snapshot.scan_cells(table):
            found += zip(page.rows, page.columns, page.values, strict=True)
    return found


async def killed(cluster: LocalCluster, directory: Path, point: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.killed_backup", cluster.address, str(directory), point
    )
    assert await asyncio.wait_for(process.wait(), 50) == -signal.SIGKILL


@pytest.mark.parametrize("point", EXPORT)
async def test_an_export_that_was_killed_can_be_resumed_at_its_own_timestamp(
    point: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "copy"
    await killed(cluster, directory, point)
    async with connect(cluster.address) as db:
        with pytest.raises(PercolatorError):
            importer.verify(directory)
        made = await exporter.export(db, directory, pin_ttl_seconds=PIN_TTL)
        assert importer.verify(directory) == made
        assert made.cells == 2 * ROWS
        assert not list(directory.rglob("*.partial"))


@pytest.mark.parametrize("point", IMPORT)
async def test_an_import_that_was_killed_shows_no_part_of_a_table_and_is_gone_on_with(
    point: str, cluster: LocalCluster, target: LocalCluster, exported: Path
) -> None:
    async with connect(cluster.address) as db:
        wanted = {table.name: await content(db, table) for table in (first, second)}
    async with connect(target.address) as db:
        for table in (first, second):
            await db.drop_table(table, missing_ok=True)
        await killed(target, exported, point)
        seen = [await visible(db, table) for table in (first, second)]
        assert all(cells in (None, []) or cells == wanted[name] for name, cells in seen)
        # No client sees one without the other.
        assert len({bool(cells) for _, cells in seen if cells is not None}) <= 1
        await importer.import_tables(db, exported)
        for table in (first, second):
            assert await content(db, table) == wanted[table.name]
        assert not (exported / importer.NAME).exists()


async def visible(db: Database, table: Table[bytes]) -> tuple[str, Content | None]:
    """The state of a table and its content; None if the content is not visible."""
    try:
        return table.name, await content(db, table)
    except (NotReady, SchemaError):
        return table.name, None
    except PercolatorError as error:
        assert "closed for the bulk load" in str(error)  # noqa: PT017 - one of several ways
        return table.name, None


@pytest.mark.parametrize("point", ["two parts are noted", "one table is open"])
async def test_an_import_from_where_nothing_can_be_noted_begins_anew(
    point: str,
    cluster: LocalCluster,
    target: LocalCluster,
    exported: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connect(target.address) as db:
        for table in (first, second):
            await db.drop_table(table, missing_ok=True)
        await killed(target, exported, point)
        # As if it had never existed and could not be created: now it is a directory.
        noted = exported / importer.NAME
        noted.unlink()
        noted.mkdir()
        if point == "one table is open":
            with pytest.raises(PercolatorError, match="'first' is not empty"):
                await importer.import_tables(db, exported)
            await importer.import_tables(db, exported, tables=["second"])
        else:
            await importer.import_tables(db, exported)
        assert "progress cannot be written down" in caplog.text
        assert len(await content(db, first)) == len(await content(db, second)) == ROWS
