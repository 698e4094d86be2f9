"""Removes what is left of deleted tables and split tablets, once it can no longer be needed.

A deleted table is dropped when no lock in another table has its primary there: until then its cells
are the only evidence of those transactions' outcomes. Directories are removed after the map no
longer names them.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import replace
from pathlib import Path

import structlog

from percolator.errors import PercolatorError
from percolator.formats.records import LockRecord
from percolator.services.chassis.store.epoch_directory import remove_tree
from percolator.services.chassis.store.files import Files
from percolator.services.chassis.trouble import Trouble
from percolator.services.master.history.lock_scan import scan_locks
from percolator.services.master.map.catalogue import Table
from percolator.services.master.map.cluster_map import ClusterMap, Tablet
from percolator.services.master.map.map_store import MapStore
from percolator.services.master.tablets.assignment import Assignment
from percolator.world import World

_ROUND_SECONDS = 1.0

_log = structlog.get_logger("percolator.master")


class Removal:
    """`run` has to run while this master leads."""

    def __init__(
        self, world: World, files: Files, root: Path, store: MapStore, assignment: Assignment
    ) -> None:
        self._world = world
        self._files = files
        self._root = root
        self._store = store
        self._assignment = assignment
        self._needed: set[int] = set()
        """Deleted tables that had to be kept in the last round."""
        self._kept: dict[tuple[int, int], str] = {}
        """Directories that could not be removed in the last round, and why."""
        self._troubles = [
            Trouble(_log, "deleted tables are not cleared up yet", level=logging.INFO),
            Trouble(_log, "what tablets have left is not removed yet", level=logging.INFO),
        ]

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._world.clock.sleep(_ROUND_SECONDS)
            # Separately: directories are removed even while a tablet cannot be asked for locks.
            work = (self._drop_tables, self._remove_retired)
            for clear_up, trouble in zip(work, self._troubles, strict=True):
                try:
                    await clear_up()
                except (PercolatorError, OSError) as error:
                    trouble.lasts(error)
                else:
                    trouble.is_over()

    async def _drop_tables(self) -> None:
        current, taken_over = self._store.current, self._assignment.is_taken_over
        # At their new epochs nothing can begin in these tables, so no lock that points into them
        # appears after the scan. This also holds for a tablet that is damaged.
        closed = {
            table_id
            for table_id, table in current.tables.items()
            if table.deleting and all(map(taken_over, current.of_tables[table_id]))
        }
        if not closed:
            return
        needed: set[int] = set()
        for tablet in list(current.tablets.values()):
            if not current.tables[tablet.table_id].deleting:
                needed |= await self._primaries(tablet) & closed
        for table_id in closed - needed:

            def decide(
                current: ClusterMap, table_id: int = table_id
            ) -> tuple[ClusterMap, Table | None]:
                gone = current.tables.get(table_id)
                return (current.without_table(table_id) if gone else current), gone

            table = await self._store.change(decide)
            if table is not None:
                _log.info("table deleted", table=table.name, table_id=table_id)
                self._assignment.wake()
        for table_id in needed - self._needed:
            _log.info("a deleted table is kept until locks are resolved", table_id=table_id)
        self._needed = needed

    async def _primaries(self, tablet: Tablet) -> set[int]:
        """The tables in which locks of this tablet have their primaries."""
        locks = scan_locks(self._world.network, self._store.current, tablet)
        return {LockRecord.decode(cell.value).primary.table_id async for cell in locks}

    async def _remove_retired(self) -> None:
        removed: list[tuple[int, int]] = []
        kept: dict[tuple[int, int], str] = {}
        for retired in self._store.current.retired:
            table_id, tablet_id = retired
            try:
                if await self._removed(self._root / str(table_id), tablet_id):
                    removed.append(retired)
            except OSError as error:
                # It may stay like this until an operator comes; all others are removed meanwhile.
                kept[retired] = str(error)
        self._tell(kept)
        if not removed:
            return

        def decide(current: ClusterMap) -> tuple[ClusterMap, None]:
            left = tuple(one for one in current.retired if one not in removed)
            return replace(current, retired=left), None

        await self._store.change(decide)

    def _tell(self, kept: dict[tuple[int, int], str]) -> None:
        """Logs each problem once, since it occurs again every second."""
        before, self._kept = self._kept, kept
        for (table_id, tablet_id), problem in kept.items():
            if before.get((table_id, tablet_id)) != problem:
                _log.warning(
                    "a directory that is no longer needed cannot be removed",
                    directory=str(self._root / str(table_id) / str(tablet_id)),
                    error=problem,
                )

    async def _removed(self, table: Path, tablet_id: int) -> bool:
        """False if a process still writes there; then the next round tries again."""
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
