"""Tables that an interrupted import has left closed, if it cannot go on."""

from __future__ import annotations

import copy
import errno
import fcntl
import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

import percolator.testing
from percolator import Table, aio, codecs
from percolator.aio.bulk_load import BulkLoad, LoadPlan, LoadTimestamps, NotEmpty
from percolator.aio.connecting import connect_to
from percolator.aio.database import Database
from percolator.backup import export_files, exporter, importer
from percolator.backup.export_files import (
    DamagedExport,
    Export,
    ExportedCodecs,
    ExportedIndex,
    ExportedObserver,
    ExportedTable,
    ExportFormat,
    ExportPart,
    file_of,
)
from percolator.backup.importer import (
    codecs_of,
    indexes_of,
    observers_of,
    open_log,
    options_of,
    require_observers,
)
from percolator.errors import InvalidArgument, SchemaError, UniqueViolation, UsageError
from percolator.recipes import Export as Entry
from percolator.recipes import ExportFile, ExportQueue, export_queue
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.local_database import PATIENT_LIMITS, PATIENT_RETRIES
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.master_pb2 import ChangeObserversRequest, Observer
from percolator.world import MachineClock, World
from tests.unit.backup.test_exports import export
from tests.unit.rowstore.model_store import loading

# A database in memory whose tablets are loaded in bulk, for tests of imports.


class LoadedCluster(ClusterInMemory):
    """Its tablets answer what a bulk load asks, too."""

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return await self._serving(request.target).fence(request)

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        return await self._serving(request.target).load(request)


class Loaded(NamedTuple):
    """Parts that tests use."""

    database: aio.Database
    cluster: LoadedCluster

    async def closed(self) -> list[str]:
        """The names of the tables of which some rows are closed for a bulk load."""
        infos = await self.database.internal.engine.catalog.tables(
            self.database.internal.engine.now() + 10
        )
        return [
            info.name
            for info in infos
            if any(
                len(list(tablet._state.load_fences))
                for tablet in self.cluster.tablets.values()
                if tablet.identity.table_id == info.table_id
            )
        ]


@asynccontextmanager
async def loaded_tablets() -> AsyncIterator[Loaded]:
    clock = MachineClock()
    cluster = LoadedCluster(clock)
    network = InProcessNetwork({ADDRESS: cluster})
    world = World(clock=clock, network=network, random=random.Random(1))
    async with await connect_to(world, [ADDRESS], PATIENT_LIMITS, PATIENT_RETRIES) as database:
        yield Loaded(database, cluster)


pytestmark = pytest.mark.real_time

A, B = Table("a", key=codecs.text), Table("b", key=codecs.text)
TABLES = (A, B)
ROWS = 10


