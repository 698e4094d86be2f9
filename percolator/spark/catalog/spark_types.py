"""Spark's types in the spelling of a CREATE TABLE: `struct<lat:double,tags:array<string>>`.

`frame.schema["field"].dataType.simpleString()` gives this spelling. Spark's own parser of it is in
Java, which the processes that read and write do not have.
"""

from __future__ import annotations

import re

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
    """Whether a nested type lets everything in it be null, as JSON does."""
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
