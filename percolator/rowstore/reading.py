"""Reads of rows at a timestamp: those that want the same columns share a call.

Reads of single rows share it also if they belong to different transactions (gathering.py).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

from percolator.errors import DeadlineExceeded, PercolatorError
from percolator.limits import Limits
from percolator.routing.cells import FoundCell, ReadSize, RowRequest, RowResult
from percolator.routing.lanes import CellAnswer
from percolator.rowstore.gathering import Gathering
from percolator.rowstore.layout import row_key
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Selection, StoredCell, StoredRow
from percolator.rowstore.selecting import (
    Seen,
    Wanted,
    add_data,
    data_selections,
    hides_earlier,
    seen,
)
from percolator.rowstore.times import Times
from percolator.v1.tabletserver_pb2 import RowRead
from percolator.world import World


class RowReads:
    """Reads rows of a row store."""

    def __init__(self, store: RowStore, times: Times, world: World, limits: Limits) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits
        self._gathering: dict[tuple[object, ...], Gathering] = {}
        """The calls that others can still join, by table and by what they want."""

    async def read(
        self, requests: Sequence[RowRequest], deadline: float, *, bytes_max: int = 0
    ) -> list[RowResult]:
        """Answers in the order of the requests. Raises if one of them failed, and `InvalidArgument`
        as soon as they have more than `bytes_max` bytes; 0 means any number."""
        size = ReadSize(bytes_max) if bytes_max else None
        if len(requests) == 1:
            table_id, read = requests[0]
            wanted, passing = _wanted(read), frozenset(read.passing)
            one = await self._read_one(table_id, read.row, wanted, passing, deadline)
            return [RowResult() if one is None else _result(one, size)]
        patience = Patience(self._world, self._limits, deadline)
        results = [RowResult() for _ in requests]
        alike: defaultdict[tuple[int, Wanted], list[int]] = defaultdict(list)
        for place, (table_id, read) in enumerate(requests):
            alike[table_id, _wanted(read)].append(place)
        calls = [
            self._read_alike(table_id, wanted, part, requests, results, size, patience)
            for (table_id, wanted), places in alike.items()
            for part in self._parts(places, requests)
        ]
        if len(calls) == 1:
            await calls[0]
            return results
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        except PercolatorError:
            for task in tasks:
                task.cancel()  # nothing that they read is of use
            raise
        return results

    def _parts(
        self, places: Sequence[int], requests: Sequence[RowRequest]
    ) -> Iterator[Sequence[int]]:
        """Divides reads that are alike among calls."""
        part: list[int] = []
        size = 0
        for place in places:
            added = len(requests[place].read.row)
            is_full = len(part) >= self._limits.batch_rows_max
            if part and (is_full or size + added > self._store.keys_bytes_max):
                yield part
                part, size = [], 0
            part.append(place)
            size += added
        yield part

    async def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> CellAnswer:
        """Reads one cell: the most frequent kind of read."""
        wanted = Wanted(timestamp, (column,))
        result = await self._read_one(table_id, row, wanted, (), deadline)
        if result is None:
            return None
        return _result(result) if result.locks else result.found.get(column)

    async def _read_one(
        self,
        table_id: int,
        row: bytes,
        wanted: Wanted,
        passing: Container[int],
        deadline: float,
    ) -> Seen | None:
        """Reads one row; None if it has nothing that is wanted. Those that begin at the same time,
        and want the same columns, share a call."""
        key = row_key(row)
        cells = await self._together(table_id, key, wanted, deadline)
        if cells is None or hides_earlier(cells, wanted.timestamp, self._times):
            patience = Patience(self._world, self._limits, deadline)
            rows = await self._rows(table_id, [key], wanted, patience)
            cells = rows[0].cells if rows else []
        if not cells:
            return None
        result = seen(row, cells, wanted, passing, self._times)
        if result.in_data:
            patience = Patience(self._world, self._limits, deadline)
            await self.complete(table_id, row, result, wanted, patience)
        return result

    async def complete(
        self, table_id: int, row: bytes, result: Seen, wanted: Wanted, patience: Patience
    ) -> None:
        """Fetches the values that lie apart from their records. Nothing but collection changes
        these."""
        if not result.in_data:
            return
        cells: list[StoredCell] = []
        bytes_max = self._store.check_bytes_max
        for selections in data_selections(result, wanted, self._times, bytes_max):
            rows = await self._patiently(table_id, [row_key(row)], selections, patience)
            cells += rows[0].cells if rows else []
        add_data(row, result, cells, wanted, self._times)

    async def _together(
        self, table_id: int, key: bytes, wanted: Wanted, deadline: float
    ) -> list[StoredCell] | None:
        """The cells of one row, as of some timestamp at or above the wanted one; None if the row
        has to be read by itself."""
        timestamp = wanted.timestamp
        about = table_id, wanted.columns, wanted.report_deletes, wanted.prefixes
        gathering = self._gathering.get(about)
        if gathering is not None and gathering.admits(deadline):
            found = await gathering.follow(key, timestamp)
            return None if found is None else found.get(key, [])
        gathering = self._gathering[about] = Gathering(key, timestamp, deadline)
        cells: dict[bytes, list[StoredCell]] | None = None
        try:
            try:
                await asyncio.sleep(0)  # whoever is ready to read, reads
            finally:
                if self._gathering.get(about) is gathering:
                    del self._gathering[about]
            wanted = replace(wanted, timestamp=gathering.latest)
            patience = Patience(self._world, self._limits, deadline)
            rows = await self._rows(
                table_id, list(gathering.keys), wanted, patience, earliest=gathering.earliest
            )
            cells = {row.key: row.cells for row in rows}
        except DeadlineExceeded:
            raise
        except PercolatorError:
            if len(gathering.keys) == 1:
                raise
            return None  # the reason may be another's row
        finally:
            gathering.end(cells)
        return cells.get(key, [])

    async def _read_alike(
        self,
        table_id: int,
        wanted: Wanted,
        places: Sequence[int],
        requests: Sequence[RowRequest],
        results: list[RowResult],
        size: ReadSize | None,
        patience: Patience,
    ) -> None:
        keys = dict.fromkeys(row_key(requests[place].read.row) for place in places)
        rows = await self._rows(table_id, list(keys), wanted, patience)
        cells = {row.key: row.cells for row in rows}
        for place in places:
            read = requests[place].read
            found = cells.get(row_key(read.row))
            if found is not None:
                result = seen(read.row, found, wanted, frozenset(read.passing), self._times)
                await self.complete(table_id, read.row, result, wanted, patience)
                results[place] = _result(result, size)

    async def _rows(
        self,
        table_id: int,
        keys: Sequence[bytes],
        wanted: Wanted,
        patience: Patience,
        *,
        earliest: int | None = None,
    ) -> list[StoredRow]:
        bytes_max = self._store.check_bytes_max
        selections = wanted.selections(self._times, bytes_max, earliest=earliest)
        return await self._patiently(table_id, keys, selections, patience) if selections else []

    async def _patiently(
        self,
        table_id: int,
        keys: Sequence[bytes],
        selections: Sequence[Selection],
        patience: Patience,
    ) -> list[StoredRow]:
        while True:
            try:
                seconds = patience.attempt_seconds
                return await self._store.read(table_id, keys, selections, seconds)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)


def _wanted(read: RowRead) -> Wanted:
    columns = None if read.all_columns else tuple(read.columns)
    return Wanted(read.timestamp, columns, read.report_deletes, tuple(read.column_prefixes))


def _result(read: Seen, size: ReadSize | None = None) -> RowResult:
    result = RowResult()
    result.found, result.locks = read.found, read.locks
    if size is not None:
        size.add(result)
    return result


def cells_by_row(
    rows: Iterable[tuple[bytes, Seen]],
) -> dict[bytes, dict[bytes, FoundCell]]:
    """What was found, by row; rows in which nothing was found are left out."""
    return {row: result.found for row, result in rows if result.found}
