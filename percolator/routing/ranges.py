"""Ranges to divide work by: what exports, Spark and others read in parallel.

Any division is right, since every range is read as a scan is: rows may move to other tablets while
it is read. A good one has parts of about equal size that different servers have.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple, Protocol

from percolator.errors import ExecutionUnknown, NotExecuted
from percolator.routing.catalog import Catalog, TabletMap
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.tabletserver_pb2 import ProposePartsRequest, TabletTarget
from percolator.wire.methods import PROPOSE_PARTS
from percolator.world import World


class TableRange(NamedTuple):
    """Rows of a table from start (included) to end (excluded; empty: to the last row)."""

    table_id: int
    start: bytes
    end: bytes


class Ranges(Protocol):
    """How an engine divides tables."""

    def of_table(self, table_id: int, deadline: float) -> Awaitable[list[TableRange]]:
        """The whole table, in order, in as many ranges as it has natural ones: at least one."""

    def cut(
        self, rows: TableRange, part_bytes: int, timeout_seconds: float
    ) -> Awaitable[list[bytes]]:
        """Rows that cut this part of one of these ranges into parts of about `part_bytes`."""


class TabletRanges:
    """Tables in tablets."""

    def __init__(self, world: World, catalog: Catalog, tablets: TabletMap) -> None:
        self._world = world
        self._catalog = catalog
        self._tablets = tablets

    async def of_table(self, table_id: int, deadline: float) -> list[TableRange]:
        found = await self._catalog.all_tablets(table_id, deadline)
        return [TableRange(table_id, one.start, one.end) for one in found]

    async def cut(self, rows: TableRange, part_bytes: int, timeout_seconds: float) -> list[bytes]:
        tablet = self._tablets.locate(rows.table_id, rows.start)
        if tablet is None:
            return []  # as below
        request = ProposePartsRequest(
            target=TabletTarget(tablet_id=tablet.tablet_id, epoch=tablet.epoch),
            range=RowRange(start=rows.start, end=rows.end),
            part_bytes=part_bytes,
        )
        propose = self._world.network.unary(tablet.address, PROPOSE_PARTS)
        try:
            return list((await propose(request, timeout_seconds)).rows)
        except (NotExecuted, ExecutionUnknown):
            return []  # it is moving right now; the task that reads it will find it
