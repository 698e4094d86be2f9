"""The data source `percolator`. Importing it is cheap: Spark does that in every session.

Spark makes one of these for every `load()` and every `save()`, in a process of its own on the
driver, and passes pickled copies to all others. So whatever has to be the same in all jobs of a
read, its snapshot above all, is settled before it is pickled for the first time.
"""

from __future__ import annotations

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

    from percolator.errors import PercolatorError


class PercolatorDataSource(DataSource):
    """`percolator.spark.options` lists the options."""

    options: dict[str, str]

    @classmethod
    def name(cls) -> str:
        return "percolator"

    def __init__(self, options: dict[str, str]) -> None:
        from percolator.spark.options import check_names

        super().__init__(options)
        check_names(options)
        self._snapshot_timestamp = 0
        self._problem: PercolatorError | None = None
        """Why the read cannot be settled, found at pickling."""

    def schema(self) -> StructType:
        from percolator.spark.connections import with_stored_catalog
        from percolator.spark.options import ReadOptions, StreamOptions, is_stream
        from percolator.spark.shapes import shape_of
        from percolator.spark.snapshots import stamped

        if is_stream(self.options):
            from percolator.spark.change_rows import stream_schema
            from percolator.spark.stream_reader import check_table

            stream = StreamOptions.parse(with_stored_catalog(self.options))
            check_table(stream)
            return stream_schema(stream.read)
        # An error reaches the user as it is from here; at pickling, as a failure to pickle.
        self._settle()
        options = ReadOptions.parse(self.options)
        schema = shape_of(options.catalog).schema(options.columns)
        return stamped(schema, self._snapshot_timestamp)

    def reader(self, schema: StructType) -> DataSourceReader:
        from percolator.spark.options import ReadOptions
        from percolator.spark.reader import TableReader
        from percolator.spark.snapshots import require_own

        if self._problem is not None:
            raise self._problem
        require_own(schema, self._snapshot_timestamp)
        return TableReader(ReadOptions.parse(self.options), schema, self._snapshot_timestamp)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from percolator.spark.connections import with_stored_catalog
        from percolator.spark.options import WriteOptions
        from percolator.spark.writers import writer_of

        given = with_stored_catalog(self.options)
        return writer_of(WriteOptions.parse(given, overwrite=overwrite), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from percolator.spark.connections import with_stored_catalog
        from percolator.spark.options import StreamOptions
        from percolator.spark.stream_reader import ChangeStreamReader

        options = StreamOptions.parse(with_stored_catalog(self.options))
        return ChangeStreamReader(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from percolator.spark.connections import with_stored_catalog
        from percolator.spark.writers import sink_of

        return sink_of(with_stored_catalog(self.options), schema, complete=overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """Reads and sinks are pickled as a whole. From here on, all copies of a read have the same
        snapshot."""
        from percolator.errors import PercolatorError
        from percolator.spark.options import is_sink, is_stream

        if not is_stream(self.options) and not is_sink(self.options):
            try:
                self._settle()
            except PercolatorError as problem:
                # From here, it would reach the user as a failure to pickle. `reader` raises it.
                self._problem = problem
        return self.__dict__.copy()

    def _settle(self) -> None:
        """Makes sure of the snapshot and of the catalogue, for all copies of this read."""
        if not self._snapshot_timestamp:
            from percolator.spark.connections import with_stored_catalog
            from percolator.spark.options import ReadOptions
            from percolator.spark.reader import pinned_timestamp

            self.options = with_stored_catalog(self.options)
            self._snapshot_timestamp = pinned_timestamp(ReadOptions.parse(self.options))
