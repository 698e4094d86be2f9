"""The catalogue of a table, made from the `Table` and `Column` objects of a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from percolator import codecs
from percolator.codecs import TupleCodec
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import Column, Table
from percolator.spark.catalog.frame_catalog import KEY_CODECS, VALUE_TYPES, FrameCatalog

INT, NESTED, TEXT = "int", "json", "string"


def catalog_of(
    table: Table[Any],
    key: str | Sequence[str],
    columns: Mapping[str, Column[Any]],
    types: Mapping[str, str],
) -> str:
    """The option `catalog`. Raises `SchemaError` about a table, column or type."""
    for field, given in (("columns", columns), ("types", types)):
        if not isinstance(given, Mapping):
            raise InvalidArgument(
                field, f"expected a mapping from names of fields, got {type(given).__name__}"
            )
    parts = _key_types(table)
    names = [key] if isinstance(key, str) else list(key)
    if len(names) != len(parts):
        raise SchemaError(
            f"the key of table {table.name!r} has {len(parts)} parts; {len(names)} names are given"
        )
    fields = [{"name": name, "type": kind} for name, kind in zip(names, parts, strict=True)]
    for name in types:
        if name not in columns:
            raise SchemaError(f"types: there is no field {name!r}")
    described = {
        name: _described(table, name, column, types.get(name)) for name, column in columns.items()
    }
    document = {"key": fields[0] if len(fields) == 1 else fields, "columns": described}
    text = json.dumps(document, ensure_ascii=False)
    FrameCatalog.parse(text)
    return text


def _key_types(table: Table[Any]) -> list[str]:
    codec = table.key
    parts = codec.parts if isinstance(codec, TupleCodec) else [codec]
    found = []
    for part in parts:
        kind = next((name for name, known in KEY_CODECS.items() if known is part), None)
        if kind is None:
            raise SchemaError(f"table {table.name!r}: Spark cannot have keys of {part!r}")
        found.append(kind)
    return found


def _described(table: Table[Any], name: str, column: object, wanted: str | None) -> dict[str, str]:
    if not isinstance(column, Column) or column.table != table:
        raise SchemaError(f"field {name!r}: {column!r} is not a column of table {table.name!r}")
    codec = column.codec.name
    # Messages, UUIDs and models have no type in Spark, so a frame has their bytes. Functions on
    # protobufs take those of a message.
    kind = codec if codec in VALUE_TYPES or codec.startswith("decimal") else "raw"
    try:
        stored = column.name.decode()
    except UnicodeDecodeError:
        raise SchemaError(
            f"field {name!r}: the column's name is not text, and a catalogue is JSON"
        ) from None
    found = {"type": kind} if stored == name else {"type": kind, "column": stored}
    if wanted is None:
        return found
    if kind == codecs.integer.name and wanted == INT:
        return found | {"type": INT}
    if kind == NESTED:
        return found | {"schema": wanted}
    from percolator.spark.catalog.spark_types import type_of

    has = type_of(kind).simpleString()
    if wanted == has:
        return found
    if codec.startswith("model("):  # which are stored as JSON
        return found | ({"type": NESTED} if wanted == TEXT else {"type": NESTED, "schema": wanted})
    raise SchemaError(f"types: field {name!r} is {has} in Spark, which cannot be {wanted}")
