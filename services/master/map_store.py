"""The leading master's map: everything in it is durable.

A change becomes durable before it takes effect here. Otherwise a server or client could hear of a
change that a successor does not find.

A change that fails may be stored or not. If it is, standbys tell clients of it. So what is stored
becomes the map soon after, and before the next change, as a successor would take it over. Otherwise
that change could give the id of a table that somebody has found, or the version of its schema, to
something else; and a table that is dropped for a standby would go on taking writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from percolator.services.chassis.coordinator import Leadership
from percolator.services.master import cluster_map
from percolator.services.master.cluster_map import Catalogue, ClusterMap
from percolator.tasks import Tasks

KEY = "map"
T = TypeVar("T")
MapT = TypeVar("MapT", bound=Catalogue)


class StoredMap(Generic[MapT]):
    """The map of one kind of cluster."""

    def __init__(
        self,
        leadership: Leadership,
        current: MapT,
        encode: Callable[[MapT], bytes],
        decode: Callable[[bytes], MapT],
    ) -> None:
        self.leadership = leadership
        self.current = current
        self._encode = encode
        self._decode = decode
        self._is_stored = True
        """True if `current` is certainly what is stored: not so after a write that failed."""
        self._changing = asyncio.Lock()
        self._tasks = Tasks()
        self.changes = 0

    async def change(self, decide: Callable[[MapT], tuple[MapT, T]]) -> T:
        """Replaces the map by the one that `decide` returns, unless `decide` raises."""
        # Not cancelled with a caller that gives up: what has become durable must take effect here.
        return await self._tasks.run_to_the_end(self._change(decide))

    async def settle(self) -> None:
        """After a write that failed: makes what is stored the map. Otherwise it does nothing."""
        if not self._is_stored:
            await self._tasks.run_to_the_end(self._settle())

    async def _change(self, decide: Callable[[MapT], tuple[MapT, T]]) -> T:
        async with self._changing:
            await self._take_over()
            changed, result = decide(self.current)
            if changed is not self.current:
                await self._put(changed)
        return result

    async def _settle(self) -> None:
        async with self._changing:
            await self._take_over()

    async def _take_over(self) -> None:
        if self._is_stored:
            return
        stored = await self._stored()
        if stored == self._encode(self.current):
            self._is_stored = True  # without a write, which a full disk would refuse
        else:
            # Written again: what could be read may be gone after a power cut.
            await self._put(self._decode(stored))

    async def _put(self, changed: MapT) -> None:
        self._is_stored = False
        await self.leadership.put(KEY, self._encode(changed))
        self._is_stored = True
        self.current = changed
        self.changes += 1

    async def _stored(self) -> bytes:
        stored = await self.leadership.get(KEY)
        return self._encode(self.current) if stored is None else stored


class MapStore(StoredMap[ClusterMap]):
    """The map with its tablets. Made by `load`, which only the leader may call."""

    def __init__(self, leadership: Leadership, current: ClusterMap) -> None:
        super().__init__(leadership, current, cluster_map.encode, cluster_map.decode)

    @classmethod
    async def load(cls, leadership: Leadership) -> MapStore:
        """The map that the previous leader left."""
        return cls(leadership, decoded(await leadership.get(KEY)))


def decoded(stored: bytes | None) -> ClusterMap:
    """The map of a value of the coordinator."""
    return ClusterMap() if stored is None else cluster_map.decode(stored)


class CatalogueStore(StoredMap[Catalogue]):
    """The map of a cluster without tablets. Made by `load`, which only the leader may call."""

    def __init__(self, leadership: Leadership, current: Catalogue) -> None:
        super().__init__(
            leadership, current, cluster_map.encode_catalogue, cluster_map.decode_catalogue
        )

    @classmethod
    async def load(cls, leadership: Leadership) -> CatalogueStore:
        """The map that the previous leader left."""
        return cls(leadership, decoded_catalogue(await leadership.get(KEY)))


def decoded_catalogue(stored: bytes | None) -> Catalogue:
    """The catalogue of a cluster without tablets."""
    return Catalogue() if stored is None else cluster_map.decode_catalogue(stored)
