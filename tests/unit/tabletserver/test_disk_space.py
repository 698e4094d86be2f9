"""Writes are refused while the disk is full, and accepted again without help."""

from __future__ import annotations

import asyncio

import structlog

from percolator.errors import Retry, StoreFault, StoreUnusable
from percolator.services.tabletserver.storage import CHECK_SECONDS, DiskSpace
from tests.simulation.virtual_time import VirtualClock


def refusal(disk: DiskSpace) -> StoreUnusable | None:
    return disk.full


async def test_it_refuses_below_the_reserve_and_recovers_by_itself() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    free = [1000]
    log = structlog.stdlib.get_logger("test")

    async def free_bytes() -> int:
        return free[0]

    disk = DiskSpace(free_bytes, clock, log, reserve_bytes=500)
    watching = asyncio.create_task(disk.watch())
    await disk.check()
    assert refusal(disk) is None
    free[0] = 499
    await clock.sleep(2 * CHECK_SECONDS)
    full = refusal(disk)
    assert full is not None
    assert full.fault is StoreFault.DISK_FULL
    assert full.retry is Retry.SAFE
    free[0] = 500
    await clock.sleep(2 * CHECK_SECONDS)
    assert refusal(disk) is None
    watching.cancel()
