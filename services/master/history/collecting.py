"""Who collects: what the rounds of `collection.py` ask of tablets, or of a row store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from percolator.wire.liveness import Liveness, LivenessLookups
from percolator.wire.lock_service import LockServiceCalls
from percolator.world import World
from services.master.history.safe_points import ClusterSafePoints


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


class LockOwners:
    """Whether the owners of old locks are alive. A master owns no locks itself."""

    session_id = None

    def __init__(self, world: World, lock_services: list[str]) -> None:
        """The list is updated in place."""
        self._lookups = LivenessLookups(
            LockServiceCalls(world.network, lock_services), timeout_seconds=1.0
        )

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        return await self._lookups.ask(session_ids)

    async def close(self) -> None:
        await self._lookups.close()
