"""Read locks in the client: a transaction's write set names the cell, the cluster a hidden one.

The hidden cell has the start timestamp in its name (formats/hidden_cells.py), which is known only
at the commit. From then on a read lock is a lock-only write like any other: it may be the primary,
and it is prewritten, committed and rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping

from percolator.errors import CellAddress
from percolator.formats.hidden_cells import locked_column, read_lock_column
from percolator.formats.records import KIND_LOCK_ONLY, KIND_READ_LOCK
from percolator.v1.cells_pb2 import Cell


def stored_writes(
    writes: Mapping[CellAddress, tuple[int, bytes]], start: int
) -> dict[CellAddress, tuple[int, bytes]]:
    """What the transaction writes to which stored cells."""
    return {
        read_lock_of(cell, start) if write[0] == KIND_READ_LOCK else cell: (
            (KIND_LOCK_ONLY, b"") if write[0] == KIND_READ_LOCK else write
        )
        for cell, write in writes.items()
    }


def read_lock_of(cell: CellAddress, start: int) -> CellAddress:
    """The hidden cell in which the transaction that began then holds its read lock of this cell."""
    return CellAddress(cell.table_id, cell.row, read_lock_column(cell.column, start))


def stored_column(found: Cell) -> bytes:
    """The column of a lock or record that a tablet has returned. It need not be the one that was
    asked about: a read lock is in the way of its cell, and the cell's lock in that of a read lock.
    """
    return found.qualifier or found.column


def is_read_lock(cell: CellAddress) -> bool:
    return locked_column(cell.column) is not None


def locked_cell(cell: CellAddress) -> CellAddress:
    """The cell that is locked, if this one is a read lock; else the cell itself."""
    column = locked_column(cell.column)
    return cell if column is None else CellAddress(cell.table_id, cell.row, column)
