"""Everything works again once each probe has succeeded that began after the strike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.pulse import NoRecovery, Pulse, now


class Way:
    """One way to use the cluster, which may be broken."""

    def __init__(self) -> None:
        self.works = asyncio.Event()
        self.works.set()

    async def use(self) -> None:
        await asyncio.sleep(0.1)
        await self.works.wait()


@asynccontextmanager
async def running(*ways: Way) -> AsyncIterator[Pulse]:
    pulse = Pulse({f"way {number}": way.use for number, way in enumerate(ways)}, 30.0)
    task = asyncio.create_task(pulse.run())
    try:
        yield pulse
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_healthy_cluster_works_as_soon_as_the_slowest_probe_was_repeated() -> None:
    async with running(Way(), Way()) as pulse:
        await asyncio.sleep(1.02)
        assert 0.1 <= await pulse.works_since(now()) <= 0.3


async def test_it_does_not_work_while_a_single_way_is_broken() -> None:
    broken = Way()
    async with running(Way(), broken) as pulse:
        await asyncio.sleep(1.0)
        broken.works.clear()
        struck = now()
        asyncio.get_running_loop().call_later(5.0, broken.works.set)
        assert 5.0 < await pulse.works_since(struck) < 5.5


async def test_a_probe_that_began_before_the_strike_does_not_count() -> None:
    way = Way()
    async with running(way) as pulse:
        await asyncio.sleep(0.05)  # in the middle of the first probe
        assert await pulse.works_since(now()) > 0.15


async def test_what_does_not_work_within_the_limit_is_named() -> None:
    broken = Way()
    broken.works.clear()
    pulse = Pulse({"orders": broken.use, "reads": Way().use}, 30.0)
    task = asyncio.create_task(pulse.run())
    with pytest.raises(NoRecovery, match="orders: not for 30 s"):
        await pulse.works_since(now())
    with pytest.raises(ExceptionGroup) as group:
        await task
    assert "orders: nothing has worked for 30 s" in str(group.value.exceptions[0])
