"""Nested values: JSON in the cells, structs, arrays and maps in a DataFrame.

JSON has no moments, days, exact numbers or bytes. These are text in it: ISO 8601 with a time zone,
ISO 8601, digits, and base64. A member that the JSON lacks is null; one that the type lacks is left
out of the DataFrame. All else that does not fit is refused, with the place of the mistake.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
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
    StructType,
    TimestampType,
)

from percolator import codecs
from percolator.errors import SchemaError

Conversion = Callable[[Any], Any]
_SHOWN_MAX = 100


def decoded_nested(values: Sequence[bytes | None], kind: DataType, target: pa.DataType) -> pa.Array:
    """Stored JSON as an array of the type. Raises `SchemaError` if it does not fit."""
    convert, parse = from_json(kind), codecs.json.decode
    found = [None if value is None else convert(parse(value)) for value in values]
    try:
        return pa.array(found, target)
    except UnicodeEncodeError as error:  # JSON may have half of a surrogate pair
        raise SchemaError(f"text in JSON is not Unicode: {error.reason}") from None


def encoded_nested(values: pa.Array, kind: DataType) -> list[bytes | None]:
    """The JSON to store for an array of the type."""
    convert, encode = to_json(kind), codecs.json.encode
    # Moments come in the time zone of the session, of which Python may not know the name.
    in_utc = values.cast(to_arrow_type(kind, timezone="UTC"))
    try:
        found = in_utc.to_pylist()
    except (OverflowError, ValueError) as error:
        raise SchemaError(f"a moment or a day is beyond the years 1 to 9999: {error}") from None
    return [None if value is None else encode(convert(value)) for value in found]


def from_json(kind: DataType, where: str = "") -> Conversion:
    """Turns parsed JSON into values for an Arrow array of the type. Raises `SchemaError`."""
    if isinstance(kind, StructType):
        return _struct_from_json(kind, where)
    if isinstance(kind, ArrayType):
        element = from_json(kind.elementType, f"{where}[]")
        elements = _checked(list, kind, where)
        return _unless_null(lambda value: [element(one) for one in elements(value)])
    if isinstance(kind, MapType):
        of = from_json(kind.valueType, f"{where}.*")
        members = _checked(dict, kind, where)
        return _unless_null(lambda value: [(key, of(one)) for key, one in members(value).items()])
    return _unless_null(_atom_from_json(kind, where))


def to_json(kind: DataType) -> Conversion:
    """Turns the values of an Arrow array, as Python has them, into what JSON can express."""
    if isinstance(kind, StructType):
        members = {field.name: to_json(field.dataType) for field in kind.fields}
        return _unless_null(lambda value: {name: to(value[name]) for name, to in members.items()})
    if isinstance(kind, ArrayType):
        element = to_json(kind.elementType)
        return _unless_null(lambda value: [element(one) for one in value])
    if isinstance(kind, MapType):
        of = to_json(kind.valueType)
        return _unless_null(lambda value: {key: of(one) for key, one in value})
    if isinstance(kind, TimestampType):
        return _unless_null(lambda value: value.astimezone(UTC).isoformat())
    if isinstance(kind, DateType):
        return _unless_null(lambda value: value.isoformat())
    if isinstance(kind, DecimalType):
        return _unless_null(lambda value: format(value, "f"))
    if isinstance(kind, BinaryType):
        return _unless_null(lambda value: base64.b64encode(value).decode())
    return lambda value: value


def _struct_from_json(kind: StructType, where: str) -> Conversion:
    members = {
        field.name: from_json(field.dataType, f"{where}.{field.name}" if where else field.name)
        for field in kind.fields
    }
    found = _checked(dict, kind, where)

    def convert(value: object) -> dict[str, Any]:
        present = found(value)
        return {name: of(present.get(name)) for name, of in members.items()}

    return _unless_null(convert)


def _atom_from_json(kind: DataType, where: str) -> Conversion:
    if isinstance(kind, StringType):
        return _checked(str, kind, where)
    if isinstance(kind, BooleanType):
        return _checked(bool, kind, where)
    if isinstance(kind, DoubleType):
        return _number(kind, where)
    if isinstance(kind, IntegerType | LongType):
        return _integer(kind, where)
    parse: Conversion = {
        DateType: date.fromisoformat,
        TimestampType: _moment,
        DecimalType: lambda text: _exact(kind, text),
        BinaryType: lambda text: base64.b64decode(text, validate=True),
    }[type(kind)]
    text = _checked(str, kind, where)

    def convert(value: object) -> object:
        try:
            return parse(text(value))
        except ValueError:
            raise _unfit(kind, where, value) from None

    return convert


def _integer(kind: DataType, where: str) -> Conversion:
    number = _checked(int, kind, where)
    limit = 1 << (31 if isinstance(kind, IntegerType) else 63)

    def convert(value: object) -> int:
        found: int = number(value)
        if not -limit <= found < limit:
            raise _unfit(kind, where, value)
        return found

    return convert


def _number(kind: DataType, where: str) -> Conversion:
    number = _checked((float, int), kind, where)

    def convert(value: object) -> float:
        try:
            return float(number(value))
        except OverflowError:
            raise _unfit(kind, where, value) from None

    return convert


def _moment(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.utcoffset() is None:
        raise ValueError
    return found


def _exact(kind: Any, text: str) -> Decimal:  # noqa: ANN401 - a DecimalType
    try:
        return codecs.decimal(kind.precision, kind.scale).decode(text.encode())
    except SchemaError:
        raise ValueError from None


def _checked(python: type | tuple[type, ...], kind: DataType, where: str) -> Conversion:
    """Returns values of a Python type as they are, and refuses all others."""

    def check(value: object) -> object:
        if not isinstance(value, python) or (isinstance(value, bool) and python is not bool):
            raise _unfit(kind, where, value)
        return value

    return check


def _unless_null(convert: Conversion) -> Conversion:
    return lambda value: None if value is None else convert(value)


def _unfit(kind: DataType, where: str, value: object) -> SchemaError:
    shown = repr(value)
    if len(shown) > _SHOWN_MAX:
        shown = f"{shown[:_SHOWN_MAX]}..."
    at = f"{where}: " if where else ""
    return SchemaError(f"{at}expected {kind.simpleString()} in JSON, found {shown}")
