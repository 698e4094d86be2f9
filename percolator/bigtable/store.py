"""Bigtable as a row store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from percolator.bigtable.chunks import Rows
from percolator.bigtable.filters import checking, mutation, selecting
from percolator.bigtable.methods import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.bigtable.place import Place
from percolator.rowstore.port import Change, Check, Selection, StoredRow
from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableReadRowsRequest,
    BigtableRowRange,
)
from percolator.world import Network

_FILTER_BYTES_MAX = 20_480
"""The service's limit on a filter."""
_SAFETY = 2
"""How far we stay below it."""


class BigtableStore:
    """The tables of one cluster in an instance of Bigtable (`percolator.rowstore.port.RowStore`).

    No call is repeated here, whatever its answer.
    """

    check_bytes_max = _FILTER_BYTES_MAX // _SAFETY

    def __init__(self, network: Network, place: Place) -> None:
        self._place = place
        self._check_and_mutate = network.unary(place.address, CHECK_AND_MUTATE_ROW)
        self._read_rows = network.stream(place.address, READ_ROWS)

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
        request = BigtableCheckAndMutateRowRequest(
            table_name=self._place.table(table_id),
            app_profile_id=self._place.app_profile,
            row_key=key,
            predicate_filter=checking(check),
        )
        made_if = request.true_mutations if check.found else request.false_mutations
        made_if.extend(map(mutation, changes))
        response = await self._check_and_mutate(request, timeout_seconds)
        return response.predicate_matched is check.found

    async def read(
        self,
        table_id: int,
        keys: Sequence[bytes],
        selections: Sequence[Selection],
        timeout_seconds: float,
    ) -> list[StoredRow]:
        request = self._reading(table_id, selections)
        request.rows.row_keys.extend(keys)
        return [row async for row in self._stream(request, timeout_seconds)]

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
    ) -> AsyncGenerator[StoredRow, None]:
        request = self._reading(table_id, selections)
        request.rows_limit, request.reversed = rows_max, reverse
        rows = BigtableRowRange()
        if first:
            rows.start_key_closed = first
        if end:
            rows.end_key_open = end
        request.rows.row_ranges.append(rows)
        async with aclosing(self._stream(request, timeout_seconds)) as found:
            async for row in found:
                yield row

    def _reading(self, table_id: int, selections: Sequence[Selection]) -> BigtableReadRowsRequest:
        return BigtableReadRowsRequest(
            table_name=self._place.table(table_id),
            app_profile_id=self._place.app_profile,
            filter=selecting(selections),
        )

    async def _stream(
        self, request: BigtableReadRowsRequest, timeout_seconds: float
    ) -> AsyncGenerator[StoredRow, None]:
        rows = Rows(reverse=request.reversed)
        async for response in self._read_rows(request, timeout_seconds):
            for row in rows.take(response.chunks):
                yield row
        rows.end()
