"""Bigtable's methods and messages: selections and changes encoded, and rows decoded.

The service refuses chains and interleaves of fewer than two filters, and ranges that are empty; the
emulator accepts some of them. Condition filters are never used: they are not atomic.

Filters are encoded here, part by part, and not built as messages: a prewrite's has forty of them,
which would cost the client as much as sending the call. Parts that all transactions have in common
are encoded once.

A row is streamed in chunks, of which each has only what differs from the one before: the row, the
family, the column. A long value comes in several. A row counts once it is committed; before that,
the server may take it back. A stream that ends within a row, or makes no sense, was cut off: it is
an error, never a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, Protocol

from percolator.errors import ExecutionUnknown
from percolator.rowstore.port import (
    TIME_UNIT,
    Change,
    Check,
    Selection,
    SetCell,
    StoredCell,
    StoredRow,
)
from percolator.v1 import bigtable_pb2 as pb
from percolator.world import StreamMethod, UnaryMethod

READ_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/ReadRows",
    pb.BigtableReadRowsRequest,
    pb.BigtableReadRowsResponse,
)
SAMPLE_ROW_KEYS = StreamMethod(
    "/google.bigtable.v2.Bigtable/SampleRowKeys",
    pb.BigtableSampleRowKeysRequest,
    pb.BigtableSampleRowKeysResponse,
)
CHECK_AND_MUTATE_ROW = UnaryMethod(
    "/google.bigtable.v2.Bigtable/CheckAndMutateRow",
    pb.BigtableCheckAndMutateRowRequest,
    pb.BigtableCheckAndMutateRowResponse,
)
GET_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/GetTable",
    pb.BigtableGetTableRequest,
    pb.BigtableTable,
)
MUTATE_ROWS = StreamMethod(
    "/google.bigtable.v2.Bigtable/MutateRows",
    pb.BigtableMutateRowsRequest,
    pb.BigtableMutateRowsResponse,
)
CREATE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable",
    pb.BigtableCreateTableRequest,
    pb.BigtableTable,
)
DELETE_TABLE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableTableAdmin/DeleteTable",
    pb.BigtableDeleteTableRequest,
    pb.BigtableDeleteTableResponse,
)
GET_APP_PROFILE = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableInstanceAdmin/GetAppProfile",
    pb.BigtableGetAppProfileRequest,
    pb.BigtableAppProfile,
)
TEST_IAM_PERMISSIONS = UnaryMethod(
    "/google.bigtable.admin.v2.BigtableInstanceAdmin/TestIamPermissions",
    pb.BigtableTestIamPermissionsRequest,
    pb.BigtableTestIamPermissionsResponse,
)


_Chunk = pb.BigtableReadRowsResponse.CellChunk

_REMEMBERED: Final = 4_096
_REMEMBERED_CHECKS: Final = 64
"""Checks of one transaction are encoded one after the other, and are equal for each of its rows."""

# The tags of the fields of `BigtableRowFilter`, and of the messages in it: number and wire type.
_CHAIN: Final = b"\x0a"
_INTERLEAVE: Final = b"\x12"
_COLUMN_RANGE: Final = b"\x3a"
_TIMESTAMP_RANGE: Final = b"\x42"
_VALUE_RANGE: Final = b"\x7a"
_CELLS_PER_ROW_OFFSET: Final = b"\x50"
_CELLS_PER_COLUMN_LIMIT: Final = b"\x60"
_PART: Final = b"\x0a"
"""A part of a chain or of an interleave."""
_FAMILY, _FIRST_COLUMN, _END_COLUMN = b"\x0a", b"\x12", b"\x2a"
_FROM_TIME, _UNTIL_TIME = b"\x08", b"\x10"
_FIRST_VALUE, _END_VALUE = b"\x0a", b"\x22"


def selecting(selections: Sequence[Selection]) -> bytes:
    """An encoded filter that leaves the cells that any of the selections names."""
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
    """The mutations of a request."""

    def add(self) -> pb.BigtableMutation: ...


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
    """A column range as part of a chain."""
    return _field(_PART, _lone_columns(family, first, end))


@lru_cache(_REMEMBERED)
def _times(from_time: int, until_time: int) -> bytes:
    """A range of times as part of a chain. All steps of a transaction name the same few."""
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


class Rows:
    """The rows of one stream, in order, put together from its chunks."""

    def __init__(self, *, reverse: bool = False) -> None:
        self._reverse = reverse
        self._last = b""
        self._clear()

    def _clear(self) -> None:
        self._key = b""
        self._family: str | None = None
        self._column: bytes | None = None
        self._time = 0
        self._value: list[bytes] = []
        self._cells: list[StoredCell] = []

    def take(self, chunks: Iterable[_Chunk]) -> Iterator[StoredRow]:
        """The rows that these chunks complete. Raises `ExecutionUnknown` if they make no sense."""
        for chunk in chunks:
            if chunk.reset_row:
                self._clear()
                continue
            self._take_cell(chunk)
            if chunk.commit_row:
                if self._value:
                    raise _malformed("a row is committed within a value")
                self._require_order()
                yield StoredRow(self._key, self._cells)
                self._clear()

    def pass_over(self, key: bytes) -> None:
        """Called when no row up to this key is selected. Raises `ExecutionUnknown` if that makes no
        sense."""
        if self._key:
            raise _malformed("a scan goes on within a row")
        last, self._last = self._last, key
        if last and (key > last if self._reverse else key < last):
            raise _malformed("a scan goes back")

    def end(self) -> None:
        """Called when the stream has ended. Raises `ExecutionUnknown` if a row is incomplete."""
        if self._key:
            raise _malformed("the stream ended within a row")

    def _require_order(self) -> None:
        """A row that comes twice may differ, since each copy was read at another time."""
        last, self._last = self._last, self._key
        if last and (self._key >= last if self._reverse else self._key <= last):
            raise _malformed("its rows are not in order")

    def _take_cell(self, chunk: _Chunk) -> None:
        if chunk.row_key:
            if self._key and chunk.row_key != self._key:
                raise _malformed("a row begins before the one before it is committed")
            self._key = chunk.row_key
        if not self._value:
            if chunk.HasField("family_name"):
                self._family, self._column = chunk.family_name.value, None
            if chunk.HasField("qualifier"):
                self._column = chunk.qualifier.value
            self._time = chunk.timestamp_micros
        self._value.append(chunk.value)
        if chunk.value_size:
            return
        if not self._key or self._family is None or self._column is None:
            raise _malformed("a cell has no row, family or column")
        cell = StoredCell(self._family, self._column, self._time, b"".join(self._value))
        self._cells.append(cell)
        self._value = []


def _malformed(why: str) -> ExecutionUnknown:
    return ExecutionUnknown(f"Bigtable's answer is malformed: {why}")
