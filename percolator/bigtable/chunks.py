"""Rows, put together from the chunks in which Bigtable streams them.

A chunk says only what differs from the one before: the row, the family, the column. A long value
comes in several. A row counts once it is committed; before that, the server may take it back. A
stream that ends within a row, or says what cannot be, was cut off: it is an error, never a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from percolator.errors import ExecutionUnknown
from percolator.rowstore.port import StoredCell, StoredRow
from percolator.v1.bigtable_pb2 import BigtableReadRowsResponse

Chunk = BigtableReadRowsResponse.CellChunk


class Rows:
    """The rows of one stream, in order."""

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

    def take(self, chunks: Iterable[Chunk]) -> Iterator[StoredRow]:
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
        """Nothing is selected from the last row to this key. Raises `ExecutionUnknown` if that
        makes no sense."""
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
        """A row that comes twice may differ: each was read at a moment of its own."""
        last, self._last = self._last, self._key
        if last and (self._key >= last if self._reverse else self._key <= last):
            raise _malformed("its rows are not in order")

    def _take_cell(self, chunk: Chunk) -> None:
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
