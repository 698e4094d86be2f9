"""Dropping tables of a row store for good.

The cells of a dropped table are the only evidence of what became of transactions with their primary
there, and no tablet refuses a client that still knows the table. So the store's table goes last:

1. The catalogue says durably that the table is dropped, and its epoch is raised. Whoever gets a
   timestamp from then on, and wants to commit a cell of the table, hears that it is gone, and does
   not commit (percolator/protocol/announcing.py).
2. A timestamp R is taken.
3. A round has resolved all locks below P, in all tables, where P is above R. Whoever could still
   commit a cell of the table had got its commit timestamp before R, and held all of its locks by
   then. So all that it locked is decided and settled, in every table.
4. The store's table is deleted, and then the catalogue's.

A lock that comes after 3, with its primary in the table, is of a transaction that never commits.
Whoever meets it finds no table, and rolls it back (percolator/rowstore/dropped.py).

All of this stays true once it is, and ids are not used again. So a leader that was replaced does no
harm by going on, and a new one begins with 1.
"""

from __future__ import annotations

import structlog

from percolator.services.chassis.store_kinds.row_cluster_store import RowClusterStore
from percolator.services.master.map.catalogue import Catalogue
from percolator.services.master.map.map_store import CatalogueStore
from percolator.services.master.oracle_time import OracleTime
from percolator.world import Clock

_ORACLE_SECONDS = 10.0

_log = structlog.get_logger("percolator.master")


class RowDrops:
    """The tables that are being dropped, for one term."""

    def __init__(
        self, clock: Clock, catalogue: CatalogueStore, rows: RowClusterStore, oracle: OracleTime
    ) -> None:
        self._clock = clock
        self._catalogue = catalogue
        self._rows = rows
        self._oracle = oracle
        self._refused_from: dict[int, int] = {}
        """By table: no commit timestamp from here on commits a cell of it."""

    async def begin(self) -> None:
        """Sees to it that no new commit reaches the tables that were dropped by now."""
        for table_id in sorted(self._dropped()):
            # Whoever deleted it could not say so any more.
            if not await self._rows.has_table(table_id):
                await self._forget(table_id)
        fresh = self._dropped() - self._refused_from.keys()
        if not fresh:
            return
        await self._oracle.raise_epoch(self._clock.monotonic_seconds() + _ORACLE_SECONDS)
        now = await self._oracle.source().get(timeout_seconds=_ORACLE_SECONDS)
        self._refused_from.update(dict.fromkeys(fresh, now))

    async def finish(self, resolved_below: int) -> None:
        """All locks below this were resolved, in all tables."""
        for table_id in sorted(self._dropped()):
            refused_from = self._refused_from.get(table_id)
            if refused_from is None or refused_from >= resolved_below:
                continue
            await self._rows.delete_table(table_id)
            await self._forget(table_id)

    async def _forget(self, table_id: int) -> None:
        def decide(current: Catalogue) -> tuple[Catalogue, None]:
            return current.without_table(table_id), None

        await self._catalogue.change(decide)
        self._refused_from.pop(table_id, None)
        _log.info("table deleted", table_id=table_id)

    def _dropped(self) -> set[int]:
        return {one.table_id for one in self._catalogue.current.tables.values() if one.deleting}
