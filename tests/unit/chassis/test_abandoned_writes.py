"""Values of a leader whose caller does not wait for the end of the write."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from percolator.errors import StoreUnusable
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock

STORE = Path("/store")


class SlowFiles(MemoryFiles):
    """Creating a file takes a second, and fails while the disk is full."""

    slow = False
    full = False

    async def create(self, path: Path, *, exclusive: bool = True) -> Any:
        if self.slow:
            await asyncio.sleep(1.0)
        if self.full:
            raise OSError(errno.ENOSPC, "disk full")
        return await super().create(path, exclusive=exclusive)


@pytest.mark.parametrize("full", [False, True])
async def test_a_write_whose_caller_leaves_is_not_torn_and_fails_silently(
    full: bool,
) -> None:
    """conftest.py refuses what the event loop would log."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    files = SlowFiles(disk)
    coordinator = DirectoryCoordinator(files, VirtualClock(asyncio.get_running_loop()), STORE)
    leadership = await coordinator.campaign("baker", "a:1")
    await leadership.put("key", b"before")
    files.slow, files.full = True, full
    writing = asyncio.create_task(leadership.put("key", b"after"))
    await asyncio.sleep(0.5)
    writing.cancel()
    await asyncio.wait([writing])
    await asyncio.sleep(3.0)
    files.slow = files.full = False
    assert await leadership.get("key") == (b"before" if full else b"after")
    files.full = True
    with pytest.raises(StoreUnusable):
        await leadership.put("key", b"later")
    files.full = False
    await leadership.resign()
    await coordinator.close()
