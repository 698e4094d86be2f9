"""Many readers that meet one lock at the same moment ask and act as one."""

from __future__ import annotations

import asyncio

import pytest

from percolator.protocol import steps
from percolator.routing.cells import CellMutation

from .cells_and_steps import PATIENT, A, B, address, put, settled, world
from .protocol_world import Client, World

CROWD = 50


async def _left_behind(here: World, *, committed: bool) -> int:
    """Leaves locks on A (the primary) and B by a client that died; returns the start timestamp."""
    dead = here.client(PATIENT)
    commit = dead.commit(await dead.start_timestamp(), {A: put(b"1"), B: put(b"2")})
    await commit._begin_two_phases().prewrite.run(dead.deadline())
    if committed:
        await commit._begin_two_phases().point.reach(dead.deadline())
    dead.crash()
    return commit._write.start


def _asked(client: Client) -> list[CellMutation]:
    return [step for step in client.network.steps if not step.message().changes]


@pytest.mark.parametrize("committed", [True, False])
async def test_a_crowd_of_readers_asks_once_and_settles_once(committed: bool) -> None:
    here = world()
    start = await _left_behind(here, committed=committed)
    client = here.client(PATIENT)
    timestamp = await client.start_timestamp()
    found = await asyncio.gather(*(client.read(B, timestamp) for _ in range(CROWD)))
    assert found == [b"2" if committed else None] * CROWD
    await settled(client)
    assert here.store.lock_of(B) is None
    assert all(step.message() == steps.status(A.row, A.column, start) for step in _asked(client))
    # If they were not shared, there would be as many of each as there are readers.
    assert len(_asked(client)) <= 5
    assert len([step for step in client.network.steps if address(step) == B]) <= 5


async def test_callers_that_joined_are_not_held_up_when_the_first_is_cancelled() -> None:
    here = world()
    await _left_behind(here, committed=True)
    client = here.client(PATIENT)
    timestamp = await client.start_timestamp()
    first = asyncio.ensure_future(client.read(B, timestamp))
    asked = asyncio.Event()

    async def slow(step: CellMutation) -> None:
        if not asked.is_set():
            asked.set()
            await asyncio.sleep(1.0)

    client.network.before_send = slow
    await asked.wait()
    others = [asyncio.ensure_future(client.read(B, timestamp)) for _ in range(3)]
    await asyncio.sleep(0.01)
    first.cancel()
    assert await asyncio.gather(*others) == [b"2"] * 3
    assert here.clock.monotonic_seconds() < 1.0
    await settled(client)
