"""Writers of DataFrames: which one a frame gets, the sink of a stream, and merging by key.

Each batch of a stream is one shared transaction, and is written exactly once:

    table    percolator.sinks
    row      the id of the query, which its checkpoint keeps
    batch    the newest batch that is committed, as an integer
    table    the id of the table that it was written into, as an integer

A copy of a checkpoint has the same id: a query that writes into another table with it has a row of
its own, whose key goes on with a slash and the id of that table.

Spark repeats a batch if the query ended after the batch was committed and before the checkpoint
said so. The number of the batch is committed with its rows, so a batch that is repeated is seen to
be written, and what its tasks have locked is rolled back.

The number is locked under the condition that no other process has written it since it was looked
at: an earlier run of the query, which was presumed dead, may be committing the same batch.

Spark makes a sink in one process for the tasks of a batch, and another one to commit it. So the
ticket of the batch and the id of the query come to the second one with the messages of the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BooleanType, StructType

from percolator import codecs
from percolator.aio.shared import Receipt, Ticket
from percolator.errors import InvalidArgument, InvariantViolation, SchemaError, UsageError
from percolator.limits import Limits
from percolator.schema import SINKS_NAME, Column, Table
from percolator.spark.atomic_writer import (
    AtomicWriter,
    Locked,
    begin,
    commit,
    receipts_of,
    roll_back,
    write_of_job,
)
from percolator.spark.bulk_load import BulkLoadWriter
from percolator.spark.catalog import FrameCatalog
from percolator.spark.connections import Connection, checked, connection_to, with_stored_catalog
from percolator.spark.options import BULK_LOAD, MERGE, WriteOptions
from percolator.spark.shapes import field_named, shape_of
from percolator.spark.transaction_writer import TransactionWriter, log, show_log, total
from percolator.timestamps import Timestamp
from percolator.v1.master_pb2 import TableOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import DataSourceWriter


ROWS_PER_TRANSACTION = 1_000
"""At most, if the options do not say."""


def writer_of(options: WriteOptions, schema: StructType) -> DataSourceWriter:
    """The writer for these options. Raises, before any task starts, what would make all fail."""
    shape = shape_of(options.catalog)
    deletes = options.operation == "delete"
    rows = _without_flag(schema, options)
    shape.check_write(rows, options.columns, deletes=deletes)
    if not options.atomic and options.operation != BULK_LOAD:
        options = replace(options, transaction_rows=_rows_per_transaction(options, rows))
    since = options.if_unchanged_since
    here = checked(options.target, options.catalog)
    if options.operation == BULK_LOAD:
        return BulkLoadWriter(options)
    if options.together is not None:
        write = write_of_job(options.together)
        return AtomicWriter(options, write.ticket, write)
    if options.atomic:
        return AtomicWriter(options, begin(here, options))
    now = here.call(here.database.timestamp)
    if since is not None and since > now:
        raise InvalidArgument(
            "if_unchanged_since",
            f"{since.describe()} is in the future: the oracle is at {now.describe()}",
        )
    return TransactionWriter(options, now)


def _rows_per_transaction(options: WriteOptions, schema: StructType) -> int:
    """As many as were asked for. Raises `InvalidArgument` if they may have too many cells: those
    that are looked at and not written are locked."""
    fields, cells_max = len(schema.fields), Limits().transaction_cells_max
    if options.catalog is not None:
        fields -= len(options.catalog.key)
        if options.if_unchanged_since is not None or options.operation == MERGE:
            fields = len(options.catalog.values)
    most = cells_max // max(fields, 1)
    if options.transaction_rows > most:
        raise InvalidArgument(
            "transaction_rows",
            f"{options.transaction_rows} rows of {fields} fields may have more than "
            f"the {cells_max} cells that a transaction can write",
        )
    return options.transaction_rows or max(min(most, ROWS_PER_TRANSACTION), 1)


def _without_flag(schema: StructType, options: WriteOptions) -> StructType:
    """The fields to write: all but the one that says which rows a merge deletes."""
    if options.delete_field is None:
        return schema
    flag = field_named(schema, options.delete_field)
    if flag is None or not isinstance(flag.dataType, BooleanType):
        raise InvalidArgument(
            "delete_field", f"the frame has no boolean field {options.delete_field!r}"
        )
    return StructType([field for field in schema.fields if field is not flag])


SINKS = Table(SINKS_NAME)
BATCH = SINKS.column("batch", codecs.integer)
OWNER = SINKS.column("table", codecs.integer)
TASK = "batch"
"""The task that locks the number of the batch. Other tasks are named by numbers."""

_QUERY = "sql.streaming.queryId"


@dataclass
class LockedInBatch(Locked):
    """The receipt of one attempt at a task of a batch for its locks."""

    ticket: Ticket | None = None
    query: str = ""


class Marks(NamedTuple):
    """The stored state of one query, and of the table into which it writes."""

    newest: int
    """The number of the newest batch that is committed; -1 for none."""
    row: str
    """The row that the next batch writes."""
    more: Mapping[Column[int, str], int]
    """Cells that it writes there besides its number."""
    seen: Timestamp


def sink_of(options: Mapping[str, str], schema: StructType, *, complete: bool) -> Sink:
    """The sink for these options. Raises what would make all batches fail."""
    if complete:
        raise InvalidArgument(
            "outputMode", 'complete would delete the table: use outputMode("append")'
        )
    parsed = WriteOptions.of_sink(options)
    writer = writer_of(parsed, schema)
    if not isinstance(writer, AtomicWriter):
        raise InvariantViolation("a sink without a shared transaction")
    return Sink(parsed, writer)


class Sink(DataSourceStreamArrowWriter):
    """Upserts or deletes the rows of each batch, in one transaction of the whole batch."""

    def __init__(self, options: WriteOptions, writer: AtomicWriter) -> None:
        self._options = options
        self._writer = writer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> LockedInBatch:
        query = _query()
        locked = self._writer.write(iterator)
        known = {field.name: getattr(locked, field.name) for field in fields(Locked)}
        return LockedInBatch(**known, ticket=self._writer.ticket, query=query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        show_log()
        receipts = receipts_of(messages)
        batch = _batch_of(messages)
        if batch is None:
            return  # no task, no row
        here = connection_to(self._options.target)
        ticket, query = batch
        marks = self._marks(here, query)
        if marks.newest >= batchId:
            roll_back(self._options, ticket, _locked(messages))
            _require_repeated(marks.newest, batchId, query)
            log.info("batch %d of query %s was written before", batchId, query)
            return
        conditional = replace(ticket, unchanged_since=int(marks.seen))
        marker = here.call(lambda: self._mark(here, conditional, marks, batchId))
        here.call(lambda: commit(here, self._options, ticket, [*receipts, marker]))
        log.info("batch %d of query %s: %s", batchId, query, total(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        show_log()
        batch = _batch_of(messages)
        if batch is None:
            return  # what tasks may have locked expires
        ticket, query = batch
        committed = roll_back(self._options, ticket, _locked(messages))
        how = f"was committed at {committed} before it was given up" if committed else "failed"
        log.warning("batch %d of query %s %s", batchId, query, how)

    def _marks(self, here: Connection, query: str) -> Marks:
        """The stored state of the query, and its timestamp."""

        async def look() -> Marks:
            catalog, deadline = here.database.internal.engine.catalog, here.deadline(target)
            await self._ensure_table(here)
            table_id = (await catalog.table(target.table, deadline)).table_id
            own, columns = f"{query}/{table_id}", [BATCH, OWNER]
            async with here.database.snapshot() as snapshot:
                first, ours = await snapshot.get_many(SINKS, [query, own], columns)
                seen = await snapshot.timestamp()
            if BATCH in ours:
                return Marks(ours[BATCH], own, {}, seen)
            owner = first.get(OWNER)
            if owner == table_id:
                return Marks(first[BATCH], query, {}, seen)
            if owner is not None:
                return Marks(-1, own, {}, seen)
            return Marks(-1, query, {OWNER: table_id}, seen)

        target = self._options.target
        return here.call(look)

    async def _mark(self, here: Connection, ticket: Ticket, marks: Marks, number: int) -> Receipt:
        """Locks the number of the batch. Raises `ConflictError` if it was written meanwhile."""
        internal, seconds = here.database.internal, self._options.retry_seconds
        async with internal.share(ticket, TASK, 0, seconds) as attempt:
            for column, value in {BATCH: number, **marks.more}.items():
                await attempt.set(marks.row, column, value)
            return await attempt.finish()

    async def _ensure_table(self, here: Connection) -> None:
        catalog = here.database.internal.engine.catalog
        deadline = here.deadline(self._options.target)
        try:
            await catalog.table(SINKS.name, deadline)
        except SchemaError:
            await catalog.create(SINKS.name, (), TableOptions(), exist_ok=True, deadline=deadline)


def _query() -> str:
    """The id of the query whose task this is."""
    task = TaskContext.get()
    query = None if task is None else task.getLocalProperty(_QUERY)
    if query is None:
        raise UsageError("Spark does not say which query this task belongs to")
    return query


def _require_repeated(newest: int, number: int, query: str) -> None:
    """Raises `InvalidArgument` unless the batch is the one that Spark repeats after a restart."""
    if newest > number:
        raise InvalidArgument(
            "checkpointLocation",
            f"batch {number} of query {query} was not written, since batch {newest} is: another "
            "driver goes on with this checkpoint or a copy of it, or it was taken back to an "
            "earlier state. Give the query a new one",
        )


def _locked(messages: list[WriterCommitMessage | None]) -> list[LockedInBatch]:
    return [message for message in messages if isinstance(message, LockedInBatch)]


def _batch_of(messages: list[WriterCommitMessage | None]) -> tuple[Ticket, str] | None:
    """The ticket of the batch and the id of the query; None if no task has reported."""
    for one in _locked(messages):
        if one.ticket is not None:
            return one.ticket, one.query
    return None


_FLAG = "percolator_delete"


def merge_frame(frame: DataFrame, delete_where: str | None, options: Mapping[str, object]) -> None:
    """Writes the frame with `operation=merge`."""
    if options.get("operation", MERGE) != MERGE:
        raise InvalidArgument("operation", f"expected {MERGE!r}, found {options['operation']!r}")
    given = {name: str(value) for name, value in options.items() if value is not None}
    given = with_stored_catalog(given | {"operation": MERGE})
    if "catalog" not in given:
        raise InvalidArgument("catalog", "is missing: a merge needs one")
    if delete_where is not None:
        if "delete_field" in given:
            raise InvalidArgument("delete_field", "cannot be given together with delete_where")
        frame = _flagged(frame, FrameCatalog.parse(given["catalog"]), delete_where)
        given["delete_field"] = _FLAG
    frame.write.format("percolator").options(**given).mode("append").save()


def _flagged(frame: DataFrame, catalogue: FrameCatalog, condition: str) -> DataFrame:
    """The frame with the condition as a field, without the fields that only the condition needs."""
    from pyspark.sql import functions as spark_sql

    fields = {field.name.lower() for field in catalogue.key}
    fields |= {field.name.lower() for field in catalogue.values}
    words = {word.lower() for word in re.findall(r"\w+", condition)}
    unknown = [name for name in frame.columns if name.lower() not in fields]
    for name in unknown:
        if not set(re.findall(r"\w+", name.lower())) <= words:
            raise SchemaError(f"field {name!r} is not in the catalogue, nor used by delete_where")
    return frame.withColumn(_FLAG, spark_sql.expr(condition).cast("boolean")).drop(*unknown)
