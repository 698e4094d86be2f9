"""Reading a table: a partition for each tablet, a batch for each page.

A partition is a list of row ranges and nothing else. When its task runs, the client finds the
tablets that have these rows by then, and resolves the locks that it meets.

Filters are not pushed down: there is no `pushFilters` here, and there must not be. Spark 4.3 keeps
the partitions and the read function that it planned with pushed filters on the relation of the
frame, and uses them for later queries of that frame, which then miss rows. What Spark keeps has to
be right for every query, so only the options of the frame choose rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from percolator import codecs
from percolator.schema import Table
from percolator.spark.connections import checked
from percolator.spark.options import ReadOptions
from percolator.spark.reading.cell_pages import sent_pages
from percolator.spark.reading.partitions import TableRows, plan
from percolator.spark.shapes.shape import shape_of
from percolator.timestamps import Timestamp


class TableReader(DataSourceReader):
    """Reads all rows of a table, or those that options choose, at one timestamp."""

    def __init__(self, options: ReadOptions, schema: StructType, timestamp: int) -> None:
        self._options = options
        self._schema = schema
        self._timestamp = Timestamp(timestamp)
        self._shape = shape_of(options.catalog)
        self._shape.check_read(schema)
        self._stored = self._shape.stored(schema, options.columns)
        self._target = to_arrow_schema(schema, timezone="UTC")

    def partitions(self) -> Sequence[InputPartition]:
        here = checked(self._options.target)
        return here.call(partial(plan, here, self._options, self._timestamp))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, TableRows):
            return  # Spark makes one of its own when there is nothing to read
        options = self._options
        here = checked(options.target)
        snapshot = here.database.internal.snapshot(self._timestamp, options.target.timeout_seconds)
        table = Table(options.target.table, key=codecs.stored)
        pages = here.thread.iterate(
            sent_pages(snapshot, table, partition.ranges, self._stored, joined=self._shape.joined)
        )
        try:
            with closing(pages):
                for page in pages:
                    if len(page.rows):
                        yield self._shape.batch(page, self._schema, self._target)
        finally:
            here.call(snapshot.close)
