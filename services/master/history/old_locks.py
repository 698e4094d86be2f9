"""Resolves the locks of tablets that are older than what is about to be collected."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import NotReady, TabletLocation
from percolator.history.older_locks import LOCKS_AT_A_TIME, resolve_older_locks
from percolator.limits import Limits
from percolator.protocol.environment import Environment, Timestamps
from percolator.protocol.met_lock import MetLock
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.verdicts import Verdicts
from percolator.routing.router import Router
from percolator.routing.table_info import TableSchema
from percolator.routing.tablet_map import TabletMap
from percolator.services.master.history.collecting import NoOwners
from percolator.services.master.history.lock_scan import scan_locks
from percolator.services.master.map.cluster_map import Tablet
from percolator.services.master.map.map_record import observer_messages
from percolator.services.master.map.map_store import MapStore
from percolator.world import World


class OldLocks:
    """A client of the tablet servers, for as long as this master leads."""

    def __init__(self, world: World, store: MapStore, timestamps: Timestamps) -> None:
        self._world = world
        self._store = store
        limits = Limits()
        self._router = Router(world, TabletMap(self._find), limits)
        self._env = Environment(
            cells=self._router,
            timestamps=timestamps,
            owners=NoOwners(),
            schemas=_MapSchemas(store, self._router),
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
        )
        self._cleanup = Cleanup(self._env)
        self.resolved = 0

    async def resolve(self, tablet: Tablet, below: int) -> None:
        """Returns when the tablet has no lock of a transaction that began below `below`, of which
        no prewrite is admitted any more. Raises `NotReady` if a primary does not answer, and the
        errors of the network and of the tablet."""
        self.resolved += await resolve_older_locks(
            self._env,
            self._cleanup,
            lambda: self._scan(tablet, below),
            below,
            f"tablet {tablet.tablet_id}",
        )

    async def close(self) -> None:
        await self._router.close()

    async def _scan(self, tablet: Tablet, below: int) -> list[MetLock]:
        cells = scan_locks(
            self._world.network, self._store.current, tablet, below=below, limit=LOCKS_AT_A_TIME
        )
        return [MetLock.of(tablet.table_id, cell) async for cell in cells]

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        """Finds tablets in the map itself."""
        tablets = self._store.current.of_tables.get(table_id, ())
        return [
            TabletLocation(table_id, one.tablet_id, one.epoch, one.start, one.end, one.address)
            for one in tablets
        ]


class _MapSchemas:
    """`Schemas` that are read from the map itself."""

    def __init__(self, store: MapStore, router: Router) -> None:
        self._store = store
        self._router = router

    def get(self, table_id: int) -> TableSchema | None:
        table = self._store.current.tables.get(table_id)
        if table is None:
            return None
        schema = TableSchema.of(table.schema_version, observer_messages(table.observers))
        self._router.schema_versions.of_table[table_id] = schema.version
        return schema

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        schema = self.get(table_id)
        if schema is None:
            raise NotReady(f"table {table_id} is gone")
        return schema
