"""Arrow arrays from lists, and lists of bytes from arrays, by way of their blocks of memory.

`pa.array` imports pandas where it is installed, to see whether the list is one of its series. That
takes 0.4 s of CPU, in each Python process that Spark starts. So it is only left to values for which
there is no block: decimals and nested types. `to_pylist` makes an object of Arrow's for each value
first, and takes five times as long as to cut the values out of their block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import pyarrow as pa

from percolator.routing.joined_page import JoinedBytes

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
    """The same without a step for each value. Arrow has offsets in the same form."""
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
    """What was found in the place of each value, and None where that is null."""
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
