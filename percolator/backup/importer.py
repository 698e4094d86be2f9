"""Imports the tables of an export, completely or not at all.

All files are checked before anything is changed. Rows are loaded behind a fence (bulk load), which
hides them from every reader; the tables are opened when all rows are loaded, and then their indexes
are built. An interrupted import leaves its tables closed: the same import resumes where it stopped,
and `--abandon` opens them, empty. In a row store, the tables do not exist before all rows are
loaded, nor after `--abandon`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from percolator.aio.bulk_load import BulkLoad, LoadComplete, LoadPlan, LoadTimestamps, NotEmpty
from percolator.aio.database import Database
from percolator.aio.index_build import IndexBuild
from percolator.aio.row_load import RowLoad, finish_together
from percolator.backup import export_files, part_files
from percolator.backup.export_files import DamagedExport, Export, ExportedTable, ExportPart
from percolator.codecs.indexes import IndexDefinition
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SchemaError,
    UniqueViolation,
    UsageError,
)
from percolator.observers.observer_change import changed_observers, notified_alike
from percolator.process import private_opener
from percolator.v1.master_pb2 import (
    ChangeObserversRequest,
    Codecs,
    ColumnCodec,
    Observer,
    Table,
    TableOptions,
)

PARTS_AT_A_TIME = 4
_CALL_SECONDS = 60.0
_log = logging.getLogger("percolator.backup")

Progress = Callable[[int, int], None]
"""Called with the number of cells done, and of all cells."""


def verify(directory: Path, progress: Progress = lambda _done, _all: None) -> Export:
    """Checks every byte of an export. Raises `DamagedExport`, naming the file."""
    export = export_files.read_manifest(directory)
    part_files.require_readers(export.form)
    export_files.check_names(directory, export)
    done = 0
    for table in export.tables:
        _check_ranges(directory, table)
        for part in table.parts:
            export_files.check_part(directory, part)
            for cells in part_files.cells_of(directory, export, table, part):
                done += len(cells)
                progress(done, export.cells)
    return export


async def import_tables(
    database: Database,
    directory: Path,
    *,
    tables: Sequence[str] = (),
    progress: Progress = lambda _done, _all: None,
) -> Export:
    """Returns when all tables are imported. Raises `UsageError` if one is not empty."""
    export = await _checked(directory, tables)
    with open_log(directory) as log:
        await _Importer(database, directory, export, log, progress).run()
    return export


async def abandon(database: Database, directory: Path, *, tables: Sequence[str] = ()) -> list[str]:
    """Opens the tables that an interrupted import left closed.

    Returns the names of those that had been imported completely; the others are empty. What keeps
    an index from being completed is only logged: it would do so each time.
    """
    export = chosen(export_files.read_manifest(directory), tables)
    known = set(await database.tables())
    complete = []
    with open_log(directory) as log:
        for table in export.tables:
            if table.name not in known and not database.internal.engine.is_on_rows:
                continue
            load = _load_of(database, export, table)
            if await (load.reopen() if isinstance(load, BulkLoad) else load.abandon()):
                complete.append(table.name)
                await _register(database, table)
            if isinstance(load, BulkLoad):
                await _build_indexes(load, table.name)
        log.remove(table.name for table in export.tables)
    return complete


async def _build_indexes(load: BulkLoad, table: str) -> None:
    try:
        await load.build_indexes()
    except (SchemaError, UniqueViolation) as error:
        _log.warning("table %r is open, but an index is incomplete: %s", table, error.message)


async def _checked(directory: Path, tables: Sequence[str]) -> Export:
    found = export_files.read_manifest(directory)
    part_files.require_readers(found.form)
    export_files.check_names(directory, found)
    export = chosen(found, tables)
    for table in export.tables:
        _check_ranges(directory, table)
    for part in export.parts:
        await asyncio.to_thread(export_files.check_part, directory, part)
    return export


def chosen(export: Export, tables: Sequence[str]) -> Export:
    """The export reduced to these tables; all of it if none are named."""
    names = {table.name for table in export.tables}
    for name in tables:
        if name not in names:
            raise InvalidArgument("tables", f"{name!r} is not in the export")
    kept = tuple(table for table in export.tables if not tables or table.name in tables)
    return replace(export, tables=kept)


@dataclass
class _Load:
    """The load of one table."""

    table: ExportedTable
    load: BulkLoad | RowLoad
    timestamps: LoadTimestamps | None = None
    """None until the table is closed, and if it turned out to be open already, and complete."""


class _Importer:
    """One run of an import, which may resume an earlier one."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        export: Export,
        log: ImportLog,
        progress: Progress,
    ) -> None:
        self._database = database
        self._directory = directory
        self._export = export
        self._log = log
        self._progress = progress
        self._loads = [_Load(table, _load_of(database, export, table)) for table in export.tables]
        self._cells = 0
        self._cells_in_all = export.cells
        self._limit = asyncio.Semaphore(PARTS_AT_A_TIME)

    async def run(self) -> None:
        touched: list[_Load] = []
        try:
            for one in self._loads:
                await self._require_observers(one.table)
            for one in self._loads:
                with _naming(one):
                    if isinstance(one.load, BulkLoad):
                        await self._make(one.table)
                    # Noted before the load begins, which may fail after it has closed some tablets.
                    touched.append(one)
                    await self._close(one)
            for one in self._loads:
                await self._load(one)
        except BaseException as error:
            if _is_final(error):
                await self._undo(touched)
            elif touched:
                state = (
                    "unknown to all others" if isinstance(touched[0].load, RowLoad) else "closed"
                )
                _log.warning(
                    "the import was interrupted: its tables stay %s until the same import is "
                    "resumed and completes, or is abandoned",
                    state,
                )
            raise
        try:
            await self._open_all()
        except BaseException:
            _log.warning(
                "the import was interrupted when everything was loaded: run the same import again, "
                "which opens the tables that are still closed, registers their observers, and "
                "builds their indexes"
            )
            raise

    async def _require_observers(self, table: ExportedTable) -> None:
        """They are registered at the end: refused only then, they would be missing from a table
        that is open, and full."""
        engine = self._database.internal.engine
        if not table.observers:
            return
        try:
            found = await engine.catalog.describe(table.name, engine.now() + _CALL_SECONDS)
        except SchemaError:
            require_observers(table, ())
        else:
            require_observers(table, found.observers)

    async def _make(self, table: ExportedTable) -> None:
        """Creates the table with its splits, options and indexes. A table that exists already keeps
        its own, but must have a change feed if the exported one has, and the same indexes."""
        engine = self._database.internal.engine
        deadline = engine.now() + _CALL_SECONDS
        options = TableOptions(change_feed=table.change_feed)
        try:
            await engine.catalog.describe(table.name, deadline)
        except SchemaError:
            options = options_of(table)
        await engine.catalog.create(
            table.name,
            table.splits,
            options,
            exist_ok=True,
            deadline=deadline,
            codecs=codecs_of(table),
            indexes=indexes_of(table),
        )

    async def _close(self, one: _Load) -> None:
        """Closes the table. Resumes an earlier run if everything that it loaded is still there."""
        name, noted = one.table.name, self._log.tables.get(one.table.name)
        try:
            if noted is not None and await one.load.resume(noted.timestamps):
                one.timestamps = noted.timestamps
                return
            one.timestamps = await one.load.begin()
        except LoadComplete:
            return
        except NotEmpty as error:
            # That run itself has filled it: readers see none of its rows before all are loaded.
            if noted is not None and error.commit_timestamp == noted.timestamps.commit:
                return
            raise
        self._log.begun(name, one.timestamps)

    async def _load(self, one: _Load) -> None:
        if one.timestamps is None:
            self._tell(one.table.cells)
            return
        done = self._log.tables[one.table.name].parts
        try:
            async with asyncio.TaskGroup() as group:
                for part in one.table.parts:
                    if part.file in done:
                        self._tell(part.cells)
                    else:
                        group.create_task(self._load_part(one, part, one.timestamps))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _load_part(self, one: _Load, part: ExportPart, timestamps: LoadTimestamps) -> None:
        async with self._limit:
            batches = part_files.cells_of(self._directory, self._export, one.table, part)
            while (cells := await asyncio.to_thread(next, batches, None)) is not None:
                await one.load.load(cells, timestamps)
                self._tell(len(cells))
            self._log.loaded(one.table.name, part.file)

    def _tell(self, cells: int) -> None:
        self._cells += cells
        self._progress(self._cells, self._cells_in_all)

    async def _undo(self, touched: Sequence[_Load]) -> None:
        """Opens the tables, with nothing imported. Tables that were created stay, empty.

        So are those that an earlier run has left closed, unless they were complete.
        """
        over: list[_Load] = []
        for one in self._loads:
            try:
                if await self._reopen(one, is_touched=one in touched):
                    over.append(one)
            except SchemaError:
                over.append(one)  # it was dropped
            except PercolatorError as problem:
                _log.warning("table %r may have stayed closed: %s", one.table.name, problem)
        self._remove_log(over)

    async def _reopen(self, one: _Load, *, is_touched: bool) -> bool:
        """Opens one table. Returns whether the next run needs nothing that the log says about it.

        A table that is open already may be complete: only the log tells the next run that its rows
        are those of the import, and no others.
        """
        noted = self._log.tables.get(one.table.name)
        try:
            if not is_touched:
                return noted is None or await one.load.undo(noted.timestamps)
            is_complete = await one.load.abandon()
        except LoadComplete:
            is_complete = True
        if is_complete:
            _log.warning("table %r was already complete, and is open", one.table.name)
            await _register(self._database, one.table)
        return True

    def _remove_log(self, loads: Sequence[_Load]) -> None:
        self._log.remove(one.table.name for one in loads)

    async def _open_all(self) -> None:
        """Opens no table before all are complete.

        From then on, if this run is interrupted, the next one finds what is left to open.
        """
        begun = [(one.load, one.timestamps) for one in self._loads if one.timestamps is not None]
        on_tablets = [(load, run) for load, run in begun if isinstance(load, BulkLoad)]
        for load, run in on_tablets:
            await load.complete(run)
        for load, run in on_tablets:
            await load.open(run)
        await finish_together([(load, run) for load, run in begun if isinstance(load, RowLoad)])
        for one in self._loads:
            await _register(self._database, one.table)
        for one in self._loads:  # also those that an earlier run has opened
            if isinstance(one.load, BulkLoad):
                await one.load.build_indexes()
            else:
                await self._create_indexes(one.table)
        self._remove_log(self._loads)

    async def _create_indexes(self, table: ExportedTable) -> None:
        """Adds the indexes to a table of a row store, which is loaded without them."""
        wanted, database = indexes_of(table), self._database
        if not wanted:
            return
        engine = database.internal.engine
        deadline = engine.now() + _CALL_SECONDS
        info = await engine.catalog.change_indexes(table.name, wanted, deadline=deadline)
        for one in info.schema.indexes:
            await IndexBuild(database, engine, info.table_id, one, _CALL_SECONDS).build()


