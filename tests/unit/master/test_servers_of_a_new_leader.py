"""A master that begins to lead lists from its first answer on what the leader before has listed."""

from __future__ import annotations

import asyncio

from tests.unit.master.cluster_world import cluster

TURNS = 1_000


async def test_no_answer_of_a_master_that_begins_to_lead_lists_no_servers() -> None:
    """Programs would believe that there are none, until they ask again seconds later."""
    async with cluster("a:1") as world:
        standby = world.start_master()
        await asyncio.sleep(2)

        async def listed() -> list[str]:
            return [one.address for one in await standby.master.servers()]

        before = await listed()
        assert "a:1" in before
        world.kill_master(world.masters[0])
        while standby.master.leader is None:
            assert await listed() == before
            await asyncio.sleep(0 if standby.master.candidacy.leader_address else 0.01)
        for _ in range(TURNS):
            assert set(before) <= set(await listed())
            await asyncio.sleep(0)
