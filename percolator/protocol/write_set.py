"""What a transaction wants to write, kept in the client until commit, and seen by its own reads.

A deletion is a write; so is a lock, which changes nothing but conflicts with other writers. A value
of no bytes is a value. The limits are checked as the set grows, so that the caller learns at the
line that is too much.
"""

from __future__ import annotations

from percolator.errors import CellAddress, TransactionTooLarge
from percolator.limits import Limits
from percolator.protocol.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.protocol.write_steps import Write


class WriteSet:
    """One write per cell: the last one counts."""

    __slots__ = ("_limits", "cells", "size_bytes")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.cells: dict[CellAddress, Write] = {}
        self.size_bytes = 0

    def put(self, cell: CellAddress, value: bytes) -> None:
        self._write(cell, (KIND_PUT, value))

    def delete(self, cell: CellAddress) -> None:
        self._write(cell, (KIND_DELETE, b""))

    def lock(self, cell: CellAddress) -> None:
        if cell not in self.cells:  # a put or a delete locks the cell anyway
            self._write(cell, (KIND_LOCK_ONLY, b""))

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
        """What is written in a range of rows, by row and column. An empty end: to the last row."""
        found: dict[bytes, dict[bytes, Write]] = {}
        for (table, row, column), write in self.cells.items():
            if table == table_id and start <= row and (not end or row < end):
                found.setdefault(row, {})[column] = write
        return found
