"""Exports of tablets are imported into a row store, and those of a row store into another.

The way back, into tablet servers, is in tests/bigtable/test_imports.py.
"""

from __future__ import annotations

import asyncio
import io
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

import pytest

import percolator.testing
from percolator import Table, Timestamp, aio, codecs
from percolator.aio.bulk_load import LoadedCell, LoadTimestamps
from percolator.aio.database import Database
from percolator.aio.pin import Pin
from percolator.aio.row_load import RowLoad
from percolator.backup import export_files, exporter, importer, part_files
from percolator.backup.export_files import Export, ExportedTable, ExportFormat, ExportPart, file_of
from percolator.backup.part_files import CellsFile, Piece
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SchemaError,
    SnapshotTooOld,
    Unavailable,
    UsageError,
)
from percolator.routing.cells import CellPage
from percolator.v1 import master_pb2
from tests.unit.refusals import refused
from tests.unit.rowstore.model_store import Loading, loading

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


@pytest.fixture
def at() -> AbstractAsyncContextManager[Loading]:
    """A row store that tables are imported into."""
    return loading()


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
        assert (items.retention_milliseconds, items.codecs.message().key) == (7_200_000, "text")
        again = tmp_path / "rows"
        await export(at.database, again, form=form)
    async with loading() as at:
        await importer.import_tables(at.database, again)
        assert await contents(at.database) == expected


REFUSED = "tables: 'shop.items' cannot be made as it was exported: "


