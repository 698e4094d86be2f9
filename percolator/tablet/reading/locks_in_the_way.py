"""Which locks keep a read from seeing what it should.

The mirror says which cells to look at; the lock record in the storage decides: since the mirror was
updated, the lock may have been pushed, or be gone, and then the storage is right. The caller must
create its cursor afterwards.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from percolator.formats.records import KIND_LOCK_ONLY, LOCK_HEADER
from percolator.tablet import keys
from percolator.tablet.keys import L
from percolator.tablet.lifetimes import FOREVER, Lifetimes
from percolator.tablet.memory.lock_mirror import LockMirror
from percolator.v1 import cells_pb2
from percolator.world import Storage


def blocks_read(header: bytes, timestamp: int, passed: Container[int]) -> bool:
    """Whether a lock is in the way of a read at `timestamp`.

    It is if its transaction may commit at or below the timestamp: the transaction began no later,
    writes the cell, has not been pushed above the timestamp, and is not known to be passable.
    """
    start, min_commit, _, kind = LOCK_HEADER.unpack_from(header)
    return (
        start <= timestamp
        and kind != KIND_LOCK_ONLY
        and min_commit <= timestamp
        and start not in passed
    )


@dataclass
class LocksFound:
    """Locks in the way in a range of rows, in the order of the scan."""

    records: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    """Row, column and lock record."""
    cells: set[bytes] = field(default_factory=set)
    """`keys.cell_prefix` of each."""
    beyond: bytes | None = None
    """The first row of the range that was not looked at; None if all of it was."""


class LockReader:
    """Looks for locks in the way of one read or scan."""

    def __init__(
        self, storage: Storage[Any], mirror: LockMirror, timestamp: int, passed: Container[int]
    ) -> None:
        self._get = storage.get
        self._mirror = mirror
        self._timestamp = timestamp
        self._passed = passed

    def on_cell(self, cell: bytes) -> bytes | None:
        """The lock record in the way of reading this cell, or None."""
        header = self._mirror.headers.get(cell)
        if header is None or not blocks_read(header, self._timestamp, self._passed):
            return None
        record = self._get(L + cell)
        if record is None or not blocks_read(record, self._timestamp, self._passed):
            return None
        return record

    def in_rows(
        self,
        start: bytes,
        end: bytes,
        *,
        wanted: Container[bytes] | None,
        reverse: bool = False,
        rows_max: int,
        looked_at_max: int,
        bytes_max: int,
    ) -> LocksFound:
        """The locks in the way of rows in [start, end), on the encoded columns that are `wanted`
        (None: on all but reserved ones). Stops when `rows_max` rows have one, their records hold
        `bytes_max`, or about `looked_at_max` locks were looked at; the scan's page must then end
        before `beyond`."""
        found = LocksFound()
        if not self._mirror.headers:
            return found
        row, row_prefix, row_counted = b"", b"\0\0", False
        rows = looked_at = size = 0
        bounds = keys.cell_bounds(start, end)
        for cell, header in self._mirror.between(*bounds, reverse=reverse):
            looked_at += 1
            if not cell.startswith(row_prefix):
                row, at = keys.split_component(cell, 0)
                if rows >= rows_max or size >= bytes_max or looked_at > looked_at_max:
                    found.beyond = row
                    break
                row_prefix, row_counted = cell[:at], False
            column = cell[len(row_prefix) :]
            if column.startswith(keys.RESERVED) if wanted is None else column not in wanted:
                continue
            if not blocks_read(header, self._timestamp, self._passed):
                continue
            record = self.on_cell(cell)
            if record is not None:
                found.records.append((row, keys.unescaped(column[:-2]), record))
                found.cells.add(cell)
                size += len(record)
                rows += not row_counted
                row_counted = True
        return found


def lock_cell(
    row: bytes, column: bytes, record: bytes, lifetimes: Lifetimes = FOREVER
) -> cells_pb2.Cell:
    """A lock as responses report it. Readers may take the value that is in it, so they have to know
    until when that is visible."""
    cell = cells_pb2.Cell(space=cells_pb2.SPACE_LOCK, row=row, column=column, value=record)
    if lifetimes:
        cell.ttl_milliseconds = lifetimes.by_column.get(column, 0)
    return cell
