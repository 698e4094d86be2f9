"""A process notices that its row store is silent, and that it is not its cluster's any more."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import structlog

from percolator.bigtable.admin import delete_table
from percolator.errors import StoreFault, StoreUnusable, Unavailable
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID
from percolator.services.chassis import cluster_store
from percolator.services.chassis.cluster_store import (
    RowClusterStore,
    RowIdentity,
    RowStoreWatch,
)
from percolator.services.chassis.row_coordinator import Records
from percolator.services.chassis.store_watch import LOOK_SECONDS, STALLED_SECONDS
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock


class Watched:
    """A store of the model, the process that watches it, and what that was told."""

    def __init__(self) -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        self.network = InProcessNetwork({MODEL.address: BigtableInMemory()})
        world = World(clock, self.network, random.Random(1))
        self.store = RowClusterStore(self.network, MODEL, world)
        self.records = Records(self.store.store, world)
        self.world = world
        self.is_silent = False
        self.stalled: list[bool] = []
        self.gone: list[str] = []

    async def look(self) -> RowIdentity | None:
        if self.is_silent:
            raise StoreUnusable("no answer", fault=StoreFault.INPUT_OUTPUT) from Unavailable(
                "no answer"
            )
        return await cluster_store.read(self.records, str(MODEL))

    async def looks(self, seconds: float = 2 * LOOK_SECONDS) -> None:
        await self.world.clock.sleep(seconds)


@asynccontextmanager
async def _watched() -> AsyncIterator[Watched]:
    one = Watched()
    identity = await one.store.establish_identity()
    made = partial(
        RowStoreWatch, one.look, identity, str(MODEL), one.world.clock, structlog.get_logger()
    )
    running = asyncio.create_task(made(stalled=one.stalled.append, gone=one.gone.append).run())
    try:
        await one.looks()
        assert not one.gone
        yield one
    finally:
        running.cancel()


async def test_a_store_without_its_tables_is_gone() -> None:
    async with _watched() as one:
        await delete_table(one.network, MODEL, TABLE_ID, 1.0)
        await one.looks()
        (reason,) = one.gone
        assert reason.startswith(f"{MODEL} now belongs to no cluster: its tables were deleted")
        assert one.stalled == []


async def test_a_store_that_another_cluster_has_taken_is_gone_and_the_other_is_named() -> None:
    async with _watched() as one:
        other = {"cluster_id": "another", "format": 1, "epoch_milliseconds": 1}
        await one.records.put(CLUSTER, {IDENTITY: json.dumps(other).encode()})
        await one.looks()
        (reason,) = one.gone
        assert "now belongs to cluster another" in reason


@pytest.mark.parametrize(("seconds", "told"), [(1.0, []), (2 * STALLED_SECONDS, [True, False])])
async def test_a_store_that_is_silent_for_long_stalls_the_process_until_it_answers(
    seconds: float, told: list[bool]
) -> None:
    async with _watched() as one:
        one.is_silent = True
        await one.looks(seconds)
        assert one.stalled == told[:1]
        one.is_silent = False
        await one.looks()
        assert (one.stalled, one.gone) == (told, [])
