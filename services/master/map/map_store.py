"""The leading master's map: everything in it is durable.

A change becomes durable before it takes effect here. Otherwise a server or client could hear of a
change that a successor does not find. A change that fails has no effect: a restart may find it or
not, and either is right, because it was told to no other process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from percolator.tasks import Tasks
from services.chassis.coordinator.interface import Leadership
from services.master.map import map_record
from services.master.map.cluster_map import ClusterMap

KEY = "map"
T = TypeVar("T")


class MapStore:
    """Made by `load`, which only the leader may call."""

    def __init__(self, leadership: Leadership, current: ClusterMap) -> None:
        self.leadership = leadership
        self.current = current
        self._changing = asyncio.Lock()
        self._tasks = Tasks()
        self.changes = 0

    @classmethod
    async def load(cls, leadership: Leadership) -> MapStore:
        """The map that the previous leader left."""
        stored = await leadership.get(KEY)
        return cls(leadership, ClusterMap() if stored is None else map_record.decode(stored))

    async def change(self, decide: Callable[[ClusterMap], tuple[ClusterMap, T]]) -> T:
        """Replaces the map by the one that `decide` returns, unless `decide` raises."""
        # Not cancelled with a caller that gives up: what has become durable must take effect here.
        return await self._tasks.run_to_the_end(self._change(decide))

    async def _change(self, decide: Callable[[ClusterMap], tuple[ClusterMap, T]]) -> T:
        async with self._changing:
            changed, result = decide(self.current)
            if changed is not self.current:
                await self.leadership.put(KEY, map_record.encode(changed))
                self.current = changed
                self.changes += 1
        return result
