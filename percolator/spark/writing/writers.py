"""Which writer a DataFrame gets, after checking on the driver that it can work at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.types import BooleanType, StructType

from percolator.errors import InvalidArgument
from percolator.limits import Limits
from percolator.spark.connections import checked
from percolator.spark.options import BULK_LOAD, MERGE, WriteOptions
from percolator.spark.shapes.fields import field_named
from percolator.spark.shapes.shape import shape_of
from percolator.spark.writing.atomic_writing import AtomicWriter, begin
from percolator.spark.writing.bulk_load_writer import BulkLoadWriter
from percolator.spark.writing.joint_writes import part_of_job
from percolator.spark.writing.plain_writing import TransactionWriter

if TYPE_CHECKING:
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
        part = part_of_job(options.together)
        return AtomicWriter(options, part.ticket, part)
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
