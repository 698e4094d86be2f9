"""A map that is missing, or comes from an older copy, is not taken for that of the tables."""

from __future__ import annotations

import asyncio

from tests.doubles.memory_files import MemoryFiles
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
