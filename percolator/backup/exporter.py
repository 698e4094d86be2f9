"""Exports tables, as they are at one timestamp, while the cluster is in use.

A pin keeps that timestamp readable until the end. Each part is read page by page, as parallel
lists; other threads encode them and write the files (`part_files.py`). An interrupted export is
resumed at its own timestamp, as long as history reaches back that far: finished parts are checked,
not exported again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from percolator import codecs
from percolator.aio.database import Database
from percolator.aio.pin import Pin
from percolator.arguments import as_timestamp
from percolator.backup import export_files, part_files
from percolator.backup.export_files import (
    Export,
    ExportedCodecs,
    ExportedIndex,
    ExportedObserver,
    ExportedTable,
    ExportFormat,
    ExportPart,
    file_of,
)
from percolator.backup.part_files import Piece
from percolator.codecs.indexes import IndexDefinition, indexes_of
from percolator.errors import InvalidArgument, SchemaError
from percolator.process import PRIVATE_DIRECTORY_MODE
from percolator.schema import INTERNAL_PREFIX, Table
from percolator.timestamps import Timestamp
from percolator.v1 import master_pb2

PARTS_AT_A_TIME = 4
COLUMNS_NOTED_MAX = 1_000
"""The most column names recorded for a part: a table may have as many columns as cells."""
_PAGE_SECONDS = 60.0

Progress = Callable[[int, int, int], None]
"""Called with the number of cells done, of parts done, and of all parts."""


async def export(
    database: Database,
    directory: Path,
    *,
    at: Timestamp | datetime | None = None,
    tables: Sequence[str] = (),
    progress: Progress = lambda _cells, _done, _all: None,
    pin_ttl_seconds: float | None = None,
    form: ExportFormat | None = None,
) -> Export:
    """Exports tables (all, if none are named) as they are at `at`, or now. Returns once complete.

    Without a `form`, the files are Parquet, or what those of the interrupted export are. Raises
    `InvalidArgument` if the directory contains something else, and `SnapshotTooOld`.
    """
    wanted = None if at is None else as_timestamp(at, "at")
    if not export_files.is_there(directory / export_files.PLAN):
        part_files.require_readers(form or ExportFormat.PARQUET)
    _check_directory(directory)
    # Otherwise, two processes would overwrite each other's files.
    with export_files.locked(directory, "exporting to"):
        return await _export(database, directory, wanted, tables, progress, pin_ttl_seconds, form)


async def _export(
    database: Database,
    directory: Path,
    wanted: Timestamp | None,
    tables: Sequence[str],
    progress: Progress,
    pin_ttl_seconds: float | None,
    form: ExportFormat | None,
) -> Export:
    planned = _interrupted(directory, wanted, tables, form)
    form = (form or ExportFormat.PARQUET) if planned is None else planned.form
    part_files.require_readers(form)
    if planned is not None:
        wanted = Timestamp(planned.at)
    if planned is None:
        names = await _names(database, tables, wanted)
    else:
        await _require_same_cluster(database, directory, planned)
        await _require_same_tables(database, planned)
        names = [table.name for table in planned.tables]
    kept = [Table(name, key=codecs.stored) for name in names]
    # In ASCII and truncated: the lock service refuses longer text, and names that are not text.
    what = f"export to {ascii(directory.name)[:100]}"
    pin = database.pin(wanted, tables=kept, description=what, ttl=pin_ttl_seconds)
    async with pin:
        if planned is None:
            planned = await _plan(database, pin.at, names, named=bool(tables), form=form)
            export_files.write_export(directory / export_files.PLAN, planned)
        done = await _Exporter(database, directory, planned, pin, progress).run()
        await _require_same_tables(database, planned)
        export_files.write_export(directory / export_files.MANIFEST, done)
    return done


def _check_directory(directory: Path) -> None:
    if export_files.is_there(directory / export_files.MANIFEST):
        raise InvalidArgument("directory", f"{directory} already contains a complete export")
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise InvalidArgument("directory", f"{directory} cannot be used: {error}") from error
    # A partly written plan does not count.
    if export_files.PLAN not in names and names - {
        export_files.unfinished(Path(export_files.PLAN)).name
    }:
        raise InvalidArgument(
            "directory", f"{directory} is neither empty nor an interrupted export"
        )


def _interrupted(
    directory: Path, at: Timestamp | None, tables: Sequence[str], form: ExportFormat | None
) -> Export | None:
    if not export_files.is_there(directory / export_files.PLAN):
        return None
    planned = export_files.read_export(directory / export_files.PLAN)
    if at is not None and at != planned.at:
        raise InvalidArgument(
            "at",
            f"the export in {directory} was started at {Timestamp(planned.at).describe()}: resume "
            "it without this, or use another directory",
        )
    names = [table.name for table in planned.tables]
    if tables and set(tables) != set(names):
        raise InvalidArgument(
            "tables", f"the export in {directory} was started with {', '.join(names)}"
        )
    if form not in (None, planned.form):
        raise InvalidArgument("format", f"the export in {directory} was started as {planned.form}")
    return planned


async def _names(database: Database, tables: Sequence[str], wanted: Timestamp | None) -> list[str]:
    engine = database.internal.engine
    described = await engine.catalog.describe_all(engine.now() + _PAGE_SECONDS)
    known = [table for table in described if not table.deleting]
    unknown = sorted(set(tables) - {table.name for table in known})
    if unknown:
        raise SchemaError(f"there is no table {unknown[0]!r}", table=unknown[0])
    return sorted(set(tables)) or sorted(
        table.name
        for table in known
        # Percolator's own tables describe one cluster, and are not exported. Younger tables are
        # left out before the pin is set: of their history, less may be kept.
        if not table.name.startswith(INTERNAL_PREFIX)
        and (wanted is None or table.created_at <= wanted)
    )


async def _plan(
    database: Database,
    at: int,
    names: Sequence[str],
    *,
    named: bool,
    form: ExportFormat = ExportFormat.PARQUET,
) -> Export:
    """All tables that existed at that timestamp. Raises `SchemaError` if one that the caller has
    `named` did not."""
    catalog, found = database.internal.engine.catalog, []
    for name in names:
        deadline = database.internal.engine.now() + _PAGE_SECONDS
        table = await catalog.describe(name, deadline)
        if named:
            (await catalog.table(name, deadline)).require_older_than(at)
        elif table.created_at > at:
            continue
        ranges = await database.internal.engine.ranges.of_table(table.table_id, deadline)
        observers = tuple(
            ExportedObserver(
                one.name,
                tuple(column.hex() for column in one.columns),
                one.weak,
                one.paused,
                one.HasField("owed"),
            )
            for one in table.observers
        )
        parts = tuple(
            ExportPart(file_of(name, number, form), one.start.hex(), one.end.hex())
            for number, one in enumerate(ranges)
        )
        options = table.options
        found.append(
            ExportedTable(
                name,
                table.table_id,
                options.retention_milliseconds,
                options.split_bytes,
                observers,
                parts,
                options.change_feed,
                _codecs(table),
                tuple((one.column.hex(), one.ttl_milliseconds) for one in options.ttls),
                tuple(map(_index, indexes_of(table.indexes))),
            )
        )
    return Export(at, tuple(found), form, await _cluster_id(database))


def _codecs(table: master_pb2.Table) -> ExportedCodecs | None:
    if not table.codecs.key and not table.codecs.columns:
        return None
    columns = tuple((one.column.hex(), one.codec) for one in table.codecs.columns)
    return ExportedCodecs(table.codecs.key, columns)


def _index(index: IndexDefinition) -> ExportedIndex:
    columns = tuple((column.hex(), codec) for column, codec in index.columns)
    return ExportedIndex(index.name, columns, index.unique)


async def _cluster_id(database: Database) -> str:
    engine = database.internal.engine
    return await engine.catalog.cluster_id(engine.now() + _PAGE_SECONDS)


async def _require_same_cluster(database: Database, directory: Path, planned: Export) -> None:
    """Raises `InvalidArgument` if it is another one: its tables may have the same names and ids."""
    here = await _cluster_id(database)
    if planned.cluster != here:
        raise InvalidArgument(
            "directory",
            f"the export in {directory} is of cluster {planned.cluster}, and this is {here}: "
            "resume it there, or use another directory",
        )


async def _require_same_tables(database: Database, planned: Export) -> None:
    """Raises `SchemaError` if a table was dropped, even if it was created again: its past is then
    gone."""
    for table in planned.tables:
        deadline = database.internal.engine.now() + _PAGE_SECONDS
        try:
            found = await database.internal.engine.catalog.describe(table.name, deadline)
        except SchemaError as error:
            raise _dropped(table, "dropped") from error
        if found.table_id != table.table_id:
            raise _dropped(table, "deleted and created again")


def _dropped(table: ExportedTable, what: str) -> SchemaError:
    return SchemaError(
        f"table {table.name!r} was {what} since the export started, so it cannot be finished: use "
        "another directory",
        table=table.name,
    )


class _Exporter:
    """One run of an export, a few parts at a time."""

    def __init__(
        self, database: Database, directory: Path, planned: Export, pin: Pin, progress: Progress
    ) -> None:
        self._database = database
        self._directory = directory
        self._planned = planned
        self._pin = pin
        self._progress = progress
        self._done: dict[str, ExportPart] = {}
        self._cells = 0

    async def run(self) -> Export:
        limit = asyncio.Semaphore(PARTS_AT_A_TIME)
        try:
            async with asyncio.TaskGroup() as group:
                for table in self._planned.tables:
                    for part in table.parts:
                        group.create_task(self._one(limit, table, part))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return self._planned.with_parts(self._done)

    async def _one(
        self, limit: asyncio.Semaphore, table: ExportedTable, planned: ExportPart
    ) -> None:
        async with limit:
            part, at = None, self._planned.at
            # A damaged part is exported again.
            with contextlib.suppress(export_files.DamagedExport):
                part = await asyncio.to_thread(export_files.read_part, self._directory, planned, at)
            if part is None:
                part = await self._export(table, planned)
                await asyncio.to_thread(export_files.write_part, self._directory, part, at)
            else:
                self._cells += part.cells
            self._done[planned.file] = part
            self._tell()

    async def _export(self, table: ExportedTable, planned: ExportPart) -> ExportPart:
        path = self._directory / planned.file
        columns: set[bytes] = set()
        cells = 0
        # One thread for the file, so that a cancelled export closes it only after the write in
        # progress.
        with export_files.being_written(path) as unfinished, ThreadPoolExecutor(1) as thread:
            in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
            file = part_files.create(unfinished, self._planned, table)
            try:
                # Otherwise the scan would stay open for as long as the exception's traceback lives.
                async with aclosing(self._pieces(table.name, planned)) as pieces:
                    async for piece in pieces:
                        await in_thread(file.write, piece)
                        if len(columns) < COLUMNS_NOTED_MAX:
                            columns |= piece.column_names()
                        cells += piece.cells
            finally:
                # Shielded: even a second cancellation must not prevent closing.
                await asyncio.shield(in_thread(file.close))
            # In the thread, too: a slow disk must not keep the loop from renewing the pin.
            await in_thread(export_files.publish, path)
        return replace(
            planned,
            cells=cells,
            bytes=path.stat().st_size,
            sha256=await asyncio.to_thread(export_files.sha256_of, path),
            columns=tuple(sorted(column.hex() for column in columns)[:COLUMNS_NOTED_MAX]),
        )

    async def _pieces(self, table: str, planned: ExportPart) -> AsyncGenerator[Piece, None]:
        """Yields the part's cells, in pieces. Each becomes a row group, or some lines."""
        start, end = bytes.fromhex(planned.start), bytes.fromhex(planned.end)
        piece = Piece()
        async with self._database.snapshot(self._pin.at) as snapshot:
            found = snapshot.scan_cells(
                Table(table, key=codecs.stored), start=start, end=end, timeout=_PAGE_SECONDS
            )
            async with aclosing(found) as scan:
                async for page in scan:
                    piece.add(page)
                    self._cells += len(page.rows)
                    self._tell()
                    if piece.is_full:
                        yield piece
                        piece = Piece()
        if piece.cells:
            yield piece

    def _tell(self) -> None:
        self._progress(self._cells, len(self._done), len(self._planned.parts))
