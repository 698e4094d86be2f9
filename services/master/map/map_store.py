"""The leading master's map: everything in it is durable.

A change becomes durable before it takes effect here. Otherwise a server or client could hear of a
change that a successor does not find. A change that fails has no effect: a restart may find it or
not, and either is right, because it was told to no other process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from percolator.tasks import Tasks
from services.chassis.coordinator.interface import Leadership
from services.master.map import map_record
from services.master.map.catalogue import Catalogue
from services.master.map.cluster_map import ClusterMap

KEY = "map"
T = TypeVar("T")
MapT = TypeVar("MapT", bound=Catalogue)


class StoredMap(Generic[MapT]):
    """The map of one kind of cluster."""

    def __init__(
        self, leadership: Leadership, current: MapT, encode: Callable[[MapT], bytes]
    ) -> None:
        self.leadership = leadership
        self.current = current
        self._encode = encode
        self._changing = asyncio.Lock()
        self._tasks = Tasks()
        self.changes = 0

    async def change(self, decide: Callable[[MapT], tuple[MapT, T]]) -> T:
        """Replaces the map by the one that `decide` returns, unless `decide` raises."""
        # Not cancelled with a caller that gives up: what has become durable must take effect here.
        return await self._tasks.run_to_the_end(self._change(decide))

    async def _change(self, decide: Callable[[MapT], tuple[MapT, T]]) -> T:
        async with self._changing:
            changed, result = decide(self.current)
            if changed is not self.current:
                await self.leadership.put(KEY, self._encode(changed))
                self.current = changed
                self.changes += 1
        return result


class MapStore(StoredMap[ClusterMap]):
    """The map with its tablets. Made by `load`, which only the leader may call."""

    def __init__(self, leadership: Leadership, current: ClusterMap) -> None:
        super().__init__(leadership, current, map_record.encode)

    @classmethod
    async def load(cls, leadership: Leadership) -> MapStore:
        """The map that the previous leader left."""
        return cls(leadership, decoded(await leadership.get(KEY)))


def decoded(stored: bytes | None) -> ClusterMap:
    """The map of a value of the coordinator."""
    return ClusterMap() if stored is None else map_record.decode(stored)


class CatalogueStore(StoredMap[Catalogue]):
    """The map of a cluster without tablets. Made by `load`, which only the leader may call."""

    def __init__(self, leadership: Leadership, current: Catalogue) -> None:
        super().__init__(leadership, current, map_record.encode_catalogue)

    @classmethod
    async def load(cls, leadership: Leadership) -> CatalogueStore:
        """The map that the previous leader left."""
        return cls(leadership, decoded_catalogue(await leadership.get(KEY)))


def decoded_catalogue(stored: bytes | None) -> Catalogue:
    """The same of a cluster without tablets."""
    return Catalogue() if stored is None else map_record.decode_catalogue(stored)
