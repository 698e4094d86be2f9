"""A model of Bigtable in memory: its data interface, as far as the driver uses it.

It answers the messages of the wire, so that the driver runs as it is. It keeps what Bigtable
promises and no more: one row is changed, checked and read at once; between two rows of a
reading, anything may happen. It is as strict as the service, which refuses what an emulator may
accept: times that are not multiples of a thousand, unknown families, chains and interleaves of
fewer than two filters, empty ranges, filters and requests to read that are too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import NamedTuple

from sortedcontainers import SortedDict

from percolator.bigtable.errors import FamilyMissing
from percolator.errors import InvalidArgument, SchemaError
from percolator.v1 import bigtable_pb2 as pb

_UNIT = 1_000
_FILTER_BYTES_MAX = 20_480
_READ_BYTES_MAX = 524_288
_CHANGES_MAX = 100_000
_KEY_BYTES_MAX = 4_096
_COLUMN_BYTES_MAX = 16_384
_ROWS_OF_A_SAMPLE = 8
_ROWS_OF_A_MARK = 4
"""So often it says how far it has come, where nothing is selected: far more often than the service.
"""


class ModelCell(NamedTuple):
    """One version. Sorted as Bigtable returns them: the newest of a column first."""

    family: str
    column: bytes
    inverted_time: int
    value: bytes

    @property
    def time(self) -> int:
        return -self.inverted_time


Row = dict[tuple[str, bytes, int], bytes]
"""Values by family, column and time."""


class ModelTable:
    """One table."""

    def __init__(self, name: str, families: Iterable[str]) -> None:
        self.name = name
        self.families = set(families)
        self.rows: SortedDict[bytes, Row] = SortedDict()

    def put(self, key: bytes, row: Row) -> None:
        """A row without cells is not there."""
        if row:
            self.rows[key] = row
        else:
            self.rows.pop(key, None)


class BigtableInMemory:
    """Answers the calls of the driver. What it has answered is never lost."""

    def __init__(self, *, chunk_bytes: int = 1 << 20) -> None:
        """Longer values are streamed in several chunks."""
        self.tables: dict[str, ModelTable] = {}
        self.app_profiles: dict[str, pb.BigtableAppProfile] = {}
        self.denied: set[str] = set()
        """The permissions that the caller does not have."""
        self._chunk_bytes = chunk_bytes

    async def create_table(self, request: pb.BigtableCreateTableRequest) -> pb.BigtableTable:
        name = f"{request.parent}/tables/{request.table_id}"
        if name in self.tables:
            raise SchemaError(f"{name} exists", table=name)
        self.tables[name] = ModelTable(name, request.table.column_families)
        return pb.BigtableTable(name=name)

    async def get_table(self, request: pb.BigtableGetTableRequest) -> pb.BigtableTable:
        answer = pb.BigtableTable(name=request.name)
        for family in self._table(request.name).families:
            answer.column_families[family].SetInParent()
        return answer

    async def delete_table(
        self, request: pb.BigtableDeleteTableRequest
    ) -> pb.BigtableDeleteTableResponse:
        self._table(request.name)
        del self.tables[request.name]
        return pb.BigtableDeleteTableResponse()

    async def get_app_profile(
        self, request: pb.BigtableGetAppProfileRequest
    ) -> pb.BigtableAppProfile:
        profile = self.app_profiles.get(request.name.rpartition("/")[2])
        if profile is None:
            raise InvalidArgument("name", f"App profile not found: {request.name}")
        return profile

    async def test_iam_permissions(
        self, request: pb.BigtableTestIamPermissionsRequest
    ) -> pb.BigtableTestIamPermissionsResponse:
        granted = [one for one in request.permissions if one not in self.denied]
        return pb.BigtableTestIamPermissionsResponse(permissions=granted)

    async def check_and_mutate_row(
        self, request: pb.BigtableCheckAndMutateRowRequest
    ) -> pb.BigtableCheckAndMutateRowResponse:
        table = self._table(request.table_name)
        key = request.row_key
        if not 0 < len(key) <= _KEY_BYTES_MAX:
            raise InvalidArgument("row_key", f"has {len(key)} bytes")
        _check_filter(table, request.predicate_filter)
        changes = [*request.true_mutations, *request.false_mutations]
        if not 0 < len(changes) <= _CHANGES_MAX:
            raise InvalidArgument("mutations", f"{len(changes)} changes")
        for change in changes:
            _check_change(table, change)
        # From here on, nothing waits: it happens here.
        row = table.rows.get(key, {})
        matched = bool(_filtered(_cells(row), request.predicate_filter))
        row = dict(row)
        for change in request.true_mutations if matched else request.false_mutations:
            _apply(row, change)
        table.put(key, row)
        return pb.BigtableCheckAndMutateRowResponse(predicate_matched=matched)

    async def mutate_rows(
        self, request: pb.BigtableMutateRowsRequest
    ) -> AsyncIterator[pb.BigtableMutateRowsResponse]:
        table = self._table(request.table_name)
        if not request.entries:
            raise InvalidArgument("entries", "is empty")
        for entry in request.entries:
            if not 0 < len(entry.row_key) <= _KEY_BYTES_MAX or not entry.mutations:
                raise InvalidArgument("entries", f"a key of {len(entry.row_key)} bytes")
            for change in entry.mutations:
                _check_change(table, change)
        for index, entry in enumerate(request.entries):
            row = dict(table.rows.get(entry.row_key, {}))
            for change in entry.mutations:
                _apply(row, change)
            table.put(entry.row_key, row)
            answer = pb.BigtableMutateRowsResponse()
            answer.entries.add(index=index).status.SetInParent()
            yield answer
            await asyncio.sleep(0)  # others see that only some of the rows were changed

    async def read_rows(
        self, request: pb.BigtableReadRowsRequest
    ) -> AsyncIterator[pb.BigtableReadRowsResponse]:
        table = self._table(request.table_name)
        if request.ByteSize() > _READ_BYTES_MAX:
            raise InvalidArgument("request", f"has {request.ByteSize()} bytes")
        _check_filter(table, request.filter)
        found = passed = 0
        for key in _keys(table, request):
            row = table.rows.get(key)
            cells = _filtered(_cells(row), request.filter) if row else []
            if cells:
                yield pb.BigtableReadRowsResponse(chunks=self._chunks(key, cells))
                found += 1
                passed = 0
                if found == request.rows_limit:
                    return
            else:
                passed += 1
                if passed % _ROWS_OF_A_MARK == 0:
                    yield pb.BigtableReadRowsResponse(last_scanned_row_key=key)
            await asyncio.sleep(0)  # others change rows that were not read yet

    async def sample_row_keys(
        self, request: pb.BigtableSampleRowKeysRequest
    ) -> AsyncIterator[pb.BigtableSampleRowKeysResponse]:
        """Every few rows, far more often than the service would: tests are small."""
        size = 0
        for number, (key, row) in enumerate(self._table(request.table_name).rows.items(), 1):
            if number % _ROWS_OF_A_SAMPLE == 0:
                yield pb.BigtableSampleRowKeysResponse(row_key=key, offset_bytes=size)
            size += sum(len(column) + len(value) for (_, column, _), value in row.items())
        yield pb.BigtableSampleRowKeysResponse(offset_bytes=size)

    def _table(self, name: str) -> ModelTable:
        table = self.tables.get(name)
        if table is None:
            raise SchemaError(f"there is no table {name}", table=name)
        return table

    def _chunks(
        self, key: bytes, cells: Sequence[ModelCell]
    ) -> Iterator[pb.BigtableReadRowsResponse.CellChunk]:
        family, column = "", b""
        for place, cell in enumerate(cells):
            parts = list(_parts(cell.value, self._chunk_bytes))
            for number, part in enumerate(parts):
                chunk = pb.BigtableReadRowsResponse.CellChunk(value=part)
                if not number:
                    chunk.timestamp_micros = cell.time
                    if not place:
                        chunk.row_key = key
                    if cell.family != family:
                        chunk.family_name.value = family = cell.family
                        column = b""
                    if cell.column != column:
                        chunk.qualifier.value = column = cell.column
                if number + 1 < len(parts):
                    chunk.value_size = len(cell.value)
                elif place + 1 == len(cells):
                    chunk.commit_row = True
                yield chunk


def _parts(value: bytes, size: int) -> Iterator[bytes]:
    for first in range(0, max(len(value), 1), size):
        yield value[first : first + size]


def _keys(table: ModelTable, request: pb.BigtableReadRowsRequest) -> list[bytes]:
    keys = set(request.rows.row_keys)
    if len(keys) != len(request.rows.row_keys):
        raise InvalidArgument("row_keys", "a key is named twice")
    for rows in request.rows.row_ranges:
        if rows.end_key_open and rows.end_key_open <= rows.start_key_closed:
            raise InvalidArgument("row_ranges", "a range is empty")
        keys.update(
            table.rows.irange(
                rows.start_key_closed or None, rows.end_key_open or None, (True, False)
            )
        )
    return sorted(keys, reverse=request.reversed)


# ---------------------------------------------------------------------------- changes


def _check_change(table: ModelTable, change: pb.BigtableMutation) -> None:
    if change.HasField("set_cell"):
        cell = change.set_cell
        _check_times(cell.timestamp_micros)
        family, column = cell.family_name, cell.column_qualifier
    elif change.HasField("delete_from_column"):
        version = change.delete_from_column
        times = version.time_range
        _check_times(times.start_timestamp_micros, times.end_timestamp_micros)
        family, column = version.family_name, version.column_qualifier
    else:
        raise InvalidArgument("mutations", "one says nothing")
    if family not in table.families:
        raise no_family(table.name)
    if len(column) > _COLUMN_BYTES_MAX:
        raise InvalidArgument("mutations", f"a column of {len(column)} bytes")


def no_family(table: str) -> FamilyMissing:
    """As the service says it: without the name of the family."""
    return FamilyMissing(table, "", where=table)


def _check_times(*times: int) -> None:
    if any(time < 0 or time % _UNIT for time in times):
        raise InvalidArgument("timestamp_micros", f"{times} are not multiples of {_UNIT}")


def _apply(row: Row, change: pb.BigtableMutation) -> None:
    if change.HasField("set_cell"):
        cell = change.set_cell
        row[cell.family_name, cell.column_qualifier, cell.timestamp_micros] = cell.value
        return
    version = change.delete_from_column
    times = version.time_range
    for family, column, time in list(row):
        if (
            (family, column) == (version.family_name, version.column_qualifier)
            and times.start_timestamp_micros <= time
            and (not times.end_timestamp_micros or time < times.end_timestamp_micros)
        ):
            del row[family, column, time]


# ---------------------------------------------------------------------------- filters


def _check_filter(table: ModelTable, one: pb.BigtableRowFilter) -> None:
    if one.ByteSize() > _FILTER_BYTES_MAX:
        raise InvalidArgument("filter", f"has {one.ByteSize()} bytes, above {_FILTER_BYTES_MAX}")
    match one.WhichOneof("filter"):
        case "chain" | "interleave" as kind:
            inner = getattr(one, kind).filters
            if len(inner) < 2:  # as the service says it
                raise InvalidArgument("filter", f"a {kind} of {len(inner)} filters")
            for each in inner:
                _check_filter(table, each)
        case "column_range_filter":
            columns = one.column_range_filter
            if columns.family_name not in table.families:
                raise no_family(table.name)
            _check_range(columns.start_qualifier_closed, columns.end_qualifier_open)
        case "timestamp_range_filter":
            times = one.timestamp_range_filter
            _check_times(times.start_timestamp_micros, times.end_timestamp_micros)
            if 0 < times.end_timestamp_micros <= times.start_timestamp_micros:
                raise InvalidArgument("filter", "a range of timestamps is empty")
        case "value_range_filter":
            values = one.value_range_filter
            _check_range(values.start_value_closed, values.end_value_open)
        case "cells_per_row_offset_filter" | "cells_per_column_limit_filter" as kind:
            if getattr(one, kind) <= 0:
                raise InvalidArgument("filter", f"{kind} is not positive")
        case _:
            raise InvalidArgument("filter", "is not one of those that are modelled")


def _check_range(start: bytes, end: bytes) -> None:
    if end and end <= start:
        raise InvalidArgument("filter", f"the range from {start!r} to {end!r} is empty")


def _cells(row: Row) -> list[ModelCell]:
    return sorted(
        ModelCell(family, column, -time, value) for (family, column, time), value in row.items()
    )


def _filtered(cells: list[ModelCell], one: pb.BigtableRowFilter) -> list[ModelCell]:
    match one.WhichOneof("filter"):
        case "chain":
            for each in one.chain.filters:
                cells = _filtered(cells, each)
            return cells
        case "interleave":
            return sorted(
                cell for each in one.interleave.filters for cell in _filtered(cells, each)
            )
        case "column_range_filter":
            columns = one.column_range_filter
            first, end = columns.start_qualifier_closed, columns.end_qualifier_open
            return [
                cell
                for cell in cells
                if cell.family == columns.family_name and _is_between(cell.column, first, end)
            ]
        case "timestamp_range_filter":
            times = one.timestamp_range_filter
            start, until = times.start_timestamp_micros, times.end_timestamp_micros
            return [
                cell for cell in cells if start <= cell.time and (not until or cell.time < until)
            ]
        case "value_range_filter":
            values = one.value_range_filter
            first, end = values.start_value_closed, values.end_value_open
            return [cell for cell in cells if _is_between(cell.value, first, end)]
        case "cells_per_row_offset_filter":
            return cells[one.cells_per_row_offset_filter :]
        case _:
            return list(_newest(cells, one.cells_per_column_limit_filter))


def _is_between(found: bytes, first: bytes, end: bytes) -> bool:
    return first <= found and (not end or found < end)


def _newest(cells: list[ModelCell], limit: int) -> Iterator[ModelCell]:
    column: tuple[str, bytes] | None = None
    count = 0
    for cell in cells:
        if (cell.family, cell.column) != column:
            column, count = (cell.family, cell.column), 0
        count += 1
        if count <= limit:
            yield cell
