"""A database in memory whose tablets are loaded in bulk, for tests of imports."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from percolator import aio
from percolator.aio.connecting import connect_to
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.local_database import PATIENT_LIMITS, PATIENT_RETRIES
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import MachineClock, World


class LoadedCluster(ClusterInMemory):
    """Its tablets answer what a bulk load asks, too."""

    async def fence(self, request: pb.FenceRequest) -> pb.FenceResponse:
        return await self._serving(request.target).fence(request)

    async def load(self, request: pb.LoadRequest) -> pb.LoadResponse:
        return await self._serving(request.target).load(request)


class Loaded(NamedTuple):
    """What tests use."""

    database: aio.Database
    cluster: LoadedCluster

    async def closed(self) -> list[str]:
        """The names of the tables of which some rows are closed for a bulk load."""
        infos = await self.database.internal.engine.catalog.tables(
            self.database.internal.engine.now() + 10
        )
        return [
            info.name
            for info in infos
            if any(
                len(list(tablet._state.load_fences))
                for tablet in self.cluster.tablets.values()
                if tablet.identity.table_id == info.table_id
            )
        ]


@asynccontextmanager
async def loaded_tablets() -> AsyncIterator[Loaded]:
    clock = MachineClock()
    cluster = LoadedCluster(clock)
    network = InProcessNetwork({ADDRESS: cluster})
    world = World(clock=clock, network=network, random=random.Random(1))
    async with await connect_to(world, [ADDRESS], PATIENT_LIMITS, PATIENT_RETRIES) as database:
        yield Loaded(database, cluster)
