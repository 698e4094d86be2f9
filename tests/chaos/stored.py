"""Every stored cell of a table, as its tablet servers have it: the input of the audit."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import TabletLocation
from percolator.testing.audit import StoredTable
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire import methods
from percolator.wire.catalog import TableInfo
from percolator.wire.status import from_detail
from percolator.world import Network

_SPACES = (
    cells_pb2.SPACE_LOCK,
    cells_pb2.SPACE_WRITE,
    cells_pb2.SPACE_DATA,
    cells_pb2.SPACE_ROLLBACK,
    cells_pb2.SPACE_NOTIFY,
)
_CALL_SECONDS = 20.0


async def stored_table(
    network: Network, table: TableInfo, tablets: Sequence[TabletLocation], name: str
) -> StoredTable:
    """Of a cluster at rest: a tablet that is not where the map says is an error."""
    cells: list[cells_pb2.Cell] = []
    for tablet in tablets:
        target = wire.TabletTarget(
            tablet_id=tablet.tablet_id,
            epoch=tablet.epoch,
            schema_version=table.schema.version,
        )
        scan = network.stream(tablet.address, methods.SCAN_CELLS)
        for space in _SPACES:
            request = wire.ScanCellsRequest(target=target, space=space)
            request.range.start, request.range.end = tablet.start, tablet.end
            async for page in scan(request, _CALL_SECONDS):
                if page.HasField("error"):
                    raise from_detail(page.error)
                cells.extend(page.cells)
    return StoredTable(table.table_id, name, cells)
