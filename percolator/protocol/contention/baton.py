"""What a transaction that has committed at a hot cell hands to the next in line there.

The next one would ask the oracle for a timestamp, and read what was just written. Instead, the
tablet sets aside the timestamp directly above the commit, and the next transaction begins there. No
commit lies between the two, so what the winner has written is what the next one finds.

Rules, each with the failure that it prevents:
- The next one has begun to read before the commit was sent. Its snapshot has to show all that was
  committed before its first read, and the timestamp is only above that if it was fetched later.
- Nobody else may have the timestamp: a transaction is known by its start. So it is set aside by the
  tablet that fetches the commit's, and only by the message that commits: a repeated one, which
  finds the commit, knows nothing of it.
- It is handed to one. The other cells of its snapshot are read at its timestamp, as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.protocol.known_row import KnownRow
from percolator.protocol.write_steps import Write
from percolator.routing.cells import FollowedCommit, FoundCell


class Baton(NamedTuple):
    """Where the next transaction begins, and what it finds there."""

    start: int
    """The timestamp directly above the commit of the transaction before it."""
    writes: Mapping[CellAddress, Write]
    """What that transaction has written."""

    @classmethod
    def after(cls, commit: int, writes: Mapping[CellAddress, Write]) -> Baton | None:
        """None if no timestamp was set aside."""
        return cls(commit + 1, writes) if isinstance(commit, FollowedCommit) else None

    def known(self, cell: CellAddress) -> KnownRow | None:
        """The cell at the new start, if the transaction before has written it."""
        table_id, row, column = cell
        kind, value = self.writes.get(cell, (0, b""))
        if kind not in (KIND_PUT, KIND_DELETE):
            return None
        found = FoundCell(self.start - 1, value if kind == KIND_PUT else None)
        return KnownRow(table_id, row, {column: found})