@contextmanager
def _naming(one: _Load) -> Iterator[None]:
    """Names the table whose options or indexes the cluster refuses: they are in the export, not in
    a call."""
    try:
        yield
    except InvalidArgument as error:
        option = error.field.removeprefix("options.")
        if option == error.field and not option.startswith("indexes"):
            raise
        # A feed is refused if the table exists: then the reason says how it gets one.
        may_differ = isinstance(one.load, BulkLoad) and option != "change_feed"
        mend = "; or create it with other options first, then import" if may_differ else ""
        reason = f"{one.table.name!r} cannot be made as it was exported: {option}: {error.reason}"
        raise InvalidArgument("tables", f"{reason}{mend}", where=error.where) from error


def _is_final(error: BaseException) -> bool:
    """The next attempt would fail, too: then no table is left closed for it.

    False if another import of the same export has taken over, because that one is at work.
    """
    if isinstance(error, InvalidArgument):
        return error.field != "run"
    return isinstance(error, DamagedExport | SchemaError | UsageError)


async def _register(database: Database, table: ExportedTable) -> None:
    """Registers the table's observers. This comes last: imported cells must not notify them.

    An observer that the export does not know, and that wants a backfill, is owed one: a worker that
    waited for the table may have registered it before there were any cells. The other observers
    have handled the cells before the export, and their results came with it.
    """
    engine = database.internal.engine
    catalog = engine.catalog
    added, paused = observers_of(table)
    exported = {one.name: one for one in added.add}
    there = await catalog.describe(table.name, engine.now() + _CALL_SECONDS)
    for one in there.observers:
        same = exported.get(one.name)
        is_owed = same is None or (same.backfill and notified_alike(one, same))
        if one.backfill and is_owed:
            # Registered anew: a backfill may already have passed rows that were imported later.
            added.remove.append(one.name)
            if same is None:
                added.add.append(one)
            if one.paused:
                added.pause.append(one.name)
    if added.add:
        await catalog.change_observers(added, engine.now() + _CALL_SECONDS)
    if paused.pause:
        await catalog.change_observers(paused, engine.now() + _CALL_SECONDS)


