"""Values as people read and write them: by default as text, or as hex if they are not text."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from percolator import codecs
from percolator.errors import InvalidArgument, SchemaError
from percolator.row_text import row_bytes, row_text


class ValueType(StrEnum):
    """How stored bytes are read and written on the command line."""

    TEXT = "text"
    INTEGER = "integer"
    FLOAT = "float"
    BOOLEAN = "boolean"
    JSON = "json"


_CODECS: dict[ValueType, codecs.Codec[Any]] = {
    ValueType.INTEGER: codecs.integer,
    ValueType.FLOAT: codecs.float,
    ValueType.BOOLEAN: codecs.boolean,
    ValueType.JSON: codecs.json,
}


def value_bytes(field: str, text: str, kind: ValueType) -> bytes:
    """The stored bytes for a value given on the command line."""
    if kind is ValueType.TEXT:
        return row_bytes(field, text)
    try:
        return _CODECS[kind].encode(_parsed(text, kind))
    except (ValueError, SchemaError):
        raise InvalidArgument(field, f"expected {kind.value}, found {text[:80]!r}") from None


def _parsed(text: str, kind: ValueType) -> object:
    if kind is ValueType.INTEGER:
        return int(text)
    if kind is ValueType.FLOAT:
        return float(text)
    value: object = json.loads(text)
    return value


def value_text(value: bytes, kind: ValueType) -> str:
    """The value as text, for people. Bytes that are not of this type are shown as hex."""
    if kind is ValueType.TEXT:
        return row_text(value)
    try:
        return json.dumps(_CODECS[kind].decode(value), ensure_ascii=False)
    except (SchemaError, ValueError):
        return "hex:" + value.hex()


def value_data(value: bytes, kind: ValueType) -> object:
    """The value as JSON, for programs."""
    text = value_text(value, kind)
    if kind is ValueType.TEXT or text.startswith("hex:"):
        return text
    # JSON cannot express NaN and the infinities: they stay text.
    found: object = json.loads(text, parse_constant=str)
    return found