@pytest.fixture
def at() -> AbstractAsyncContextManager[Loaded]:
    """Tablets that tables are imported into."""
    return loaded_tablets()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of an export."""
    return tmp_path / "out"


class Interrupted(Exception):
    """Stands in for anything that ends a process."""


def refusing(code: int) -> Any:
    """Stands in for a call to the system that fails."""
    return Mock(side_effect=OSError(code, os.strerror(code)))


async def exported(database: Database, directory: Path, *tables: Table[str]) -> None:
    """Fills the tables, exports them, and drops them."""
    for table in tables:
        await database.create_table(table, exist_ok=True)
        async with database.transaction() as tx:
            for number in range(ROWS):
                await tx.set(f"{number:03}", table.column("v", codecs.integer), number)
    at = await database.timestamp()
    names = [table.name for table in tables]
    planned = await exporter._plan(database, at, names, named=True, form=ExportFormat.JSONL)
    export_files.write_export(directory / export_files.PLAN, planned)
    pin: Any = SimpleNamespace(at=at)
    done = await exporter._Exporter(database, directory, planned, pin, lambda *_: None).run()
    export_files.write_export(directory / export_files.MANIFEST, done)
    for table in tables:
        await database.drop_table(table)


async def rows_of(database: Database, table: Table[str]) -> int:
    async with database.snapshot() as snapshot:
        return len([row async for row in snapshot.scan(table)])


async def interrupt_opening(at: Loaded, directory: Path) -> None:
    """Interrupts an import when its first table is open."""
    correct = BulkLoad.open

    async def opened(load: BulkLoad, timestamps: LoadTimestamps) -> None:
        if load._plan.table == B.name:
            raise Interrupted
        await correct(load, timestamps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BulkLoad, "open", opened)
        with pytest.raises(Interrupted):
            await importer.import_tables(at.database, directory)
    assert await at.closed() == [B.name]


async def interrupt_loading(at: Loaded, directory: Path) -> None:
    """Interrupts an import when some tables are loaded."""

    def progress(done: int, _all: int) -> None:
        if done > ROWS:
            raise Interrupted

    with pytest.raises(Interrupted):
        await importer.import_tables(at.database, directory, progress=progress)
    assert await at.closed() == [A.name, B.name]


async def test_a_refused_import_opens_what_an_earlier_run_has_left_closed(
    at: Loaded, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also complete tables that the refused run has not come to: else they would be closed, and
    nothing would say so, since the log is deleted."""
    await exported(at.database, directory, *TABLES)
    await interrupt_opening(at, directory)
    async with at.database.transaction() as tx:
        await tx.set("000", A.column("v", codecs.integer), 99)
    with pytest.raises(NotEmpty, match="'a' is not empty"):
        await importer.import_tables(at.database, directory)
    assert await at.closed() == []
    assert "table 'b' was already complete, and is open" in caplog.text
    assert await rows_of(at.database, B) == ROWS
    assert not (directory / importer.NAME).exists()


def watch(directory: Path) -> None:
    """Makes this the export of a table with an observer."""
    whole = export_files.read_manifest(directory)
    observer = ExportedObserver("watcher", (b"v".hex(),), weak=False, paused=False)
    tables = (replace(whole.tables[0], observers=(observer,)), *whole.tables[1:])
    export_files.write_export(directory / export_files.MANIFEST, replace(whole, tables=tables))


async def register(database: Database, column: str) -> None:
    engine = database.internal.engine
    other = Observer(name="watcher", columns=[column.encode()])
    request = ChangeObserversRequest(table=A.name, add=[other])
    await engine.catalog.change_observers(request, engine.now() + 10)


async def test_observers_that_have_waited_for_an_imported_table_are_owed_its_cells(
    at: Loaded, directory: Path
) -> None:
    """But not those that came with the export: they have handled the cells before."""
    engine = at.database.internal.engine
    await exported(at.database, directory, *TABLES)
    watch(directory)
    names = {"watcher": True, "new": True, "only what is new": False}
    waiting = [
        Observer(name=name, columns=[b"v"], backfill=backfill) for name, backfill in names.items()
    ]
    request = ChangeObserversRequest(table=A.name, add=waiting, awaited=True)
    assert not await engine.catalog.await_table(request, engine.now() + 10)
    await importer.import_tables(at.database, directory)
    found = (await engine.catalog.describe(A.name, engine.now() + 10)).observers
    owed = {one.name: list(one.owed.columns) for one in found}
    assert owed == {"watcher": [], "new": [b"v"], "only what is new": []}


async def test_so_does_one_that_is_refused_for_its_observers(at: Loaded, directory: Path) -> None:
    await exported(at.database, directory, *TABLES)
    await interrupt_loading(at, directory)

    watch(directory)
    await register(at.database, "label")
    with pytest.raises(InvalidArgument, match="observers"):
        await importer.import_tables(at.database, directory)
    assert await at.closed() == []
    assert await rows_of(at.database, A) == await rows_of(at.database, B) == 0


