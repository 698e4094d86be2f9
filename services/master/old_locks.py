"""Settles every lock that is older than what is about to be collected, in all tables.

The cells that say what became of its transaction may be among what goes: a lock that is left would
be rolled back by whoever meets it next, although its transaction had committed.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import NotReady, TabletLocation
from percolator.limits import Limits
from percolator.protocol.background import Background
from percolator.protocol.cleanup import Cleanup, MetLock
from percolator.protocol.surroundings import Owners, Surroundings, Timestamps
from percolator.protocol.verdicts import Verdicts
from percolator.wire.catalog import TableSchema
from percolator.wire.router import Router
from percolator.wire.tablet_map import TabletMap
from percolator.world import World
from services.master.cluster_map import Tablet
from services.master.lock_scan import scan_locks
from services.master.map_record import observer_messages
from services.master.map_store import MapStore

_SETTLE_SECONDS = 30.0
_LOCKS_AT_A_TIME = 1_000
_PATIENCE_SECONDS = 1.0
"""As if it had been waited for so long: sessions are asked, and the oracle's time."""
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
        around = Surroundings(
            cells=self._router,
            timestamps=timestamps,
            owners=owners,
            schemas=_MapSchemas(store, self._router),
            clock=world.clock,
            random=world.random,
            limits=limits,
            verdicts=Verdicts(limits.verdicts_max),
            background=Background(limits.background_tasks_max),
        )
        self._cleanup = Cleanup(around)
        self.settled = 0

    async def settle(self, tablet: Tablet, below: int) -> None:
        """Returns when the tablet has no lock of a transaction that began below; no prewrite of
        one is admitted any more. Raises `NotReady` when an owner is alive, and whatever the
        network or the tablet says."""
        for _ in range(_ROUNDS_MAX):
            found = await self._scan(tablet, below)
            if not found:
                return
            clock = self._world.clock
            await self._cleanup.clear(
                found,
                deadline=clock.monotonic_seconds() + _SETTLE_SECONDS,
                known_now=await self._timestamps.get(),
                waited_seconds=_PATIENCE_SECONDS,
            )
            left = {lock.address for lock in await self._scan(tablet, below)}
            settled = sum(lock.address not in left for lock in found)
            self.settled += settled
            if not settled:
                raise NotReady(
                    f"a lock of transaction {found[0].lock.start_timestamp} in tablet "
                    f"{tablet.tablet_id} is still held, below {below}"
                )
        raise NotReady(f"tablet {tablet.tablet_id} has more old locks than can be settled now")

    async def close(self) -> None:
        await self._router.close()

    async def _scan(self, tablet: Tablet, below: int) -> list[MetLock]:
        cells = scan_locks(
            self._world.network, self._store.current, tablet, below=below, limit=_LOCKS_AT_A_TIME
        )
        return [MetLock.of(tablet.table_id, cell) async for cell in cells]

    async def _find(self, table_id: int, row: bytes) -> Sequence[TabletLocation]:
        """From the map itself."""
        tablets = self._store.current.of_tables.get(table_id, ())
        return [
            TabletLocation(table_id, one.tablet_id, one.epoch, one.start, one.end, one.address)
            for one in tablets
        ]


class _MapSchemas:
    """`Schemas` from the map itself."""

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
