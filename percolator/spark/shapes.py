"""How cells look as rows of a DataFrame: a row per cell, or per row of the catalogue's types.

Both shapes answer the same questions, for whoever reads and writes: which schema, which stored
columns, which rows a page of cells makes, which cells a batch of rows makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, StructField, StructType

from percolator.errors import SchemaError
from percolator.spark.catalogue import Catalogue
from percolator.wire.questions import CellPage

Cell = tuple[bytes, bytes, bytes | None]
"""Row, column, and the value; None: the cell is to go."""


class Shape(Protocol):
    """What a DataFrame's rows are."""

    key_codec: Any
    """Of the row key, as the DataFrame has it."""

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The fields that make up the row key."""
        ...

    def schema(self, columns: tuple[str, ...] | None) -> StructType:
        """Of a read, with the option `columns`."""
        ...

    def check_read(self, schema: StructType) -> None:
        """Refuses fields that a read cannot have. Raises `SchemaError`."""
        ...

    def stored(
        self, schema: StructType, columns: tuple[str, ...] | None
    ) -> tuple[bytes, ...] | None:
        """The columns to read; None for all that there are."""
        ...

    def batch(self, page: CellPage, schema: StructType, target: pa.Schema) -> pa.RecordBatch:
        """The rows that a page of cells makes."""
        ...

    def check_write(
        self, schema: StructType, columns: tuple[str, ...] | None, *, deletes: bool
    ) -> None:
        """Refuses a DataFrame that cannot be written. Raises `SchemaError`, `InvalidArgument`."""
        ...

    def cells(self, batch: pa.RecordBatch, nulls: str) -> list[Cell]:
        """The cells that a batch of rows puts; nulls as the option `nulls` says."""
        ...

    def deletions(self, batch: pa.RecordBatch, columns: tuple[str, ...] | None) -> list[Cell]:
        """The cells that a batch of rows deletes."""
        ...


def shape_of(catalogue: Catalogue | None) -> Shape:
    """With a catalogue, rows; without one, raw cells."""
    from percolator.spark.raw_cells import RawCells
    from percolator.spark.typed_rows import TypedRows

    return RawCells() if catalogue is None else TypedRows(catalogue)


# ---------------------------------------------------------------------------- shared


def field_named(schema: StructType, name: str) -> StructField | None:
    """Spark does not tell upper case from lower case in names of fields."""
    for field in schema.fields:
        if field.name.lower() == name.lower():
            return field
    return None


def type_name(kind: DataType) -> str:
    """ "bigint": as in a CREATE TABLE."""
    return kind.simpleString()


def check_fields(schema: StructType, known: Sequence[str], where: str) -> None:
    """Refuses a schema without fields, with one that nobody knows, or with one twice."""
    if not schema.fields:
        raise SchemaError("the schema has no fields")
    names = {name.lower() for name in known}
    seen = set[str]()
    for field in schema.fields:
        name = field.name.lower()
        if name not in names:
            raise SchemaError(
                f"field {field.name!r} is not in {where}, which has {', '.join(sorted(known))}"
            )
        if name in seen:
            raise SchemaError(f"field {field.name!r} is there twice")
        seen.add(name)


def refuse_nulls(values: pa.Array, name: str, hint: str) -> None:
    """Raises `SchemaError` when there is a null."""
    if values.null_count:
        raise SchemaError(f"field {name!r} is null in {values.null_count} rows{hint}")


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """A field of a batch, by its name in whatever case."""
    for index, found in enumerate(batch.schema.names):
        if found.lower() == name.lower():
            return batch.column(index)
    raise SchemaError(f"field {name!r} is missing")


BINARY = BinaryType()