async def test_a_row_store_that_refuses_an_option_names_the_table(
    at: Loading, exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    at: Loading, exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = exported
    done = await interrupt(at, directory, monkeypatch)
    assert done
    assert await at.database.tables() == []
    loaded: list[int] = []
    correct = RowLoad.load

    async def load(self: RowLoad, cells: Sequence[LoadedCell], timestamps: LoadTimestamps) -> None:
        loaded.append(len(cells))
        await correct(self, cells, timestamps)

    monkeypatch.setattr(RowLoad, "load", load)
    made = await importer.import_tables(at.database, directory)
    of_parts = {part.file: part.cells for part in made.parts}
    assert sum(loaded) == made.cells - sum(of_parts[file] for file in done)
    assert await contents(at.database) == expected
    assert not (directory / importer.NAME).exists()


async def test_an_abandoned_import_leaves_nothing(
    at: Loading, exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = exported
    await interrupt(at, directory, monkeypatch)
    assert await importer.abandon(at.database, directory) == []
    await at.cluster.remove_dropped()
    assert not at.cluster.kept.current.tables
    await importer.import_tables(at.database, directory)
    assert await contents(at.database) == expected
    assert await importer.abandon(at.database, directory) == ["empty", "shop.items"]
    assert await contents(at.database) == expected


async def test_an_import_that_has_published_its_tables_is_resumed(
    at: Loading, exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ended before it could delete its log, and before it had its answer."""
    directory, expected = exported
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
    at: Loading, exported: tuple[Path, str]
) -> None:
    directory, _ = exported
    await at.database.create_table(ITEMS)
    with pytest.raises(PercolatorError, match=r"table 'shop\.items' exists: in a row store"):
        await importer.import_tables(at.database, directory)
    assert await at.database.tables() == ["shop.items"]
    assert not (directory / importer.NAME).exists()


@pytest.mark.parametrize("what", ["feed", "ttl"])
async def test_what_a_row_store_does_not_have_is_refused(
    at: Loading, what: str, tmp_path: Path
) -> None:
    async with percolator.testing.connect_async() as database:
        ttl = {PRICE: timedelta(hours=1)} if what == "ttl" else None
        await database.create_table(ITEMS, change_feed=what == "feed", ttl=ttl)
        await export(database, tmp_path / "out")
    with pytest.raises(InvalidArgument, match=f"{REFUSED}(change_feed: tables|ttls: no value)"):
        await importer.import_tables(at.database, tmp_path / "out")
    assert not at.cluster.kept.current.tables
    with pytest.raises(SchemaError):
        await contents(at.database)


async def test_indexes_are_created_in_a_row_store_over_what_is_imported(
    at: Loading, tmp_path: Path
) -> None:
    async with percolator.testing.connect_async() as database:
        await database.create_table(ITEMS)
        await database.create_index(PRICE)
        async with database.transaction() as tx:
            tx.set("pen", PRICE, 7)
        await export(database, tmp_path / "out")
    await importer.import_tables(at.database, tmp_path / "out")
    async with at.database.snapshot() as snapshot:
        assert [row.key async for row in snapshot.find(PRICE, 7)] == ["pen"]
    assert await at.database.check_index(PRICE) == []
    assert [table.name for table in at.cluster.kept.current.tables.values()] == [
        "shop.items",
        f"percolator.index/{at.cluster.kept.current.table('shop.items').table_id}/price",
    ]


async def test_a_store_that_does_not_answer_leaves_the_import_to_be_resumed(
    at: Loading, exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, expected = exported

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


AT = 5
PART = ExportPart("table/part-00000.parquet", "", "")
TABLE = ExportedTable("table", 1, 0, 0, (), (PART,))
CELLS = 2_000


def piece() -> Piece:
    made = Piece()
    rows = [b"%05d" % at for at in range(CELLS)]
    lists = rows, [b"c"] * CELLS, [1] * CELLS, [b"v" * 50] * CELLS
    made.add(CellPage(*lists, [], [], b"", b""))
    return made


class Exported(exporter._Exporter):
    """Exports one part of ten batches, without a database."""

    def __init__(self, directory: Path) -> None:
        nothing = cast("Any", None)
        super().__init__(
            cast("Database", nothing), directory, Export(1, ()), cast("Pin", nothing), print
        )
        self.scan_is_open = False

    async def _pieces(self, table: str, planned: ExportPart) -> AsyncGenerator[Piece, None]:
        self.scan_is_open = True
        try:
            for _ in range(10):
                yield piece()
        finally:
            self.scan_is_open = False


class HeldFile:
    """A file whose first write blocks until the test lets it continue."""

    def __init__(self) -> None:
        self.writing, self.go_on = threading.Event(), threading.Event()
        self.done: list[str] = []

    def write(self, _piece: object) -> None:
        self.writing.set()
        assert self.go_on.wait(30)
        self.done.append("written")

    def close(self) -> None:
        self.done.append("closed")


class FullDisk(io.RawIOBase):
    """Accepts some bytes, and then is full."""

    def __init__(self, space: int) -> None:
        super().__init__()
        self._space = space

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._space -= len(data)
        if self._space < 0:
            raise OSError(28, "No space left on device")
        return len(data)


def full_after(space: int) -> Callable[..., CellsFile]:
    return lambda *_: CellsFile(cast("IO[bytes]", FullDisk(space)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
async def test_a_disk_that_fills_up_at_any_point_is_reported_and_leaves_no_part(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = io.BytesIO()
    file = CellsFile(whole)
    for _ in range(10):
        file.write(piece())
    file.close()
    exported = Exported(tmp_path)
    monkeypatch.setattr(part_files, "create", full_after(int(len(whole.getvalue()) * share) - 1))
    threads = threading.active_count()
    with refused("directory", r"part-00000.*cannot be written.*No space"):
        await exported._export(TABLE, PART)
    assert not (tmp_path / PART.file).exists()
    assert not exported.scan_is_open
    assert threading.active_count() == threads


async def test_a_table_whose_directory_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("a file")
    with pytest.raises(InvalidArgument, match="cannot be written"):
        await Exported(tmp_path)._export(TABLE, PART)


@pytest.mark.parametrize(
    "name",
    ["表" * 85, "." * 85, "n" * 255, "." * 255],
    ids=["signs", "dots", "letters", "most dots"],
)
async def test_a_table_of_the_longest_name_has_a_directory_of_its_own(
    name: str, tmp_path: Path
) -> None:
    """The master accepts names of 255 bytes, each of which may take three in a path."""
    file = file_of(name, 0)
    assert len({file, file_of(name[:-1] + "x", 0), file_of(name[:-1], 0)}) == 3
    part = ExportPart(file, "", "")
    assert export_files.read_part(tmp_path, part, AT) is None
    done = await Exported(tmp_path)._export(TABLE, part)
    export_files.write_part(tmp_path, done, AT)
    assert export_files.read_part(tmp_path, part, AT) == done
    table = replace(TABLE, name=name, parts=(done,))
    export_files.write_export(tmp_path / export_files.MANIFEST, Export(1, (table,)))
    assert export_files.read_manifest(tmp_path).parts == [done]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"at": AT, "start": "61"}, "is about another part"),
        ({"at": AT, "end": "7a"}, "is about another part"),
        ({"at": AT, "file": "t/part-00000.parquet"}, "is about another part"),
        ({"at": 6}, "is not known to be of this export"),
        ({}, "is not known to be of this export"),
    ],
    ids=["start", "end", "file", "another export", "no export"],
)
async def test_the_record_of_another_part_or_export_does_not_say_that_this_one_is_done(
    other: dict[str, object], said: str, tmp_path: Path
) -> None:
    """As of another export, from which files were copied: its rows would be missing here."""
    done = await Exported(tmp_path)._export(TABLE, PART)
    export_files.write_record((tmp_path / PART.file).with_suffix(".json"), asdict(done) | other)
    with pytest.raises(export_files.DamagedExport, match=said):
        export_files.read_part(tmp_path, PART, AT)


def test_an_export_that_named_a_table_twice_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    planned = Export(1, (TABLE,))
    export_files.write_export(tmp_path / export_files.PLAN, planned)
    assert exporter._interrupted(tmp_path, None, ["table", "table"], None) == planned
    with pytest.raises(InvalidArgument, match=r"tables: .* was started with table"):
        exporter._interrupted(tmp_path, None, ["table", "other"], None)


async def test_an_export_cancelled_twice_does_not_close_a_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the second cancellation, only the file's own thread still waits for it to be closed."""
    file = HeldFile()

    class Last(ThreadPoolExecutor):
        def __exit__(self, *raised: Any) -> None:
            assert file.done == []
            file.go_on.set()
            super().__exit__(*raised)

    monkeypatch.setattr(part_files, "create", lambda *_: file)
    monkeypatch.setattr(exporter, "ThreadPoolExecutor", Last)
    exported = Exported(tmp_path)
    export = asyncio.create_task(exported._export(TABLE, PART))
    assert await asyncio.to_thread(file.writing.wait, 30)
    for _ in range(2):
        export.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await export
    assert file.done == ["written", "closed"]
    assert not exported.scan_is_open
    assert not (tmp_path / PART.file).exists()


async def test_an_exception_while_a_batch_is_written_propagates_and_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(HeldFile):
        def write(self, _piece: object) -> None:
            raise ValueError("a bug")

    file = Wrong()
    monkeypatch.setattr(part_files, "create", lambda *_: file)
    exported = Exported(tmp_path)
    with pytest.raises(ValueError, match="a bug"):
        await exported._export(TABLE, PART)
    assert file.done == ["closed"]
    assert not exported.scan_is_open


async def test_two_exports_into_one_directory_cannot_run_at_the_same_time(tmp_path: Path) -> None:
    with (
        export_files.locked(tmp_path, "exporting to"),
        pytest.raises(UsageError, match="another process is exporting to"),
    ):
        await exporter.export(cast("Database", None), tmp_path)


async def test_a_directory_that_cannot_be_seen_is_named(tmp_path: Path) -> None:
    """As without permission, which does not stop the account that runs some tests."""
    unseen = tmp_path / ("x" * 300)
    exporting = exporter.export(cast("Database", None), unseen)
    for work in (exporting, asyncio.to_thread(importer.verify, unseen)):
        with pytest.raises(InvalidArgument, match=r"cannot be read: .*File name too long"):
            await work


async def test_a_slow_disk_stops_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the pin would not be renewed while a large file is made durable, and would be lost."""
    loop_thread, correct = threading.get_ident(), os.fsync
    synced: list[bool] = []

    def fsync(descriptor: int) -> None:
        synced.append(threading.get_ident() == loop_thread)
        correct(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    await Exported(tmp_path)._export(TABLE, PART)
    assert len(synced) > 1
    assert not any(synced)


GOODS, SCRATCH = Table("goods"), Table("scratch")


class PinOfTablesOfAnExport:
    """A cluster in memory pins nothing. This refuses what a pin would, and believes that no history
    of the scratch table is left."""

    def __init__(self, database: aio.Database, at: Timestamp | None, names: set[str]) -> None:
        self._database = database
        self._wanted = at
        self._names = names
        self.at = Timestamp(0)

    async def __aenter__(self) -> PinOfTablesOfAnExport:
        for name in self._names - set(await self._database.tables()):
            raise SchemaError(f"there is no table {name!r}", table=name)
        if self._wanted is not None and (SCRATCH.name in self._names or not self._names):
            raise SnapshotTooOld("older than the history of 'scratch'", timestamp=1, safe_point=2)
        self.at = self._wanted or await self._database.timestamp()
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@asynccontextmanager
async def connected() -> AsyncIterator[aio.Database]:
    async with percolator.testing.connect_async() as database:

        def pin(
            at: Timestamp | None, *, tables: Sequence[Table[Any]], **_: Any
        ) -> PinOfTablesOfAnExport:
            return PinOfTablesOfAnExport(database, at, {table.name for table in tables})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(database, "pin", pin)
            yield database


@pytest.fixture
def database() -> AbstractAsyncContextManager[Database]:
    """A database in memory whose tables can be exported."""
    return connected()


async def test_a_younger_table_needs_no_history_from_before_it_was_created(
    database: Database, tmp_path: Path
) -> None:
    await database.create_table(GOODS)
    then = await database.timestamp()
    await database.create_table(SCRATCH, retention=timedelta(minutes=1))
    made = await exporter.export(database, tmp_path / "out", at=then, form=ExportFormat.JSONL)
    assert [table.name for table in made.tables] == [GOODS.name]
    with pytest.raises(SnapshotTooOld):
        await exporter.export(database, tmp_path / "named", at=then, tables=[SCRATCH.name])


async def test_a_table_that_was_dropped_meanwhile_is_not_to_be_created_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new table of this name, the export could not be finished either."""
    said = "'goods' was dropped since the export started, so it cannot .* another directory"
    await database.create_table(GOODS)

    async def run(one: exporter._Exporter) -> Export:
        await database.drop_table(GOODS)
        return one._planned

    monkeypatch.setattr(exporter._Exporter, "run", run)
    for _ in ("at the end", "when it is resumed"):
        with pytest.raises(SchemaError, match=said):
            await exporter.export(database, tmp_path, form=ExportFormat.JSONL)


async def test_an_export_of_one_cluster_is_not_resumed_at_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of tables are small numbers: there, a table of this name may well have the same one."""

    async def interrupted(_: exporter._Exporter) -> Export:
        raise Unavailable("gone")

    async def another(_: float) -> str:
        return "staging"

    async with connected() as other, connected() as database:
        for one in (other, database):
            await one.create_table(GOODS)
        with monkeypatch.context() as patch:
            patch.setattr(exporter._Exporter, "run", interrupted)
            with pytest.raises(Unavailable):
                await exporter.export(database, tmp_path, form=ExportFormat.JSONL)
        with monkeypatch.context() as patch:
            patch.setattr(other.internal.engine.catalog, "cluster_id", another)
            with pytest.raises(InvalidArgument, match="of cluster in-memory, and this is staging"):
                await exporter.export(other, tmp_path)
        # As far as anybody can tell, this is the same one.
        assert await exporter.export(other, tmp_path) == export_files.read_manifest(tmp_path)
