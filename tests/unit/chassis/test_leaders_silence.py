"""A leader whose signs of life are a little late is not taken for dead."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from percolator.services.chassis.coordinator import (
    BEAT_SECONDS,
    GRACE_SECONDS_MIN,
    CoordinatorTimes,
)
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import Files
from percolator.services.chassis.settings import ServiceSettings, load
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock

STORE = Path("/store")
LATE_SECONDS = 0.6 * BEAT_SECONDS
"""What a busy machine adds to the interval between two signs of life."""


class SlowFiles:
    """Every file takes a while to be created."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    async def create(self, *arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(LATE_SECONDS)
        return await self._files.create(*arguments, **named)


async def test_a_leader_that_is_a_little_late_is_not_replaced_within_the_shortest_silence() -> None:
    disk, clock = MemoryDisk(), VirtualClock(asyncio.get_running_loop())
    disk.make_durable_directory(STORE)
    slow = cast("Files", SlowFiles(MemoryFiles(disk)))
    leading = DirectoryCoordinator(slow, clock, STORE)
    times = CoordinatorTimes(grace_seconds=GRACE_SECONDS_MIN)
    standing_by = DirectoryCoordinator(MemoryFiles(disk), clock, STORE, times)
    leader = await leading.campaign("oracle", "a:1")
    campaign = asyncio.create_task(standing_by.campaign("oracle", "b:1"))
    await asyncio.sleep(100 * BEAT_SECONDS)
    assert not campaign.done()
    await leader.check()
    campaign.cancel()
    await leading.close()


@pytest.mark.parametrize("settings", [OracleSettings, MasterSettings])
def test_a_silence_shorter_than_two_signs_of_life_is_refused(
    settings: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(settings, ["--store", "/store", "--leader-silence-seconds", "0.9"], {})
    assert "leader_silence_seconds" in capsys.readouterr().err.replace("-", "_")
