"""Converts between Arrow arrays and the bytes of cells, a page or a batch at a time.

Text and bytes take no step per value. Numbers, moments and days are converted as one block of
memory: Arrow has them in the machine's byte order, cells in big-endian.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Any, overload

import pyarrow as pa

from percolator import codecs
from percolator.errors import SchemaError
from percolator.moments import days_of, microseconds_of
from percolator.routing.joined_page import JoinedBytes
from percolator.spark.catalog.frame_catalog import DECIMAL, KEY_CODECS
from percolator.spark.shapes.arrow_arrays import (
    bytes_in,
    of_blocks,
    of_bytes,
    of_flags,
    of_numbers,
    of_texts,
    without_nulls,
)

Bytes = list[bytes | None]
"""The bytes of cells; None where a cell has no value."""
Stored = Sequence[bytes | None] | JoinedBytes
"""The same as a read has found them: joined, if every cell has a value."""

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
"""The size of a number, moment or day."""


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
    """Numbers as what they count: microseconds are moments, days are dates."""
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
    """Refuses moments and days that programs in Python could not read. Where there is a null, the
    block may have any number."""
    first, last = _BOUNDS[kind]
    for number in numbers.to_pylist():
        if number is not None and not first <= number <= last:
            what = "microseconds" if kind == "timestamp" else "days"
            raise SchemaError(f"{number} {what} since 1970 are beyond the years 1 to 9999 in UTC")
