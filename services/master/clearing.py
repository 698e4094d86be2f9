"""What is left of deleted tables and split tablets: it goes when nobody can need it any more.

A deleted table goes when no lock in any other table has its primary in it: until then its cells
are the only evidence of what became of those transactions. Directories go after the map no longer
names them.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import structlog

from percolator.errors import PercolatorError
from percolator.protocol.records import LockRecord
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.wire.status import from_detail
from percolator.world import World
from services.chassis.epoch_directory import remove_tree
from services.chassis.files import Files
from services.master.assignment import Assignment
from services.master.cluster_map import ClusterMap, Table, Tablet
from services.master.map_store import MapStore

_ROUND_SECONDS = 1.0
_SCAN_SECONDS = 60.0

_log = structlog.get_logger("percolator.master")


class Clearing:
    """`run` has to run while this master leads."""

    def __init__(
        self, world: World, files: Files, root: Path, store: MapStore, assignment: Assignment
    ) -> None:
        self._world = world
        self._files = files
        self._root = root
        self._store = store
        self._assignment = assignment

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._world.clock.sleep(_ROUND_SECONDS)
            try:
                await self._drop_tables()
                await self._remove_retired()
            except (PercolatorError, OSError) as error:
                _log.info("not cleared up yet", error=str(error))

    async def _drop_tables(self) -> None:
        deleting = {
            table.table_id for table in self._store.current.tables.values() if table.deleting
        }
        if not deleting:
            return
        # With their new epochs nobody can begin anything in them: what a scan does not find after
        # this will not come.
        for table_id in deleting:
            if not all(map(self._assignment.is_served, self._store.current.of_tables[table_id])):
                return
        needed: set[int] = set()
        for tablet in list(self._store.current.tablets.values()):
            if tablet.table_id not in deleting:
                needed |= await self._primaries(tablet) & deleting
        for table_id in deleting - needed:

            def decide(
                current: ClusterMap, table_id: int = table_id
            ) -> tuple[ClusterMap, Table | None]:
                gone = current.tables.get(table_id)
                return (current.without_table(table_id) if gone else current), gone

            table = await self._store.change(decide)
            if table is not None:
                _log.info("table deleted", table=table.name, table_id=table_id)
                self._assignment.wake()
        for table_id in needed:
            _log.info("a deleted table waits for locks to be resolved", table_id=table_id)

    async def _primaries(self, tablet: Tablet) -> set[int]:
        """The tables that locks of this tablet have their primaries in."""
        scan = self._world.network.stream(tablet.address, methods.SCAN_CELLS)
        request = wire.ScanCellsRequest(
            target=wire.TabletTarget(
                tablet_id=tablet.tablet_id,
                epoch=tablet.epoch,
                schema_version=self._store.current.tables[tablet.table_id].schema_version,
            ),
            space=cells_pb2.SPACE_LOCK,
            range=cells_pb2.RowRange(start=tablet.start, end=tablet.end),
        )
        found: set[int] = set()
        async for page in scan(request, _SCAN_SECONDS):
            if page.HasField("error"):
                raise from_detail(page.error)
            found |= {LockRecord.decode(cell.value).primary.table_id for cell in page.cells}
        return found

    async def _remove_retired(self) -> None:
        removed = []
        for table_id, tablet_id in self._store.current.retired:
            if await self._removed(self._root / str(table_id), tablet_id):
                removed.append((table_id, tablet_id))
        if not removed:
            return

        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            left = tuple(one for one in current.retired if one not in removed)
            return replace(current, retired=left), None

        await self._store.change(decide)

    async def _removed(self, table: Path, tablet_id: int) -> bool:
        """False when somebody still writes there: next time."""
        directory = table / str(tablet_id)
        try:
            for name in await self._files.list(directory):
                await remove_tree(self._files, directory / name)
            await self._files.remove_directory(directory)
            if not await self._files.list(table):
                await self._files.remove_directory(table)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
        return True
