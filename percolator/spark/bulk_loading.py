"""Loading a DataFrame in bulk: many times quicker than transactions, into an empty range of rows.

    from percolator.spark.bulk_loading import bulk_load

    bulk_load(frame, table="pages", catalog=catalog, load_name="crawl-7")

The range (all rows, or those from `load_from` to `load_to`) is closed to everybody while it is
loaded: what reads or writes there meanwhile waits. All rows appear at one timestamp. When the job
fails, what was loaded is deleted and the range opened. When the driver dies, it stays closed; the
same load, under the same `load_name`, takes over from there, or `abandon_load` opens it.

A row has to be in the frame once. The frame is arranged so that each task has the rows of one
tablet, in order; one that is written as it comes is loaded as well, but slower.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator.aio.bulk_load import BulkLoad, LoadComplete, LoadedCell, LoadPlan
from percolator.errors import InvalidArgument, SchemaError
from percolator.spark.connections import checked
from percolator.spark.options import BULK_LOAD, WriteOptions
from percolator.spark.raw_cells import COLUMN
from percolator.spark.shapes import Cell, shape_of
from percolator.spark.writing import Written, log, show_log, total

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

PROGRESS_SECONDS = 10.0
NAME_BYTES = 8


def bulk_load(frame: DataFrame, **options: object) -> None:
    """Arranges the rows by tablets, and loads them. The options are those of the data source."""
    given = _given(options)
    writer = arranged(frame, given).write.format("percolator").options(**given)
    writer.mode("append").save()


def abandon_load(**options: object) -> bool:
    """Opens the range of a load that was left behind, after deleting what was loaded.

    The options are `load_name` and those of the load that say where: `table`, `address`,
    `load_from`, `load_to`, and the `catalog` if these two are given. Returns whether the load
    turned out to be complete; then its rows stay.
    """
    given = _given(options)
    parsed = WriteOptions.parse(given)
    if not parsed.load_name:
        raise InvalidArgument("load_name", "is missing: which load?")
    here = checked(parsed.target)
    return here.call(BulkLoad(here.database, _plan(parsed)).abandon)


def _given(options: Mapping[str, object]) -> dict[str, str]:
    """As Spark hands them over; None is as good as nothing."""
    if options.get("operation", BULK_LOAD) != BULK_LOAD:
        raise InvalidArgument("operation", f"is {BULK_LOAD!r} here, and nothing else")
    given = {name: str(value) for name, value in options.items() if value is not None}
    return given | {"operation": BULK_LOAD}


def arranged(frame: DataFrame, options: dict[str, str]) -> DataFrame:
    """The rows of each tablet in a partition of its own, and there in order."""
    from pyspark.sql import functions as spark_sql

    parsed = WriteOptions.parse(options)
    keys = shape_of(parsed.catalog).key_fields
    # Cells, too, that are there twice come one after the other.
    order = keys if parsed.catalog is not None else (*keys, COLUMN)
    here = checked(parsed.target)
    starts = [tablet.start for tablet in here.call(lambda: here.tablets(parsed.target))]
    kinds = ["raw"] if parsed.catalog is None else [field.type for field in parsed.catalog.key]
    if kinds[0] == "ordered_integer" or len(kinds) > 1:
        # Ranges of equal numbers of rows: tablets of such keys cannot be compared in Spark.
        return frame.repartitionByRange(len(starts), *keys).sortWithinPartitions(*order)
    key = spark_sql.col(keys[0]).cast("binary")
    tablet = spark_sql.lit(0)
    for start in starts[1:]:
        tablet = tablet + (key >= spark_sql.lit(start)).cast("int")
    return frame.repartitionById(len(starts), tablet).sortWithinPartitions(*order)


def _plan(options: WriteOptions) -> LoadPlan:
    return LoadPlan(
        table=options.target.table,
        name=options.load_name or f"spark-{os.urandom(NAME_BYTES).hex()}",
        start=options.load_from,
        end=options.load_to,
        notify=options.notify,
    )


class BulkLoadWriter(DataSourceArrowWriter):
    """Closes the range when it is made, on the driver, before any task."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._plan = _plan(options)
        show_log()
        here = checked(options.target)
        self._timestamps = here.call(BulkLoad(here.database, self._plan).begin)
        log.info(
            "bulk load %r into table %r: the range is closed", self._plan.name, self._plan.table
        )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        show_log()
        began = told = time.monotonic()
        here = checked(self._options.target)
        shape = shape_of(self._options.catalog)
        load = BulkLoad(here.database, self._plan)
        written = Written()
        under_way = None
        before: list[LoadedCell] = []
        for batch in iterator:
            cells = _sorted(shape.cells(batch, self._options.nulls))
            _refuse_repeated(before, cells)
            before = cells or before
            if under_way is not None:
                under_way.wait()
            under_way = here.thread.start(partial(load.load, cells, self._timestamps))
            written.rows += batch.num_rows
            written.cells += len(cells)
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                log.info("bulk load %r: %d rows of this task", self._plan.name, written.rows)
        if under_way is not None:
            under_way.wait()
        written.seconds = time.monotonic() - began
        return written

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        here = checked(self._options.target)
        load = BulkLoad(here.database, self._plan)
        here.call(lambda: load.finish(self._timestamps))
        done = total(messages)
        log.info("bulk load %r: %d rows, %d cells", self._plan.name, done.rows, done.cells)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        here = checked(self._options.target)
        load = BulkLoad(here.database, self._plan)
        try:
            undone = here.call(lambda: load.undo(self._timestamps))
            what = "was undone" if undone else "another run has taken over"
        except LoadComplete:
            what = "was complete, its rows are there"
        log.warning("bulk load %r failed, and %s", self._plan.name, what)


def _sorted(cells: list[Cell]) -> list[LoadedCell]:
    """In the order of rows. Each address may be there once."""
    found: dict[tuple[bytes, bytes], bytes] = {}
    for row, column, value in cells:
        if value is None:
            raise SchemaError("a null cannot be loaded in bulk: nothing is there to be deleted")
        found[row, column] = value
    if len(found) < len(cells):
        raise _twice()
    return [(row, column, found[row, column]) for row, column in sorted(found)]


def _refuse_repeated(before: list[LoadedCell], cells: list[LoadedCell]) -> None:
    """Where the rows are in order, one that is there twice may be in two batches."""
    if not (before and cells) or before[-1][0] != cells[0][0]:
        return
    row = cells[0][0]
    last = {column for _, column, _ in takewhile(lambda cell: cell[0] == row, reversed(before))}
    if any(column in last for _, column, _ in takewhile(lambda cell: cell[0] == row, cells)):
        raise _twice()


def _twice() -> SchemaError:
    return SchemaError("a row is in the frame twice, and a bulk load cannot tell which counts")
