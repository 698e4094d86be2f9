"""The mark as a leading oracle has it, on files in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import make_durable_directory
from percolator.services.oracle.oracle import ROLE, DurableMark
from percolator.world import Clock
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock

STORE = Path("/store")


async def open_mark(
    files: MemoryFiles, clock: Clock | None = None, *, cluster_id: str = ""
) -> DurableMark:
    """Waits until it leads."""
    clock = clock or VirtualClock(asyncio.get_running_loop())
    await make_durable_directory(files, STORE)
    leadership = await DirectoryCoordinator(files, clock, STORE).campaign(ROLE, "me:1")
    try:
        return await DurableMark.open(leadership, cluster_id=cluster_id)
    except Exception:
        await leadership.resign()
        raise


# A clock that stands still until a test moves it.


class HandClock:
    """The wall clock may jump; the monotonic clock only advances."""

    def __init__(self, wall_milliseconds: int = 1_800_000_000_000) -> None:
        self.wall = wall_milliseconds
        self.monotonic = 1000.0

    def wall_milliseconds(self) -> int:
        return self.wall

    def monotonic_seconds(self) -> float:
        return self.monotonic

    async def sleep(self, seconds: float) -> None:
        self.go_on(seconds)

    def go_on(self, seconds: float) -> None:
        """Advances both clocks."""
        self.monotonic += seconds
        self.wall += round(seconds * 1000)
