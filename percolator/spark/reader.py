"""Reading a table: a partition for each tablet, a batch for each page.

Partitions are ranges of rows and nothing else: the client finds the tablet that holds the rows when
the task runs, wherever it is by then, and settles the locks that it meets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from percolator import codecs
from percolator.schema import Table
from percolator.spark.connections import checked
from percolator.spark.key_range import KeyFilters, RowsBetween
from percolator.spark.options import ReadOptions
from percolator.spark.partitions import TableRows, plan
from percolator.spark.shapes import shape_of
from percolator.timestamps import Timestamp


class TableReader(DataSourceReader):
    """Reads all rows, or those in the range that was pushed down."""

    def __init__(self, options: ReadOptions, schema: StructType, timestamp: int) -> None:
        self._options = options
        self._schema = schema
        self._timestamp = Timestamp(timestamp)
        self._shape = shape_of(options.catalog)
        self._shape.check_read(schema)
        self._stored = self._shape.stored(schema, options.columns)
        self._target = to_arrow_schema(schema, timezone="UTC")
        self.rows = RowsBetween()

    def partitions(self) -> Sequence[InputPartition]:
        here = checked(self._options.target)
        return here.call(partial(plan, here, self._options, self.rows, self._timestamp))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TableRows):
            return  # Spark makes one when there is nothing to read
        options = self._options
        here = checked(options.target)
        snapshot = here.database.new_snapshot(self._timestamp, options.target.timeout_seconds)
        table = Table(options.target.table, key=codecs.raw)
        cells = snapshot.scan_cells(
            table, start=partition.start, end=partition.end, columns=self._stored
        )
        pages = here.thread.iterate(cells)
        try:
            with closing(pages):
                for page in pages:
                    if page.rows:
                        yield self._shape.batch(page, self._schema, self._target)
        finally:
            here.call(snapshot.close)


class FilteringTableReader(TableReader):
    """As `TableReader`, in a session that pushes filters down."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        keys = KeyFilters(self._shape.key_fields, self._shape.key_codec)
        self.rows, left = keys.push(filters)
        return left
