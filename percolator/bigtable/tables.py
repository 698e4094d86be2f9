"""Creating the tables of a cluster in Bigtable."""

from __future__ import annotations

from percolator.bigtable.methods import CREATE_TABLE
from percolator.bigtable.place import Place
from percolator.rowstore.layout import FAMILIES
from percolator.v1.bigtable_pb2 import BigtableCreateTableRequest
from percolator.world import Network


async def create_table(
    network: Network, place: Place, table_id: int, timeout_seconds: float
) -> None:
    """Creates a table with the families of a row store. They have no rule of collection: the
    service would delete versions that snapshots need."""
    request = BigtableCreateTableRequest(parent=place.parent, table_id=place.table_name(table_id))
    for family in FAMILIES:
        request.table.column_families[family].SetInParent()
    await network.unary(place.address, CREATE_TABLE)(request, timeout_seconds)
