"""Who collects: what the rounds of `collection.py` ask of tablets, or of a row store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from percolator.services.master.history.safe_points import ClusterSafePoints
from percolator.wire.liveness import Liveness


@dataclass(frozen=True)
class TableCollected:
    """What is known of the collection of one table."""

    below: int = 0
    """Everything is collected below it."""
    history_bytes: int = 0
    """The size of superseded versions that are kept; 0 where nobody counts it."""
    cells: int = 0
    bytes: int = 0


class Collecting(Protocol):
    """Gives up history, where it is."""

    @property
    def locks_resolved(self) -> int:
        """How many older locks were resolved so far."""
        ...

    async def collect(self, ordered: ClusterSafePoints) -> None:
        """Collects all tables. `ordered` is written down, and no session needs what is below it.
        Raises what prevents it; by then, nothing that is needed is gone."""
        ...

    def collected(self, table_id: int) -> TableCollected: ...

    async def close(self) -> None: ...


class NoOwners:
    """No sessions: a master owns no locks, and asks no owner of an old lock whether it is alive."""

    session_id = None

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        return [Liveness.UNDECIDED] * len(session_ids)
