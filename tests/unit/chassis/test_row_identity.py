"""A row store belongs to one cluster, and says to which."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from percolator.bigtable.admin import create_table
from percolator.errors import InvalidArgument, SchemaError, StoreUnusable, WrongCluster
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID
from percolator.services.chassis.cluster_store import RowClusterStore
from percolator.services.chassis.row_coordinator import Records
from percolator.testing.bigtable_in_memory import BigtableInMemory, ModelTable
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock


class Instance:
    """An instance of the model, and processes that open it."""

    def __init__(self) -> None:
        self.model = BigtableInMemory()
        self.network = InProcessNetwork({MODEL.address: self.model})
        self._clock = VirtualClock(asyncio.get_running_loop())
        self._seeds = iter(range(100))

    def opened(self) -> RowClusterStore:
        chance = random.Random(next(self._seeds))
        return RowClusterStore(self.network, MODEL, World(self._clock, self.network, chance))

    async def stored(self, content: dict[str, Any] | bytes) -> None:
        await create_table(self.network, MODEL, TABLE_ID, 1.0)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        await Records(self.opened().store, self.opened()._world).put(CLUSTER, {IDENTITY: data})


async def test_masters_that_start_together_agree_on_one_identity() -> None:
    instance = Instance()
    stores = [instance.opened() for _ in range(4)]
    found = await asyncio.gather(*(store.establish_identity() for store in stores))
    assert len(set(found)) == 1
    assert await instance.opened().establish_identity() == found[0]
    clock = instance._clock.wall_milliseconds()
    assert 0 <= found[0].epoch_milliseconds <= clock - 86_400_000


async def test_a_store_without_a_master_belongs_to_no_cluster() -> None:
    with pytest.raises(
        InvalidArgument, match="belongs to no cluster yet: start a master"
    ) as caught:
        await Instance().opened().refuse_other_cluster("")
    assert caught.value.field == "store"


async def test_the_store_of_another_cluster_is_refused_and_both_are_named() -> None:
    instance = Instance()
    identity = await instance.opened().establish_identity()
    await instance.opened().refuse_other_cluster(identity.cluster_id)
    await instance.opened().refuse_other_cluster("")
    with pytest.raises(WrongCluster) as caught:
        await instance.opened().refuse_other_cluster("another")
    said = f"{MODEL} belongs to cluster {identity.cluster_id}, the masters to cluster another"
    assert said in str(caught.value)


async def test_a_table_of_that_name_with_other_families_is_refused_by_its_name() -> None:
    instance = Instance()
    instance.model.tables[MODEL.table(TABLE_ID)] = ModelTable(MODEL.table(TABLE_ID), ["cf1"])
    with pytest.raises(SchemaError, match="percolator-0 was made by another program, or changed"):
        await instance.opened().establish_identity()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        ({"cluster_id": "a", "format": 1}, "epoch_milliseconds is None"),
        ({"cluster_id": "a", "format": 1, "epoch_milliseconds": -1}, "epoch_milliseconds is -1"),
        ({"cluster_id": "", "format": 1, "epoch_milliseconds": 1}, "cluster_id is ''"),
    ],
)
async def test_a_damaged_identity_is_refused(content: dict[str, Any] | bytes, says: str) -> None:
    instance = Instance()
    await instance.stored(content)
    with pytest.raises(StoreUnusable, match=says):
        await instance.opened().establish_identity()


async def test_a_store_of_a_newer_release_is_refused() -> None:
    instance = Instance()
    await instance.stored({"cluster_id": "a", "format": 3, "epoch_milliseconds": 1})
    with pytest.raises(WrongCluster, match="has format 3"):
        await instance.opened().establish_identity()
