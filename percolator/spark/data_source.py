"""The data source `percolator`. Importing it is cheap: Spark does that in every session.

Spark makes one of these for every `load()` and every `save()`, in processes of its own on the
driver, and hands pickled copies to everybody else. So whatever a read has to keep the same in all
its jobs, its snapshot above all, is settled before the first pickling.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from percolator.spark.options import ReadOptions

_PUSHING_FILTERS = "pyspark.sql.worker.data_source_pushdown_filters"
"""The program in which Spark plans a read with filters."""


class PercolatorDataSource(DataSource):
    """See `percolator.spark.options` for what `options` may hold."""

    @classmethod
    def name(cls) -> str:
        return "percolator"

    def __init__(self, options: dict[str, str]) -> None:
        from percolator.spark.options import check_names

        super().__init__(options)
        check_names(options)
        self._snapshot_timestamp = 0

    def schema(self) -> StructType:
        from percolator.spark.options import ReadOptions
        from percolator.spark.shapes import shape_of

        options = ReadOptions.parse(self.options)
        # What is wrong is told as it is here; at pickling, as a failure to pickle.
        self._settle_snapshot(options)
        return shape_of(options.catalog).schema(options.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from percolator.spark.options import ReadOptions
        from percolator.spark.reader import FilteringTableReader, TableReader

        # Spark refuses a reader that takes filters while they are turned off, and plans reads
        # with filters in another program than reads without.
        reader = FilteringTableReader if _PUSHING_FILTERS in sys.modules else TableReader
        return reader(ReadOptions.parse(self.options), schema, self._snapshot_timestamp)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from percolator.spark.options import WriteOptions
        from percolator.spark.writing import writer_of

        return writer_of(WriteOptions.parse(self.options), schema, overwrite=overwrite)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        raise _no_streams("a table's changes are what observers are for")

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        raise _no_streams("use foreachBatch, and write each batch with append")

    def __getstate__(self) -> dict[str, Any]:
        """Only a read is pickled as a whole: from here on its snapshot is the same for all."""
        from percolator.spark.options import ReadOptions

        self._settle_snapshot(ReadOptions.parse(self.options))
        return self.__dict__.copy()

    def _settle_snapshot(self, options: ReadOptions) -> None:
        if not self._snapshot_timestamp:
            from percolator.spark.pins import pinned_timestamp

            self._snapshot_timestamp = pinned_timestamp(options)


def _no_streams(instead: str) -> Exception:
    from percolator.errors import UsageError

    return UsageError(f"percolator is no source or sink of streams: {instead}")
