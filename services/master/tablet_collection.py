"""Collection by tablets: each deletes by itself, when it is told to.

1. Raise the safe points of every tablet of every table. Once all have acknowledged, nothing can
   begin, read or commit below them.
2. Resolve every older lock in every table. Since step 1 no new ones appear.
3. Only now may the tablets delete.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from percolator.errors import NotReady, TabletLocation
from percolator.history.rows import LOCKS_AT_A_TIME, resolve_older_locks
from percolator.limits import Limits
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment, Timestamps, Verdicts
from percolator.routing.catalog import TableSchema, TabletMap
from percolator.routing.router import Router
from percolator.services.master.cluster_map import ClusterMap, Tablet, observer_messages
from percolator.services.master.collection import ClusterSafePoints, NoOwners, TableCollected
from percolator.services.master.map_store import MapStore
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.status import from_detail
from percolator.world import Network, World

_SCAN_SECONDS = 60.0


async def scan_locks(
    network: Network, current: ClusterMap, tablet: Tablet, *, below: int = 0, limit: int = 0
) -> AsyncIterator[cells_pb2.Cell]:
    """The locks of transactions that began below `below`, at most `limit`; 0 means no bound.

    Raises the errors of the network and of the tablet.
    """
    scan = network.stream(tablet.address, methods.SCAN_CELLS)
    request = pb.ScanCellsRequest(
        target=pb.TabletTarget(
            tablet_id=tablet.tablet_id,
            epoch=tablet.epoch,
            schema_version=current.tables[tablet.table_id].schema_version,
        ),
        space=cells_pb2.SPACE_LOCK,
        range=cells_pb2.RowRange(start=tablet.start, end=tablet.end),
        until_timestamp=below,
        cell_limit=limit,
    )
    async for page in scan(request, _SCAN_SECONDS):
        if page.HasField("error"):
            raise from_detail(page.error)
        for cell in page.cells:
            yield cell


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


_ORDER_SECONDS = 30.0
_TABLETS_AT_A_TIME = 8


class TabletCollecting:
    """Orders tablet servers to collect, for as long as this master leads."""

    def __init__(self, world: World, store: MapStore, timestamps: Timestamps) -> None:
        self._world = world
        self._store = store
        self._old_locks = OldLocks(world, store, timestamps)
        self._told: dict[int, pb.RaisedSafePoint] = {}
        """Each tablet's last answer."""

    @property
    def locks_resolved(self) -> int:
        return self._old_locks.resolved

    async def collect(self, ordered: ClusterSafePoints) -> None:
        await self._every_tablet(lambda tablets: self._order(tablets, ordered, collect=False))
        await self._every_tablet(
            _one_by_one(lambda tablet: self._old_locks.resolve(tablet, ordered.transactions))
        )
        tablets = self._tablets()
        await self._order(tablets, ordered, collect=True)
        present = {one.tablet_id for one in tablets}
        self._told = {one: said for one, said in self._told.items() if one in present}

    def collected(self, table_id: int) -> TableCollected:
        nothing = pb.RaisedSafePoint()
        tablets = self._store.current.of_tables[table_id]
        said = [self._told.get(tablet.tablet_id, nothing) for tablet in tablets]
        return TableCollected(
            below=min(one.collected_below for one in said),
            history_bytes=sum(one.history_bytes for one in said),
            cells=sum(one.cells_collected for one in said),
            bytes=sum(one.bytes_collected for one in said),
        )

    async def close(self) -> None:
        await self._old_locks.close()

    def _tablets(self) -> list[Tablet]:
        """The tablets of all tables but deleted ones, which are removed as a whole."""
        current = self._store.current
        return [
            one for one in current.tablets.values() if not current.tables[one.table_id].deleting
        ]

    async def _every_tablet(
        self, work: Callable[[list[Tablet]], Coroutine[Any, Any, None]]
    ) -> None:
        """Includes tablets that are made by splits meanwhile. A move makes no difference: what a
        tablet has acknowledged is in its storage."""
        done: set[int] = set()
        while left := [one for one in self._tablets() if one.tablet_id not in done]:
            await work(left)
            done |= {one.tablet_id for one in left}

    async def _order(
        self, tablets: Iterable[Tablet], ordered: ClusterSafePoints, *, collect: bool
    ) -> None:
        """Raises `NotReady`, or a tablet's error, unless all have acknowledged."""
        by_address: defaultdict[str, list[Tablet]] = defaultdict(list)
        for tablet in tablets:
            if not tablet.server_id:
                raise NotReady(f"tablet {tablet.tablet_id} is not served now")
            by_address[tablet.address].append(tablet)
        await self._store.leadership.check()
        await asyncio.gather(
            *(
                self._order_server(address, found, ordered, collect)
                for address, found in by_address.items()
            )
        )

    async def _order_server(
        self, address: str, tablets: list[Tablet], ordered: ClusterSafePoints, collect: bool
    ) -> None:
        orders = []
        for tablet in tablets:
            reads = ordered.reads.get(tablet.table_id, 0)
            orders.append(
                pb.SafePoint(
                    tablet_id=tablet.tablet_id,
                    epoch=tablet.epoch,
                    reads=reads,
                    transactions=ordered.transactions,
                    collect_below=reads if collect else 0,
                )
            )
        call = self._world.network.unary(address, methods.RAISE_SAFE_POINTS)
        answer = await call(pb.RaiseSafePointsRequest(safe_points=orders), _ORDER_SECONDS)
        if len(answer.safe_points) != len(tablets):
            raise NotReady(f"{address} has not answered for every tablet")
        for tablet, raised in zip(tablets, answer.safe_points, strict=True):
            if raised.HasField("error"):
                raise from_detail(raised.error)
            self._told[tablet.tablet_id] = raised


def _one_by_one(
    work: Callable[[Tablet], Coroutine[Any, Any, None]],
) -> Callable[[list[Tablet]], Coroutine[Any, Any, None]]:
    """Does the work for one tablet each, for a few at a time."""

    async def for_all(tablets: list[Tablet]) -> None:
        limit = asyncio.Semaphore(_TABLETS_AT_A_TIME)

        async def limited(tablet: Tablet) -> None:
            async with limit:
                await work(tablet)

        await asyncio.gather(*map(limited, tablets))

    return for_all
