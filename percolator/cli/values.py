"""Values as people read and write them: by default text, where they are text, else bytes as hex."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from percolator import codecs
from percolator.cli.masters import row_bytes, row_text
from percolator.errors import InvalidArgument, SchemaError


class ValueType(StrEnum):
    """What the stored bytes are to be taken for."""

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
    """The bytes that a value on the command line stands for."""
    if kind is ValueType.TEXT:
        return row_bytes(field, text)
    try:
        return _CODECS[kind].encode(_meant(text, kind))
    except (ValueError, SchemaError):
        raise InvalidArgument(field, f"expected {kind.value}, found {text[:80]!r}") from None


def _meant(text: str, kind: ValueType) -> object:
    if kind is ValueType.INTEGER:
        return int(text)
    if kind is ValueType.FLOAT:
        return float(text)
    value: object = json.loads(text)
    return value


def value_text(value: bytes, kind: ValueType) -> str:
    """For people. Bytes of another type are shown as the bytes that they are."""
    if kind is ValueType.TEXT:
        return row_text(value)
    try:
        return json.dumps(_CODECS[kind].decode(value), ensure_ascii=False)
    except (SchemaError, ValueError):
        return "hex:" + value.hex()


def value_data(value: bytes, kind: ValueType) -> object:
    """For programs: a JSON value."""
    text = value_text(value, kind)
    if kind is ValueType.TEXT or text.startswith("hex:"):
        return text
    # JSON has no word for NaN and the infinities: they stay text.
    found: object = json.loads(text, parse_constant=str)
    return found
