"""Writing a DataFrame with transactions, several at a time in each task.

At least once: Spark runs a failed task again, and may run two attempts of a task at the same time.
All attempts write the same rows, so the table ends up the same; a cell that is written twice has
two versions, and its observers run twice, unless `skip_equal` is set. If a job fails, what it has
committed so far stays.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from percolator.errors import SchemaError
from percolator.garbage_collector import MIDDLE_COLLECTIONS, NEW_OBJECTS, YOUNG_COLLECTIONS
from percolator.row_text import quoted
from percolator.spark.connections import DRAIN_SECONDS, checked
from percolator.spark.options import MERGE, WriteOptions
from percolator.spark.shapes.fields import Cell, column_of
from percolator.spark.shapes.shape import Shape, shape_of
from percolator.spark.writing.created_tables import refuse_created_table
from percolator.spark.writing.transactions import Transactions
from percolator.spark.writing.written import Written, log, show_log, total
from percolator.timestamps import Timestamp


class TransactionWriter(DataSourceArrowWriter):
    """Upserts, deletes or merges."""

    def __init__(self, options: WriteOptions, began: Timestamp) -> None:
        """Made on the driver, at `began`, before any task."""
        self._options = options
        self._began = began

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        show_log()
        refuse_created_table()
        began = time.monotonic()
        here = checked(self._options.target, self._options.catalog)
        transactions = Transactions(
            here, self._options, began=self._began, is_first=_is_first_attempt()
        )
        cells = cells_of(self._options)
        written = Written()
        try:
            with collecting_rarely():
                for batch in iterator:
                    written.rows += batch.num_rows
                    transactions.write(cells(batch))
                transactions.finish()
        except Exception as error:
            transactions.settle()
            _count(written, transactions, began)
            log.warning("the task failed; what it committed stays: %s", written)
            error.add_note(f"the task failed; what it committed stays: {written}")
            raise
        finally:
            # The process may end with the task: let it finish what it has committed.
            here.call(lambda: here.database.internal.engine.env.background.drain(DRAIN_SECONDS))
        _count(written, transactions, began)
        log.info("task: %s", written)
        return written

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        log.info("job: %s", total(messages))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        show_log()
        reported = sum(message is not None for message in messages)
        log.warning(
            "the job failed; what it committed stays. %d of %d tasks reported %s. "
            "A task that failed has logged its own count",
            reported,
            len(messages),
            total(messages),
        )


def cells_of(options: WriteOptions) -> Callable[[pa.RecordBatch], list[Cell]]:
    """What turns the rows of a frame into the cells that are written."""
    shape = shape_of(options.catalog)
    if options.operation == "delete":
        return lambda batch: shape.deletions(batch, options.columns)
    if options.operation == MERGE:
        return lambda batch: _once(_merge_cells(batch, shape, options), "a merge")
    if options.if_unchanged_since is not None:
        # The values of both were computed from one row: whichever stays, the other one is lost.
        return lambda batch: _once(shape.cells(batch, options.nulls), "if_unchanged_since")
    return lambda batch: shape.cells(batch, options.nulls)


def _once(cells: list[Cell], who: str) -> list[Cell]:
    """The cells, none of which may be there twice."""
    addresses = [(row, column) for row, column, _ in cells]
    if len(set(addresses)) < len(addresses):
        row, _ = next(one for one, times in Counter(addresses).items() if times > 1)
        raise SchemaError(
            f"a key appears twice in the frame, and {who} needs each key once: row {quoted(row)}"
        )
    return cells


def _is_first_attempt() -> bool:
    """Whether Spark says that no attempt of this task was made before.

    It does not say so of a whole stage that runs again: then rows that the task has written before
    are refused, which is safe.
    """
    task = TaskContext.get()
    return task is None or not task.attemptNumber()


def _merge_cells(batch: pa.RecordBatch, shape: Shape, options: WriteOptions) -> list[Cell]:
    """The cells of rows to write, and the deletions of those that `delete_field` names."""
    nulls = options.nulls
    if nulls == "delete" and not options.update_existing:
        # Of a row that exists, nothing is written: deletions alone would look like one to delete.
        nulls = "skip"
    if options.delete_field is None:
        return shape.cells(batch, nulls)
    flags = [bool(flag) for flag in column_of(batch, options.delete_field).to_pylist()]
    rows = batch.drop_columns([_named(batch, options.delete_field)])
    kept = rows.filter(pa.array([not flag for flag in flags], pa.bool_()))
    gone = rows.filter(pa.array(flags, pa.bool_()))
    return shape.cells(kept, nulls) + shape.deletions(gone, None)


def _named(batch: pa.RecordBatch, name: str) -> str:
    """The name as the batch spells it."""
    return next(one for one in batch.schema.names if one.lower() == name.lower())


def _count(written: Written, transactions: Transactions, began: float) -> None:
    written.cells = transactions.cells
    written.equal = transactions.equal
    written.transactions = transactions.committed
    written.conflicts = transactions.conflicts
    written.seconds = time.monotonic() - began


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Thousands of rows in flight are not garbage, and searching them for some is expensive."""
    before = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, MIDDLE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
