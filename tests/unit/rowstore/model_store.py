"""Cells in the model of a row store, for tests of the way there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

from percolator import aio
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.admin import create_table, delete_table
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.rowstore.adapter import RowStoreCells
from percolator.rowstore.intents import INTENTS_TABLE, Intents
from percolator.rowstore.layout import Times
from percolator.services.master.cluster_map import (
    Catalogue,
    decode_catalogue,
    encode_catalogue,
    table_message,
)
from percolator.services.master.row_term import RowLoads
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL, ClusterOverRows
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import master_pb2 as pb
from percolator.world import Clock, MachineClock, Network, World
from tests.simulation.virtual_time import VirtualClock

PLACE = Place("bigtable:1", "some-project", "some-instance")
EPOCH_MILLISECONDS = 1_000
TABLE = 7
SECONDS = 60.0
TIMES = Times(EPOCH_MILLISECONDS)


def at(number: int) -> int:
    """The timestamp of that number: the first ones that can be stored."""
    return (EPOCH_MILLISECONDS << SEQUENCE_BITS) + number * 64


class ModelStore:
    """A table in the model, and how to get at it."""

    def __init__(self, **limits: Any) -> None:
        self.model = BigtableInMemory(chunk_bytes=7)
        self.network = InProcessNetwork({PLACE.address: self.model})
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.store = BigtableStore(self.network, PLACE)
        self.world = World(self.clock, self.network, random.Random(1))
        self.limits = Limits(**limits)
        self.intents = Intents(self.store, TIMES, self.world, self.limits)
        self.cells = RowStoreCells(self.store, self.intents, TIMES, self.world, self.limits)

    @property
    def deadline(self) -> float:
        return self.clock.monotonic_seconds() + SECONDS

    async def opened(self) -> ModelStore:
        await create_table(self.network, PLACE, TABLE, SECONDS)
        return self


# A cluster over the model of a row store whose tables are those of a real master's term.

LOADING_SECONDS = 10.0


class _Kept:
    """The catalogue of a leader: what is read is what was written."""

    def __init__(self) -> None:
        self.current = Catalogue()

    async def change(self, decide: Callable[[Catalogue], tuple[Catalogue, Any]]) -> Any:
        changed, result = decide(self.current)
        self.current = decode_catalogue(encode_catalogue(changed))
        return result


class LoadingCluster(ClusterOverRows):
    """Tables are created, loaded and dropped as a master of a row store does it."""

    def __init__(self, clock: Clock, network: Network) -> None:
        super().__init__(clock, network, MODEL)
        self._there = network
        self.kept = _Kept()
        kept, oracle, tables = (
            cast("Any", one) for one in (self.kept, _Oracle(self), _Tables(network))
        )
        self.loads = RowLoads(clock, kept, oracle, tables, retention_min_seconds=0.0)

    async def create_table(self, request: pb.CreateTableRequest) -> pb.CreateTableResponse:
        table, created = await self.loads.create(request, self._deadline())
        self._learn()
        return pb.CreateTableResponse(table=self._tables[table.name], created=created)

    async def change_indexes(self, request: pb.ChangeIndexesRequest) -> pb.ChangeIndexesResponse:
        table = await self.loads.change_indexes(request, self._deadline())
        self._learn()
        return pb.ChangeIndexesResponse(table=table_message(table))

    def _learn(self) -> None:
        used = [one for one in self.kept.current.tables.values() if one.is_used]
        self._tables = {one.name: table_message(one) for one in used}

    async def delete_table(self, request: pb.DeleteTableRequest) -> pb.DeleteTableResponse:
        deleted = await self.loads.delete(request, self._deadline())
        self._learn()
        return pb.DeleteTableResponse(deleted=deleted)

    async def begin_load(self, request: pb.BeginLoadRequest) -> pb.BeginLoadResponse:
        table = await self.loads.begin_load(request, self._deadline())
        return pb.BeginLoadResponse(table=None if table is None else table_message(table))

    async def publish_loads(self, request: pb.PublishLoadsRequest) -> pb.PublishLoadsResponse:
        tables = await self.loads.publish_loads(request, self._deadline())
        self._learn()
        return pb.PublishLoadsResponse(tables=map(table_message, tables))

    async def abandon_load(self, request: pb.AbandonLoadRequest) -> pb.AbandonLoadResponse:
        return await self.loads.abandon_load(request, self._deadline())

    async def remove_dropped(self) -> None:
        """As a round of collection does."""
        for table in list(self.kept.current.tables.values()):
            if table.deleting:
                await delete_table(self._there, MODEL, table.table_id, LOADING_SECONDS)
                self.kept.current = self.kept.current.without_table(table.table_id)

    @property
    def newest_timestamp(self) -> int:
        """A new one."""
        return self._allocate(1)

    def _deadline(self) -> float:
        return self._clock.monotonic_seconds() + LOADING_SECONDS


class _Oracle:
    """The cluster's, as a master asks it."""

    def __init__(self, cluster: LoadingCluster) -> None:
        self._cluster = cluster

    def source(self) -> _Oracle:
        return self

    async def get(self, *, timeout_seconds: float) -> int:
        return self._cluster.newest_timestamp

    async def raise_epoch(self, deadline: float) -> None:
        self._cluster.raise_epoch()


class _Tables:
    """The store's tables."""

    name = "the model"

    def __init__(self, network: Network) -> None:
        self._network = network

    async def create_table(self, table_id: int) -> None:
        await create_table(self._network, MODEL, table_id, LOADING_SECONDS)

    async def require_empty(self, table_id: int) -> None:
        """It is: nobody else makes tables here."""


class Loading(NamedTuple):
    """Parts that tests of bulk loads use."""

    database: aio.Database
    cluster: LoadingCluster
    store: BigtableStore
    network: InProcessNetwork


@asynccontextmanager
async def loading() -> AsyncIterator[Loading]:
    clock = MachineClock()
    there = InProcessNetwork({MODEL.address: BigtableInMemory()})
    cluster = LoadingCluster(clock, there)
    await create_table(there, MODEL, INTENTS_TABLE, LOADING_SECONDS)
    here = InProcessNetwork({ADDRESS: cluster})
    world = World(clock=clock, network=here, random=random.Random(1))
    store = BigtableStore(there, MODEL)
    rows = Rows(store, Times(clock.wall_milliseconds() - 86_400_000))
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy(), rows=rows) as database:
        yield Loading(database, cluster, store, there)
