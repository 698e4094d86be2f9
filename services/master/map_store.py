"""The leading master's map: what it says is durable, and this process leads.

A change is first durable and then believed, so that nothing is told to anybody that a successor
would not find. One that fails is as if it had never been tried: whether a restart finds it or not,
nobody was told of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.chassis.coordinator.interface import Leadership
from services.master import map_record
from services.master.cluster_map import ClusterMap

KEY = "map"
T = TypeVar("T")


class MapStore:
    """Made by `load`, by the leader alone."""

    def __init__(self, leadership: Leadership, current: ClusterMap) -> None:
        self.leadership = leadership
        self.current = current
        self._changing = asyncio.Lock()
        self.changes = 0

    @classmethod
    async def load(cls, leadership: Leadership) -> MapStore:
        """What the leader before left."""
        stored = await leadership.get(KEY)
        return cls(leadership, ClusterMap() if stored is None else map_record.decode(stored))

    async def change(self, decide: Callable[[ClusterMap], tuple[ClusterMap, T]]) -> T:
        """Replaces the map. `decide` sees the present one, and may raise instead."""
        # Not torn by a caller that gives up: what is durable has to be believed.
        return await asyncio.shield(asyncio.ensure_future(self._change(decide)))

    async def _change(self, decide: Callable[[ClusterMap], tuple[ClusterMap, T]]) -> T:
        async with self._changing:
            changed, result = decide(self.current)
            if changed is not self.current:
                await self.leadership.put(KEY, map_record.encode(changed))
                self.current = changed
                self.changes += 1
        return result
