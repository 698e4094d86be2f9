"""Raw cells: each row of the DataFrame is a cell, with its bytes as they are stored."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from percolator import codecs
from percolator.errors import InvalidArgument, InvariantViolation, SchemaError
from percolator.routing.cells import CellPage
from percolator.routing.joined_page import SentPage
from percolator.schema import Column, Table
from percolator.spark.shapes.arrow_arrays import bytes_in, of_bytes, of_numbers
from percolator.spark.shapes.fields import (
    BINARY,
    Cell,
    check_fields,
    check_rows,
    check_values,
    column_of,
    field_named,
    refuse_nulls,
    type_name,
)

ROW, COLUMN, VALUE, COMMITTED = "row", "column", "value", "commit_timestamp"
_ANY_TABLE = Table("any")


class RawCells:
    """The `Shape` of a read or write without a catalogue."""

    @property
    def key_fields(self) -> tuple[str, ...]:
        return (ROW,)

    @property
    def joined(self) -> bool:
        return False  # they have no timestamps

    def schema(self, columns: tuple[str, ...] | None) -> StructType:
        return StructType(
            [
                StructField(ROW, BinaryType(), nullable=False),
                StructField(COLUMN, BinaryType(), nullable=False),
                StructField(VALUE, BinaryType(), nullable=False),
                StructField(COMMITTED, LongType(), nullable=False),
            ]
        )

    def check_read(self, schema: StructType) -> None:
        full = self.schema(None)
        check_fields(schema, full.names, "raw cells (no catalog was given)")
        for field in schema.fields:
            known = field_named(full, field.name)
            if known is not None and field.dataType != known.dataType:
                raise SchemaError(
                    f"field {field.name!r} is {type_name(field.dataType)}; raw cells have "
                    f"{type_name(known.dataType)}"
                )

    def stored(
        self, schema: StructType, columns: tuple[str, ...] | None
    ) -> tuple[bytes, ...] | None:
        if columns is None:
            return None
        return tuple(Column(_ANY_TABLE, name, codecs.raw).name for name in columns)

    def batch(self, page: SentPage, schema: StructType, target: pa.Schema) -> pa.RecordBatch:
        if not isinstance(page, CellPage):
            raise InvariantViolation("joined cells have no timestamps, and raw cells need them")
        lists = {ROW: page.rows, COLUMN: page.columns, VALUE: page.values}
        arrays = [
            of_numbers(page.commit_timestamps, field.type)
            if field.name.lower() == COMMITTED
            else of_bytes(lists[field.name.lower()], field.type)
            for field in target
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=target)

    def check_write(
        self, schema: StructType, columns: tuple[str, ...] | None, *, deletes: bool
    ) -> None:
        if columns is not None:
            raise InvalidArgument(
                "columns",
                "raw cells carry the name of their column in each row; leave the option out",
            )
        needed = (ROW, COLUMN) if deletes else (ROW, COLUMN, VALUE)
        # Whatever a read of raw cells returns can be written as it is.
        check_fields(schema, (ROW, COLUMN, VALUE, COMMITTED), "raw cells (no catalog was given)")
        for name in needed:
            field = field_named(schema, name)
            if field is None:
                raise SchemaError(
                    f"field {name!r} is missing; without a catalog, a row is a raw cell"
                )
            if field.dataType != BINARY:
                raise SchemaError(
                    f"field {name!r} is {type_name(field.dataType)}; raw cells have binary"
                )

    def cells(self, batch: pa.RecordBatch, nulls: str) -> list[Cell]:
        values = column_of(batch, VALUE)
        if nulls == "refuse":
            refuse_nulls(values, VALUE, "; set the option nulls to skip or delete")
        stored = bytes_in(values)
        check_values(stored, VALUE)
        found = list(zip(*self._addresses(batch), stored, strict=True))
        return [cell for cell in found if cell[2] is not None] if nulls == "skip" else found

    def deletions(self, batch: pa.RecordBatch, columns: tuple[str, ...] | None) -> list[Cell]:
        return [(row, column, None) for row, column in zip(*self._addresses(batch), strict=True)]

    @staticmethod
    def _addresses(batch: pa.RecordBatch) -> tuple[list[bytes], list[bytes]]:
        rows, columns = column_of(batch, ROW), column_of(batch, COLUMN)
        names = _without_nulls(columns, COLUMN)
        for name in set(names):
            Column(_ANY_TABLE, name, codecs.raw)  # raises if the name is not valid
        found = _without_nulls(rows, ROW)
        check_rows(found, ROW)
        return found, names


def _without_nulls(values: pa.Array, name: str) -> list[bytes]:
    refuse_nulls(values, name, "")
    return [value for value in bytes_in(values) if value is not None]
