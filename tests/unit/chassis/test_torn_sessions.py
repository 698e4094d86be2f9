"""Sessions are not synced: a power cut may leave one without its content, or with a part of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock

STORE = Path("/store")
SESSIONS = STORE / "coordinator" / "sessions"
LOOK_SECONDS = 0.1
FORGOTTEN_SECONDS = 61.0


@pytest.mark.parametrize("content", [b"", b"percolator-value 1 40 01"])
async def test_a_session_that_a_power_cut_has_torn_is_not_listed_and_removed_in_the_end(
    content: bytes,
) -> None:
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    clock = VirtualClock(asyncio.get_running_loop())
    files = MemoryFiles(disk)
    coordinator = DirectoryCoordinator(files, clock, STORE)
    await coordinator.open_session("master-1", b"alive")
    async with await files.create(SESSIONS / "master-2") as torn:
        await torn.append(content)
    for _ in range(int(FORGOTTEN_SECONDS / LOOK_SECONDS)):
        assert await coordinator.sessions("master-") == {"master-1": b"alive"}
        await clock.sleep(LOOK_SECONDS)
    assert await files.list(SESSIONS) == ["master-1"]
    await coordinator.close()
