"""Converts between Arrow arrays and the bytes of cells, a page or a batch at a time.

Text and bytes take no step per value. Numbers, times and days are converted as one block of memory:
Arrow has them in the machine's byte order, cells in big-endian.

`pa.array` imports pandas where it is installed, to see whether the list is one of its series. That
takes 0.4 s of CPU, in each Python process that Spark starts. So it is only left to values for which
there is no block: decimals and nested types. `to_pylist` makes an object of Arrow's for each value
first, and takes five times as long as to cut the values out of their block.

Nested values are JSON in the cells, and structs, arrays and maps in a DataFrame. JSON has no times,
days, exact numbers or bytes. These are text in it: ISO 8601 with a time zone, ISO 8601, digits, and
base64. A member that the JSON lacks is null; one that the type lacks is left out of the DataFrame.
All else that does not fit is refused, with the place of the mistake.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import Any, overload

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
from percolator.codecs.values import days_of, microseconds_of
from percolator.errors import SchemaError
from percolator.routing.range_scan import JoinedBytes
from percolator.spark.catalog import DECIMAL, KEY_CODECS

_EMPTY = b""


def of_bytes(values: Sequence[bytes | None] | JoinedBytes, target: pa.DataType) -> pa.Array:
    """An array of a binary type, or of text. Raises `pa.ArrowInvalid` if text is not UTF-8."""
    if isinstance(values, JoinedBytes):
        return _of_joined(values, target)
    validity, nulls = _validity(values)
    present = [value or _EMPTY for value in values] if nulls else values
    offsets = array("i", list(accumulate(map(len, present), initial=0)))  # type: ignore[arg-type]
    content = _EMPTY.join(present)  # type: ignore[arg-type]  # nulls are replaced
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(content)]
    found = pa.Array.from_buffers(target, len(values), buffers, nulls)
    if pa.types.is_string(target):
        found.validate(full=True)
    return found


def _of_joined(values: JoinedBytes, target: pa.DataType) -> pa.Array:
    """An array without a step for each value. Arrow has offsets in the same form."""
    buffers = [None, pa.py_buffer(values.bounds()), pa.py_buffer(values.block)]
    found = pa.Array.from_buffers(target, len(values), buffers, 0)
    # They came from elsewhere: wrong ones would point into other memory.
    found.validate(full=True)
    return found


def of_texts(values: Sequence[str], target: pa.DataType) -> pa.Array:
    """An array of text."""
    return of_bytes([value.encode() for value in values], target)


def of_numbers(values: Iterable[int], target: pa.DataType) -> pa.Array:
    """An array of 64-bit integers. Raises `OverflowError` if one of them does not fit."""
    numbers = array("q", values)
    return pa.Array.from_buffers(target, len(numbers), [None, pa.py_buffer(numbers)], 0)


def of_flags(values: Sequence[bool | None]) -> pa.Array:
    """An array of booleans."""
    validity, nulls = _validity(values)
    return pa.Array.from_buffers(pa.bool_(), len(values), [validity, _bits(values)], nulls)


def of_blocks(values: Sequence[bytes | None] | JoinedBytes, size: int) -> pa.Array:
    """An array of binary values, each of that many bytes. Raises `pa.ArrowInvalid` for others."""
    if isinstance(values, JoinedBytes):
        return _of_joined(values, pa.binary()).cast(pa.binary(size))
    validity, nulls = _validity(values)
    blank = bytes(size)
    present = [blank if value is None else value for value in values] if nulls else values
    if any(len(value) != size for value in present):  # type: ignore[arg-type]
        raise pa.ArrowInvalid(f"expected {size} bytes each")
    content = pa.py_buffer(_EMPTY.join(present))  # type: ignore[arg-type]
    return pa.Array.from_buffers(pa.binary(size), len(values), [validity, content], nulls)


def bytes_in(values: pa.Array) -> list[bytes | None]:
    """The values of an array of bytes or text; None for a null."""
    values = values.cast(pa.binary())
    if not len(values):
        return []
    _, offsets, content = values.buffers()
    bounds = memoryview(offsets).cast("i")[values.offset : values.offset + len(values) + 1].tolist()
    # The whole content may be that of a much larger array.
    first, last = bounds[0], bounds[-1]
    block = bytes(memoryview(content)[first:last]) if last > first else _EMPTY
    found: list[bytes | None] = [block[at - first : end - first] for at, end in pairwise(bounds)]
    return without_nulls(found, values)


def without_nulls(found: list[bytes | None], values: pa.Array) -> list[bytes | None]:
    """The value found in each place, and None where that is null."""
    if values.null_count:
        for index, valid in enumerate(values.is_valid().to_pylist()):
            if not valid:
                found[index] = None
    return found


def _validity(values: Sequence[object]) -> tuple[pa.Buffer | None, int]:
    """Arrow's bitmap of the values that are not None, if some are, and their number."""
    nulls = values.count(None)
    return (_bits([value is not None for value in values]) if nulls else None), nulls


