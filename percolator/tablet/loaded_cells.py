"""The cells of one request of a bulk load, on their way into the storage.

They are checked and encoded many at a time: most requests have one column and no zero byte in their
rows, and then hardly a step is taken for a single cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_PUT,
    KIND_PUT_IN_DATA,
    WRITE_HEADER,
    WRITE_HEADER_BYTES,
)
from percolator.tablet.keys import (
    END,
    TIMESTAMP_BYTES,
    ColumnEncoder,
    D,
    N,
    W,
    change_of_write,
    component,
    inverted,
)
from percolator.tablet.memory.change_feed import loaded_change
from percolator.tablet.memory.state import TabletState
from percolator.v1 import tabletserver_pb2 as pb

INLINE_BYTES_MAX = 1_024
"""Same as the client's `value_inline_bytes_max`: longer values are stored separately."""


class LoadedCells:
    """Some cells of one request. `fill` puts them into `batch`; `publish` once that is durable."""

    def __init__(
        self,
        state: TabletState,
        rows: tuple[bytes, bytes],
        request: pb.LoadRequest,
        columns: ColumnEncoder,
    ) -> None:
        """`rows` are those behind the fence in this tablet."""
        self.batch = state.storage.batch()
        self._state = state
        self._request = request
        self._first, self._end = rows
        self._columns = columns
        self._observers = {one.column: tuple(one.observers) for one in request.observed}
        self._commit = inverted(request.commit_timestamp)
        self._start = inverted(request.start_timestamp)
        self._apart = WRITE_HEADER.pack(request.start_timestamp, KIND_PUT_IN_DATA)
        self._notifications: list[bytes] = []
        self._cells = 0
        self._bytes = 0

    async def check(self) -> None:
        """Checks all cells of the request. Raises `InvalidArgument`."""
        request, size = self._request, self._state.limits.slice_rows
        for at in range(0, len(request.rows), size):
            some = slice(at, at + size)
            self._check(at, request.rows[some], request.columns[some], request.values[some])
            await asyncio.sleep(0)
            self._state.require_open()

    async def fill(self, first: int, stop: int) -> None:
        """Takes the cells of the request from `first` to `stop`, which were checked."""
        request, size = self._request, self._state.limits.slice_rows
        for at in range(first, stop, size):
            some = slice(at, min(at + size, stop))
            self._put(request.rows[some], request.columns[some], request.values[some])
            await asyncio.sleep(0)
            self._state.require_open()

    def _put(
        self, rows: Sequence[bytes], columns: Sequence[bytes], values: Sequence[bytes]
    ) -> None:
        put, apart = self.batch.put, self._put_apart
        if b"\0" in b"".join(rows):
            rows = [component(row)[: -len(END)] for row in rows]
        tails = {column: END + self._columns[column] + self._commit for column in {*columns}}
        keys = [W + row + tails[column] for row, column in zip(rows, columns, strict=True)]
        inline = WRITE_HEADER.pack(self._request.start_timestamp, KIND_PUT)
        for key, value in zip(keys, values, strict=True):
            if len(value) <= INLINE_BYTES_MAX:
                put(key, inline + value)
            else:
                apart(key, value)
        if self._state.feed.on:
            change = loaded_change(self._request.start_timestamp)
            for key, column in zip(keys, columns, strict=True):
                if column[0] != 0:
                    put(change_of_write(key), change)
        if self._observers:
            for key, column in zip(keys, columns, strict=True):
                self._notify(key, column)
        self._cells += len(keys)
        self._bytes += sum(map(len, keys)) + sum(map(len, values)) + WRITE_HEADER_BYTES * len(keys)

    def _check(
        self, at: int, rows: Sequence[bytes], columns: Sequence[bytes], values: Sequence[bytes]
    ) -> None:
        """Checks all at once; then each, if one of them is wrong, to say which."""
        first, end, limits = self._first, self._end, self._state.limits
        widths = {*map(len, columns)}
        if (
            min(rows) >= first
            and not (end and max(rows) >= end)
            and max(map(len, rows)) <= limits.row_bytes_max
            and max(map(len, values)) <= limits.value_bytes_max
            and min(widths) >= 1
            and max(widths) <= limits.column_bytes_max
        ):
            return
        cells = zip(rows, columns, values, strict=True)
        for index, (row, column, value) in enumerate(cells, at):
            if row < first or (end and row >= end):
                raise InvalidArgument(f"rows[{index}]", "not behind the fence in this tablet")
            if len(row) > limits.row_bytes_max or len(value) > limits.value_bytes_max:
                raise InvalidArgument(f"rows[{index}]", "the row or its value is too long")
            if not 1 <= len(column) <= limits.column_bytes_max:
                raise InvalidArgument(f"columns[{index}]", "is empty or too long")

    def _put_apart(self, key: bytes, value: bytes) -> None:
        self.batch.put(key, self._apart)
        data = D + key[1:-TIMESTAMP_BYTES] + self._start
        self.batch.put(data, value)
        self._cells += 1
        self._bytes += len(data)

    def _notify(self, key: bytes, column: bytes) -> None:
        for observer in self._observers.get(column, ()):
            cell = key[1:-TIMESTAMP_BYTES]
            notification = cell + component(observer) + self._commit
            self.batch.put(N + notification, b"")
            self._notifications.append(notification)

    def publish(self) -> None:
        """Call this once it is durable. A cell that is loaded a second time is counted again."""
        state, counters = self._state, self._state.counters
        for notification in self._notifications:
            state.index.put(notification)
        counters.notifications_written += len(self._notifications)
        counters.cells += self._cells
        counters.bytes += self._bytes
        counters.batches_synced += 1
