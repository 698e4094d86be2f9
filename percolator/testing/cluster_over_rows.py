"""A cluster in memory whose cells are in a row store: a model of Bigtable, or an emulator of it.

Master and oracle are those of `ClusterInMemory`. Its tablets stay empty.
"""

from __future__ import annotations

from percolator.bigtable.place import Place
from percolator.bigtable.tables import create_table
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.testing.cluster_in_memory import ClusterInMemory
from percolator.v1 import master_pb2, oracle_pb2
from percolator.world import Clock, Network

_TABLE_SECONDS = 30.0


class ClusterOverRows(ClusterInMemory):
    """Creates each table in the row store, too. A deleted one stays there: a real master deletes it
    when it collects history."""

    def __init__(self, clock: Clock, network: Network, place: Place) -> None:
        super().__init__(clock)
        self._network = network
        self._place = place
        self._has_intents = False
        self._epoch = 0

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        response = await super().get_timestamps(request)
        response.catalogue_epoch = self._epoch
        return response

    async def change_observers(
        self, request: master_pb2.ChangeObserversRequest
    ) -> master_pb2.ChangeObserversResponse:
        response = await super().change_observers(request)
        self.raise_epoch()
        return response

    async def delete_table(
        self, request: master_pb2.DeleteTableRequest
    ) -> master_pb2.DeleteTableResponse:
        response = await super().delete_table(request)
        self.raise_epoch()
        return response

    def raise_epoch(self) -> None:
        """Whoever gets a timestamp from now on asks for schemas again before it commits."""
        self._epoch += 1

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        if not self._has_intents:
            await create_table(self._network, self._place, INTENTS_TABLE, _TABLE_SECONDS)
            self._has_intents = True
        response = await super().create_table(request)
        if response.created:
            table_id = response.table.table_id
            await create_table(self._network, self._place, table_id, _TABLE_SECONDS)
        return response
