"""What raw cells and typed rows share: the fields of a schema, the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, StructField, StructType

from percolator.counts import counted
from percolator.errors import SchemaError
from percolator.limits import Limits
from percolator.spark.catalog.spark_types import may_be_null_throughout

Cell = tuple[bytes, bytes, bytes | None]
"""Row, column and value; a value of None deletes the cell."""

BINARY = BinaryType()
_LIMITS = Limits()


def field_named(schema: StructType, name: str) -> StructField | None:
    """The field of that name. Like Spark, this ignores case."""
    for field in schema.fields:
        if field.name.lower() == name.lower():
            return field
    return None


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
    longest, most = max(map(len, rows), default=0), _LIMITS.row_bytes_max
    if longest > most:
        raise SchemaError(
            f"field {name!r}: a row key has {longest} bytes, at most {most} can be stored"
        )


def check_values(values: Sequence[bytes | None], name: str) -> None:
    """Refuses values that are too large to be stored."""
    most = _LIMITS.value_bytes_max
    longest = max((len(value) for value in values if value is not None), default=0)
    if longest > most:
        raise SchemaError(
            f"field {name!r}: a value has {longest} bytes, at most {most} can be stored"
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