def _bits(flags: Sequence[object]) -> pa.Buffer:
    """One bit for each, the first one the lowest of the first byte."""
    digits = "".join("1" if flag else "0" for flag in reversed(flags))
    return pa.py_buffer(int(digits or "0", 2).to_bytes((len(flags) + 7) // 8, "little"))


Bytes = list[bytes | None]
"""The bytes of cells; None where a cell has no value."""
Stored = Sequence[bytes | None] | JoinedBytes
"""Values as a read has found them: joined, if every cell has a value."""

_INTEGERS = ("q", pa.int64())
_BLOCKS = {
    "integer": _INTEGERS,
    "int": _INTEGERS,
    "timestamp": _INTEGERS,
    "date": _INTEGERS,
    "float": ("d", pa.float64()),
}
_CODECS: dict[str, codecs.Codec[Any]] = {
    "raw": codecs.raw,
    "text": codecs.text,
    "integer": codecs.integer,
    "int": codecs.integer,
    "float": codecs.float,
    "boolean": codecs.boolean,
    "timestamp": codecs.timestamp,
    "date": codecs.date,
    "json": codecs.json,
}
_BOUNDS = {
    "timestamp": (
        microseconds_of(datetime.min.replace(tzinfo=UTC)),
        microseconds_of(datetime.max.replace(tzinfo=UTC)),
    ),
    "date": (days_of(date.min), days_of(date.max)),
}
"""The first and the last that a codec can store. Spark has others."""
_EIGHT = 8
"""The size of a number, time or day."""


def decoded(values: Stored, kind: str, target: pa.DataType) -> pa.Array:
    """Stored values of one type as an array. Raises `SchemaError` if they have another type."""
    try:
        if kind in ("raw", "text", "json"):
            return of_bytes(values, target)
        if kind in _BLOCKS:
            return _shown_as(target, _from_block(values, *_BLOCKS[kind]))
    except pa.ArrowInvalid:
        pass  # one of them is damaged: the codec finds it and names what is wrong
    decode = _codec(kind).decode
    found = [None if value is None else decode(value) for value in cut(values)]
    if kind == "boolean":
        return of_flags(found)
    try:
        return pa.array(found, target)
    except (pa.ArrowInvalid, OverflowError):
        raise SchemaError(f"a stored {_codec(kind).name} does not fit {kind}") from None


def decoded_key(rows: list[bytes] | JoinedBytes, kind: str, target: pa.DataType) -> pa.Array:
    """As `decoded`, for row keys."""
    if kind in ("raw", "text"):
        return decoded(rows, kind, target)
    decode = KEY_CODECS[kind].decode
    return of_numbers((decode(row) for row in cut(rows)), target)


def parts_of_keys(parts: Sequence[Any], kind: str, target: pa.DataType) -> pa.Array:
    """One part of each key, decoded, as an array."""
    if kind == "raw":
        return of_bytes(parts, target)
    return of_texts(parts, target) if kind == "text" else of_numbers(parts, target)


def encoded(values: pa.Array, kind: str) -> Bytes:
    """The values to store for an array."""
    if kind in ("raw", "text"):
        return bytes_in(values)
    if kind in _BLOCKS:
        return _to_block(_as_numbers(values), kind)
    encode = _compact_json if kind == "json" else _codec(kind).encode
    return [None if value is None else encode(value) for value in values.to_pylist()]


def encoded_key(values: pa.Array, kind: str) -> list[bytes]:
    """As `encoded`, for row keys, none of which is null."""
    if kind in ("raw", "text"):
        return encoded(values, kind)  # type: ignore[return-value]
    encode = KEY_CODECS[kind].encode
    return [encode(value) for value in values.cast(pa.int64()).to_pylist()]


@overload
def cut(values: list[bytes] | JoinedBytes) -> list[bytes]: ...
@overload
def cut(values: Stored) -> Sequence[bytes | None]: ...
def cut(values: Any) -> Any:
    """The values as a list."""
    return values.cut() if isinstance(values, JoinedBytes) else values


def _codec(kind: str) -> codecs.Codec[Any]:
    exact = DECIMAL.fullmatch(kind)
    return codecs.decimal(int(exact[1]), int(exact[2])) if exact else _CODECS[kind]


def _shown_as(target: pa.DataType, numbers: pa.Array) -> pa.Array:
    """Numbers as what they count: microseconds are times, days are dates."""
    if pa.types.is_timestamp(target):
        return numbers.view(target)
    if pa.types.is_date(target):
        return numbers.cast(pa.int32()).view(target)
    return numbers.cast(target)


def _as_numbers(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        return values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
    if pa.types.is_date(values.type):
        return values.cast(pa.int32())
    return values


def _compact_json(text: str) -> bytes:
    """The JSON as its codec stores it, however it was formatted."""
    try:
        return codecs.json.encode(codecs.json.decode(text.encode()))
    except SchemaError:
        raise SchemaError("a value of type json is not JSON") from None


def _from_block(values: Stored, letter: str, target: pa.DataType) -> pa.Array:
    fixed = of_blocks(values, _EIGHT)
    validity, block = fixed.buffers()
    numbers = array(letter)
    numbers.frombytes(memoryview(block)[: _EIGHT * len(fixed)])
    if sys.byteorder == "little":
        numbers.byteswap()
    return pa.Array.from_buffers(
        target, len(fixed), [validity, pa.py_buffer(numbers)], fixed.null_count
    )


def _to_block(values: pa.Array, kind: str) -> Bytes:
    letter, target = _BLOCKS[kind]
    if not len(values):
        return []  # it may have no block
    values = values.cast(target)
    start, end = _EIGHT * values.offset, _EIGHT * (values.offset + len(values))
    numbers = array(letter)
    numbers.frombytes(memoryview(values.buffers()[1])[start:end])
    if kind in _BOUNDS:
        first, last = _BOUNDS[kind]
        if min(numbers) < first or max(numbers) > last:
            _require_within(values, kind)
    if sys.byteorder == "little":
        numbers.byteswap()
    block = numbers.tobytes()
    found: Bytes = [block[at : at + _EIGHT] for at in range(0, len(block), _EIGHT)]
    return without_nulls(found, values)


def _require_within(numbers: pa.Array, kind: str) -> None:
    """Refuses times and days that programs in Python could not read. Where there is a null, the
    block may have any number."""
    first, last = _BOUNDS[kind]
    for number in numbers.to_pylist():
        if number is not None and not first <= number <= last:
            what = "microseconds" if kind == "timestamp" else "days"
            raise SchemaError(f"{number} {what} since 1970 are beyond the years 1 to 9999 in UTC")


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
    # Times come in the time zone of the session, of which Python may not know the name.
    in_utc = values.cast(to_arrow_type(kind, timezone="UTC"))
    try:
        found = in_utc.to_pylist()
    except (OverflowError, ValueError) as error:
        raise SchemaError(f"a time or a day is beyond the years 1 to 9999: {error}") from None
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
        TimestampType: _time_with_zone,
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


def _time_with_zone(text: str) -> datetime:
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
