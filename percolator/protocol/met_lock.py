"""A lock of another transaction that was met on the way."""

from __future__ import annotations

from typing import NamedTuple

from percolator.errors import CellAddress
from percolator.formats.records import LockRecord
from percolator.protocol.read_locks import stored_column
from percolator.v1.cells_pb2 import Cell


class MetLock(NamedTuple):
    """Another transaction's lock, and the cell that holds it."""

    address: CellAddress
    lock: LockRecord
    ttl_milliseconds: int = 0
    """For how long the value in it is visible once it is committed; 0: for ever."""

    @classmethod
    def of(cls, table_id: int, cell: Cell) -> MetLock:
        address = CellAddress(table_id, cell.row, stored_column(cell))
        return cls(address, LockRecord.decode(cell.value), cell.ttl_milliseconds)

    @property
    def on_primary(self) -> bool:
        return self.address == self.lock.primary
