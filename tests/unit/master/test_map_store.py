"""The leading master's map: a change is durable before it takes effect, even if its caller left."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import StoreFault, StoreUnusable
from percolator.services.chassis.coordinator import Leadership
from percolator.services.master.cluster_map import ClusterMap
from percolator.services.master.map_store import MapStore


class SlowLeadership(Leadership):
    """Takes a second to write, and then may fail."""

    def __init__(self) -> None:
        self.failure: StoreUnusable | None = None
        self.values: dict[str, bytes] = {}

    async def put(self, key: str, value: bytes) -> None:
        await asyncio.sleep(1.0)
        if self.failure is not None:
            raise self.failure
        self.values[key] = value


def new_table(current: ClusterMap) -> tuple[ClusterMap, int]:
    changed, table = current.with_new_table(f"t{len(current.tables)}", [], 0, 0)
    return changed, table.table_id


@pytest.mark.parametrize("fails", [False, True])
async def test_a_change_whose_caller_leaves_takes_effect_if_it_is_durable_and_only_then(
    fails: bool,
) -> None:
    """A write that fails then reports to no caller: conftest.py fails on what the loop logs."""
    leadership = SlowLeadership()  # type: ignore[abstract]
    store = MapStore(leadership, ClusterMap())
    if fails:
        leadership.failure = StoreUnusable("disk full", fault=StoreFault.DISK_FULL)
    changing = asyncio.create_task(store.change(new_table))
    await asyncio.sleep(0.5)
    changing.cancel()
    await asyncio.wait([changing])
    await asyncio.sleep(1.0)
    assert len(store.current.tables) == store.changes == len(leadership.values) == (not fails)
