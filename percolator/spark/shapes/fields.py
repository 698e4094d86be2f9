"""What raw cells and typed rows share: the fields of a schema, the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import BinaryType, DataType, StructField, StructType

from percolator.counts import counted
from percolator.errors import SchemaError

Cell = tuple[bytes, bytes, bytes | None]
"""Row, column and value; a value of None deletes the cell."""

BINARY = BinaryType()


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
