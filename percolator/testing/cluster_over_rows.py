"""A cluster in memory whose cells are in a row store: a model of Bigtable, or an emulator of it.

Master and oracle are those of `ClusterInMemory`. Its tablets stay empty.
"""

from __future__ import annotations

from percolator.bigtable.place import Place
from percolator.bigtable.tables import create_table
from percolator.testing.cluster_in_memory import ClusterInMemory
from percolator.v1 import master_pb2
from percolator.world import Clock, Network

_TABLE_SECONDS = 30.0


class ClusterOverRows(ClusterInMemory):
    """Creates each table in the row store, too. A deleted one stays there: nothing knows yet when
    no lock elsewhere needs it any more."""

    def __init__(self, clock: Clock, network: Network, place: Place) -> None:
        super().__init__(clock)
        self._network = network
        self._place = place

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        response = await super().create_table(request)
        if response.created:
            table_id = response.table.table_id
            await create_table(self._network, self._place, table_id, _TABLE_SECONDS)
        return response
