"""Reads every stored cell of some tables from their tablet servers, for the audit.

The cluster has to be at rest: two readings in a row have to be equal. Otherwise, something that was
collected between the reading of two spaces would look like a commit without its value. A tablet
that is not where the map says is an error, and the reading starts again: half of a store proves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import NotReady, TabletLocation, TabletMoved
from percolator.routing.catalog import Catalog
from percolator.testing.store_audit.audit import StoredTable
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
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
_READINGS_MAX = 20


async def stored_tables(
    network: Network, catalog: Catalog, names: Sequence[str], deadline: float
) -> list[StoredTable]:
    """All cells of all spaces of these tables. Raises the error if one cannot be read."""
    former: list[StoredTable] | None = None
    for _ in range(_READINGS_MAX):
        try:
            stored = await _read(network, catalog, names, deadline)
        except TabletMoved:
            former = None
            continue
        if stored == former:
            return stored
        former = stored
    raise NotReady("the store does not come to rest")


async def _read(
    network: Network, catalog: Catalog, names: Sequence[str], deadline: float
) -> list[StoredTable]:
    stored = []
    for name in names:
        info = await catalog.table(name, deadline)
        cells: list[cells_pb2.Cell] = []
        for tablet in await catalog.all_tablets(info.table_id, deadline):
            for space in _SPACES:
                cells += await _cells(network, tablet, info.schema.version, space)
        stored.append(StoredTable(info.table_id, name, cells))
    return stored


async def _cells(
    network: Network, tablet: TabletLocation, schema_version: int, space: cells_pb2.Space
) -> list[cells_pb2.Cell]:
    target = pb.TabletTarget(
        tablet_id=tablet.tablet_id, epoch=tablet.epoch, schema_version=schema_version
    )
    request = pb.ScanCellsRequest(target=target, space=space)
    request.range.start, request.range.end = tablet.start, tablet.end
    found: list[cells_pb2.Cell] = []
    scan = network.stream(tablet.address, methods.SCAN_CELLS)
    async for page in scan(request, _CALL_SECONDS):
        if page.HasField("error"):
            raise from_detail(page.error)
        found.extend(page.cells)
    return found
