"""Deletes acknowledgements of cells that no longer exist, or each deleted cell would leave one.

An acknowledgement says which changes of its cell an observer has handled. Below the safe point,
once none of the cell's records is left, it carries no information: whatever is committed there
later is newer than anything that was acknowledged, and is handled with or without it.

While the cell has a record, its acknowledgement stays, or a deletion would be handled twice. An
acknowledgement that records a dead letter stays: the run for the next change has to know about it.

Keys sort by row, then column, and these columns sort before all observed ones: during the walk over
a row, its acknowledgements are held until the walk reaches their cells.
"""

from __future__ import annotations

from collections.abc import Callable

from percolator.formats.hidden_cells import ACKNOWLEDGEMENTS, observed_column
from percolator.tablet.keys import component, split_component

_ROW_END = b"\0\x01"
_MARK = _ROW_END + component(ACKNOWLEDGEMENTS)[:-2]
"""In an encoded cell, whose row is encoded too, this occurs only where such a column begins."""
WAITING_MAX = 10_000
"""The most that are held for one row. Any others stay stored."""

Record = tuple[bytes, bytes]
"""A stored acknowledgement: its key in the write space, and its write record."""


class AnsweredCells:
    """The acknowledgements of the row that a walk is in."""

    def __init__(self, gone: Callable[[Record], None]) -> None:
        """`gone` is called for each acknowledgement whose cell has no record left."""
        self._gone = gone
        self._row = b""
        self._waiting: dict[bytes, list[Record]] = {}
        """The acknowledgements that are held, by the cell that they refer to."""
        self._number = 0

    def came_to(self, cell: bytes) -> list[Record]:
        """Returns the acknowledgements of the (encoded) cell that the walk has reached."""
        if not self._waiting:
            return []
        if not cell.startswith(self._row):
            self.end()
            return []
        return self._waiting.pop(cell, [])

    def acknowledges(self, cell: bytes) -> bool:
        """Whether this cell has to be passed to `wait`."""
        return _MARK in cell

    def wait(self, cell: bytes, record: Record) -> None:
        """Holds the current acknowledgement in this hidden cell until its own cell is reached."""
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
        """Ends the row or the walk: the cells still waited for do not exist."""
        for records in self._waiting.values():
            for record in records:
                self._gone(record)
        self._waiting.clear()
        self._number = 0