@pytest.mark.parametrize("cluster", [loaded_tablets, loading])
async def test_complete_tables_get_their_observers_once_nothing_is_in_the_way(
    directory: Path, monkeypatch: pytest.MonkeyPatch, cluster: Any
) -> None:
    """However often the import is refused until then, since another observer has the name."""
    async with cluster() as at:
        await exported(at.database, directory, *TABLES)
        watch(directory)
        correct = importer._register

        async def too_late(database: Database, table: ExportedTable) -> None:
            if table.name == A.name:
                await register(database, "label")
            await correct(database, table)

        with monkeypatch.context() as patch:
            patch.setattr(importer, "_register", too_late)
            with pytest.raises(InvalidArgument, match="watcher"):
                await importer.import_tables(at.database, directory)
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="watcher"):
                await importer.import_tables(at.database, directory)

        engine = at.database.internal.engine
        removal = ChangeObserversRequest(table=A.name, remove=["watcher"])
        await engine.catalog.change_observers(removal, engine.now() + 10)
        await importer.import_tables(at.database, directory)
        (observer,) = (await engine.catalog.describe(A.name, engine.now() + 10)).observers
        assert observer.columns == [b"v"]
        assert await rows_of(at.database, A) == await rows_of(at.database, B) == ROWS
        assert not (directory / importer.NAME).exists()


