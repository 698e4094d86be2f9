"""The leading master's map: everything in it is durable.

A change becomes durable before it takes effect here. Otherwise a server or client could hear of a
change that a successor does not find.

A change that fails may be stored or not. If it is, standbys tell clients of it. So the next change
is made to what is stored, as a successor would: otherwise it could give the id of a table that
somebody has found, or the version of its schema, to something else.
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
        """Whether `current` is certainly what is stored: not so after a write that failed."""
        self._changing = asyncio.Lock()
        self._tasks = Tasks()
        self.changes = 0

    async def change(self, decide: Callable[[MapT], tuple[MapT, T]]) -> T:
        """Replaces the map by the one that `decide` returns, unless `decide` raises."""
        # Not cancelled with a caller that gives up: what has become durable must take effect here.
        return await self._tasks.run_to_the_end(self._change(decide))

    async def _change(self, decide: Callable[[MapT], tuple[MapT, T]]) -> T:
        async with self._changing:
            before = self.current if self._is_stored else await self._found()
            changed, result = decide(before)
            if changed is not self.current:
                self._is_stored = False
                await self.leadership.put(KEY, self._encode(changed))
                self._is_stored = True
                self.current = changed
                self.changes += 1
        return result

    async def _found(self) -> MapT:
        stored = await self.leadership.get(KEY)
        return self.current if stored is None else self._decode(stored)


class MapStore(StoredMap[ClusterMap]):
    """The map with its tablets. Made by `load`, which only the leader may call."""

    def __init__(self, leadership: Leadership, current: ClusterMap) -> None:
        super().__init__(leadership, current, map_record.encode, map_record.decode)

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
        super().__init__(
            leadership, current, map_record.encode_catalogue, map_record.decode_catalogue
        )

    @classmethod
    async def load(cls, leadership: Leadership) -> CatalogueStore:
        """The map that the previous leader left."""
        return cls(leadership, decoded_catalogue(await leadership.get(KEY)))


def decoded_catalogue(stored: bytes | None) -> Catalogue:
    """The same of a cluster without tablets."""
    return Catalogue() if stored is None else map_record.decode_catalogue(stored)
