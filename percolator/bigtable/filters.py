"""Selections and changes as Bigtable's messages.

The service refuses chains and interleaves of fewer than two filters, and ranges that are empty; the
emulator accepts some of them. Condition filters are never used: they are not atomic.

Filters are encoded here, part by part, and not built as messages: a prewrite's has forty of them,
which would cost the client as much as sending the call. What is the same for all transactions is
encoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol

from percolator.rowstore.port import TIME_UNIT, Change, Check, Selection, SetCell
from percolator.v1.bigtable_pb2 import BigtableMutation

_REMEMBERED: Final = 4_096
_REMEMBERED_CHECKS: Final = 64
"""Those of one transaction are encoded one after the other, and are the same for each of its rows.
"""

# The tags of the fields of `BigtableRowFilter`, and of the messages in it: number and wire type.
_CHAIN: Final = b"\x0a"
_INTERLEAVE: Final = b"\x12"
_COLUMN_RANGE: Final = b"\x3a"
_TIMESTAMP_RANGE: Final = b"\x42"
_VALUE_RANGE: Final = b"\x7a"
_CELLS_PER_ROW_OFFSET: Final = b"\x50"
_CELLS_PER_COLUMN_LIMIT: Final = b"\x60"
_PART: Final = b"\x0a"
"""Of a chain, and of an interleave."""
_FAMILY, _FIRST_COLUMN, _END_COLUMN = b"\x0a", b"\x12", b"\x2a"
_FROM_TIME, _UNTIL_TIME = b"\x08", b"\x10"
_FIRST_VALUE, _END_VALUE = b"\x0a", b"\x22"


def selecting(selections: Sequence[Selection]) -> bytes:
    """An encoded filter that leaves what any of the selections names."""
    if len(selections) == 1:
        return _selecting_one(selections[0])
    return _joined(_INTERLEAVE, map(_selecting_one, selections))


@lru_cache(_REMEMBERED_CHECKS)
def checking(check: Check) -> bytes:
    """An encoded filter that leaves a cell if more than `more_than` are found."""
    found = selecting(check.selections)
    if not check.more_than:
        return found
    return _joined(_CHAIN, (found, _CELLS_PER_ROW_OFFSET + _varint(check.more_than)))


class Mutations(Protocol):
    """Those of a request."""

    def add(self) -> BigtableMutation: ...


def add_mutation(mutations: Mutations, change: Change) -> None:
    """Adds a change to a request: built in its place, which costs half of building and copying."""
    if isinstance(change, SetCell):
        cell = mutations.add().set_cell
        cell.family_name, cell.column_qualifier, cell.timestamp_micros, cell.value = change
    else:
        version = mutations.add().delete_from_column
        version.family_name, version.column_qualifier, time = change
        times = version.time_range
        times.start_timestamp_micros, times.end_timestamp_micros = time, time + TIME_UNIT


def _selecting_one(selection: Selection) -> bytes:
    family, first, end, from_time, until_time, first_value, end_value, newest, any_of = selection
    parts = _columns(family, first, end)
    if from_time or until_time:
        parts += _times(from_time, until_time)
    elif not (first_value or end_value or newest or any_of):
        return _lone_columns(family, first, end)
    if first_value or end_value:
        parts += _field(_PART, _values(first_value, end_value))
    if any_of:
        parts += _field(_PART, _in_any(any_of))
    if newest:
        parts += _NEWEST
    return _field(_CHAIN, parts)


def _in_any(ranges: Sequence[tuple[bytes, bytes]]) -> bytes:
    """One filter for all, in which each range takes a few bytes besides its ends."""
    if len(ranges) == 1:
        return _values(*ranges[0])
    return _joined(_INTERLEAVE, [_values(*one) for one in ranges])


def _values(first: bytes, end: bytes) -> bytes:
    return _field(_VALUE_RANGE, _optional(_FIRST_VALUE, first) + _optional(_END_VALUE, end))


@lru_cache(_REMEMBERED)
def _lone_columns(family: str, first: bytes, end: bytes) -> bytes:
    columns = _field(_FAMILY, family.encode())
    columns += _optional(_FIRST_COLUMN, first) + _optional(_END_COLUMN, end)
    return _field(_COLUMN_RANGE, columns)


@lru_cache(_REMEMBERED)
def _columns(family: str, first: bytes, end: bytes) -> bytes:
    """As a part of a chain."""
    return _field(_PART, _lone_columns(family, first, end))


@lru_cache(_REMEMBERED)
def _times(from_time: int, until_time: int) -> bytes:
    """As a part of a chain. All steps of a transaction name the same few."""
    times = _FROM_TIME + _varint(from_time) if from_time else b""
    if until_time:
        times += _UNTIL_TIME + _varint(until_time)
    return _field(_PART, _field(_TIMESTAMP_RANGE, times))


def _joined(kind: bytes, filters: Iterable[bytes]) -> bytes:
    return _field(kind, b"".join([_field(_PART, one) for one in filters]))


def _optional(tag: bytes, content: bytes) -> bytes:
    return _field(tag, content) if content else b""


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    if number < _ONE_BYTE:
        return _SHORT[number]
    found = bytearray()
    while number >= _ONE_BYTE:
        found.append(number & 0x7F | _ONE_BYTE)
        number >>= 7
    found.append(number)
    return bytes(found)


_ONE_BYTE: Final = 0x80
_SHORT: Final = [bytes((number,)) for number in range(_ONE_BYTE)]
_NEWEST: Final = _field(_PART, _CELLS_PER_COLUMN_LIMIT + _varint(1))