async def test_the_import_of_one_table_leaves_the_progress_of_the_others(
    at: Loaded, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await exported(at.database, directory, *TABLES)
    await interrupt_loading(at, directory)
    await importer.import_tables(at.database, directory, tables=[A.name])
    assert await at.closed() == [B.name]
    with importer.open_log(directory) as log:
        begun = log.tables[B.name].timestamps
    runs: list[LoadTimestamps] = []
    correct = BulkLoad.open

    async def opened(load: BulkLoad, timestamps: LoadTimestamps) -> None:
        runs.append(timestamps)
        await correct(load, timestamps)

    monkeypatch.setattr(BulkLoad, "open", opened)
    await importer.import_tables(at.database, directory)
    assert runs == [begun]
    assert await rows_of(at.database, A) == await rows_of(at.database, B) == ROWS
    assert not (directory / importer.NAME).exists()


async def test_an_import_that_is_interrupted_at_the_end_says_how_to_open_the_rest(
    at: Loaded, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await exported(at.database, directory, *TABLES)
    await interrupt_opening(at, directory)
    assert "run the same import again" in caplog.text
    await importer.import_tables(at.database, directory)
    assert await at.closed() == []
    assert await rows_of(at.database, A) == await rows_of(at.database, B) == ROWS


async def test_a_log_that_cannot_be_deleted_does_not_fail_the_import(
    at: Loaded, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the file system has become read-only meanwhile."""
    await exported(at.database, directory, *TABLES)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refusing(errno.EROFS))
        await importer.import_tables(at.database, directory)
    assert "import.log, which is not needed any more, cannot be deleted" in caplog.text
    assert await rows_of(at.database, B) == ROWS


async def test_a_table_that_another_import_has_left_closed_is_named(
    at: Loaded, tmp_path: Path
) -> None:
    await exported(at.database, tmp_path / "one", *TABLES)
    await exported(at.database, tmp_path / "other", B)
    await interrupt_loading(at, tmp_path / "one")
    said = r"table: 'b' cannot be closed: .* another load, 'import-\d+': complete or abandon"
    for work in (importer.import_tables, importer.abandon):
        with pytest.raises(InvalidArgument, match=said):
            await work(at.database, tmp_path / "other")
    assert await at.closed() == [A.name, B.name]


async def test_only_what_the_other_load_has_closed_stays_closed(at: Loaded, tmp_path: Path) -> None:
    """The other one needs only some rows of the table, and the import comes to them last."""
    await exported(at.database, tmp_path / "out", A)
    await at.database.create_table(A, splits=["m"])
    other = BulkLoad(at.database, LoadPlan(A.name, "other", b"m", b"", notify=False))
    timestamps = await other.begin()
    with pytest.raises(InvalidArgument, match="another load, 'other'"):
        await importer.import_tables(at.database, tmp_path / "out")
    tablets = at.cluster.tablets.values()
    assert [one.identity.start for one in tablets if list(one._state.load_fences)] == [b"m"]
    await other.finish(timestamps)
    await importer.import_tables(at.database, tmp_path / "out")
    assert await rows_of(at.database, A) == ROWS


async def test_a_table_that_exists_without_a_feed_is_to_be_given_one(
    at: Loaded, tmp_path: Path
) -> None:
    """It cannot be created with other options: it exists."""
    await exported(at.database, tmp_path / "out", A)
    whole = export_files.read_manifest(tmp_path / "out")
    tables = (replace(whole.tables[0], change_feed=True),)
    export_files.write_export(
        tmp_path / "out" / export_files.MANIFEST, replace(whole, tables=tables)
    )
    await at.database.create_table(A)
    said = r"'a' cannot be made as it was exported: change_feed: .* tables change-feed\)$"
    with pytest.raises(InvalidArgument, match=said):
        await importer.import_tables(at.database, tmp_path / "out")


NOTED = LoadTimestamps(3, 4)


C = Table("c", key=codecs.text)
by_value = C.column("v", codecs.integer, unique=True)
by_both = C.index("both", by_value, C.column("w", codecs.text))


async def keys_of(database: Database, index: Any, *values: object) -> list[str]:
    async with database.snapshot() as snapshot:
        return [row.key async for row in snapshot.find(index, *values)]


async def test_the_indexes_of_an_export_are_built_over_what_is_imported(
    at: Loaded, directory: Path
) -> None:
    await exported(at.database, directory, C, A)
    await importer.import_tables(at.database, directory)
    assert await keys_of(at.database, by_value, 7) == ["007"]
    for index in (by_value, by_both):
        assert await at.database.check_index(index) == []
    tx = at.database.transaction()
    tx.set("new", by_value, 7)
    with pytest.raises(UniqueViolation, match="row '007' has the same value"):
        await tx.commit()
    with pytest.raises(SchemaError, match="table 'a' has no index 'v'"):
        await keys_of(at.database, A.column("v", codecs.integer))


async def test_an_import_that_ends_before_the_indexes_are_built_builds_them_when_it_is_resumed(
    at: Loaded, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await exported(at.database, directory, A, C)

    async def interrupted(_: BulkLoad) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(BulkLoad, "build_indexes", interrupted)
        with pytest.raises(Interrupted):
            await importer.import_tables(at.database, directory)
    assert await at.closed() == []
    with pytest.raises(SchemaError, match="index 'v' is not complete"):
        await keys_of(at.database, by_value)
    await importer.import_tables(at.database, directory)
    assert await keys_of(at.database, by_value, 7) == ["007"]
    assert not (directory / importer.NAME).exists()


async def test_rows_that_an_index_cannot_have_are_imported_and_named(
    at: Loaded, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the index was still being built when the table was exported."""
    await at.database.create_table(A)
    async with at.database.transaction() as tx:
        for row in ("ann", "bob"):
            tx.set(row, A.column("name", codecs.text), "same")
    await exported(at.database, directory, A, B)
    export = export_files.read_manifest(directory)
    name = ExportedIndex("name", ((b"name".hex(), "text"),), unique=True)
    with_index = replace(export.tables[0], indexes=(name,))
    damaged = replace(export, tables=(with_index, export.tables[1]))
    export_files.write_export(directory / export_files.MANIFEST, damaged)
    with pytest.raises(UniqueViolation, match="the rows are loaded, but an index is incomplete"):
        await importer.import_tables(at.database, directory)
    assert await at.closed() == []
    assert await rows_of(at.database, A) == ROWS + 2
    for _ in range(2):
        await importer.abandon(at.database, directory)
    assert "table 'a' is open, but an index is incomplete: " in caplog.text
    assert "have the same value in 'name'" in caplog.text
    assert not (directory / importer.NAME).exists()


async def test_a_table_that_exists_must_have_the_indexes_of_the_export(
    at: Loaded, directory: Path
) -> None:
    await exported(at.database, directory, A, C)
    await at.database.create_table(Table("c", key=codecs.text))
    with pytest.raises(SchemaError, match="table 'c' exists without the index 'both'"):
        await importer.import_tables(at.database, directory)
    assert await at.closed() == []
    for index in (by_value, by_both):
        await at.database.create_index(index)
    await importer.import_tables(at.database, directory)
    assert await keys_of(at.database, by_value, 7) == ["007"]


def test_an_import_whose_disk_is_full_goes_on_and_can_be_resumed_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_log(tmp_path) as log:
        log.begun("t", NOTED)
        log.loaded("t", "t/part-00000.jsonl")
        monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
        log.loaded("t", "t/part-00001.jsonl")
        log.loaded("t", "t/part-00002.jsonl")
        assert len(log.tables["t"].parts) == 3
    assert [one.message for one in caplog.records] == [
        "the import's progress cannot be written down any more, so part of it is repeated if it is "
        "interrupted: [Errno 28] No space left on device"
    ]
    with open_log(tmp_path) as again:
        assert again.tables["t"].timestamps == NOTED
        assert again.tables["t"].parts >= {"t/part-00000.jsonl"}
        assert "t/part-00002.jsonl" not in again.tables["t"].parts


def test_an_import_whose_disk_was_full_leaves_no_log_once_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_log(tmp_path) as log:
        with monkeypatch.context() as failing:
            failing.setattr(os, "fsync", refusing(errno.EIO))
            log.begun("t", NOTED)
        log.remove(["t"])
    assert list(tmp_path.iterdir()) == []


def test_a_log_is_locked_on_nfs_too_which_locks_only_what_is_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = fcntl.flock

    def as_on_nfs(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        correct(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    with (
        open_log(tmp_path),
        pytest.raises(UsageError, match="another process is importing, according to"),
        open_log(tmp_path),
    ):
        pass


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    with (
        pytest.raises(InvalidArgument, match=r"import\.log cannot be locked: .*No locks available"),
        open_log(tmp_path),
    ):
        pass
    with (
        pytest.raises(InvalidArgument, match=f"{tmp_path} cannot be locked"),
        export_files.locked(tmp_path, "exporting to"),
    ):
        pass


TABLE = ExportedTable(
    "goods",
    7,
    3_600_000,
    1 << 30,
    (ExportedObserver("watcher", (b"price".hex(),), weak=False, paused=True),),
    (
        ExportPart(file_of("goods", 0), "", b"m".hex(), 3, 120, "ab" * 32, (b"price".hex(),)),
        ExportPart(file_of("goods", 1), b"m".hex(), "", 4, 150, "cd" * 32, (b"price".hex(),)),
    ),
    change_feed=True,
    codecs=ExportedCodecs("text", ((b"price".hex(), "integer"),)),
    ttls=((b"label".hex(), 86_400_000),),
    indexes=(ExportedIndex("by price", ((b"price".hex(), "integer"),), unique=True),),
)
OTHERS: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 1.5, 2**63, 2**64, 10**400),
    *("", "a", "00", "zz", "a b", "AB", "../a", "/etc/passwd", "\0", "\ud800", "x" * 5_000),
    *([], {}, [[]], ["zz"], [1], [["00", -1]], [["00", 10**400]], [["zz", 1]], [["00", "\ud800"]]),
)


def places(record: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in record if isinstance(record, dict) else range(len(record)):
        yield (*above, key)
        if isinstance(record[key], dict | list):
            yield from places(record[key], (*above, key))


def inside_of(record: Any, place: tuple[Any, ...]) -> Any:
    """The container of the entry at this place."""
    for key in place[:-1]:
        record = record[key]
    return record


def edited(record: dict[str, Any], place: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The record without this entry, and with others in its place."""
    for other in (KeyError, *OTHERS):
        changed = copy.deepcopy(record)
        inside = inside_of(changed, place)
        if other is KeyError:
            del inside[place[-1]]
        else:
            inside[place[-1]] = other
        yield changed


def signed(path: Path, record: dict[str, Any]) -> Path:
    checksum = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record | {"checksum": checksum}))
    return path


@pytest.fixture
def manifest(tmp_path: Path) -> dict[str, Any]:
    export_files.write_export(tmp_path / "whole.json", Export(123, (TABLE,)))
    return export_files.read_record(tmp_path / "whole.json")


def test_an_edited_manifest_is_refused_or_everything_in_it_can_be_asked_for(
    manifest: dict[str, Any], tmp_path: Path
) -> None:
    outcomes: Counter[str] = Counter()
    for place in places(manifest):
        for record in edited(manifest, place):
            try:
                export = export_files.read_export(signed(tmp_path / "edited.json", record))
            except (DamagedExport, InvalidArgument) as refusal:
                outcomes[type(refusal).__name__] += 1
                continue
            outcomes["read"] += 1
            for table in export.tables:
                for message in (options_of(table), codecs_of(table), *observers_of(table)):
                    assert message is None or message.SerializeToString() is not None
                for index in indexes_of(table):
                    assert index.message().SerializeToString()
                assert len(table.splits) == max(len(table.parts) - 1, 0)
    assert min(outcomes[one] for one in ("read", "DamagedExport", "InvalidArgument")) > 20


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (
            ("retention_milliseconds",),
            -1,
            r"tables\[0\]: ExportedTable refuses.*-1 is out of range",
        ),
        (("ttls", 0, 0), "zz", r"tables\[0\]: .*non-hexadecimal"),
        (("indexes", 0, "columns", 0, 0), "zz", r"tables\[0\]\.indexes\[0\]: .*non-hexadecimal"),
        (("observers", 0, "weak"), 1, r"tables\[0\]\.observers\[0\]\.weak: expected bool, got int"),
        (("codecs", "key"), "\ud800", r"tables\[0\]\.codecs\.key: .*UTF-8"),
    ],
)
def test_a_refusal_names_the_entry_of_a_manifest(
    manifest: dict[str, Any], tmp_path: Path, place: tuple[Any, ...], value: object, said: str
) -> None:
    inside_of(manifest["tables"][0], place)[place[-1]] = value
    with pytest.raises(DamagedExport, match=f"is not the record of an export: {said}"):
        export_files.read_export(signed(tmp_path / "edited.json", manifest))


def test_observers_that_a_table_cannot_get_are_refused_by_the_name_of_the_table() -> None:
    require_observers(TABLE, [Observer(name="watcher", columns=[b"price"])])
    other = Observer(name="watcher", columns=[b"label"])
    with pytest.raises(InvalidArgument, match=r"observers of 'goods' cannot be .*'watcher', for"):
        require_observers(TABLE, [other])


# A queue that was exported with entries in it, and imported, loses none of them.


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 100])
async def test_imported_exports_of_one_key_have_different_numbers_in_order(
    tmp_path: Path, batch: int
) -> None:
    """An import gives all entries one commit timestamp, of which numbers are made. However many of
    them a call is given, what was put after the import comes last."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.integer, buckets=1)
    async with percolator.testing.connect_async() as database:
        await mails.create(database)
        for number in range(0, 10, 2):
            async with database.transaction() as tx:
                await mails.put(tx, "ann", number)
                await mails.put(tx, "bob", number)
                await mails.put(tx, "ann", number + 1)
        await export(database, tmp_path / "export")

    file = ExportFile(tmp_path / "mails.jsonl")
    sent: list[Entry[str, int]] = []

    @mails.exporter(batch=batch)
    async def send(exports: Sequence[Entry[str, int]]) -> None:
        assert len(exports) <= batch
        sent.extend(exports)
        assert file.append(exports) == len(exports)

    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        async with at.database.transaction() as tx:
            await mails.put(tx, "ann", 10)
        await percolator.testing.run_observers_async(at.database, [send])
        async with at.database.snapshot() as snapshot:
            assert await mails.pending(snapshot) == 0
    assert [one.value for one in sent if one.key == "ann"] == list(range(11))
    assert [one.value for one in sent if one.key == "bob"] == list(range(0, 10, 2))


async def exported_queue(mails: ExportQueue[str, int], values: Iterable[int], path: Path) -> None:
    """Exports the queue after so many transactions, each of which has put one value."""
    async with percolator.testing.connect_async() as database:
        await mails.create(database)
        for value in values:
            async with database.transaction() as tx:
                await mails.put(tx, "ann", value)
        await export(database, path)


async def taken_by(at: Any, mails: ExportQueue[str, Any], most: int) -> Sequence[Entry[str, Any]]:
    """Entries that one run takes from the queue, whose keys are all in one bucket."""
    async with at.database.transaction() as tx:
        return await mails._take(tx, mails._rows.bucket(mails.key_bytes("ann")), most)


async def test_what_is_put_while_they_get_their_numbers_comes_after_them(tmp_path: Path) -> None:
    """Its commit is older than that of the run that gives the numbers."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.integer, buckets=1)
    await exported_queue(mails, range(4), tmp_path / "export")

    sent: list[Entry[str, int]] = []
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        bucket = mails._rows.bucket(mails.key_bytes("ann"))
        for number in range(4, 8):
            async with at.database.transaction() as tx:
                taken = await mails._take(tx, bucket, 2)
                if not sent and not taken:
                    async with at.database.transaction() as other:
                        await mails.put(other, "ann", number)
            sent += taken
        async with at.database.snapshot() as snapshot:
            left = await mails.pending(snapshot)
        assert ([one.value for one in sent], left) == ([0, 1, 2, 3], 2)
        sent += await taken_by(at, mails, 100)
    assert [one.value for one in sent] == list(range(6))
    assert [one.sequence for one in sent] == sorted({one.sequence for one in sent})


async def test_queues_that_are_imported_twice_keep_their_order(tmp_path: Path) -> None:
    """The second time when only some of the entries have got their numbers."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.integer, buckets=1)
    await exported_queue(mails, range(5), tmp_path / "first")

    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "first")
        assert await taken_by(at, mails, 2) == []
        await export(at.database, tmp_path / "second")

    sent: list[Entry[str, int]] = []
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "second")
        for _ in range(6):
            sent += await taken_by(at, mails, 2)
    assert [one.value for one in sent] == list(range(5))
    assert [one.sequence for one in sent] == sorted({one.sequence for one in sent})


async def test_many_keys_with_few_imported_entries_take_few_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run numbers those of as many keys as the next one can take; of large values, fewer."""
    mails = ExportQueue("mails", key=codecs.text, value=codecs.text, buckets=1)
    async with percolator.testing.connect_async() as database:
        await mails.create(database)
        for value in "ab":
            async with database.transaction() as tx:
                for number in range(40):
                    await mails.put(tx, f"{number}", value * 10)
        await export(database, tmp_path / "export")

    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        assert [len(await taken_by(at, mails, 50)) for _ in range(4)] == [0, 50, 0, 30]

    monkeypatch.setattr(export_queue, "BATCH_BYTES", 100)
    async with loading() as at:
        await importer.import_tables(at.database, tmp_path / "export")
        async with at.database.transaction() as tx:
            assert await mails._take(tx, mails._rows.bucket(mails.key_bytes("0")), 50) == []
            written = [write for kind, write in tx.internal.writes.cells.values() if write]
        assert len(written) == 12
