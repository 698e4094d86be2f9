"""A map that is missing, or comes from an older copy, is not taken for that of the tables."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest

from percolator.errors import NotReady, StoreUnusable
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.master.leader import TabletTerms
from percolator.world import World
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.master.cluster_world import ROOT, cluster
from tests.unit.master.tables_of_rows import create, served


async def test_no_master_leads_with_a_map_that_is_older_than_the_tables() -> None:
    """Otherwise it would give their ids to new tables, which would have the cells of the old."""
    async with cluster("a:1") as world:
        table = await create(world, splits=[])
        world.kill_master(world.masters[0])
        world.disk.make_durable_directory(ROOT / str(table) / "2")
        files, roles = MemoryFiles(world.disk), ROOT / "coordinator"
        await files.rename(roles / "master", roles / "lost")
        process = world.start_master()
        await asyncio.sleep(10)
        assert process.master.leader is None
        world.kill_master(process)
        await files.rename(roles / "master", roles / "empty")
        await files.rename(roles / "lost", roles / "master")
        world.start_master()
        await world.until(lambda: served(world, table))


@pytest.mark.parametrize(
    ("is_deposed", "error"), [(False, StoreUnusable), (True, NotReady)], ids=["leads", "deposed"]
)
async def test_a_former_leader_does_not_ask_for_its_successors_tables_to_be_moved_away(
    *, is_deposed: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was paused before its term began finds tables that are not in its map."""
    disk, clock = MemoryDisk(), VirtualClock(asyncio.get_running_loop())
    disk.make_durable_directory(ROOT)
    files, anything = MemoryFiles(disk), cast("Any", None)
    leadership = await DirectoryCoordinator(files, clock, ROOT).campaign("master", "a:1")
    correct, directory = leadership.get, ROOT / "coordinator/master/e1"

    async def get(key: str) -> bytes | None:
        found = await correct(key)
        if is_deposed:
            await files.rename(directory, directory.with_name("e1.sealed"))
        disk.make_durable_directory(ROOT / "10" / "11")
        return found

    monkeypatch.setattr(leadership, "get", get)
    terms = TabletTerms(World(clock, anything, Random(1)), files, ROOT, anything)
    with pytest.raises(error):
        await terms.begin(leadership)
    await leadership.resign()
