"""Resolves every lock that is older than what is about to be collected, in all tables.

The cells that show the outcome of a lock's transaction may be among those that are collected. A
lock that was left would then be rolled back by the next reader, although its transaction committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import NotReady, TabletLocation
from percolator.limits import Limits
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.environment import Environment, Owners, Timestamps
from percolator.protocol.verdicts import Verdicts
from percolator.routing.catalog import TableSchema
from percolator.routing.router import Router
from percolator.routing.tablet_map import TabletMap
from percolator.world import World
from services.master.history.lock_scan import scan_locks
from services.master.map.cluster_map import Tablet
from services.master.map.map_record import observer_messages
from services.master.map.map_store import MapStore

_SETTLE_SECONDS = 30.0
_LOCKS_AT_A_TIME = 1_000
_PATIENCE_SECONDS = 1.0
"""Locks are treated as if readers had waited this long: sessions are asked at once."""
_ROUNDS_MAX = 1_000


class OldLocks:
    """A client of the tablet servers, for as long as this master leads."""

    def __init__(
        self, world: World, store: MapStore, timestamps: Timestamps, owners: Owners
    ) -> None:
        self._world = world
        self._store = store
        self._timestamps = timestamps
        limits = Limits()
        self._router = Router(world, TabletMap(self._find), limits)
        env = Environment(
            cells=self._router,
            timestamps=timestamps,
            owners=owners,
            schemas=_MapSchemas(store, self._router),
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
        )
        self._cleanup = Cleanup(env)
        self.resolved = 0

    async def resolve(self, tablet: Tablet, below: int) -> None:
        """Returns when the tablet has no lock of a transaction that began below `below`, of which
        no prewrite is admitted any more. Raises `NotReady` if an owner is alive, and the errors of
        the network and of the tablet."""
        for _ in range(_ROUNDS_MAX):
            found = await self._scan(tablet, below)
            if not found:
                return
            clock = self._world.clock
            await self._cleanup.resolve(
                found,
                deadline=clock.monotonic_seconds() + _SETTLE_SECONDS,
                known_now=await self._timestamps.get(),
                waited_seconds=_PATIENCE_SECONDS,
            )
            left = {lock.address for lock in await self._scan(tablet, below)}
            resolved = sum(lock.address not in left for lock in found)
            self.resolved += resolved
            if not resolved:
                raise NotReady(
                    f"a lock of transaction {found[0].lock.start_timestamp} in tablet "
                    f"{tablet.tablet_id} is still held, below {below}"
                )
        raise NotReady(f"tablet {tablet.tablet_id} has too many old locks to resolve in one round")

    async def close(self) -> None:
        await self._router.close()

    async def _scan(self, tablet: Tablet, below: int) -> list[MetLock]:
        cells = scan_locks(
            self._world.network, self._store.current, tablet, below=below, limit=_LOCKS_AT_A_TIME
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
        schema = TableSchema.of(table.schema_version, observer_messages(table))
        self._router.schema_versions.of_table[table_id] = schema.version
        return schema

    async def refresh(self, table_id: int, deadline: float) -> TableSchema:
        schema = self.get(table_id)
        if schema is None:
            raise NotReady(f"table {table_id} is gone")
        return schema
