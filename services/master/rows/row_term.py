"""One term of a leading master over a row store. It has tables and servers, and no tablets."""

from __future__ import annotations

from functools import partial

from percolator.services.chassis.coordinator.interface import Leadership
from percolator.services.chassis.store_kinds.row_cluster_store import RowClusterStore
from percolator.services.master.history.collection import Collection, CollectionTimes
from percolator.services.master.map.catalogue import Catalogue
from percolator.services.master.map.map_store import CatalogueStore, decoded_catalogue
from percolator.services.master.registry import Registry
from percolator.services.master.rows.row_drops import RowDrops
from percolator.services.master.rows.row_history import row_collecting
from percolator.services.master.rows.row_loads import RowLoads
from percolator.services.master.term import Term
from percolator.world import World


class RowTerm(Term[Catalogue]):
    """A term over a row store."""

    def __init__(
        self,
        world: World,
        store: CatalogueStore,
        registry: Registry,
        rows: RowClusterStore,
        times: CollectionTimes,
    ) -> None:
        super().__init__(world, store, registry)
        self._tables = RowLoads(
            world.clock,
            store,
            self.oracle_time,
            rows,
            retention_min_seconds=times.retention_min_seconds,
        )
        self.collection = Collection(
            world,
            store,
            registry,
            self.oracle_time,
            times,
            partial(
                row_collecting,
                world,
                store,
                rows,
                RowDrops(world.clock, store, rows, self.oracle_time),
            ),
        )

    @property
    def tables(self) -> RowLoads:
        return self._tables

    def _start_work(self) -> None:
        """The store serves its tables."""
        self.start("collect history", self.collection.run())


class RowTerms:
    """The terms of a master over a row store (`percolator.services.master.master.Terms`)."""

    def __init__(
        self,
        world: World,
        registry: Registry,
        rows: RowClusterStore,
        times: CollectionTimes,
    ) -> None:
        self._world = world
        self._registry = registry
        self._rows = rows
        self._times = times

    async def begin(self, leadership: Leadership) -> RowTerm:
        return RowTerm(
            self._world,
            await CatalogueStore.load(leadership),
            self._registry,
            self._rows,
            self._times,
        )

    def decoded(self, stored: bytes | None) -> Catalogue:
        return decoded_catalogue(stored)