def _load_of(database: Database, export: Export, table: ExportedTable) -> BulkLoad | RowLoad:
    # The plan has the same name for every run, so that a later run takes over from an earlier.
    plan = LoadPlan(table.name, f"import-{export.at}", start=b"", end=b"", notify=False)
    if database.internal.engine.is_on_rows:
        return RowLoad(database, plan, options_of(table), codecs_of(table))
    return BulkLoad(database, plan)


def _check_ranges(directory: Path, table: ExportedTable) -> None:
    """Checks that the parts cover all of the table: each begins where the previous one ends."""
    begin = ""
    for part in table.parts:
        if part.start != begin:
            raise DamagedExport(
                f"{directory / export_files.MANIFEST}: {part.file} does not begin where the part "
                "before it ends"
            )
        begin = part.end
    if begin or not table.parts:
        raise DamagedExport(
            f"{directory / export_files.MANIFEST}: the last part of {table.name} is missing"
        )


NAME = "import.log"


@dataclass
class TableLog:
    """Entries of the log about one table."""

    timestamps: LoadTimestamps
    parts: set[str] = field(default_factory=set)


class ImportLog:
    """The progress of an import: import.log, in the directory of the export.

    It has lines of JSON, each after its CRC-32, and each durable before the import continues:

        begun   a table is closed, and its load has these timestamps
        part    that load has all cells of a file

    Only the line that a process was writing last can be broken. Whether an entry is still true is
    decided by the tablets: they know whose load they are closed for, and refuse a run that was
    taken over or cleared. So if the log is lost, damaged, or belongs to an import into another
    cluster, the only cost is that everything is loaded again.
    """

    def __init__(self, path: Path, file: IO[bytes] | None) -> None:
        self._path = path
        self._file = file
        self._can_note = file is not None
        self.tables: dict[str, TableLog] = {}
        if file is not None:
            self._read(file)

    def begun(self, table: str, timestamps: LoadTimestamps) -> None:
        """Notes a new load of the table, which replaces all earlier entries about it."""
        self._note(
            {"begun": table, "start": int(timestamps.start), "commit": int(timestamps.commit)}
        )

    def loaded(self, table: str, file: str) -> None:
        self._note({"part": file, "table": table})

    def remove(self, tables: Iterable[str]) -> None:
        """Deletes the log, since nothing of these tables is left to resume. It stays, as it is, if
        it is about others, too: an import of some tables must not cost the others their progress.
        """
        for table in tables:
            self.tables.pop(table, None)
        if self._file is None or self.tables:
            return
        try:
            self._path.unlink(missing_ok=True)
            export_files.sync_directory(self._path.parent)
        except OSError as error:
            _log.warning("%s, which is not needed any more, cannot be deleted: %s", NAME, error)

    def _note(self, entry: dict[str, Any]) -> None:
        self._take(entry)
        if self._file is None or not self._can_note:
            return
        text = json.dumps(entry).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            _write_out(self._file, line)
        except OSError as error:
            # The tables are closed, and loading them needs no log.
            self._can_note = False
            _log.warning(
                "the import's progress cannot be written down any more, so part of it is repeated "
                "if it is interrupted: %s",
                error,
            )

    def _read(self, file: IO[bytes]) -> None:
        content = file.read()
        intact = 0
        for line in content.splitlines(keepends=True):
            checksum, _, text = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
                break
            self._take(json.loads(text))
            intact += len(line)
        if intact < len(content):
            # New entries must not follow half a line.
            file.truncate(intact)

    def _take(self, entry: dict[str, Any]) -> None:
        if "begun" in entry:
            timestamps = LoadTimestamps(entry["start"], entry["commit"])
            self.tables[entry["begun"]] = TableLog(timestamps)
        else:
            self.tables[entry["table"]].parts.add(entry["part"])


