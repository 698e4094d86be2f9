"""The rows of a DataFrame: each is a cell (raw cells), or a row of the table (typed rows).

Both shapes answer the same questions for reads and writes: which schema, which stored columns,
which rows a page of cells becomes, which cells a batch of rows becomes.

A missing cell reads as null. A row with none of the cells that a read asks for is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DecimalType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from percolator import codecs
from percolator.codecs.readable import counted, quoted
from percolator.errors import InvalidArgument, InvariantViolation, SchemaError
from percolator.limits import Limits
from percolator.routing.cells import CellPage
from percolator.routing.range_scan import JoinedBytes, JoinedPage, SentPage
from percolator.schema import Column, Table
from percolator.spark.catalog import FrameCatalog, ValueField, may_be_null_throughout
from percolator.spark.values import (
    Stored,
    bytes_in,
    cut,
    decoded,
    decoded_key,
    decoded_nested,
    encoded,
    encoded_key,
    encoded_nested,
    of_bytes,
    of_numbers,
    parts_of_keys,
)

Cell = tuple[bytes, bytes, bytes | None]
"""Row, column and value; a value of None deletes the cell."""

BINARY = BinaryType()
_LIMITS = Limits()


def field_named(schema: StructType, name: str) -> StructField | None:
    """The field of that name. Like Spark, this ignores case."""
    return next((one for one in schema.fields if one.name.lower() == name.lower()), None)


def type_name(kind: DataType) -> str:
    """A type as a CREATE TABLE spells it, such as "bigint"."""
    return kind.simpleString()


def check_fields(schema: StructType, known: Sequence[str], where: str) -> None:
    """Refuses a schema that is empty, or has an unknown or repeated field."""
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
            raise SchemaError(f"field {field.name!r} appears twice")
        seen.add(name)


def require_nullable(field: StructField) -> None:
    """Refuses a field that is declared as never null. Spark relies on that: it answers `IS NULL`
    with false, without looking."""
    if not field.nullable or not may_be_null_throughout(field.dataType):
        raise SchemaError(
            f"field {field.name!r} is declared not null, and it may be null: leave NOT NULL out"
        )


def check_rows(rows: Sequence[bytes], name: str) -> None:
    """Refuses row keys that are too long to be stored, before a transaction has locked others: if
    such a row were its primary, nobody could ask what became of it."""
    _check_sizes(rows, name, "row key", _LIMITS.row_bytes_max)


def check_values(values: Sequence[bytes | None], name: str) -> None:
    """Refuses values that are too large to be stored."""
    _check_sizes(values, name, "value", _LIMITS.value_bytes_max)


def _check_sizes(stored: Sequence[bytes | None], name: str, what: str, most: int) -> None:
    longest = max((len(one) for one in stored if one is not None), default=0)
    if longest > most:
        raise SchemaError(
            f"field {name!r}: a {what} has {longest} bytes, at most {most} can be stored"
        )


def check_text(values: pa.Array, name: str) -> None:
    """Refuses text that is not UTF-8, in nested values, too. Spark does not look at what it casts
    to a string, and nobody could read such a value, or any page of rows with such a key."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"field {name!r}: text is not UTF-8; Spark's make_valid_utf8 replaces what is wrong in "
            "it, and bytes are stored as type raw"
        ) from error


def refuse_nulls(values: pa.Array, name: str, hint: str) -> None:
    """Raises `SchemaError` if there is a null."""
    if values.null_count:
        raise SchemaError(f"field {name!r} is null in {counted(values.null_count, 'row')}{hint}")


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """The column of a batch with that name, ignoring case."""
    for index, found in enumerate(batch.schema.names):
        if found.lower() == name.lower():
            return batch.column(index)
    raise SchemaError(f"field {name!r} is missing")


ROW, COLUMN, VALUE, COMMITTED = "row", "column", "value", "commit_timestamp"
_ANY_TABLE = Table("any")


class RawCells:
    """The shape of a read or write without a catalogue."""

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The fields that make up the row key."""
        return (ROW,)

    @property
    def joined(self) -> bool:
        """`batch` takes joined pages, too."""
        return False  # they have no timestamps

    def schema(self, columns: tuple[str, ...] | None) -> StructType:
        """The schema of a read, given the option `columns`."""
        return StructType(
            [
                StructField(ROW, BinaryType(), nullable=False),
                StructField(COLUMN, BinaryType(), nullable=False),
                StructField(VALUE, BinaryType(), nullable=False),
                StructField(COMMITTED, LongType(), nullable=False),
            ]
        )

    def check_read(self, schema: StructType) -> None:
        """Refuses fields that a read cannot return. Raises `SchemaError`."""
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
        """The columns to read; None for all columns."""
        if columns is None:
            return None
        return tuple(Column(_ANY_TABLE, name, codecs.raw).name for name in columns)

    def batch(self, page: SentPage, schema: StructType, target: pa.Schema) -> pa.RecordBatch:
        """The rows that a page of cells becomes."""
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
        """Refuses a DataFrame that cannot be written. Raises `SchemaError`, `InvalidArgument`."""
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
        """The cells that a batch of rows writes; `nulls` is the option of that name."""
        values = column_of(batch, VALUE)
        if nulls == "refuse":
            refuse_nulls(values, VALUE, "; set the option nulls to skip or delete")
        stored = bytes_in(values)
        check_values(stored, VALUE)
        found = list(zip(*self._addresses(batch), stored, strict=True))
        return [cell for cell in found if cell[2] is not None] if nulls == "skip" else found

    def deletions(self, batch: pa.RecordBatch, columns: tuple[str, ...] | None) -> list[Cell]:
        """The cells that a batch of rows deletes."""
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


_WIDENED = {
    "bigint": (ByteType, ShortType, IntegerType),
    "int": (ByteType, ShortType),
    "double": (FloatType,),
}
"""Narrower types that can be written as the type of the catalogue; decimals have a rule."""

_OF_ANY_SIZE = ("raw", "text", "json")
_OF_TEXT = ("text", "json")


class TypedRows:
    """The shape of a read or write with a catalogue."""

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
    """Two types are the same, but for what may be null."""
    return type_name(one) == type_name(other)


def _fits(found: DataType, known: DataType) -> bool:
    """All values of a type can be written as the catalogue's type."""
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


Shape = RawCells | TypedRows
"""The meaning of a DataFrame's rows."""


def shape_of(catalogue: FrameCatalog | None) -> Shape:
    """Typed rows with a catalogue, raw cells without one."""
    return RawCells() if catalogue is None else TypedRows(catalogue)
