"""A database whose cells are in a row store: in a model of Bigtable, or in an emulator of it.

All else of the cluster is in this process, as in `local_database.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from percolator import aio
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.admin import create_table
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.blocking.api import Database
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import master_pb2, oracle_pb2
from percolator.world import Clock, MachineClock, Network, World

_TABLE_SECONDS = 30.0


class ClusterOverRows(ClusterInMemory):
    """A cluster in memory whose cells are in a row store. Its tablets stay empty.

    It creates each table in the row store, too. A deleted one stays there: a real master deletes it
    when it collects history.
    """

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

    async def change_indexes(
        self, request: master_pb2.ChangeIndexesRequest
    ) -> master_pb2.ChangeIndexesResponse:
        response = await super().change_indexes(request)
        self.raise_epoch()
        return response

    async def delete_table(
        self, request: master_pb2.DeleteTableRequest
    ) -> master_pb2.DeleteTableResponse:
        response = await super().delete_table(request)
        self.raise_epoch()
        return response

    def raise_epoch(self) -> None:
        """Makes transactions with later timestamps ask for schemas again before they commit."""
        self._epoch += 1

    async def create_table(
        self, request: master_pb2.CreateTableRequest
    ) -> master_pb2.CreateTableResponse:
        if not self._has_intents:
            await create_table(self._network, self._place, INTENTS_TABLE, _TABLE_SECONDS)
            self._has_intents = True
        return await super().create_table(request)

    async def _add_table(self, table: master_pb2.Table, splits: Sequence[bytes] = ()) -> None:
        await create_table(self._network, self._place, table.table_id, _TABLE_SECONDS)
        await super()._add_table(table, splits)


MODEL = Place("bigtable:1", "model-project", "model-instance")
_DAY_MILLISECONDS = 86_400_000


def connect_over_model(
    limits: Limits | None = None, model: BigtableInMemory | None = None
) -> Database:
    """A new, empty database over the model. A test that gives one can look into it."""
    there = BigtableInMemory() if model is None else model

    async def start() -> aio.Database:
        return await _connected(InProcessNetwork({MODEL.address: there}), MODEL, limits)

    return Database.over(start)


def connect_over(
    network: Callable[[], Network], place: Place, limits: Limits | None = None
) -> Database:
    """Connects to an emulator at that address, which may be empty: a new cluster counts its tables
    from one. `network` is called in the database's event loop."""

    async def start() -> aio.Database:
        return await _connected(network(), place, limits)

    return Database.over(start)


async def _connected(network: Network, place: Place, limits: Limits | None) -> aio.Database:
    clock = MachineClock()
    cluster = ClusterOverRows(clock, network, place)
    here = InProcessNetwork({ADDRESS: cluster})
    world = World(clock=clock, network=here, random=random.Random())  # noqa: S311 - for a test
    rows = Rows(BigtableStore(network, place), Times(clock.wall_milliseconds() - _DAY_MILLISECONDS))
    return await connect_to(world, [ADDRESS], limits or Limits(), RetryPolicy(), rows=rows)
