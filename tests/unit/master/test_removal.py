"""What deleted tables leave behind is removed, and what cannot be removed is told once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from percolator.v1 import master_pb2 as wire
from percolator.wire import methods
from tests.doubles.memory_files import MemoryFiles
from tests.unit.master.cluster_world import ROOT, ModelCluster, cluster
from tests.unit.master.tables_of_rows import create

TOLD = "a directory that is no longer needed cannot be removed"


async def deleted(world: ModelCluster, name: str) -> Path:
    """A deleted table, and the directory of its only tablet."""
    table = await create(world, name, splits=[])
    (tablet,) = await world.locate(table)
    directory = ROOT / str(table) / str(tablet.tablet_id)
    world.disk.make_durable_directory(directory / "e1")
    await world.ask(methods.DELETE_TABLE, wire.DeleteTableRequest(name=name))
    return directory


async def test_a_directory_that_cannot_be_removed_does_not_keep_those_of_other_tables() -> None:
    """Such as one that belongs to another user, or into which somebody has put a file."""
    async with cluster("a:1") as world:
        files = MemoryFiles(world.disk)
        kept = await deleted(world, "kept")
        await (await files.create(kept / "e1.tar")).close()
        gone = await deleted(world, "gone")
        with structlog.testing.capture_logs() as log:
            await asyncio.sleep(30)
        assert gone.parent.name not in await files.list(ROOT)
        told = [line for line in log if line["event"] == TOLD]
        assert [line["directory"] for line in told] == [str(kept)]
        leader = world.masters[0].master.leader
        assert leader is not None
        assert len(leader.store.current.retired) == 1
        await files.unlink(kept / "e1.tar")
        await asyncio.sleep(3)
        assert kept.parent.name not in await files.list(ROOT)
