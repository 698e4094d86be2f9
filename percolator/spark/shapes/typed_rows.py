"""Typed rows: each row of the DataFrame is a row of the table, with the catalogue's fields.

A missing cell reads as null. A row with none of the cells that a read asks for is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ByteType,
    DataType,
    DecimalType,
    FloatType,
    IntegerType,
    ShortType,
    StructField,
    StructType,
)

from percolator.errors import InvalidArgument, SchemaError
from percolator.routing.cells import CellPage
from percolator.routing.joined_page import JoinedBytes, JoinedPage, SentPage
from percolator.row_text import quoted
from percolator.spark.catalog.frame_catalog import FrameCatalog, ValueField
from percolator.spark.shapes.fields import (
    Cell,
    check_fields,
    check_rows,
    check_text,
    check_values,
    column_of,
    field_named,
    refuse_nulls,
    require_nullable,
    type_name,
)
from percolator.spark.shapes.nested_values import decoded_nested, encoded_nested
from percolator.spark.shapes.values import (
    Stored,
    cut,
    decoded,
    decoded_key,
    encoded,
    encoded_key,
    parts_of_keys,
)

_WIDENED = {
    "bigint": (ByteType, ShortType, IntegerType),
    "int": (ByteType, ShortType),
    "double": (FloatType,),
}
"""Narrower types that can be written as the type of the catalogue; decimals have a rule."""

_OF_ANY_SIZE = ("raw", "text", "json")
_OF_TEXT = ("text", "json")


class TypedRows:
    """The `Shape` of a read or write with a catalogue."""

    def __init__(self, catalogue: FrameCatalog) -> None:
        self._catalogue = catalogue
        self._key_codec: Any = catalogue.key_codec
        self._value_fields = {field.name.lower(): field for field in catalogue.values}

    @property
    def key_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in self._catalogue.key)

    # ------------------------------------------------------------------ reading

    @property
    def joined(self) -> bool:
        return True

    def schema(self, columns: tuple[str, ...] | None) -> StructType:
        key = [
            StructField(field.name, field.spark_type, nullable=False)
            for field in self._catalogue.key
        ]
        values = [
            StructField(field.name, field.spark_type) for field in self._catalogue.chosen(columns)
        ]
        return StructType(key + values)

    def check_read(self, schema: StructType) -> None:
        full = self.schema(None)
        check_fields(schema, full.names, "the catalogue")
        for field in schema.fields:
            known = field_named(full, field.name)
            if known is None:
                continue
            if not _same(field.dataType, known.dataType):
                raise _of_another_type(field, known)
            if known.nullable:
                require_nullable(field)

    def stored(
        self, schema: StructType, columns: tuple[str, ...] | None
    ) -> tuple[bytes, ...] | None:
        chosen = self._catalogue.chosen(columns)
        fields = self.read_fields(schema)
        for field in fields:
            if field not in chosen:
                raise InvalidArgument(
                    "columns", f"leaves out {field.name!r}, which the schema of the read asks for"
                )
        return tuple(field.column for field in fields or chosen)

    def read_fields(self, schema: StructType) -> tuple[ValueField, ...]:
        """The fields of a schema that are cells, in the order of the schema."""
        names = [field.name.lower() for field in schema.fields]
        return tuple(self._value_fields[name] for name in names if name in self._value_fields)

    def batch(self, page: SentPage, schema: StructType, target: pa.Schema) -> pa.RecordBatch:
        fields = self.read_fields(schema)
        if isinstance(page, JoinedPage):
            nothing: Stored = [None] * len(page.rows)
            joined = [page.columns.get(field.column, nothing) for field in fields]
            arrays = self.arrays(page.rows, joined, fields, target)
        else:
            arrays = self.arrays(*by_field(page, fields), fields, target)
        return pa.RecordBatch.from_arrays(arrays, schema=target)

    def arrays(
        self,
        rows: list[bytes] | JoinedBytes,
        values: Sequence[Stored],
        fields: tuple[ValueField, ...],
        target: pa.Schema,
    ) -> list[pa.Array]:
        """The columns of `target`, given the rows, and the values of all rows for each field."""
        try:
            keys = self._keys(rows, target)
        except SchemaError as error:
            raise self._of_key(rows, error) from None
        stored = {
            field.name.lower(): (field, found) for field, found in zip(fields, values, strict=True)
        }
        arrays = []
        for field in target:
            name = field.name.lower()
            if name in keys:
                arrays.append(keys[name])
            else:
                arrays.append(_array(rows, *stored[name], field.type))
        return arrays

    def _of_key(self, rows: list[bytes] | JoinedBytes, error: SchemaError) -> SchemaError:
        """The error about a key of these rows, with its fields and itself."""
        for row in cut(rows):
            try:
                self._key_codec.decode(row)
            except SchemaError:
                names = ", ".join(self.key_fields)
                return SchemaError(f"key {names!r}: {error.message}, in row {quoted(row)}")
        return error

    def _keys(self, rows: list[bytes] | JoinedBytes, target: pa.Schema) -> dict[str, pa.Array]:
        """The arrays of those parts of the key that the read returns."""
        types = {field.name.lower(): field.type for field in target}
        key = self._catalogue.key
        if len(key) == 1:
            name = key[0].name.lower()
            return {name: decoded_key(rows, key[0].type, types[name])} if name in types else {}
        wanted = [(i, part.type, part.name.lower()) for i, part in enumerate(key)]
        wanted = [(i, kind, name) for i, kind, name in wanted if name in types]
        decode = self._key_codec.decode
        keys = [decode(row) for row in cut(rows)] if wanted else []
        return {
            name: parts_of_keys([found[i] for found in keys], kind, types[name])
            for i, kind, name in wanted
        }

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
            raise SchemaError("there is nothing to write: the frame has only the key")
        for field in schema.fields:
            known = field_named(full, field.name)
            if known is not None and not _fits(field.dataType, known.dataType):
                raise _of_another_type(field, known)

    def cells(self, batch: pa.RecordBatch, nulls: str) -> list[Cell]:
        rows = self._rows(batch)
        found: list[Cell] = []
        places = {name.lower(): place for place, name in enumerate(batch.schema.names)}
        for field in self._catalogue.values:
            place = places.get(field.name.lower())
            if place is None:
                continue
            values = batch.column(place)
            if nulls == "refuse":
                hint = "; set the option nulls to skip or delete"
                refuse_nulls(values, field.name, hint)
            column = field.column
            stored = _stored(field, values)
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
            refuse_nulls(values, part.name, ", and a key cannot be null")
            if part.type in _OF_TEXT:
                check_text(values, part.name)
        if len(key) == 1:
            rows = encoded_key(parts[0], key[0].type)
        else:
            encode = self._key_codec.encode
            rows = [encode(found) for found in zip(*(p.to_pylist() for p in parts), strict=True)]
        check_rows(rows, ", ".join(self.key_fields))
        return rows


def _array(
    rows: list[bytes] | JoinedBytes, field: ValueField, found: Stored, target: pa.DataType
) -> pa.Array:
    try:
        return _decoded(field, found, target)
    except SchemaError as error:
        where = ""
        for row, value in zip(cut(rows), cut(found), strict=True):
            try:
                _decoded(field, [value], target)
            except SchemaError:
                where = f", in row {quoted(row)}"
                break
        raise SchemaError(f"field {field.name!r}: {error.message}{where}") from None


def _decoded(field: ValueField, found: Stored, target: pa.DataType) -> pa.Array:
    if field.nested is not None:
        return decoded_nested(cut(found), field.nested, target)
    return decoded(found, field.type, target)


def _stored(field: ValueField, values: pa.Array) -> list[bytes | None]:
    """The values to store for a field."""
    if field.type in _OF_TEXT:
        check_text(values, field.name)
    try:
        if field.nested is None:
            found = encoded(values, field.type)
        else:
            found = encoded_nested(values, field.nested)
    except SchemaError as error:
        raise SchemaError(f"field {field.name!r}: {error.message}") from None
    if field.type in _OF_ANY_SIZE:
        check_values(found, field.name)
    return found


def _same(one: DataType, other: DataType) -> bool:
    """Whether two types are the same, but for what may be null."""
    return type_name(one) == type_name(other)


def _fits(found: DataType, known: DataType) -> bool:
    """Whether all values of a type can be written as the catalogue's type."""
    if isinstance(found, DecimalType) and isinstance(known, DecimalType):
        before = found.precision - found.scale <= known.precision - known.scale
        return before and found.scale <= known.scale
    return _same(found, known) or isinstance(found, _WIDENED.get(type_name(known), ()))


def _of_another_type(field: StructField, known: StructField) -> SchemaError:
    found, expected = type_name(field.dataType), type_name(known.dataType)
    return SchemaError(f"field {field.name!r} is {found}; the catalogue has {expected}")


def by_field(
    page: CellPage, fields: tuple[ValueField, ...]
) -> tuple[list[bytes], list[list[bytes | None]]]:
    """The rows of a page, and for each field the value, or None, of every row."""
    if len(fields) == 1:
        return page.rows, [page.values]  # type: ignore[list-item]  # none is None
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
