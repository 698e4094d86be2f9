"""Bigtable as a row store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from percolator.bigtable.admission import Admission
from percolator.bigtable.chunks import Rows
from percolator.bigtable.filters import add_mutation, checking, selecting
from percolator.bigtable.methods import (
    CHECK_AND_MUTATE_ROW,
    MUTATE_ROWS,
    READ_ROWS,
    SAMPLE_ROW_KEYS,
)
from percolator.bigtable.missing_family import FamilyMissing, missing_family, named
from percolator.bigtable.place import Place
from percolator.errors import ExecutionUnknown, InvalidArgument, PercolatorError
from percolator.rowstore.port import Change, Check, RowChange, Sample, Selection, SetCell, StoredRow
from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableMutateRowsRequest,
    BigtableMutateRowsResponse,
    BigtableReadRowsRequest,
    BigtableRowRange,
    BigtableSampleRowKeysRequest,
)
from percolator.world import Network, RequestT

AnswerT = TypeVar("AnswerT")

_FILTER_BYTES_MAX = 20_480
"""The service's limit on a filter."""
_READ_BYTES_MAX = 524_288
"""That on a request to read. It is not documented, but users of Google's clients have met it."""
_SAFETY = 2
"""How far we stay below these."""
_RANGES_MAX = 600
"""Each takes 34 bytes of the filter of a check."""
_KEY_BYTES_MAX = 4_096
_VALUE_BYTES_MAX = 100 * 1024 * 1024
_TIMEOUT_SECONDS_MIN = 0.001
_NOT_ANSWERED = ExecutionUnknown("the call was cancelled")


