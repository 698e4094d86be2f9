"""What a transaction wants to write, kept in the client until commit, and seen by its own reads.

A deletion is a write; so is a lock, which changes nothing but conflicts with other writers; and so
is a read lock, which conflicts with all but read locks. An empty value is a value. The limits are
checked as the set grows, so that the error is raised at the line that exceeds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from sortedcontainers import SortedDict

from percolator.errors import CellAddress, TransactionTooLarge
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, KIND_READ_LOCK
from percolator.limits import Limits
from percolator.protocol.read_locks import stored_writes
from percolator.protocol.write_steps import Write

_FEW = 32
"""So many writes are sooner looked through than sorted by row."""


class WriteSet:
    """The writes by cell; only the last write to a cell counts."""

    __slots__ = ("_columns", "_limits", "cells", "has_read_locks", "size_bytes")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.cells: dict[CellAddress, Write] = {}
        self.size_bytes = 0
        self.has_read_locks = False
        self._columns: SortedDict[tuple[int, bytes], list[bytes]] | None = None
        """The columns of the cells, by table and row. Made for the first read that needs them:
        otherwise, each read of a row would look through all writes."""

    def put(self, cell: CellAddress, value: bytes) -> None:
        self._write(cell, (KIND_PUT, value))

    def delete(self, cell: CellAddress) -> None:
        self._write(cell, (KIND_DELETE, b""))

    def lock(self, cell: CellAddress) -> None:
        known = self.cells.get(cell)
        if known is None or known[0] == KIND_READ_LOCK:  # a put or a delete locks the cell anyway
            self._write(cell, (KIND_LOCK_ONLY, b""))

    def read_lock(self, cell: CellAddress) -> None:
        if cell not in self.cells:  # any other write excludes more
            self._write(cell, (KIND_READ_LOCK, b""))
            self.has_read_locks = True

    def adopt(self, other: WriteSet) -> None:
        """Takes over all writes of a set that was checked against the same limits."""
        self.cells.update(other.cells)
        self._columns = None
        self.has_read_locks = self.has_read_locks or other.has_read_locks

    def stored(self, start: int) -> Mapping[CellAddress, Write]:
        """What is stored in which cells by a transaction that began then."""
        return stored_writes(self.cells, start) if self.has_read_locks else self.cells

    def write_together(self, writes: Sequence[tuple[CellAddress, bytes | None]]) -> None:
        """Writes all values, or none if there is no room for all of them; None deletes."""
        before = {cell: self.cells.get(cell) for cell, _ in writes}
        size_bytes = self.size_bytes
        try:
            for cell, value in writes:
                self._write(cell, (KIND_DELETE, b"") if value is None else (KIND_PUT, value))
        except TransactionTooLarge:
            for cell, old in before.items():
                if old is None:
                    self.cells.pop(cell, None)
                else:
                    self.cells[cell] = old
            self.size_bytes = size_bytes
            self._columns = None
            raise

    def _write(self, cell: CellAddress, write: Write) -> None:
        cells, limits = self.cells, self._limits
        old = cells.get(cell)
        size_bytes = self.size_bytes + len(write[1])
        if old is None:
            if len(cells) >= limits.transaction_cells_max:
                raise TransactionTooLarge(
                    f"a transaction can write at most {limits.transaction_cells_max} cells"
                )
            size_bytes += len(cell.row) + len(cell.column)
        else:
            size_bytes -= len(old[1])
        if size_bytes > limits.transaction_bytes_max:
            raise TransactionTooLarge(
                f"a transaction can write at most {limits.transaction_bytes_max} bytes"
            )
        cells[cell] = write
        self.size_bytes = size_bytes
        if old is None and self._columns is not None:
            _note(self._columns, cell)

    def rows(self, table_id: int, start: bytes, end: bytes) -> dict[bytes, dict[bytes, Write]]:
        """The writes in a range of rows, by row and column. An empty `end` means the last row."""
        if len(self.cells) <= _FEW:
            return _by_row(
                (cell, write)
                for cell, write in self.cells.items()
                if cell[0] == table_id and start <= cell[1] and (not end or cell[1] < end)
            )
        stop = (table_id, end) if end else (table_id + 1, b"")
        columns = self._columns_by_row()
        rows = columns.irange((table_id, start), stop, inclusive=(True, False))
        return {row: self._of_row(table_id, row, columns[table_id, row]) for _, row in rows}

    def of_rows(self, table_id: int, rows: Collection[bytes]) -> dict[bytes, dict[bytes, Write]]:
        """The writes to these rows, by row and column; rows without any are missing."""
        if len(self.cells) <= _FEW:
            wanted = frozenset(rows)
            return _by_row(
                (cell, write)
                for cell, write in self.cells.items()
                if cell[0] == table_id and cell[1] in wanted
            )
        columns = self._columns_by_row()
        return {
            row: self._of_row(table_id, row, columns[table_id, row])
            for row in rows
            if (table_id, row) in columns
        }

    def _of_row(self, table_id: int, row: bytes, columns: list[bytes]) -> dict[bytes, Write]:
        return {column: self.cells[CellAddress(table_id, row, column)] for column in columns}

    def _columns_by_row(self) -> SortedDict[tuple[int, bytes], list[bytes]]:
        if self._columns is None:
            self._columns = SortedDict()
            for cell in self.cells:
                _note(self._columns, cell)
        return self._columns


def _note(columns: SortedDict[tuple[int, bytes], list[bytes]], cell: CellAddress) -> None:
    table_id, row, column = cell
    columns.setdefault((table_id, row), []).append(column)


def _by_row(writes: Iterable[tuple[CellAddress, Write]]) -> dict[bytes, dict[bytes, Write]]:
    found: dict[bytes, dict[bytes, Write]] = {}
    for (_, row, column), write in writes:
        found.setdefault(row, {})[column] = write
    return found
