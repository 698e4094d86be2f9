"""Tables of a database for tests, when several calls want the same one."""

from __future__ import annotations

import asyncio

from percolator.testing.cluster_in_memory import ClusterInMemory
from percolator.v1 import master_pb2
from percolator.world import MachineClock


async def test_a_table_that_several_calls_create_at_once_is_one_table() -> None:
    cluster = ClusterInMemory(MachineClock())
    request = master_pb2.CreateTableRequest(name="accounts", splits=[b"m"], exist_ok=True)
    made = await asyncio.gather(*(cluster.create_table(request) for _ in range(3)))
    assert [one.created for one in made] == [True, False, False]
    assert len({one.table.table_id for one in made}) == 1
    assert len(cluster.tablets) == 2
