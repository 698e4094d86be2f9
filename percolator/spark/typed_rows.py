"""Typed rows: a row of the DataFrame for each row of the table, with the catalogue's fields.

A cell that is not there is null. A row with none of the cells that a read asks for is not in it.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from percolator.errors import SchemaError
from percolator.spark.catalogue import SPARK_TYPES, Catalogue, ValueField
from percolator.spark.shapes import (
    Cell,
    check_fields,
    column_of,
    field_named,
    refuse_nulls,
    type_name,
)
from percolator.spark.values import decoded, decoded_key, encoded, encoded_key
from percolator.wire.questions import CellPage

_TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "bigint": LongType(),
    "boolean": BooleanType(),
    "double": DoubleType(),
    "string": StringType(),
}
_WIDENED = {"bigint": (ByteType, ShortType, IntegerType), "double": (FloatType,)}
"""What may be written as such without losing anything."""


class TypedRows:
    """`Shape` with a catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.key_codec: Any = catalogue.key_codec
        self._value_fields = {field.name.lower(): field for field in catalogue.values}

    @property
    def key_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in self._catalogue.key)

    # ------------------------------------------------------------------ reading

    def schema(self, columns: tuple[str, ...] | None) -> StructType:
        key = [
            StructField(field.name, _TYPES[SPARK_TYPES[field.type]], nullable=False)
            for field in self._catalogue.key
        ]
        values = [
            StructField(field.name, _TYPES[SPARK_TYPES[field.type]])
            for field in self._catalogue.chosen(columns)
        ]
        return StructType(key + values)

    def check_read(self, schema: StructType) -> None:
        full = self.schema(None)
        check_fields(schema, full.names, "the catalogue")
        for field in schema.fields:
            known = field_named(full, field.name)
            if known is not None and field.dataType != known.dataType:
                raise _of_another_type(field, known)

    def stored(
        self, schema: StructType, columns: tuple[str, ...] | None
    ) -> tuple[bytes, ...] | None:
        fields = self._read_fields(schema) or self._catalogue.chosen(columns)
        return tuple(field.column for field in fields)

    def _read_fields(self, schema: StructType) -> tuple[ValueField, ...]:
        names = [field.name.lower() for field in schema.fields]
        return tuple(self._value_fields[name] for name in names if name in self._value_fields)

    def batch(self, page: CellPage, schema: StructType, target: pa.Schema) -> pa.RecordBatch:
        fields = self._read_fields(schema)
        rows, values = _by_field(page, fields)
        keys = self._keys(rows, target)
        stored = {
            field.name.lower(): (field.type, found)
            for field, found in zip(fields, values, strict=True)
        }
        arrays = []
        for field in target:
            name = field.name.lower()
            if name in keys:
                arrays.append(keys[name])
            else:
                kind, found = stored[name]
                arrays.append(decoded(found, kind, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=target)

    def _keys(self, rows: list[bytes], target: pa.Schema) -> dict[str, pa.Array]:
        """The arrays of those parts of the key that are wanted."""
        types = {field.name.lower(): field.type for field in target}
        key = self._catalogue.key
        if len(key) == 1:
            name = key[0].name.lower()
            return {name: decoded_key(rows, key[0].type, types[name])} if name in types else {}
        wanted = [(i, part.name.lower()) for i, part in enumerate(key)]
        wanted = [(i, name) for i, name in wanted if name in types]
        decode = self.key_codec.decode
        keys = [decode(row) for row in rows] if wanted else []
        return {name: pa.array([found[i] for found in keys], types[name]) for i, name in wanted}

    # ------------------------------------------------------------------ writing

    def check_write(
        self, schema: StructType, columns: tuple[str, ...] | None, *, deletes: bool
    ) -> None:
        full = self.schema(None)
        check_fields(schema, full.names, "the catalogue")
        for part in self.key_fields:
            if field_named(schema, part) is None:
                raise SchemaError(f"the key field {part!r} is missing")
        if deletes:
            self._catalogue.chosen(columns)
        elif len(schema.fields) == len(self.key_fields):
            raise SchemaError("there is nothing to write besides the key")
        for field in schema.fields:
            known = field_named(full, field.name)
            if known is None or known.dataType == field.dataType:
                continue
            if not isinstance(field.dataType, _WIDENED.get(type_name(known.dataType), ())):
                raise _of_another_type(field, known)

    def cells(self, batch: pa.RecordBatch, nulls: str) -> list[Cell]:
        rows = self._rows(batch)
        found: list[Cell] = []
        for field in self._catalogue.values:
            if field.name.lower() not in {name.lower() for name in batch.schema.names}:
                continue
            values = column_of(batch, field.name)
            if nulls == "refuse":
                hint = "; option nulls says what that means: skip or delete"
                refuse_nulls(values, field.name, hint)
            column = field.column
            stored = encoded(values, field.type)
            if nulls == "skip" and values.null_count:
                pairs = zip(rows, stored, strict=True)
                found += [(row, column, value) for row, value in pairs if value is not None]
            else:
                found += [(row, column, value) for row, value in zip(rows, stored, strict=True)]
        return found

    def deletions(self, batch: pa.RecordBatch, columns: tuple[str, ...] | None) -> list[Cell]:
        fields = self._catalogue.chosen(columns)
        return [(row, field.column, None) for row in self._rows(batch) for field in fields]

    def _rows(self, batch: pa.RecordBatch) -> list[bytes]:
        key = self._catalogue.key
        parts = [column_of(batch, part.name) for part in key]
        for part, values in zip(key, parts, strict=True):
            refuse_nulls(values, part.name, ", and it is the key")
        if len(key) == 1:
            return encoded_key(parts[0], key[0].type)
        encode = self.key_codec.encode
        return [encode(found) for found in zip(*(p.to_pylist() for p in parts), strict=True)]


def _of_another_type(field: StructField, known: StructField) -> SchemaError:
    found, expected = type_name(field.dataType), type_name(known.dataType)
    return SchemaError(f"field {field.name!r} is {found}; the catalogue says {expected}")


def _by_field(
    page: CellPage, fields: tuple[ValueField, ...]
) -> tuple[list[bytes], list[list[bytes | None]]]:
    """The rows of a page, and for each field a value, or None, for each of them."""
    if len(fields) == 1:
        return page.rows, [page.values]  # type: ignore[list-item]
    rows: list[bytes] = []
    values: list[list[bytes | None]] = [[] for _ in fields]
    by_column = {field.column: found for field, found in zip(fields, values, strict=True)}
    last: bytes | None = None
    for row, column, value in zip(page.rows, page.columns, page.values, strict=True):
        if row != last:
            last = row
            rows.append(row)
            for found in values:
                found.append(None)
        target = by_column.get(column)
        if target is not None:
            target[-1] = value
    return rows, values
