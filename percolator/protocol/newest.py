"""Reading one cell as it is now, in one round trip: its tablet says what is newest.

A snapshot needs a timestamp so that all its reads show the same moment. A read that is the only one
does not: it shows the moment at which the tablet looks. That is the same as if the oracle had
handed out a timestamp at this moment:

- Every commit that has a timestamp by then is shown, or is in the way. A commit in one round holds
  its cells before it asks for its timestamp, and the tablet waits for held cells. A commit in two
  phases has a lock before that, and *every* lock is in the way: its owner may have committed at its
  primary already, and said so.
- Every later commit of the cell asks for its timestamp later.

Nothing can be decided about a lock without a timestamp, since its owner may be pushed above none.
So if one is met, the cell is read again, in a snapshot. So is a cell whose values expire: only a
timestamp decides which have.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, Protocol

from percolator.errors import CellAddress, InvalidArgument
from percolator.routing.cells import FoundCell, RowResult
from percolator.routing.pending_cell import CellAnswer
from percolator.timestamps import NEWEST

TIMESTAMPS_SECONDS = 60.0
"""After a server has refused such a read, timestamps are used for this long: it may be upgraded."""


class NotNow(Enum):
    """The answer that takes a snapshot instead."""

    NOT_NOW = "not now"


NOT_NOW: Final = NotNow.NOT_NOW


class ReadsCells(Protocol):
    """What reads single cells."""

    def read_cell(
        self, table_id: int, row: bytes, column: bytes, timestamp: int, deadline: float
    ) -> Awaitable[CellAnswer]: ...


class NewestReads:
    """Reads of single cells without a timestamp, and what is known about the servers' releases."""

    def __init__(self, cells: ReadsCells, now: Callable[[], float]) -> None:
        self._cells = cells
        self._now = now
        self._timestamps_until = 0.0

    @property
    def are_possible(self) -> bool:
        return self._now() >= self._timestamps_until

    async def read(self, cell: CellAddress, deadline: float) -> FoundCell | NotNow | None:
        """The newest version of the cell; None if there is none. NOT_NOW if it takes a snapshot."""
        table_id, row, column = cell
        try:
            found = await self._cells.read_cell(table_id, row, column, NEWEST, deadline)
        except InvalidArgument as refused:
            if not refused.field.endswith(".timestamp"):
                raise
            # The server runs an older release, or values of the column expire and this client does
            # not know it yet.
            self._timestamps_until = self._now() + TIMESTAMPS_SECONDS
            return NOT_NOW
        return NOT_NOW if isinstance(found, RowResult) else found
