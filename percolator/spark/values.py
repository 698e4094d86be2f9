"""Between Arrow arrays and the bytes of cells, a page or a batch at a time.

Text and bytes pass without a step for each value; numbers are turned as one block of memory, since
Arrow has them in the machine's order and cells have them big-endian.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from percolator import codecs
from percolator.errors import SchemaError
from percolator.spark.catalogue import KEY_CODECS

Bytes = list[bytes | None]
"""None where there is no value."""

_BLOCKS = {"integer": ("q", pa.int64()), "float": ("d", pa.float64())}
_CODECS: dict[str, codecs.Codec[Any]] = {
    "raw": codecs.raw,
    "text": codecs.text,
    "integer": codecs.integer,
    "float": codecs.float,
    "boolean": codecs.boolean,
    "json": codecs.json,
}
_EIGHT = pa.binary(8)


def decoded(values: Sequence[bytes | None], kind: str, target: pa.DataType) -> pa.Array:
    """Stored values of one type as an array. Raises `SchemaError` if they are not of the type."""
    try:
        if kind == "raw":
            return pa.array(values, target)
        if kind in ("text", "json"):
            return pa.array(values, pa.binary()).cast(target)
        if kind in _BLOCKS:
            return _from_block(values, *_BLOCKS[kind])
    except pa.ArrowInvalid:
        pass  # one of them is damaged: the codec finds it, and says what is wrong
    decode = _CODECS[kind].decode
    return pa.array([None if value is None else decode(value) for value in values], target)


def decoded_key(rows: Sequence[bytes], kind: str, target: pa.DataType) -> pa.Array:
    """As `decoded`, of row keys."""
    if kind in ("raw", "text"):
        return decoded(rows, kind, target)
    decode = KEY_CODECS[kind].decode
    return pa.array([decode(row) for row in rows], target)


def encoded(values: pa.Array, kind: str) -> Bytes:
    """An array as the values to store."""
    if kind == "raw":
        return values.to_pylist()  # type: ignore[no-any-return]
    if kind == "text":
        return values.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]
    if kind in _BLOCKS:
        return _to_block(values, *_BLOCKS[kind])
    encode = codecs.boolean.encode if kind == "boolean" else _compact_json
    return [None if value is None else encode(value) for value in values.to_pylist()]


def encoded_key(values: pa.Array, kind: str) -> list[bytes]:
    """As `encoded`, of row keys, none of which is null."""
    if kind in ("raw", "text"):
        return encoded(values, kind)  # type: ignore[return-value]
    encode = KEY_CODECS[kind].encode
    return [encode(value) for value in values.cast(pa.int64()).to_pylist()]


def _compact_json(text: str) -> bytes:
    """As the codec of JSON stores it, however it was written."""
    try:
        return codecs.json.encode(codecs.json.decode(text.encode()))
    except SchemaError:
        raise SchemaError("a text is not JSON") from None


def _from_block(values: Sequence[bytes | None], letter: str, target: pa.DataType) -> pa.Array:
    fixed = pa.array(values, _EIGHT)
    validity, block = fixed.buffers()
    numbers = array(letter)
    numbers.frombytes(memoryview(block)[: 8 * len(fixed)])
    if sys.byteorder == "little":
        numbers.byteswap()
    return pa.Array.from_buffers(
        target, len(fixed), [validity, pa.py_buffer(numbers)], fixed.null_count
    )


def _to_block(values: pa.Array, letter: str, target: pa.DataType) -> Bytes:
    values = values.cast(target)
    start, end = 8 * values.offset, 8 * (values.offset + len(values))
    numbers = array(letter)
    numbers.frombytes(memoryview(values.buffers()[1])[start:end])
    if sys.byteorder == "little":
        numbers.byteswap()
    block = pa.Array.from_buffers(_EIGHT, len(values), [None, pa.py_buffer(numbers)])
    found: Bytes = block.to_pylist()
    if values.null_count:
        for index, valid in enumerate(values.is_valid().to_pylist()):
            if not valid:
                found[index] = None
    return found
