"""The source of `spark.readStream`: on the driver for offsets, in tasks for rows.

One process on the driver lives as long as the query. Another one, which is only asked for the code
of `read`, makes a reader, too: so a reader connects when it is first asked for something.

A batch is described by two offsets alone, and everything in it is settled before Spark writes the
second one into its checkpoint. So a batch has the same rows however often it is read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from percolator import codecs
from percolator.aio import Snapshot
from percolator.errors import InvalidArgument
from percolator.routing.cells import ChangesRequest, FoundCell, StoredChange
from percolator.schema import Table
from percolator.spark.change_rows import CellChanges, Cells, RowChanges, RowImages
from percolator.spark.connections import Connection, checked, connection_to
from percolator.spark.options import StreamOptions
from percolator.spark.reader import TableRows, cell_pages, plan
from percolator.spark.stream_progress import Offset, Progress, SomeChanges, WholeTable
from percolator.timestamps import Timestamp

ROWS_PER_READ = 512
"""How many rows are read at once to complete the images of changed rows."""


@dataclass
class SnapshotRows(InputPartition):
    """A part of the table as it was at a timestamp."""

    rows: TableRows
    at: int


@dataclass
class ChangePartition(InputPartition):
    """The changes of one tablet's rows, with after < commit timestamp <= until."""

    table_id: int
    start: bytes
    end: bytes
    after: int
    until: int


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the changes of a table."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._read = options.read
        self._table: Table[bytes] = Table(options.read.target.table, key=codecs.stored)
        target = to_arrow_schema(schema, timezone="UTC")
        make = CellChanges if options.read.catalog is None else RowChanges
        self._shape: CellChanges | RowChanges = make(options.read, schema, target)
        self._here: Connection | None = None
        self._progress: Progress | None = None

    # ------------------------------------------------------------------ offsets, on the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return Offset().json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows_max = self._options.rows_per_batch
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        here, progress = self._begun()
        begin = Offset.parse(start)
        return here.call(lambda: progress.latest(begin, rows_max)).json()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        here, progress = self._begun()
        here.call(progress.end_here)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        here, progress = self._begun()
        begin, until = Offset.parse(start), Offset.parse(end)
        batch = here.call(lambda: progress.batch(begin, until))
        if batch is None:
            return []
        if isinstance(batch, WholeTable):
            parts = here.call(partial(plan, here, self._read, Timestamp(batch.at)))
            return [SnapshotRows(rows, batch.at) for rows in parts]
        return _tablets(batch)

    def commit(self, end: dict[str, Any]) -> None:
        here, progress = self._begun()

        async def committed() -> None:
            progress.committed(Offset.parse(end))

        here.call(committed)

    def stop(self) -> None:
        if self._here is not None and self._progress is not None:
            self._here.call(self._progress.close)

    def _begun(self) -> tuple[Connection, Progress]:
        if self._here is None or self._progress is None:
            # Spark asks for no schema, and so has nothing checked, if it was given one.
            self._here = check_table(self._options)
            columns = self._shape.columns if isinstance(self._shape, RowChanges) else None
            self._progress = Progress(self._here.database, self._options.wanted(columns))
        return self._here, self._progress

    # ------------------------------------------------------------------ rows, in tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        here = connection_to(self._read.target)
        if isinstance(partition, SnapshotRows):
            # This process may remember a table of that name that was dropped since.
            batches = self._snapshot(checked(self._read.target), partition)
        elif isinstance(partition, ChangePartition):
            batches = self._changes(here, partition)
        else:
            return  # Spark makes one of its own when there is nothing to read
        with closing(here.thread.iterate(batches)) as found:
            for batch in found:
                if batch.num_rows:
                    yield batch

    async def _snapshot(
        self, here: Connection, part: SnapshotRows
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        async with self._at(here, part.at) as snapshot:
            pages = cell_pages(snapshot, self._table, part.rows.ranges, self._shape.columns)
            async with aclosing(pages):
                async for page in pages:
                    yield self._shape.of_snapshot(page)

    async def _changes(
        self, here: Connection, part: ChangePartition
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        engine, shape = here.database.internal.engine, self._shape
        before = isinstance(shape, CellChanges) and shape.needs_before
        request = ChangesRequest(part.table_id, part.after, part.until, before)
        # The driver's pin keeps history, too, unless it could not be set.
        reading = object()
        engine.open_starts.add(reading, part.after)
        try:
            found = engine.router.scan_changes(
                request, [(part.start, part.end)], self._read.target.timeout_seconds
            )
            async with (
                aclosing(found) as pages,
                aclosing(self._batches(here, pages)) as batches,
            ):
                async for batch in batches:
                    yield batch
        finally:
            engine.open_starts.discard(reading)

    async def _batches(
        self, here: Connection, pages: AsyncGenerator[list[StoredChange], None]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        shape = self._shape
        if isinstance(shape, CellChanges):
            async for page in pages:
                yield shape.of_changes(page)
            return
        target = self._read.target
        catalog = here.database.internal.engine.catalog
        table = await catalog.describe(target.table, here.deadline(target))
        ttls = {one.column: one.ttl_milliseconds for one in table.options.ttls}
        images = RowImages(self._read.rows, shape.columns, partial(self._rows_at, here), ttls)
        async with aclosing(images.of(pages)) as found:
            async for some in found:
                yield shape.of_images(some)

    async def _rows_at(
        self, here: Connection, at: int, rows: Sequence[bytes]
    ) -> dict[bytes, Cells]:
        """The rows at a timestamp; rows without any of the stream's columns are missing."""
        columns = self._shape.columns or ()
        places = {column: place for place, column in enumerate(columns)}
        found: dict[bytes, list[FoundCell | None]] = {}
        async with self._at(here, at) as snapshot:
            for first in range(0, len(rows), ROWS_PER_READ):
                some = rows[first : first + ROWS_PER_READ]
                page = await snapshot.get_cells(self._table, some, columns=columns)
                cells = map(FoundCell, page.commit_timestamps, page.values)
                for row, column, cell in zip(page.rows, page.columns, cells, strict=True):
                    found.setdefault(row, [None] * len(columns))[places[column]] = cell
        return {row: tuple(cells) for row, cells in found.items()}

    def _at(self, here: Connection, at: int) -> Snapshot:
        seconds = self._read.target.timeout_seconds
        return here.database.internal.snapshot(Timestamp(at), seconds)


def _tablets(batch: SomeChanges) -> list[InputPartition]:
    return [
        ChangePartition(batch.table_id, start, end, batch.after, batch.until)
        for start, end in batch.ranges
    ]


def check_table(options: StreamOptions) -> Connection:
    """The connection to the table's cluster. Raises `InvalidArgument` if there is no such table, or
    it has no change feed, and `SchemaError` if it has other codecs."""
    target = options.read.target
    here = checked(target, options.read.catalog)
    engine = here.database.internal.engine
    if engine.is_on_rows:
        raise InvalidArgument(
            "table",
            f"{target.table!r} is in a row store, which has no change feeds to stream "
            "(docs/bigtable.md): read snapshots of it instead",
        )
    table = here.call(lambda: engine.catalog.describe(target.table, here.deadline(target)))
    if not table.options.change_feed:
        raise InvalidArgument(
            "table",
            f"{target.table!r} has no change feed; give it one with "
            f"`percolator tables change-feed {target.table} --on`",
        )
    return here
