"""What an observer's transaction knows of the row of its change, and what it reads of it.

The columns of this row that the last run of an observer has read are read together with the change,
in the first message of its next run (the paper's section 2.5). All of it is as of the transaction's
own timestamp: nothing that an earlier run has read is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from percolator.errors import CellAddress
from percolator.routing.cells import FoundCell


class KnownRow:
    """Some cells of one row, as a transaction's timestamp shows them."""

    __slots__ = ("_cells", "_place", "read")

    def __init__(self, table_id: int, row: bytes, cells: Mapping[bytes, FoundCell | None]) -> None:
        self._place = (table_id, row)
        self._cells = cells
        self.read: dict[bytes, None] = {}
        """The columns of the row that were asked for, known or not, in that order."""

    def has(self, address: CellAddress) -> bool:
        """Whether the cell is known, and need not be read. Notes that it was asked for."""
        table_id, row, column = address
        if (table_id, row) != self._place:
            return False
        self.read[column] = None
        return column in self._cells

    def cells_of(
        self, table_id: int, row: bytes, columns: Sequence[bytes]
    ) -> Mapping[bytes, FoundCell | None] | None:
        """These cells, if all of them are known. Notes that they were asked for."""
        if (table_id, row) != self._place:
            return None
        self.read.update(dict.fromkeys(columns))
        if not self._cells.keys() >= set(columns):
            return None
        return {column: self._cells[column] for column in columns}

    def __getitem__(self, column: bytes) -> FoundCell | None:
        return self._cells[column]


def known_rows(
    known: KnownRow | None, table_id: int, rows: Iterable[bytes], columns: Sequence[bytes] | None
) -> dict[bytes, Mapping[bytes, FoundCell | None]]:
    """The rows of which all these columns are known; none without columns."""
    if known is None or not columns:
        return {}
    found = {row: known.cells_of(table_id, row, columns) for row in rows}
    return {row: cells for row, cells in found.items() if cells is not None}