def _write_out(file: IO[bytes], line: bytes) -> None:
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


@contextmanager
def open_log(directory: Path) -> Iterator[ImportLog]:
    """Opens the log. Raises `UsageError` if another process is importing from this directory."""
    path = directory / NAME
    try:
        # Unbuffered, so that what could not be written is not tried again when it is closed.
        file = open(path, "a+b", buffering=0, opener=private_opener)  # noqa: SIM115
    except OSError as error:
        _log.warning(
            "the import's progress cannot be written down, so it cannot be resumed if it is "
            "interrupted: %s",
            error,
        )
        yield ImportLog(path, None)
        return
    with file:
        export_files.lock(file.fileno(), path, "importing, according to")
        file.seek(0)
        yield ImportLog(path, file)


def options_of(table: ExportedTable) -> TableOptions:
    """The options that it had."""
    options = TableOptions(
        change_feed=table.change_feed,
        retention_milliseconds=table.retention_milliseconds,
        split_bytes=table.split_bytes,
    )
    for column, milliseconds in table.ttls:
        options.ttls.add(column=bytes.fromhex(column), ttl_milliseconds=milliseconds)
    return options


def codecs_of(table: ExportedTable) -> Codecs | None:
    """The codecs that its schema names; None if it says nothing."""
    if table.codecs is None:
        return None
    columns = [
        ColumnCodec(column=bytes.fromhex(column), codec=codec)
        for column, codec in table.codecs.columns
    ]
    return Codecs(key=table.codecs.key, columns=columns)


