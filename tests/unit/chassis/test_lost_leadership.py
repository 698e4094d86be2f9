"""A role whose newest directory was deleted, or is missing in a restored copy, has no leader."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from percolator.errors import NotReady, StoreFault, StoreUnusable
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock

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

    async def stages(self) -> list[str]:
        return [name for name in await self.files.list(ROLE) if name.startswith("e")]


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


async def test_what_earlier_leaders_left_and_nobody_can_delete_prevents_no_leader() -> None:
    """As after a run under another account: its directory can be renamed, and not emptied."""
    role = await led_twice()
    role.files.faults.fail("unlink", times=10**6, number=errno.EACCES)
    for value in (b"three", b"four"):
        await (await role.led(value)).close()
    assert await role.value() == b"four"
    role.files.faults.heal()
    await (await role.led(b"five")).close()
    assert await role.stages() == ["e5.sealed", "e6"], "deleted as soon as that is possible"


async def test_a_directory_that_cannot_be_deleted_does_not_keep_those_of_other_leaders() -> None:
    role = await led_twice()
    for value in (b"three", b"four"):
        role.files.faults.fail("unlink", number=errno.EACCES)
        await (await role.led(value)).close()
    assert await role.stages() == ["e1.sealed", "e3.sealed", "e4"]