class BigtableStore:
    """The tables of one cluster in an instance of Bigtable (`percolator.rowstore.port.RowStore`).

    No call is repeated here, whatever its answer. Calls in flight are bounded, but not scans:
    whoever scans may make other calls meanwhile, and must not wait for itself.
    """

    check_bytes_max = _FILTER_BYTES_MAX // _SAFETY
    keys_bytes_max = _READ_BYTES_MAX // _SAFETY
    ranges_max = _RANGES_MAX

    def __init__(self, network: Network, place: Place) -> None:
        self._place = place
        self._network = network
        self.name_of: Callable[[int], str] = _unknown
        self._admission = Admission()
        self._check_and_mutate = network.unary(place.address, CHECK_AND_MUTATE_ROW)
        self._mutate_rows = network.stream(place.address, MUTATE_ROWS)
        self._read_rows = network.stream(place.address, READ_ROWS)
        self._sample_row_keys = network.stream(place.address, SAMPLE_ROW_KEYS)

    @property
    def scans_backwards(self) -> bool:
        return self._place.scans_backwards

    async def check_and_mutate(
        self,
        table_id: int,
        key: bytes,
        check: Check,
        changes: Sequence[Change],
        timeout_seconds: float,
    ) -> bool:
        _require_key(key)
        request = BigtableCheckAndMutateRowRequest(
            table_name=self._place.table(table_id),
            app_profile_id=self._place.app_profile,
            row_key=key,
        )
        request.predicate_filter.MergeFromString(checking(check))
        made_if = request.true_mutations if check.found else request.false_mutations
        for change in changes:
            if isinstance(change, SetCell) and len(change.value) > _VALUE_BYTES_MAX:
                raise _too_long("value", change.value, _VALUE_BYTES_MAX)
            add_mutation(made_if, change)
        response = await self._in_turn(table_id, self._check_and_mutate, request, timeout_seconds)
        return response.predicate_matched is check.found

    async def write(self, table_id: int, rows: Sequence[RowChange], timeout_seconds: float) -> None:
        request = BigtableMutateRowsRequest(
            table_name=self._place.table(table_id), app_profile_id=self._place.app_profile
        )
        for row in rows:
            entry = request.entries.add(row_key=row.key)
            for change in row.changes:
                add_mutation(entry.mutations, change)
        await self._in_turn(table_id, self._written, request, timeout_seconds)

    async def read(
        self,
        table_id: int,
        keys: Sequence[bytes],
        selections: Sequence[Selection],
        timeout_seconds: float,
    ) -> list[StoredRow]:
        for key in keys:
            _require_key(key)
        request = self._reading(table_id, selections)
        request.rows.row_keys.extend(keys)
        return await self._in_turn(table_id, self._all_rows, request, timeout_seconds)

    async def scan(
        self,
        table_id: int,
        first: bytes,
        end: bytes,
        selections: Sequence[Selection],
        *,
        rows_max: int,
        reverse: bool,
        timeout_seconds: float,
        marks: bool = False,
    ) -> AsyncGenerator[StoredRow, None]:
        request = self._reading(table_id, selections)
        request.rows_limit, request.reversed = rows_max, reverse
        rows = BigtableRowRange()
        if first:
            rows.start_key_closed = first
        if end:
            rows.end_key_open = end
        request.rows.row_ranges.append(rows)
        async with aclosing(self._stream(request, timeout_seconds, marks=marks)) as found:
            try:
                async for row in found:
                    yield row
            except FamilyMissing as error:
                told = await named(self._network, self._place, error)
                self._locate(told, table_id)
                raise told from error
            except PercolatorError as error:
                self._locate(error, table_id)
                raise

    async def _in_turn(
        self,
        table_id: int,
        call: Callable[[RequestT, float], Awaitable[AnswerT]],
        request: RequestT,
        timeout_seconds: float,
    ) -> AnswerT:
        ticket = self._admission.enter_at_once()
        if not ticket:
            now = asyncio.get_running_loop().time
            deadline = now() + timeout_seconds
            ticket = await self._admission.enter(timeout_seconds)
            timeout_seconds = max(deadline - now(), _TIMEOUT_SECONDS_MIN)
        problem: PercolatorError | None = _NOT_ANSWERED
        try:
            answer = await call(request, timeout_seconds)
            problem = None
        except FamilyMissing as error:
            problem = error
            told = await named(self._network, self._place, error)
            self._locate(told, table_id)
            raise told from error
        except PercolatorError as error:
            problem = error
            self._locate(error, table_id)
            raise
        finally:
            self._admission.leave(ticket, problem)
        return answer

    def _locate(self, error: PercolatorError, table_id: int) -> None:
        """Adds the table's own name to the one that it has in the store."""
        name = self.name_of(table_id)
        if name:
            error.where = f"{error.where}, table {name!r}" if error.where else f"table {name!r}"

    async def _written(self, request: BigtableMutateRowsRequest, timeout_seconds: float) -> None:
        left = set(range(len(request.entries)))
        async with aclosing(self._mutate_rows(request, timeout_seconds)) as responses:
            async for response in responses:
                for entry in response.entries:
                    if entry.status.code:
                        raise _not_written(entry.status, request.table_name)
                    left.discard(entry.index)
        if left:
            raise ExecutionUnknown(f"{len(left)} rows have no answer", where=request.table_name)

    async def _all_rows(
        self, request: BigtableReadRowsRequest, timeout_seconds: float
    ) -> list[StoredRow]:
        async with aclosing(self._stream(request, timeout_seconds)) as rows:
            return [row async for row in rows]

    async def sample(self, table_id: int, timeout_seconds: float) -> list[Sample]:
        request = BigtableSampleRowKeysRequest(
            table_name=self._place.table(table_id), app_profile_id=self._place.app_profile
        )
        async with aclosing(self._sample_row_keys(request, timeout_seconds)) as answers:
            return [Sample(one.row_key, one.offset_bytes) async for one in answers]

    def _reading(self, table_id: int, selections: Sequence[Selection]) -> BigtableReadRowsRequest:
        request = BigtableReadRowsRequest(
            table_name=self._place.table(table_id), app_profile_id=self._place.app_profile
        )
        request.filter.MergeFromString(selecting(selections))
        return request

    async def _stream(
        self, request: BigtableReadRowsRequest, timeout_seconds: float, *, marks: bool = False
    ) -> AsyncGenerator[StoredRow, None]:
        rows = Rows(reverse=request.reversed)
        async with aclosing(self._read_rows(request, timeout_seconds)) as responses:
            async for response in responses:
                for row in rows.take(response.chunks):
                    yield row
                if response.last_scanned_row_key and not response.chunks:
                    rows.pass_over(response.last_scanned_row_key)
                    if marks:
                        yield StoredRow(response.last_scanned_row_key, [])
        rows.end()


def _unknown(table_id: int) -> str:
    return ""


def _not_written(status: BigtableMutateRowsResponse.Status, table: str) -> PercolatorError:
    why = status.message or str(status.code)
    lacking = missing_family(why, table)
    return lacking or ExecutionUnknown(f"a row was not written: {why}", where=table)


def _require_key(key: bytes) -> None:
    if len(key) > _KEY_BYTES_MAX:
        raise _too_long("row", key, _KEY_BYTES_MAX)


def _too_long(field: str, found: bytes, most: int) -> InvalidArgument:
    return InvalidArgument(
        field,
        f"has {len(found):,} bytes, and Bigtable accepts at most {most:,}: store a shorter one",
    )
