"""The data source `gated`: `percolator` with gates (gates.py), in whichever process a step runs.

TABLE.middle, TABLE.middle.PARTITION.ATTEMPT    a task has locked some of its rows
TABLE.before                                    the driver is about to commit
TABLE.after                                     it has committed, and Spark does not know yet
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from percolator.spark import locking
from percolator.spark.data_source import PercolatorDataSource
from tests.spark.gates import gate

FLUSH_CELLS = 8
"""A task locks its cells in portions of this size, so that it has some at its gate."""
SLICE_ROWS = 4


class GatedDataSource(PercolatorDataSource):
    """Writes and sinks only; all options are those of `percolator`."""

    @classmethod
    def name(cls) -> str:
        return "gated"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return GatedWriter(self.options["table"], super().writer(schema, overwrite))

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        return GatedSink(self.options["table"], super().streamWriter(schema, overwrite))


class _Gated:
    """What both have in common."""

    def __init__(self, table: str, inner: Any) -> None:
        self._table = table
        self._inner = inner

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        with mock.patch.object(locking, "FLUSH_CELLS", FLUSH_CELLS):
            return self._inner.write(self._halting(iterator))

    def _halting(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows in small batches; halts after half of the first one that Spark passes."""
        task = TaskContext.get()
        assert task is not None
        for number, batch in enumerate(batches):
            for first in range(0, batch.num_rows, SLICE_ROWS):
                if number == 0 and first >= batch.num_rows // 2 > first - SLICE_ROWS:
                    gate(f"{self._table}.middle")
                    gate(f"{self._table}.middle.{task.partitionId()}.{task.attemptNumber()}")
                yield batch.slice(first, SLICE_ROWS)

    def _commit(self, *given: Any) -> None:
        gate(f"{self._table}.before")
        self._inner.commit(*given)
        gate(f"{self._table}.after")


class GatedWriter(_Gated, DataSourceArrowWriter):
    """A batch write."""

    def commit(self, messages: list[Any]) -> None:
        self._commit(messages)

    def abort(self, messages: list[Any]) -> None:
        self._inner.abort(messages)


class GatedSink(_Gated, DataSourceStreamArrowWriter):
    """The sink of a stream."""

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._commit(messages, batchId)

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._inner.abort(messages, batchId)
