"""The catalogue: which field of a DataFrame is which cell, and of which type.

    {"key": {"name": "url", "type": "text"},
     "columns": {"title":  {"type": "text"},
                 "visits": {"type": "integer", "column": "stats:visits"}}}

A field is stored in the column with its name, unless `column` names another one. A key of several
parts is a list, `"key": [{"name": "host", "type": "text"}, {"name": "at", "type":
"ordered_integer"}]`, and is stored as `codecs.tuple_of(...)` stores it. The types are those of
`percolator.codecs`, whose bytes are the same in every language (docs/formats.md):

    columns   raw (binary), text (string), integer (bigint), float (double), boolean, timestamp,
              date, decimal(10,2) (any digits and places), json (string)
    keys      raw (binary), text (string), ordered_integer (bigint)

`int` is stored as `integer` and is Spark's int. JSON with a `schema`, as Spark's `simpleString()`
spells it, is a nested value (nested_values.py):

    "place": {"type": "json", "schema": "struct<lat:double,lon:double,tags:array<string>>"}

`percolator.spark.spark_catalog` makes a catalogue from the `Table` and the `Column` objects of a
program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import Column, Table
from percolator.spark.catalog import strict_json

if TYPE_CHECKING:
    # Catalogues are also read where there is no Spark. Its types are needed only to make frames.
    from pyspark.sql.types import DataType

KEY_CODECS: dict[str, Any] = {
    "raw": codecs.raw,
    "text": codecs.text,
    "ordered_integer": codecs.ordered_integer,
}
DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
VALUE_TYPES = (
    "raw",
    "text",
    "integer",
    "int",
    "float",
    "boolean",
    "timestamp",
    "date",
    "json",
)


@dataclass(frozen=True)
class KeyField:
    """The row key, or a part of it."""

    name: str
    type: str

    @property
    def spark_type(self) -> DataType:
        """The type of the field in a DataFrame."""
        from percolator.spark.catalog.spark_types import type_of

        return type_of(self.type)


@dataclass(frozen=True)
class ValueField:
    """A field that is stored as a cell."""

    name: str
    type: str
    column: bytes
    nested: DataType | None = None
    """The type of JSON that is a nested value."""

    @property
    def spark_type(self) -> DataType:
        """The type of the field in a DataFrame."""
        from percolator.spark.catalog.spark_types import type_of

        return self.nested or type_of(self.type)


@dataclass(frozen=True)
class FrameCatalog:
    """The fields of a DataFrame."""

    key: tuple[KeyField, ...]
    values: tuple[ValueField, ...]

    @classmethod
    def parse(cls, text: str) -> FrameCatalog:
        """Raises `InvalidArgument` about the option `catalog`."""
        document = strict_json.parsed("catalog", text)
        _members(document, "", required=("key", "columns"))
        key = document["key"]
        parts = key if isinstance(key, list) else [key]
        if not parts:
            raise _wrong("key", "has no parts")
        fields = tuple(_key_field(part) for part in parts)
        columns = document["columns"]
        if not isinstance(columns, Mapping) or not columns:
            raise _wrong("columns", "expected fields by name, at least one")
        values = tuple(_value_field(name, entry) for name, entry in columns.items())
        names = [field.name.lower() for field in fields]
        names += [field.name.lower() for field in values]
        for name in names:
            if names.count(name) > 1:
                raise _wrong("", f"two fields are named {name!r}; Spark ignores case in names")
        stored = [field.column for field in values]
        for column in stored:
            if stored.count(column) > 1:
                raise _wrong("columns", f"two fields are stored in column {column!r}")
        return cls(fields, values)

    @property
    def key_codec(self) -> Any:  # noqa: ANN401 - of whatever type the key is
        """The codec of the whole row key."""
        parts = [KEY_CODECS[field.type] for field in self.key]
        return parts[0] if len(parts) == 1 else codecs.tuple_of(*parts)

    def chosen(self, names: tuple[str, ...] | None) -> tuple[ValueField, ...]:
        """The fields that the option `columns` names, or all fields."""
        if names is None:
            return self.values
        by_name = {field.name.lower(): field for field in self.values}
        keys = {field.name.lower() for field in self.key}
        for name in names:
            if name.lower() in keys:
                raise InvalidArgument(
                    "columns", f"{name!r} is the key, which every row has: leave it out"
                )
            if name.lower() not in by_name:
                near = get_close_matches(name.lower(), sorted(by_name), n=1, cutoff=0.0)
                meant = by_name[near[0]].name
                raise InvalidArgument(
                    "columns", f"the catalogue has no column {name!r}; did you mean {meant!r}?"
                )
        found = tuple(by_name[name.lower()] for name in names)
        if len(set(found)) < len(found):
            raise InvalidArgument(
                "columns", f"names a column twice: {', '.join(names)}; case does not count"
            )
        return found


def _key_field(entry: object) -> KeyField:
    fields = _members(entry, "key", required=("name", "type"))
    return KeyField(fields["name"], _type("key.type", fields["type"], tuple(KEY_CODECS)))


def _value_field(name: str, entry: object) -> ValueField:
    where = f"columns.{name}"
    fields = _members(entry, where, required=("type",), optional=("column", "schema"))
    try:
        column = Column(Table("any"), fields.get("column", name), codecs.raw).name
    except SchemaError as error:
        raise _wrong(where, error.message) from None
    kind = _value_type(f"{where}.type", fields["type"])
    return ValueField(name, kind, column, _nested(where, kind, fields.get("schema")))


def _value_type(where: str, text: str) -> str:
    """The type in its one spelling."""
    kind = "".join(text.split())
    exact = DECIMAL.fullmatch(kind)
    if not exact:
        return _type(where, text, VALUE_TYPES, more=("decimal(digits,places)",))
    try:
        return codecs.decimal(int(exact[1]), int(exact[2])).name
    except SchemaError as error:
        raise _wrong(where, error.message) from None


def _nested(where: str, kind: str, schema: str | None) -> DataType | None:
    if schema is None:
        return None
    if kind != "json":
        raise _wrong(f"{where}.schema", f"is for type json only, and the type is {kind}")
    from percolator.spark.catalog.spark_types import parse_type

    try:
        return parse_type(schema)
    except ValueError as error:
        raise _wrong(f"{where}.schema", str(error)) from None


def _members(
    entry: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, str]:
    """An object with these members. In the description of a field, all are texts and not empty."""
    if not isinstance(entry, dict):
        raise _wrong(where, f"expected an object with {', '.join(required)}")
    for name in required:
        if name not in entry:
            raise _wrong(where, f"{name!r} is missing")
    for name, value in entry.items():
        if name not in required + optional:
            raise _wrong(where, f"{name!r} is not known here")
        if where and (not isinstance(value, str) or not value):
            raise _wrong(f"{where}.{name}", "expected text")
    return entry


def _type(where: str, name: str, known: tuple[str, ...], more: tuple[str, ...] = ()) -> str:
    if name not in known:
        raise _wrong(where, f"expected one of {', '.join(known + more)}, found {name!r}")
    return name


def _wrong(where: str, reason: str) -> InvalidArgument:
    return InvalidArgument("catalog", f"{where}: {reason}" if where else reason)
