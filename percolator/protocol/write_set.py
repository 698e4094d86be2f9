"""What a transaction wants to write, kept in the client until commit, and seen by its own reads.

A deletion is a write; so is a lock, which changes nothing but conflicts with other writers; and so
is a read lock, which conflicts with all but read locks. An empty value is a value. The limits are
checked as the set grows, so that the error is raised at the line that exceeds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from percolator.errors import CellAddress, TransactionTooLarge
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT, KIND_READ_LOCK
from percolator.limits import Limits
from percolator.protocol.read_locks import stored_writes
from percolator.protocol.write_steps import Write


class WriteSet:
    """The writes by cell; only the last write to a cell counts."""

    __slots__ = ("_limits", "cells", "has_read_locks", "size_bytes")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.cells: dict[CellAddress, Write] = {}
        self.size_bytes = 0
        self.has_read_locks = False

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
            raise

    def _write(self, cell: CellAddress, write: Write) -> None:
        cells, limits = self.cells, self._limits
        old = cells.get(cell)
        size_bytes = self.size_bytes + len(write[1])
        if old is None:
            if len(cells) >= limits.transaction_cells_max:
                raise TransactionTooLarge(
                    f"a transaction writes at most {limits.transaction_cells_max} cells"
                )
            size_bytes += len(cell.row) + len(cell.column)
        else:
            size_bytes -= len(old[1])
        if size_bytes > limits.transaction_bytes_max:
            raise TransactionTooLarge(
                f"a transaction writes at most {limits.transaction_bytes_max} bytes"
            )
        cells[cell] = write
        self.size_bytes = size_bytes

    def rows(self, table_id: int, start: bytes, end: bytes) -> dict[bytes, dict[bytes, Write]]:
        """The writes in a range of rows, by row and column. An empty `end` means the last row."""
        found: dict[bytes, dict[bytes, Write]] = {}
        for (table, row, column), write in self.cells.items():
            if table == table_id and start <= row and (not end or row < end):
                found.setdefault(row, {})[column] = write
        return found
