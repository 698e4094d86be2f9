"""Loading a DataFrame in bulk into an empty range of rows: much faster than transactions.

    from percolator.spark.bulk_load import bulk_load

    bulk_load(frame, table="pages", catalog=catalog, load_name="crawl-7")

The range (all rows, or those from `load_from` to `load_to`) is closed during the load: other reads
and writes there wait. All rows appear at one timestamp. If the job fails, what it loaded is deleted
and the range opens again. If the driver dies, the range stays closed: run the same load again under
the same `load_name` to take over, or open the range with `abandon_load`.

A row may appear only once in the frame. `bulk_load` arranges the frame so that each task has the
rows of one tablet, in order, and finds rows that appear twice. A frame that is not arranged, and
is written with `operation=bulk_load`, loads as well, but more slowly, and of rows that appear twice
only neighbours are found: of others, any one stays.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice, takewhile
from operator import lt
from typing import TYPE_CHECKING, cast

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator.aio.bulk_load import BulkLoad, LoadComplete, LoadedCell, LoadPlan
from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument, SchemaError
from percolator.spark.connections import Connection, checked, with_stored_catalog
from percolator.spark.options import BULK_LOAD, WriteOptions
from percolator.spark.shapes import COLUMN, Cell, shape_of
from percolator.spark.transaction_writer import Written, log, refuse_created_table, show_log, total

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame


def bulk_load(frame: DataFrame, **options: object) -> None:
    """Arranges the rows by tablet and loads them. Takes the options of the data source."""
    given = _given(options)
    writer = arranged(frame, given).write.format("percolator").options(**given)
    writer.mode("append").save()


def abandon_load(**options: object) -> bool:
    """Opens the range of an abandoned load, after deleting what was loaded.

    Takes `load_name` and the options that said where the rows were to go: `table`, `address`,
    `load_from`, `load_to`, and the `catalog` if these two are given. Returns True if the load
    turned out to be complete; its rows then stay.
    """
    given = _given(options)
    parsed = WriteOptions.parse(given)
    if not parsed.load_name:
        raise InvalidArgument("load_name", "is missing: give the name of the load")
    here = checked(parsed.target)
    require_bulk_loads(here)
    return here.call(BulkLoad(here.database, plan_of(parsed)).abandon)


def _given(options: Mapping[str, object]) -> dict[str, str]:
    """The options as Spark passes them. None means that an option was not given."""
    if options.get("operation", BULK_LOAD) != BULK_LOAD:
        raise InvalidArgument(
            "operation", f"expected {BULK_LOAD!r}, found {options['operation']!r}"
        )
    given = {name: str(value) for name, value in options.items() if value is not None}
    return with_stored_catalog(given | {"operation": BULK_LOAD})


def arranged(frame: DataFrame, options: dict[str, str]) -> DataFrame:
    """The frame with the rows of each tablet in one partition, in order."""
    from pyspark.sql import functions as spark_sql

    parsed = WriteOptions.parse(options)
    keys = shape_of(parsed.catalog).key_fields
    # Raw cells that appear twice have to be neighbours as well, to be found.
    names = keys if parsed.catalog is not None else (*keys, COLUMN)
    by, order = [_column(frame, name) for name in keys], [_column(frame, name) for name in names]
    here = checked(parsed.target)
    require_bulk_loads(here)
    starts = [one.start for one in here.call(lambda: here.ranges(parsed.target))]
    kinds = ["raw"] if parsed.catalog is None else [field.type for field in parsed.catalog.key]
    if kinds[0] == "ordered_integer" or len(kinds) > 1:
        # Spark cannot compare such keys with the tablets' bounds: partitions of equal size instead.
        return frame.repartitionByRange(len(starts), *by).sortWithinPartitions(*order)
    key = by[0].cast("binary")
    tablet = spark_sql.lit(0)
    for start in starts[1:]:
        tablet = tablet + (key >= spark_sql.lit(start)).cast("int")
    return frame.repartitionById(len(starts), tablet).sortWithinPartitions(*order)


def _column(frame: DataFrame, name: str) -> Column:
    """The column of that name, in whatever case. Without quotes, a dot would ask for a part of
    one."""
    from pyspark.sql import functions as spark_sql

    found = next((one for one in frame.columns if one.lower() == name.lower()), name)
    quoted = found.replace("`", "``")
    return spark_sql.col(f"`{quoted}`")


_PROGRESS_SECONDS = 10.0
_NAME_BYTES = 8


def plan_of(options: WriteOptions) -> LoadPlan:
    return LoadPlan(
        table=options.target.table,
        name=options.load_name or f"spark-{os.urandom(_NAME_BYTES).hex()}",
        start=options.load_rows.start,
        end=options.load_rows.end,
        notify=options.notify,
    )


def require_bulk_loads(here: Connection) -> None:
    """Raises `InvalidArgument` where tasks cannot load in bulk."""
    if here.database.internal.engine.is_on_rows:
        raise InvalidArgument(
            "operation",
            "the cells of this cluster are in a row store, where Spark cannot load in bulk: an "
            "attempt at a task that goes on after the load would change rows that have been read "
            "(docs/bigtable.md). Append the frame, or import an export",
        )


class BulkLoadWriter(DataSourceArrowWriter):
    """Closes the range on creation, which is on the driver and before any task."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._plan = plan_of(options)
        show_log()
        here = checked(options.target, options.catalog)
        require_bulk_loads(here)
        self._timestamps = here.call(BulkLoad(here.database, self._plan).begin)
        log.info("bulk load %r into table %r: closed the range", self._plan.name, self._plan.table)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        show_log()
        refuse_created_table()
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
            _require_within(self._options, cells)
            before = cells or before
            if under_way is not None:
                under_way.wait()
            under_way = here.thread.start(partial(load.load, cells, self._timestamps))
            written.rows += batch.num_rows
            written.cells += len(cells)
            if time.monotonic() - told >= _PROGRESS_SECONDS:
                told = time.monotonic()
                log.info("bulk load %r: %d rows by this task so far", self._plan.name, written.rows)
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
            what = "its rows were deleted" if undone else "another run has taken over"
        except LoadComplete:
            what = "but its load was complete: the rows are there"
        log.warning("the job of bulk load %r failed; %s", self._plan.name, what)


