"""Writing a DataFrame: many transactions, several at a time in each task.

At least once: Spark runs a task again that failed, and may run two attempts at the same time. Every
attempt writes the same rows, so that what is there in the end is the same; a cell that is written
twice has two versions, and its observers run again, unless `skip_equal` is set. What was written
before a job failed stays.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage

from percolator.errors import InvalidArgument
from percolator.limits import Limits
from percolator.spark.connections import DRAIN_SECONDS, checked
from percolator.spark.options import WriteOptions
from percolator.spark.shapes import Cell, shape_of
from percolator.spark.transactions import Transactions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger("percolator.spark")

COLLECTOR = (50_000, 20, 50)


@dataclass
class Written(WriterCommitMessage):
    """What one task has done."""

    rows: int = 0
    cells: int = 0
    equal: int = 0
    """Cells that were there already, with `skip_equal`."""
    transactions: int = 0
    conflicts: int = 0
    """Attempts at a transaction that others were in the way of, or nobody answered."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.cells} cells in {self.transactions} transactions, "
            f"{self.equal} cells were there already, {self.conflicts} attempts were repeated, "
            f"{self.seconds:.1f} s"
        )


def total(messages: list[WriterCommitMessage | None]) -> Written:
    """Of all tasks that have reported."""
    found = Written()
    for message in messages:
        if isinstance(message, Written):
            for field in fields(Written):
                value = getattr(found, field.name) + getattr(message, field.name)
                setattr(found, field.name, value)
    return found


def writer_of(options: WriteOptions, schema: StructType, *, overwrite: bool) -> DataSourceWriter:
    """On the driver, before any task: what cannot work is refused here."""
    if overwrite:
        raise InvalidArgument(
            "mode", 'overwrite would delete the table: use mode("append"), which replaces rows'
        )
    shape = shape_of(options.catalog)
    deletes = options.operation == "delete"
    shape.check_write(schema, options.columns, deletes=deletes)
    cells_max = Limits().transaction_cells_max
    if options.transaction_rows * len(schema.fields) > cells_max:
        raise InvalidArgument(
            "transaction_rows",
            f"{options.transaction_rows} rows of {len(schema.fields)} fields may have more than "
            f"the {cells_max} cells that a transaction can write",
        )
    checked(options.target)
    if options.operation == "bulk_load":
        from percolator.spark.bulk_loading import BulkLoadWriter

        return BulkLoadWriter(options)
    return TransactionWriter(options)


class TransactionWriter(DataSourceArrowWriter):
    """Upserts or deletes."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        show_log()
        began = time.monotonic()
        here = checked(self._options.target)
        transactions = Transactions(here, self._options)
        cells = self._cells()
        written = Written()
        try:
            with _collector_seldom():
                for batch in iterator:
                    written.rows += batch.num_rows
                    transactions.write(cells(batch))
                transactions.finish()
        finally:
            # The process may end with the task: what was committed is finished before that.
            here.call(lambda: here.database.engine.around.background.drain(DRAIN_SECONDS))
        written.cells = transactions.cells
        written.equal = transactions.equal
        written.transactions = transactions.committed
        written.conflicts = transactions.conflicts
        written.seconds = time.monotonic() - began
        log.info("task: %s", written)
        return written

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        log.info("job: %s", total(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        log.warning("the job failed; what was written stays, at least: %s", total(messages))

    def _cells(self) -> Callable[[pa.RecordBatch], list[Cell]]:
        options = self._options
        shape = shape_of(options.catalog)
        if options.operation == "delete":
            return lambda batch: shape.deletions(batch, options.columns)
        return lambda batch: shape.cells(batch, options.nulls)


@contextmanager
def _collector_seldom() -> Iterator[None]:
    """Thousands of rows in flight are no garbage, and looking for some among them is dear."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTOR)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def show_log() -> None:
    """Spark's Python processes set up no logging, and the counters would be lost."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
