"""The writer of a bulk load: closes the range, loads cells in order, opens the range again."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from operator import lt
from typing import TYPE_CHECKING, cast

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator.aio.bulk_load import BulkLoad, LoadComplete, LoadedCell, LoadPlan
from percolator.errors import InvalidArgument, SchemaError
from percolator.row_text import quoted
from percolator.spark.connections import Connection, checked
from percolator.spark.options import WriteOptions
from percolator.spark.shapes.fields import Cell
from percolator.spark.shapes.shape import shape_of
from percolator.spark.writing.created_tables import refuse_created_table
from percolator.spark.writing.written import Written, log, show_log, total

if TYPE_CHECKING:
    import pyarrow as pa

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
