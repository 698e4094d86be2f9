"""Cells as they are stored, with locks and markers: what operators look at, and no transaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from percolator.codecs.readable import quoted
from percolator.errors import NotReady, TabletLocation
from percolator.routing.catalog import Catalog, TableInfo
from percolator.v1.cells_pb2 import Cell, Space
from percolator.v1.tabletserver_pb2 import ScanCellsRequest, TabletTarget
from percolator.wire.methods import SCAN_CELLS
from percolator.wire.status import from_detail
from percolator.world import World


class Contents(Protocol):
    """Stored cells of an engine."""

    def cells(
        self,
        table: TableInfo,
        space: Space,
        start: bytes,
        end: bytes,
        timeout_seconds: float,
    ) -> AsyncGenerator[Cell, None]:
        """The cells of one space in the rows from start to end (empty: to the last row), by row,
        column, and from newest to oldest. Only the cells of one page are as of one moment."""


class TabletContents:
    """Stored cells of tablets."""

    def __init__(self, world: World, catalog: Catalog) -> None:
        self._world = world
        self._catalog = catalog

    async def cells(
        self,
        table: TableInfo,
        space: Space,
        start: bytes,
        end: bytes,
        timeout_seconds: float,
    ) -> AsyncGenerator[Cell, None]:
        deadline = self._world.clock.monotonic_seconds() + timeout_seconds
        for tablet in await self._catalog.all_tablets(table.table_id, deadline):
            low, high = _common(tablet, start, end)
            if high and low >= high:
                continue
            if not tablet.address:
                raise NotReady(
                    f"no server has tablet {tablet.tablet_id} of table {table.name!r}, from row "
                    f"{quoted(tablet.start)} on, at the moment"
                )
            target = TabletTarget(
                tablet_id=tablet.tablet_id, epoch=tablet.epoch, schema_version=table.schema.version
            )
            scan = self._world.network.stream(tablet.address, SCAN_CELLS)
            request = ScanCellsRequest(target=target, space=space)
            request.range.start, request.range.end = low, high
            async for page in scan(request, timeout_seconds):
                if page.HasField("error"):
                    raise from_detail(page.error)
                for cell in page.cells:
                    yield cell


def _common(tablet: TabletLocation, start: bytes, end: bytes) -> tuple[bytes, bytes]:
    low = max(tablet.start, start)
    ends = [one for one in (tablet.end, end) if one]
    return low, min(ends) if ends else b""