def indexes_of(table: ExportedTable) -> list[IndexDefinition]:
    """Its indexes, for a new table."""
    return [
        IndexDefinition(
            one.name,
            tuple((bytes.fromhex(column), codec) for column, codec in one.columns),
            one.unique,
        )
        for one in table.indexes
    ]


def observers_of(
    table: ExportedTable,
) -> tuple[ChangeObserversRequest, ChangeObserversRequest]:
    """The request that registers its observers, and the one that pauses some of them after that."""
    observers = [
        Observer(
            name=one.name,
            columns=[bytes.fromhex(column) for column in one.columns],
            weak=one.weak,
            paused=one.paused,
            backfill=one.backfill,
        )
        for one in table.observers
    ]
    paused = [one.name for one in table.observers if one.paused]
    return (
        ChangeObserversRequest(table=table.name, add=observers),
        ChangeObserversRequest(table=table.name, pause=paused),
    )


def require_observers(table: ExportedTable, present: Iterable[Observer]) -> None:
    """Raises `InvalidArgument` unless a table with these observers can get those of the export."""
    added, _ = observers_of(table)
    try:
        changed_observers(Table(name=table.name, observers=present), added)
    except InvalidArgument as error:
        reason = f"the observers of {table.name!r} cannot be registered: {error.reason}"
        raise InvalidArgument("tables", reason) from error
