"""The catalogue: which columns of a DataFrame are which cells, and of which type.

    {"key": {"name": "url", "type": "text"},
     "columns": {"title":  {"type": "text"},
                 "visits": {"type": "integer", "column": "stats:visits"}}}

A field of the DataFrame is stored in the column of its name unless `column` says another one. A key
of several parts is a list: `"key": [{"name": "host", "type": "text"}, {"name": "at", "type":
"ordered_integer"}]`, stored as `codecs.tuple_of(...)` does. The types are those of
`percolator.codecs`, whose bytes are the same in every language (docs/formats.md):

    columns   raw (binary), text (string), integer (bigint), float (double), boolean, json (string)
    keys      raw (binary), text (string), ordered_integer (bigint)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import Column, Table

KEY_CODECS: dict[str, Any] = {
    "raw": codecs.raw,
    "text": codecs.text,
    "ordered_integer": codecs.ordered_integer,
}
VALUE_TYPES = ("raw", "text", "integer", "float", "boolean", "json")

SPARK_TYPES = {
    "raw": "binary",
    "text": "string",
    "ordered_integer": "bigint",
    "integer": "bigint",
    "float": "double",
    "boolean": "boolean",
    "json": "string",
}
"""How Spark calls the type of a field."""


@dataclass(frozen=True)
class KeyField:
    """A part of the row key, or all of it."""

    name: str
    type: str


@dataclass(frozen=True)
class ValueField:
    """A field that is a cell."""

    name: str
    type: str
    column: bytes


@dataclass(frozen=True)
class Catalogue:
    """The fields of a DataFrame."""

    key: tuple[KeyField, ...]
    values: tuple[ValueField, ...]

    @classmethod
    def parse(cls, text: str) -> Catalogue:
        """Raises `InvalidArgument` about the option `catalog`."""
        try:
            document = json.loads(text, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise _wrong("", f"is not JSON: {error}") from None
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
                raise _wrong("", f"two fields are named {name!r}; Spark would not tell them apart")
        stored = [field.column for field in values]
        for column in stored:
            if stored.count(column) > 1:
                raise _wrong("columns", f"two fields are stored in column {column!r}")
        return cls(fields, values)

    @property
    def key_codec(self) -> Any:  # noqa: ANN401 - of whatever type the key is
        """Of the whole row key."""
        parts = [KEY_CODECS[field.type] for field in self.key]
        return parts[0] if len(parts) == 1 else codecs.tuple_of(*parts)

    def chosen(self, names: tuple[str, ...] | None) -> tuple[ValueField, ...]:
        """The fields that the option `columns` names: all without it."""
        if names is None:
            return self.values
        by_name = {field.name: field for field in self.values}
        for name in names:
            if name not in by_name:
                near = get_close_matches(name, sorted(by_name), n=1, cutoff=0.0)
                raise InvalidArgument(
                    "columns", f"the catalogue has no column {name!r}; is {near[0]!r} meant?"
                )
        return tuple(by_name[name] for name in names)


def _each_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two members of one name, JSON would take the second, and say nothing."""
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise _wrong("", f"{twice!r} is there twice")
    return found


def _key_field(entry: object) -> KeyField:
    fields = _members(entry, "key", required=("name", "type"))
    return KeyField(fields["name"], _type("key.type", fields["type"], tuple(KEY_CODECS)))


def _value_field(name: str, entry: object) -> ValueField:
    where = f"columns.{name}"
    fields = _members(entry, where, required=("type",), optional=("column",))
    try:
        column = Column(Table("any"), fields.get("column", name), codecs.raw).name
    except SchemaError as error:
        raise _wrong(where, error.message) from None
    except UnicodeEncodeError:
        raise _wrong(where, "half of a surrogate pair cannot be stored") from None
    return ValueField(name, _type(f"{where}.type", fields["type"], VALUE_TYPES), column)


def _members(
    entry: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, str]:
    """An object with these members. Those of a field are texts, none of them empty."""
    if not isinstance(entry, dict):
        raise _wrong(where, f"expected an object with {', '.join(required)}")
    for name in required:
        if name not in entry:
            raise _wrong(where, f"{name!r} is missing")
    for name, value in entry.items():
        if name not in required + optional:
            raise _wrong(where, f"{name!r} is not known here")
        if where and (not isinstance(value, str) or not value):
            raise _wrong(f"{where}.{name}", "expected a text")
    return entry


def _type(where: str, name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise _wrong(where, f"expected one of {', '.join(known)}, found {name!r}")
    return name


def _wrong(where: str, reason: str) -> InvalidArgument:
    return InvalidArgument("catalog", f"{where}: {reason}" if where else reason)
