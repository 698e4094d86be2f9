"""What is stored, for operators, who look while something is wrong."""

from __future__ import annotations

import pytest

from percolator.errors import NotReady
from percolator.routing.catalog import NO_OBSERVERS, Catalog, TableInfo
from percolator.routing.contents import TabletContents
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import master_pb2 as pb
from percolator.v1.cells_pb2 import RowRange, Space
from percolator.v1.errors_pb2 import TabletLocation

from .tablet_servers import Cluster


class _Master:
    """It has found no server for the only tablet yet."""

    async def locate_tablets(self, request: pb.LocateTabletsRequest) -> pb.LocateTabletsResponse:
        location = TabletLocation(table_id=1, tablet_id=2, epoch=3, range=RowRange(start=b"m"))
        return pb.LocateTabletsResponse(locations=[location])


async def test_a_tablet_without_a_server_is_named() -> None:
    cluster = Cluster({})
    network = cluster.world.network
    assert isinstance(network, InProcessNetwork)
    network.handlers["m:1"] = _Master()
    versions = cluster.router.schema_versions
    catalog = Catalog(cluster.world, ["m:1"], cluster.tablets, versions)
    contents = TabletContents(cluster.world, catalog)
    table = TableInfo(1, "accounts", NO_OBSERVERS)
    with pytest.raises(NotReady, match=r"tablet 2 of table 'accounts', from row 'm' on"):
        [cell async for cell in contents.cells(table, Space.SPACE_LOCK, b"", b"", 5.0)]
