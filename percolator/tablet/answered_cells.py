"""Acknowledgements of cells that are no more: they go, too, or every deleted cell would leave one.

An acknowledgement says which changes of its cell an observer has answered. Below the safe point,
where none of the cell's records is left, it says nothing: whatever is committed there later is
newer than anything that was acknowledged, and is answered with or without it.

As long as the cell has a record, its acknowledgement stays, or a deletion would be answered twice.
One that tells of a dead letter stays: the run that answers the next change has to know.

Keys sort by row, then column, and these columns sort before all that are observed: while a row is
walked over, its acknowledgements wait for their cells to come by.
"""

from __future__ import annotations

from collections.abc import Callable

from percolator.protocol.hidden_cells import ACKNOWLEDGEMENTS, observed_column
from percolator.tablet.keys import component, split_component

_ROW_END = b"\0\x01"
_MARK = _ROW_END + component(ACKNOWLEDGEMENTS)[:-2]
"""In an encoded cell, whose row is encoded too, only where such a column begins."""
WAITING_MAX = 10_000
"""Of one row. Others stay."""

Record = tuple[bytes, bytes]
"""A stored acknowledgement: its key in the write space, and its write record."""


class AnsweredCells:
    """Of the row that a walk is in."""

    def __init__(self, gone: Callable[[Record], None]) -> None:
        """`gone` is called for each whose cell has no record left."""
        self._gone = gone
        self._row = b""
        self._waiting: dict[bytes, list[Record]] = {}
        """By the cell that they are about."""
        self._number = 0

    def came_to(self, cell: bytes) -> list[Record]:
        """The walk came to another cell, encoded: the acknowledgements that are about it."""
        if not self._waiting:
            return []
        if not cell.startswith(self._row):
            self.end()
            return []
        return self._waiting.pop(cell, [])

    def acknowledges(self, cell: bytes) -> bool:
        """Whether this is a cell for `wait`."""
        return _MARK in cell

    def wait(self, cell: bytes, record: Record) -> None:
        """The acknowledgement that holds in this hidden cell."""
        _, behind_row = split_component(cell, 0)
        if cell[:behind_row] != self._row:
            self.end()
            self._row = cell[:behind_row]
        observed = observed_column(split_component(cell, behind_row)[0])
        if observed is None or self._number >= WAITING_MAX:
            return
        self._number += 1
        self._waiting.setdefault(self._row + component(observed), []).append(record)

    def end(self) -> None:
        """Of the row, or of the walk: what waited for has not come."""
        for records in self._waiting.values():
            for record in records:
                self._gone(record)
        self._waiting.clear()
        self._number = 0
