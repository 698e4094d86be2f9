"""The locks of a tablet, which the leading master reads from its server."""

from __future__ import annotations

from collections.abc import AsyncIterator

from percolator.services.master.map.cluster_map import ClusterMap, Tablet
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.status import from_detail
from percolator.world import Network

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
