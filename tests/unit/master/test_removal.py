"""What deleted tables leave behind is removed, and what cannot be removed is told once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from percolator.errors import CellAddress, DeadlineExceeded
from percolator.formats.records import LockRecord, RecordKind
from percolator.v1 import cells_pb2
from percolator.v1 import master_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
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
    await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name=name))
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


class Locks:
    """The locks that a tablet server finds in its tablets."""

    def __init__(self) -> None:
        self.primary_tables: dict[int, int] = {}
        """The table of a lock's primary, by the tablet of the lock."""

    async def scan_cells(
        self, request: tablets.ScanCellsRequest
    ) -> AsyncIterator[tablets.ScanCellsResponse]:
        table = self.primary_tables.get(request.target.tablet_id)
        if table is not None:
            lock = LockRecord(
                7, 0, 1000, RecordKind.PUT, b"", CellAddress(table, b"r", b"c")
            ).encode()
            cell = cells_pb2.Cell(row=b"r", column=b"c", value=lock)
            yield tablets.ScanCellsResponse(cells=[cell])


async def test_a_damaged_tablet_of_a_deleted_table_is_removed_unless_a_lock_points_into_it() -> (
    None
):
    """Its owner has taken it over, so that nothing can begin there, whether it can be opened or
    not."""
    async with cluster("a:1", "b:1") as world:
        locks = Locks()
        for address, server in world.servers.items():
            world.network.handlers[address] = (server, locks)
        damaged, other = await create(world, "damaged"), await create(world, "other")
        lost = (await world.locate(damaged))[0]
        world.store.tablets[lost.tablet_id].unreadable = True
        locks.primary_tables[(await world.locate(other))[0].tablet_id] = damaged
        await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="damaged"))
        leader = world.masters[0].master.leader
        assert leader is not None
        await asyncio.sleep(30)
        assert damaged in leader.store.current.tables
        locks.primary_tables.clear()
        await asyncio.sleep(3)
        assert damaged not in leader.store.current.tables


async def test_a_deleted_table_stays_until_every_tablet_was_taken_over() -> None:
    """Until then a former owner may still accept a transaction there."""
    async with cluster("a:1", "b:1") as world:
        table = await create(world, "t")
        lost = (await world.locate(table))[0]
        world.store.tablets[lost.tablet_id].damaged = True
        with pytest.raises(DeadlineExceeded, match=r"not in force everywhere yet.*nothing there"):
            await world.ask(methods.DELETE_TABLE, pb.DeleteTableRequest(name="t"), 90)
        leader = world.masters[0].master.leader
        assert leader is not None
        await asyncio.sleep(30)
        assert table in leader.store.current.tables
