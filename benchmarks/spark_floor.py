"""The least cost of Spark's Python data sources: sources that have their rows, and keep none.

`make bench-spark` compares scans and bulk loads with Parquet, which Spark reads and writes in its
own process. Whatever a data source in Python does comes on top of these floors: rows pass between
Spark and a process of Python's, and a load has to be arranged by tablet and in order first.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

SCHEMA = "key string, value string"
_PAGE_ROWS = 8_192
_VALUE_BYTES = 100


class Numbered(InputPartition):
    """Some of the rows."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.rows = rows


class ReadyReader(DataSourceReader):
    """Yields the same batch again and again."""

    def __init__(self, rows: int, partitions: int) -> None:
        self._rows = rows
        self._partitions = partitions

    def partitions(self) -> list[InputPartition]:
        return [Numbered(self._rows // self._partitions) for _ in range(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Numbered)
        keys = pa.array([f"{number:010d}" for number in range(_PAGE_ROWS)])
        values = pa.array(["x" * _VALUE_BYTES] * _PAGE_ROWS)
        page = pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])
        left = partition.rows
        while left > 0:
            yield page.slice(0, min(left, _PAGE_ROWS))
            left -= _PAGE_ROWS


class CountingWriter(DataSourceArrowWriter):
    """Takes every batch, and keeps none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Floor(DataSource):
    """Options: `rows` and `partitions` of a read."""

    @classmethod
    def name(cls) -> str:
        return "floor"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return ReadyReader(int(self.options["rows"]), int(self.options["partitions"]))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return CountingWriter()
