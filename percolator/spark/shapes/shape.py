"""What a row of a DataFrame stands for: a cell (raw cells), or a row of the table (typed rows).

Both shapes answer the same questions for reads and writes: which schema, which stored columns,
which rows a page of cells becomes, which cells a batch of rows becomes.
"""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa
from pyspark.sql.types import StructType

from percolator.routing.joined_page import SentPage
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.shapes.fields import Cell
from percolator.spark.shapes.raw_cells import RawCells
from percolator.spark.shapes.typed_rows import TypedRows


class Shape(Protocol):
    """What the rows of a DataFrame are."""

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The fields that make up the row key."""
        ...

    @property
    def joined(self) -> bool:
        """Whether `batch` takes joined pages, too."""
        ...

    def schema(self, columns: tuple[str, ...] | None) -> StructType:
        """The schema of a read, given the option `columns`."""
        ...

    def check_read(self, schema: StructType) -> None:
        """Refuses fields that a read cannot return. Raises `SchemaError`."""
        ...

    def stored(
        self, schema: StructType, columns: tuple[str, ...] | None
    ) -> tuple[bytes, ...] | None:
        """The columns to read; None for all columns."""
        ...

    def batch(self, page: SentPage, schema: StructType, target: pa.Schema) -> pa.RecordBatch:
        """The rows that a page of cells becomes."""
        ...

    def check_write(
        self, schema: StructType, columns: tuple[str, ...] | None, *, deletes: bool
    ) -> None:
        """Refuses a DataFrame that cannot be written. Raises `SchemaError`, `InvalidArgument`."""
        ...

    def cells(self, batch: pa.RecordBatch, nulls: str) -> list[Cell]:
        """The cells that a batch of rows writes; `nulls` is the option of that name."""
        ...

    def deletions(self, batch: pa.RecordBatch, columns: tuple[str, ...] | None) -> list[Cell]:
        """The cells that a batch of rows deletes."""
        ...


def shape_of(catalogue: FrameCatalog | None) -> Shape:
    """Typed rows with a catalogue, raw cells without one."""
    return RawCells() if catalogue is None else TypedRows(catalogue)