def _sorted(cells: list[Cell]) -> list[LoadedCell]:
    """The cells in the order of their rows. Raises `SchemaError` if one appears twice."""
    for row, column, value in cells:
        if value is None:
            raise SchemaError(
                f"row {quoted(row)}, column {quoted(column)}: a bulk load cannot load a null, "
                "since there is nothing to delete yet; set the option nulls to skip"
            )
    loaded = cast(list[LoadedCell], cells)
    rows = [row for row, _, _ in loaded]
    if all(map(lt, rows, islice(rows, 1, None))):
        return loaded  # nearly always, if the frame is arranged and has one column
    found = {(row, column): value for row, column, value in loaded}
    if len(found) < len(cells):
        times = Counter((row, column) for row, column, _ in cells)
        raise _twice(next(row for (row, _), number in times.items() if number > 1))
    return [(row, column, found[row, column]) for row, column in sorted(found)]


def _refuse_repeated(before: list[LoadedCell], cells: list[LoadedCell]) -> None:
    """Finds a row that ends one batch and begins the next: rows in order repeat like this."""
    if not (before and cells) or before[-1][0] != cells[0][0]:
        return
    row = cells[0][0]
    last = {column for _, column, _ in takewhile(lambda cell: cell[0] == row, reversed(before))}
    if any(column in last for _, column, _ in takewhile(lambda cell: cell[0] == row, cells)):
        raise _twice(row)


def _require_within(options: WriteOptions, cells: list[LoadedCell]) -> None:
    """Refuses rows outside of the range that is closed for the load. The cells are in order."""
    start, end = options.load_rows.start, options.load_rows.end
    if not cells:
        return
    first, last = cells[0][0], cells[-1][0]
    if first < start:
        raise InvalidArgument("load_from", f"row {quoted(first)} of the frame is below it")
    if end and last >= end:
        raise InvalidArgument("load_to", f"row {quoted(last)} of the frame is not below it")


def _twice(row: bytes) -> SchemaError:
    return SchemaError(
        f"row {quoted(row)} appears twice in the frame, and a bulk load cannot tell which one to "
        "keep"
    )
