"""A standby that cannot read its store sends callers to another master, as one that cannot lead."""

from __future__ import annotations

import asyncio
import errno

import pytest

from percolator.errors import NotReady
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from tests.unit.master.cluster_world import cluster
from tests.unit.master.tables_of_rows import create


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
async def test_a_standby_that_cannot_read_what_the_leader_recorded_says_so(number: int) -> None:
    """The caller was told that an invariant is violated, and so was whoever is on call."""
    async with cluster("a:1") as world:
        table = await create(world)
        standby = world.start_master()
        await asyncio.sleep(1)
        standby.files.faults.fail("list", times=10**9, number=number)
        locate = world.network.unary(standby.address, methods.LOCATE_TABLETS)
        with pytest.raises(NotReady, match="cannot read what the leader has recorded"):
            await locate(pb.LocateTabletsRequest(table_id=table), 1.0)
        with pytest.raises(NotReady):
            await standby.master.servers()
        world.masters.reverse()
        assert await world.locate(table), "the leader answers"
        standby.files.faults.heal()
        assert (await locate(pb.LocateTabletsRequest(table_id=table), 1.0)).locations
