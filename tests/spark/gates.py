"""Gates at which Spark's processes halt: files in one directory, which the test makes and removes.

`PAGES.halt` halts whatever comes to the gate `PAGES`, until the file is gone. Whoever comes there
leaves `PAGES.reached`, with the number of its process. Files reach all processes that Spark starts,
and outlive those that are killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from percolator.spark import atomic_writer
from percolator.spark.data_source import PercolatorDataSource
from percolator.spark.options import StreamOptions
from percolator.spark.stream_reader import ChangeStreamReader

GATES = "PERCOLATOR_TEST_GATES"
"""The variable of the environment that names the directory."""
_SECONDS = 0.01


def gate(name: str) -> None:
    """Says that it was reached, and halts here if a test wants that."""
    directory = Path(os.environ[GATES])
    made = directory / f"{name}.{os.getpid()}"
    made.write_text(str(os.getpid()))
    made.rename(directory / f"{name}.reached")
    while (directory / f"{name}.halt").exists():
        time.sleep(_SECONDS)


class Gates:
    """The test's side of the gates."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def close(self, name: str) -> None:
        (self.directory / f"{name}.halt").touch()

    def open(self, name: str) -> None:
        (self.directory / f"{name}.halt").unlink()

    def reached(self, name: str) -> bool:
        return (self.directory / f"{name}.reached").exists()

    def forget(self, name: str) -> None:
        """Whoever has reached the gate has died: only others count from now on."""
        (self.directory / f"{name}.reached").unlink()

    def wait(self, name: str, go_on: Callable[[], object]) -> int:
        """The process that has reached the gate. `go_on` raises when none will."""
        while not self.reached(name):
            go_on()
            time.sleep(_SECONDS)  # for a process of Spark's, which can tell only by a file
        return int((self.directory / f"{name}.reached").read_text())


# The data source `gated`: `percolator` with gates (gates.py), in whichever process a step runs.
#
# TABLE.middle, TABLE.middle.PARTITION.ATTEMPT    a task has locked some of its rows
# TABLE.before                                    the driver is about to commit
# TABLE.after                                     it has committed, and Spark does not know yet
#
# The steps of a batch of a stream have these, and before and after them, with the table it reads:
#
# TABLE.asked      the driver knows where the batch ends, and has not noted it in the checkpoint
# TABLE.planned    it has noted that, and makes the tasks
# TABLE.noted      the checkpoint says that the batch is done, and the next one has begun

FLUSH_CELLS = 8
"""A task locks its cells in portions of this size, so that it has some at its gate."""
SLICE_ROWS = 4


class GatedDataSource(PercolatorDataSource):
    """Streams, writes and sinks; all options are those of `percolator`."""

    @classmethod
    def name(cls) -> str:
        return "gated"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return GatedWriter(self.options["table"], super().writer(schema, overwrite))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return GatedStreamReader(StreamOptions.parse(self.options), schema)

    def streamWriter(  # noqa: N802 - Spark's name
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        return GatedSink(self.options["table"], super().streamWriter(schema, overwrite))


class _Gated:
    """Calls that both have in common."""

    def __init__(self, table: str, inner: Any) -> None:
        self._table = table
        self._inner = inner

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Any:
        with mock.patch.object(atomic_writer, "FLUSH_CELLS", FLUSH_CELLS):
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


class GatedStreamReader(ChangeStreamReader):
    """The source of a stream."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._name = options.read.target.table

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        found = super().latestOffset(start, limit)
        if found != start:
            gate(f"{self._name}.asked")
        return found

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        gate(f"{self._name}.planned")
        return super().partitions(start, end)

    def commit(self, end: dict[str, Any]) -> None:
        gate(f"{self._name}.noted")
        super().commit(end)
