"""A role whose newest directory was deleted, or is missing in a restored copy, has no leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from percolator.errors import NotReady, StoreFault, StoreUnusable
from percolator.testing.simulator.virtual_time import VirtualClock
from services.chassis.coordinator.directory import DirectoryCoordinator
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles

STORE = Path("/store")
ROLE = STORE / "coordinator" / "master"
LOST = "e2 was in use, but"


class Role:
    """A role whose second leader has written "two" over "one" of the first."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.disk.make_durable_directory(STORE)
        self._clock = VirtualClock(asyncio.get_running_loop())
        self.files = MemoryFiles(self.disk)

    def candidate(self) -> DirectoryCoordinator:
        return DirectoryCoordinator(self.files, self._clock, STORE)

    async def led(self, value: bytes) -> DirectoryCoordinator:
        coordinator = self.candidate()
        leadership = await coordinator.campaign("master", "a:1")
        await leadership.put("map", value)
        return coordinator

    async def value(self) -> bytes | None:
        candidate = self.candidate()
        leadership = await candidate.campaign("master", "b:1")
        found = await leadership.get("map")
        await candidate.close()
        return found


async def led_twice() -> Role:
    role = Role()
    for value in (b"one", b"two"):
        await (await role.led(value)).close()
    return role


async def test_nobody_leads_with_what_an_earlier_leader_left() -> None:
    role = await led_twice()
    await role.files.rename(ROLE / "e2", ROLE / "elsewhere")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match=LOST) as caught:
            await role.value()
        assert caught.value.fault is StoreFault.DAMAGED
    await role.files.rename(ROLE / "elsewhere", ROLE / "e2")
    assert await role.value() == b"two"


async def test_a_leader_whose_directory_is_lost_ends_and_nobody_leads_with_less() -> None:
    role = await led_twice()
    leading = role.candidate()
    leadership = await leading.campaign("master", "a:1")
    await leadership.put("map", b"three")
    await role.files.rename(ROLE / "e3", ROLE / "elsewhere")
    with pytest.raises(NotReady):
        await leadership.put("map", b"four")
    await leading.close()
    with pytest.raises(StoreUnusable, match="e3 was in use, but"):
        await role.value()


async def test_who_gives_the_last_directory_up_gives_its_name_to_the_one_before() -> None:
    """docs/formats.md tells operators to do this."""
    role = await led_twice()
    await role.files.rename(ROLE / "e2", ROLE / "elsewhere")
    await role.files.rename(ROLE / "e1.sealed", ROLE / "e2.sealed")
    assert await role.value() == b"one"


@pytest.mark.parametrize("signed", [b"", b"\0", b"1"])
async def test_a_power_cut_that_tears_the_lock_prevents_no_leader(signed: bytes) -> None:
    role = await led_twice()
    async with await role.files.create(ROLE / "lock", exclusive=False) as lock:
        await lock.append(signed)
    assert await role.value() == b"two"


async def test_who_cannot_clean_up_behind_earlier_leaders_does_not_keep_the_lock() -> None:
    """Its successors would never have it, and no process would notice at once that one is dead."""
    role = await led_twice()
    candidate = role.candidate()
    role.files.faults.fail("unlink")
    with pytest.raises(StoreUnusable):
        await candidate.campaign("master", "a:1")
    await candidate.close()
    lock = await MemoryFiles(role.disk).lock(ROLE / "lock")
    lock.release()
    assert await role.value() == b"two"
