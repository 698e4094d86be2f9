"""Exports tables, as they are at one timestamp, while the cluster is in use.

A pin keeps that timestamp readable until the end. Each part is read page by page, as parallel
lists, which become Arrow batches with no object for each cell; encoding and writing them happens in
other threads. An export that was interrupted is gone on with at its own timestamp, as long as
history goes back so far: parts that are done are checked, not made again.
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

import pyarrow as pa

from percolator import codecs
from percolator.aio.database import Database
from percolator.aio.pin import PIN_TTL_SECONDS, Pin
from percolator.aio.snapshot import as_timestamp
from percolator.backup import layout
from percolator.backup.cells_file import Piece, writer
from percolator.backup.layout import Export, ExportedObserver, ExportedTable, Part
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import Table
from percolator.timestamps import Timestamp

PARTS_AT_A_TIME = 4
COLUMNS_NOTED_MAX = 1_000
"""Of each part: a table may have as many columns as cells."""
SYSTEM_PREFIX = "percolator."
"""Tables of the product itself: they are about one cluster, and are left out."""
_PAGE_SECONDS = 60.0

Progress = Callable[[int, int, int], None]
"""Cells done, parts done, parts in all."""


async def export(
    database: Database,
    directory: Path,
    *,
    at: Timestamp | datetime | None = None,
    tables: Sequence[str] = (),
    progress: Progress = lambda _cells, _done, _all: None,
    pin_ttl_seconds: float = PIN_TTL_SECONDS,
) -> Export:
    """Returns when it is whole. Without `tables`, all of them; without `at`, as they are now.

    Raises `InvalidArgument` for a directory with something else in it, `SnapshotTooOld`.
    """
    wanted = None if at is None else as_timestamp(at)
    _check_directory(directory)
    # Two processes would write over each other's files.
    with layout.locked(directory, "exporting to"):
        return await _export(database, directory, wanted, tables, progress, pin_ttl_seconds)


async def _export(
    database: Database,
    directory: Path,
    wanted: Timestamp | None,
    tables: Sequence[str],
    progress: Progress,
    pin_ttl_seconds: float,
) -> Export:
    planned = _interrupted(directory, wanted, tables)
    if planned is not None:
        wanted = Timestamp(planned.at)
    names = await _names(database, tables) if planned is None else [t.name for t in planned.tables]
    kept = [Table(name, key=codecs.raw) for name in names]
    # In ASCII and cut: the lock service takes no longer text, nor names that are no text.
    what = f"export to {ascii(directory.name)[:100]}"
    pin = database.pin(wanted, tables=kept, description=what, ttl=pin_ttl_seconds)
    async with pin:
        if planned is None:
            planned = await _plan(database, pin.at, names)
            layout.write_export(directory / layout.PLAN, planned)
        else:
            await _require_same_tables(database, planned)
        done = await _Exporting(database, directory, planned, pin, progress).run()
        await _require_same_tables(database, planned)
        layout.write_export(directory / layout.MANIFEST, done)
    return done


# ---------------------------------------------------------------------------- the plan


def _check_directory(directory: Path) -> None:
    if (directory / layout.MANIFEST).exists():
        raise InvalidArgument("directory", f"there is a whole export in {directory} already")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise InvalidArgument("directory", f"{directory} cannot be used: {error}") from error
    # A plan that was not finished is nothing yet.
    if layout.PLAN not in names and names - {layout.unfinished(Path(layout.PLAN)).name}:
        raise InvalidArgument(
            "directory", f"{directory} is neither empty nor an export that was interrupted"
        )


def _interrupted(directory: Path, at: Timestamp | None, tables: Sequence[str]) -> Export | None:
    if not (directory / layout.PLAN).exists():
        return None
    planned = layout.read_export(directory / layout.PLAN)
    if at is not None and at != planned.at:
        raise InvalidArgument(
            "at",
            f"the export in {directory} was begun at {Timestamp(planned.at).describe()}: go on "
            "with that, or take another directory",
        )
    names = [table.name for table in planned.tables]
    if tables and sorted(tables) != sorted(names):
        raise InvalidArgument(
            "tables", f"the export in {directory} was begun of {', '.join(names)}"
        )
    return planned


async def _names(database: Database, tables: Sequence[str]) -> list[str]:
    known = await database.tables()
    unknown = sorted(set(tables) - set(known))
    if unknown:
        raise SchemaError(f"there is no table {unknown[0]!r}", table=unknown[0])
    return sorted(set(tables)) or [one for one in known if not one.startswith(SYSTEM_PREFIX)]


async def _plan(database: Database, at: int, names: Sequence[str]) -> Export:
    catalog, found = database.engine.catalog, []
    for name in names:
        deadline = database.engine.now() + _PAGE_SECONDS
        table = await catalog.describe(name, deadline)
        tablets = await catalog.all_tablets(table.table_id, deadline)
        observers = tuple(
            ExportedObserver(
                one.name, tuple(column.hex() for column in one.columns), one.weak, one.paused
            )
            for one in table.observers
        )
        parts = tuple(
            Part(layout.file_of(name, number), tablet.start.hex(), tablet.end.hex())
            for number, tablet in enumerate(tablets)
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
            )
        )
    return Export(at, tuple(found))


async def _require_same_tables(database: Database, planned: Export) -> None:
    """A table that was dropped and made again is another one: of its past, nothing is there."""
    for table in planned.tables:
        deadline = database.engine.now() + _PAGE_SECONDS
        found = await database.engine.catalog.describe(table.name, deadline)
        if found.table_id != table.table_id:
            raise SchemaError(
                f"table {table.name!r} was deleted and made again since the export was begun",
                table=table.name,
            )


# ---------------------------------------------------------------------------- the parts


class _Exporting:
    """One run: some parts at a time."""

    def __init__(
        self, database: Database, directory: Path, planned: Export, pin: Pin, progress: Progress
    ) -> None:
        self._database = database
        self._directory = directory
        self._planned = planned
        self._pin = pin
        self._progress = progress
        self._done: dict[str, Part] = {}
        self._cells = 0

    async def run(self) -> Export:
        limit = asyncio.Semaphore(PARTS_AT_A_TIME)
        try:
            async with asyncio.TaskGroup() as group:
                for table in self._planned.tables:
                    for part in table.parts:
                        group.create_task(self._one(limit, table.name, part))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        return self._planned.with_parts(self._done)

    async def _one(self, limit: asyncio.Semaphore, table: str, planned: Part) -> None:
        async with limit:
            part = None
            # What is damaged is made again.
            with contextlib.suppress(layout.DamagedExport):
                part = await asyncio.to_thread(layout.read_part, self._directory, planned)
            if part is None:
                part = await self._export(table, planned)
                await asyncio.to_thread(layout.write_part, self._directory, part)
            else:
                self._cells += part.cells
            self._done[planned.file] = part
            self._tell()

    async def _export(self, table: str, planned: Part) -> Part:
        path = self._directory / planned.file
        columns: set[bytes] = set()
        cells = 0
        # One thread for the file: whoever gives up, while it is written, closes it after that.
        with layout.durable(path) as unfinished, ThreadPoolExecutor(1) as thread:
            in_turn = partial(asyncio.get_running_loop().run_in_executor, thread)
            file = writer(unfinished)
            try:
                # Else the scan would stay open for as long as somebody looks at the failure.
                async with aclosing(self._batches(table, planned)) as batches:
                    async for batch in batches:
                        await in_turn(file.write_batch, batch)
                        if len(columns) < COLUMNS_NOTED_MAX:
                            columns.update(batch.column("column").unique().to_pylist())
                        cells += len(batch)
            finally:
                # Also for whoever gives up a second time.
                await asyncio.shield(in_turn(file.close))
        return replace(
            planned,
            cells=cells,
            bytes=path.stat().st_size,
            sha256=await asyncio.to_thread(layout.sha256_of, path),
            columns=tuple(sorted(column.hex() for column in columns)[:COLUMNS_NOTED_MAX]),
        )

    async def _batches(self, table: str, planned: Part) -> AsyncGenerator[pa.RecordBatch, None]:
        """Each becomes a row group."""
        start, end = bytes.fromhex(planned.start), bytes.fromhex(planned.end)
        piece = Piece()
        async with self._database.snapshot(self._pin.at) as snapshot:
            found = snapshot.scan_cells(
                Table(table, key=codecs.raw), start=start, end=end, timeout=_PAGE_SECONDS
            )
            async with aclosing(found) as scan:
                async for page in scan:
                    piece.add(page)
                    self._cells += len(page.rows)
                    self._tell()
                    if piece.is_full:
                        yield await asyncio.to_thread(piece.batch)
                        piece = Piece()
        if piece.cells:
            yield await asyncio.to_thread(piece.batch)

    def _tell(self) -> None:
        self._progress(self._cells, len(self._done), len(self._planned.parts))
