"""What is read once everything is at rest: every row by a transaction, every cell as stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from percolator.aio import Database
from percolator.errors import PercolatorError, TabletLocation
from percolator.schema import Table
from percolator.testing.audit import StoredTable
from percolator.testing.history import Found, Scan
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.world import World
from tests.simulation.cluster import Cluster
from tests.simulation.workloads.workload import Rows

_SPACES = (
    cells_pb2.SPACE_LOCK,
    cells_pb2.SPACE_WRITE,
    cells_pb2.SPACE_DATA,
    cells_pb2.SPACE_ROLLBACK,
    cells_pb2.SPACE_NOTIFY,
)
_RETRY_SECONDS = 0.3
_CALL_SECONDS = 5.0


class LastReading:
    """Filled by `read`, in a process of its own."""

    def __init__(self, cluster: Cluster, tables: Sequence[Table[bytes]]) -> None:
        self._cluster = cluster
        self._tables = tables
        self.tables: dict[str, Rows] = {}
        self.stored: list[StoredTable] = []
        self.timestamp = 0
        """Newer than everything that is stored."""

    async def read(self, world: World) -> None:
        """Until it succeeds. First the rows: reading them settles whatever locks are left."""
        database = await self._cluster.connected(world)
        await _until_done(lambda: self._read_rows(database))
        await _until_done(lambda: self._read_cells(world, database))
        self.timestamp = await database.timestamp()
        await database.close()

    async def _read_rows(self, database: Database) -> bool:
        recorded = self._cluster.chronicle.recorder.begin("auditor")
        try:
            async with database.snapshot() as snapshot:
                recorded.began(await snapshot.timestamp())
                for table in self._tables:
                    rows = {row.key: row.raw() async for row in snapshot.scan(table)}
                    self.tables[table.name] = rows
                    found = tuple(
                        Found(row, *cell)
                        for row, cells in rows.items()
                        for cell in sorted(cells.items())
                    )
                    recorded.scan(Scan(table.name, b"", b"", found))
        except PercolatorError:
            recorded.aborted()
            return False
        recorded.committed()
        return True

    async def _read_cells(self, world: World, database: Database) -> bool:
        catalog = database._engine.catalog
        self.stored.clear()
        try:
            for table in self._tables:
                deadline = world.clock.monotonic_seconds() + _CALL_SECONDS
                info = await catalog.table(table.name, deadline)
                tablets = await catalog.all_tablets(info.table_id, deadline)
                cells: list[cells_pb2.Cell] = []
                for tablet in tablets:
                    for space in _SPACES:
                        cells += await _scan(world, tablet, info.schema.version, space)
                self.stored.append(StoredTable(info.table_id, table.name, cells))
        except PercolatorError:
            return False
        return True


async def _until_done(attempt: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await attempt():
            return
        await asyncio.sleep(_RETRY_SECONDS)


async def _scan(
    world: World, tablet: TabletLocation, schema_version: int, space: cells_pb2.Space
) -> list[cells_pb2.Cell]:
    request = wire.ScanCellsRequest(
        target=wire.TabletTarget(
            tablet_id=tablet.tablet_id, epoch=tablet.epoch, schema_version=schema_version
        ),
        space=space,
        range=cells_pb2.RowRange(start=tablet.start, end=tablet.end),
    )
    found: list[cells_pb2.Cell] = []
    call = world.network.stream(tablet.address, methods.SCAN_CELLS)
    async for page in call(request, _CALL_SECONDS):
        if page.HasField("error"):
            raise _Retry("the tablet is not served")
        found.extend(page.cells)
    return found


class _Retry(PercolatorError):
    """The reading is to be begun again."""
