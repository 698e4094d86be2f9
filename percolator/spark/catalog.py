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
spells it, is a nested value (values.py):

    "place": {"type": "json", "schema": "struct<lat:double,lon:double,tags:array<string>>"}

`percolator.spark.spark_catalog` makes a catalogue from the `Table` and the `Column` objects of a
program.

A catalogue need not be written by hand: it is also made from the codecs that the
table's schema keeps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from percolator import codecs
from percolator.codecs.names import CodecNames, other_codec
from percolator.codecs.readable import key_codec
from percolator.codecs.values import TupleCodec, name_of
from percolator.errors import InvalidArgument, SchemaError
from percolator.schema import Column, Table

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


_ATOMS: dict[str, DataType] = {
    "bigint": LongType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "double": DoubleType(),
    "int": IntegerType(),
    "string": StringType(),
    "timestamp": TimestampType(),
}
_STORED: dict[str, DataType] = {
    "raw": BinaryType(),
    "text": StringType(),
    "ordered_integer": LongType(),
    "integer": LongType(),
    "int": IntegerType(),
    "float": DoubleType(),
    "boolean": BooleanType(),
    "timestamp": TimestampType(),
    "date": DateType(),
    "json": StringType(),
}
"""By the types of a catalogue."""
_TOKEN = re.compile(r"\s*([<>:,]|decimal\(\s*\d+\s*,\s*\d+\s*\)|[^<>:,\s]+)\s*")
_DECIMAL = re.compile(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_DEPTH_MAX = 32
_DIGITS_MAX = 38


def type_of(stored: str) -> DataType:
    """The type in a DataFrame of what a catalogue calls by this name."""
    exact = _DECIMAL.fullmatch(stored)
    return DecimalType(int(exact[1]), int(exact[2])) if exact else _STORED[stored]


def may_be_null_throughout(kind: DataType) -> bool:
    """A nested type lets everything in it be null, as JSON does."""
    if isinstance(kind, StructType):
        return all(
            field.nullable and may_be_null_throughout(field.dataType) for field in kind.fields
        )
    if isinstance(kind, ArrayType):
        return kind.containsNull and may_be_null_throughout(kind.elementType)
    if isinstance(kind, MapType):
        return kind.valueContainsNull and may_be_null_throughout(kind.valueType)
    return True


def parse_type(text: str) -> DataType:
    """The type that a text spells. Raises `ValueError` that says what is wrong with it."""
    tokens = _TOKEN.findall(text)
    if "".join("".join(tokens).split()) != "".join(text.split()):
        raise ValueError(f"{text!r} is not a type")
    parser = _Parser(tokens)
    found = parser.type(0)
    if parser.next() is not None:
        raise ValueError(f"{text!r} continues after the end of a type")
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = iter(tokens)

    def next(self) -> str | None:
        return next(self._tokens, None)

    def type(self, depth: int) -> DataType:
        name = self.next()
        if depth > _DEPTH_MAX:
            raise ValueError(f"types are nested more than {_DEPTH_MAX} levels deep")
        if name == "array":
            self._expect("<", name)
            element = self.type(depth + 1)
            self._expect(">", name)
            return ArrayType(element)
        if name == "map":
            self._expect("<", name)
            if self.next() != "string":
                raise ValueError("the keys of a map in JSON are string")
            self._expect(",", name)
            value = self.type(depth + 1)
            self._expect(">", name)
            return MapType(StringType(), value)
        if name == "struct":
            return self._struct(depth)
        if name in _ATOMS:
            return _ATOMS[name]
        exact = _DECIMAL.fullmatch(name or "")
        if exact and 1 <= int(exact[1]) <= _DIGITS_MAX and int(exact[2]) <= int(exact[1]):
            return DecimalType(int(exact[1]), int(exact[2]))
        raise ValueError(
            f"expected {', '.join(_ATOMS)}, decimal(…,…), array<…>, map<string,…> or struct<…>, "
            f"found {name or 'nothing'!r}"
        )

    def _struct(self, depth: int) -> StructType:
        self._expect("<", "struct")
        fields: list[StructField] = []
        while True:
            name = self.next()
            if not name or name in "<>:,":
                raise ValueError(f"expected a field of a struct, found {name or 'nothing'!r}")
            self._expect(":", f"field {name!r}")
            fields.append(StructField(name, self.type(depth + 1)))
            after = self.next()
            if after == ">":
                break
            if after != ",":
                raise ValueError(f"expected , or > after field {name!r}")
        names = [field.name.lower() for field in fields]
        if len(set(names)) < len(names):
            raise ValueError("a struct has two fields of one name; Spark ignores case in names")
        return StructType(fields)

    def _expect(self, token: str, after: str) -> None:
        found = self.next()
        if found != token:
            raise ValueError(f"expected {token} after {after}, found {found or 'nothing'!r}")


def parsed(option: str, text: str) -> Any:  # noqa: ANN401 - whatever JSON can say
    """The document in an option. Raises `InvalidArgument` that names the option."""

    def each_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
        """If two members have the same name, a JSON parser silently takes the second."""
        found = dict(members)
        if len(found) < len(members):
            names = [name for name, _ in members]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgument(option, f"{twice!r} appears twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(option, f"is not JSON: {error}") from None


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

        return self.nested or type_of(self.type)


@dataclass(frozen=True)
class FrameCatalog:
    """The fields of a DataFrame."""

    key: tuple[KeyField, ...]
    values: tuple[ValueField, ...]

    @classmethod
    def parse(cls, text: str) -> FrameCatalog:
        """Raises `InvalidArgument` about the option `catalog`."""
        document = parsed("catalog", text)
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

    has = type_of(kind).simpleString()
    if wanted == has:
        return found
    if codec.startswith("model("):  # which are stored as JSON
        return found | ({"type": NESTED} if wanted == TEXT else {"type": NESTED, "schema": wanted})
    raise SchemaError(f"types: field {name!r} is {has} in Spark, which cannot be {wanted}")


_BYTES = "raw"


def declared_catalog(names: CodecNames) -> str | None:
    """The option `catalog`; None if the table has no column that a frame could have.

    The key is the field `key`, or `key_1`, `key_2` and so on for the members of a tuple; if a
    column is named like that, `row_key` and so on. A column that has a codec is a field of its
    name. Columns without one are left out, because nothing says what they hold.
    """
    columns = {}
    for column, codec in sorted(names.columns.items()):
        try:
            columns[column.decode()] = {"type": declared_type(codec)}
        except UnicodeDecodeError:
            continue  # a catalogue is JSON, which cannot name it
    if not columns:
        return None
    key, taken = _key_fields(names.key), {name.lower() for name in columns}
    while any(field["name"] in taken for field in key):
        key = [field | {"name": f"row_{field['name']}"} for field in key]
    document = {"key": key if len(key) > 1 else key[0], "columns": columns}
    return json.dumps(document, ensure_ascii=False)


def declared_type(codec: str) -> str:
    if codec.startswith("model("):
        return "json"
    return codec if codec in VALUE_TYPES or DECIMAL.fullmatch(codec) else _BYTES


def _key_fields(name: str) -> list[dict[str, str]]:
    codec = key_codec(name)
    if isinstance(codec, TupleCodec):
        parts = [name_of(part) for part in codec.parts]
        if all(part in KEY_CODECS for part in parts):
            return [{"name": f"key_{at}", "type": part} for at, part in enumerate(parts, 1)]
    return [{"name": "key", "type": name if name in KEY_CODECS else _BYTES}]


_CODECS = {"int": "integer"}
"""The codec of a type that is not named like it."""


def require_declared(table: str, names: CodecNames, catalogue: FrameCatalog) -> None:
    """Raises `SchemaError` with both codecs if a field or the key is of another type.

    Other programs would misread a value that is written as another type, and this one a value that
    is read as another: eight bytes of an integer are a number as a float, too. A type that is bytes
    reads and writes every column, as `codecs.stored` does.
    """
    key = name_of(catalogue.key_codec)
    if names.key and key not in (_BYTES, names.key):
        raise other_codec(table, None, names.key, key)
    for field in catalogue.values:
        codec = names.columns.get(field.column)
        if codec is None or field.type == _BYTES:
            continue
        declared = _CODECS.get(field.type, field.type)
        if declared != declared_type(codec):
            raise other_codec(table, field.column, codec, declared)
