"""The last reading, once everything is at rest: every row in a transaction, every stored cell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from percolator.aio import Database
from percolator.errors import PercolatorError
from percolator.schema import Table
from percolator.v1 import master_pb2
from percolator.v1.cells_pb2 import SPACE_WRITE
from percolator.wire import methods
from percolator.world import Random, World
from tests.isolation.history import Found, Scan
from tests.isolation.store_audit import StoredTable
from tests.isolation.stored_cells import stored_tables
from tests.simulation.cluster import Cluster
from tests.simulation.joined_scans import JoinedScans
from tests.simulation.workloads.workload import Rows

_RETRY_SECONDS = 0.3
_CALL_SECONDS = 5.0
_READINGS_MAX = 20
"""Longer than a message is under way and waits in a tablet. What then still commits is judged."""


class LastReading:
    """The last reading; `read` fills it, in a separate process."""

    def __init__(self, cluster: Cluster, tables: Sequence[Table[bytes]]) -> None:
        self._cluster = cluster
        self._tables = tables
        self._joined = JoinedScans(
            cluster.scenario.joined_share, Random("last joined scans"), cluster.chronicle.struck
        )
        self.tables: dict[str, Rows] = {}
        self.stored: list[StoredTable] = []
        self.timestamp = 0
        """Newer than everything that is stored."""
        self._read_at = 0
        self.collected_below = 0
        """History may be collected below it."""
        self.catalogue = cluster.placements.loaded.current
        """The tables that bulk loads have created; with real masters on a row store, all."""

    async def read(self, world: World) -> None:
        """Tries until it succeeds. Reads the rows first, which resolves the locks that are left."""
        database = await self._cluster.connected(world)
        for _ in range(_READINGS_MAX):
            await _until_done(lambda: self._read_rows(database))
            await _until_done(lambda: self._read_cells(world, database))
            if not self._has_missed_a_commit():
                break
            await asyncio.sleep(_RETRY_SECONDS)
        self.timestamp = await database.timestamp()
        if self._cluster.row_collector is not None:
            self.collected_below = self._cluster.row_collector.decided.transactions
        if self._cluster.scenario.with_master:
            await _until_done(lambda: self._ask_the_master(world))
        if self._cluster.row_cluster is not None:
            self.catalogue = await self._cluster.row_cluster.catalogue(world)
            await self._cluster.row_cluster.count_leaders(world)
        await database.close()

    def _has_missed_a_commit(self) -> bool:
        """Whether cells show a commit that the rows do not: one of which no client has an answer
        may still arrive between the two readings, on a slow link."""
        return any(
            cell.space == SPACE_WRITE and cell.timestamp > self._read_at
            for table in self.stored
            for cell in table.cells
        )

    async def _read_rows(self, database: Database) -> bool:
        recorded = self._cluster.chronicle.recorder.begin("auditor")
        try:
            async with database.snapshot() as snapshot:
                self._read_at = await snapshot.timestamp()
                recorded.began(self._read_at)
                for table in self._tables:
                    rows = {row.key: row.raw() async for row in snapshot.scan(table)}
                    self.tables[table.name] = rows
                    found = tuple(
                        Found(row, *cell)
                        for row, cells in rows.items()
                        for cell in sorted(cells.items())
                    )
                    recorded.scan(Scan(table.name, b"", b"", found))
                    if self._joined.is_due():
                        recorded.scan(await self._joined.scan(snapshot, table))
        except PercolatorError:
            recorded.aborted()
            return False
        recorded.committed()
        return True

    async def _read_cells(self, world: World, database: Database) -> bool:
        deadline = world.clock.monotonic_seconds() + _CALL_SECONDS
        names = [table.name for table in self._tables]
        store = self._cluster.row_store
        if store is not None:
            try:
                tables = await database._engine.catalog.tables(deadline)
            except PercolatorError:
                return False
            placed = {one.name: one.table_id for one in tables}
            self.stored = [await store.stored(placed[name], name) for name in names]
            return True
        try:
            catalog = database._engine.catalog
            self.stored = await stored_tables(world.network, catalog, names, deadline)
        except PercolatorError:
            return False
        return True

    async def _ask_the_master(self, world: World) -> bool:
        for master in self._cluster.masters:
            try:
                answer = await world.network.unary(master, methods.DESCRIBE_COLLECTION)(
                    master_pb2.DescribeCollectionRequest(), _CALL_SECONDS
                )
            except PercolatorError:
                continue
            self.collected_below = answer.transactions_safe_point
            return True
        return False


async def _until_done(attempt: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await attempt():
            return
        await asyncio.sleep(_RETRY_SECONDS)
