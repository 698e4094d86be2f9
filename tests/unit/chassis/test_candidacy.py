"""One candidacy for every role: who serves, what a candidate answers, and how a term ends.

A role whose newest directory was deleted, or is missing in a restored copy, has no leader.

A leader whose signs of life are a little late is not taken for dead.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from percolator.errors import NotReady, StoreFault, StoreUnusable
from percolator.services.chassis.coordinator import (
    BEAT_SECONDS,
    GRACE_SECONDS_MIN,
    Candidacy,
    CoordinatorTimes,
    Leadership,
)
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import Files
from percolator.services.chassis.settings import ServiceSettings, load
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock

STORE = Path("/store")
ROLE = "baker"


class Process:
    """One candidate. Its term is the epoch at which it leads."""

    def __init__(self, disk: MemoryDisk, name: str) -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        self.files = MemoryFiles(disk)
        self.coordinator = DirectoryCoordinator(self.files, clock, STORE)
        self.candidacy: Candidacy[int] = Candidacy(
            self.coordinator, clock, role=ROLE, address=f"{name}:1"
        )

    async def begin(self) -> int:
        return await self.candidacy.begin(_epoch)


async def _epoch(leadership: Leadership) -> int:
    return leadership.epoch


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Process, Process]]:
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    first, second = Process(disk, "a"), Process(disk, "b")
    yield first, second
    for process in (first, second):
        await process.candidacy.end()
        await process.coordinator.close()


@asynccontextmanager
async def waiting(process: Process) -> AsyncIterator[asyncio.Task[int]]:
    """The process has asked for the role and has checked who leads."""
    task = asyncio.create_task(process.begin())
    await asyncio.sleep(1)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_before_anything_is_known_a_candidate_refuses_without_naming_a_leader() -> None:
    async with two() as (first, _):
        with pytest.raises(NotReady) as refused:
            first.candidacy.serving()
        assert str(refused.value) == "this baker does not lead"
        assert refused.value.retry_after_seconds == 0.1


async def test_a_candidate_that_waits_names_the_leader_and_the_leader_serves_its_term() -> None:
    async with two() as (first, second):
        assert await first.begin() == first.candidacy.serving() == 1
        async with waiting(second):
            with pytest.raises(NotReady, match="this baker does not lead; the one at a:1 does"):
                second.candidacy.serving()


async def test_a_term_that_ends_is_followed_at_once_by_the_next_candidate() -> None:
    async with two() as (first, second):
        await first.begin()
        async with waiting(second) as task:
            ended_at = asyncio.get_running_loop().time()
            await first.candidacy.end()
            assert await task == second.candidacy.serving() == 2
            assert asyncio.get_running_loop().time() - ended_at < 0.5
        with pytest.raises(NotReady):
            first.candidacy.serving()


async def test_a_leader_seen_before_a_term_is_not_named_after_it() -> None:
    """It would send callers to a process that may be long gone."""
    async with two() as (first, second):
        await first.begin()
        async with waiting(second) as task:
            await first.candidacy.end()
            await task
            await second.candidacy.end()
            with pytest.raises(NotReady) as refused:
                second.candidacy.serving()
            assert str(refused.value) == "this baker does not lead"


async def test_a_term_that_cannot_be_made_leaves_the_role_to_the_next_candidate() -> None:
    """Otherwise the role would be held by a process that serves nothing."""

    async def fail(leadership: Leadership) -> int:
        raise StoreUnusable("the last map cannot be read", fault=StoreFault.DAMAGED)

    async with two() as (first, second):
        with pytest.raises(StoreUnusable):
            await first.candidacy.begin(fail)
        assert first.candidacy.term is None
        async with asyncio.timeout(0.5):
            assert await second.begin() == 2


async def test_a_start_waits_for_a_decision_and_no_longer() -> None:
    async with two() as (first, second):
        loop = asyncio.get_running_loop()
        await first.candidacy.until_decided(5)
        assert loop.time() >= 5, "nothing was decided, so it waits for the whole time"
        await first.begin()
        async with asyncio.timeout(0.1):
            await first.candidacy.until_decided(5)
        task = asyncio.create_task(second.begin())
        async with asyncio.timeout(0.1):
            await second.candidacy.until_decided(5)
        assert second.candidacy.leader_address == "a:1"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_candidate_goes_on_looking_while_the_coordinator_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(role: str) -> None:
        raise OSError("the disk does not answer")

    async with two() as (first, second):
        await first.begin()
        with monkeypatch.context() as patched:
            patched.setattr(second.coordinator, "leader", fail)
            task = asyncio.create_task(second.begin())
            await asyncio.sleep(1)
            assert second.candidacy.leader_address == ""
        await asyncio.sleep(1)
        assert second.candidacy.leader_address == "a:1"
        await first.candidacy.end()
        assert await task == 2


ROLE_LEADERSHIP = STORE / "coordinator" / "master"
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
        return [name for name in await self.files.list(ROLE_LEADERSHIP) if name.startswith("e")]


async def led_twice() -> Role:
    role = Role()
    for value in (b"one", b"two"):
        await (await role.led(value)).close()
    return role


async def test_nobody_leads_with_what_an_earlier_leader_left() -> None:
    role = await led_twice()
    await role.files.rename(ROLE_LEADERSHIP / "e2", ROLE_LEADERSHIP / "elsewhere")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match=LOST) as caught:
            await role.value()
        assert caught.value.fault is StoreFault.DAMAGED
    await role.files.rename(ROLE_LEADERSHIP / "elsewhere", ROLE_LEADERSHIP / "e2")
    assert await role.value() == b"two"


async def test_a_leader_whose_directory_is_lost_ends_and_nobody_leads_with_less() -> None:
    role = await led_twice()
    leading = role.candidate()
    leadership = await leading.campaign("master", "a:1")
    await leadership.put("map", b"three")
    await role.files.rename(ROLE_LEADERSHIP / "e3", ROLE_LEADERSHIP / "elsewhere")
    with pytest.raises(NotReady):
        await leadership.put("map", b"four")
    await leading.close()
    with pytest.raises(StoreUnusable, match="e3 was in use, but"):
        await role.value()


async def test_who_gives_the_last_directory_up_gives_its_name_to_the_one_before() -> None:
    """docs/formats.md tells operators to do this."""
    role = await led_twice()
    await role.files.rename(ROLE_LEADERSHIP / "e2", ROLE_LEADERSHIP / "elsewhere")
    await role.files.rename(ROLE_LEADERSHIP / "e1.sealed", ROLE_LEADERSHIP / "e2.sealed")
    assert await role.value() == b"one"


@pytest.mark.parametrize("signed", [b"", b"\0", b"1"])
async def test_a_power_cut_that_tears_the_lock_prevents_no_leader(signed: bytes) -> None:
    role = await led_twice()
    async with await role.files.create(ROLE_LEADERSHIP / "lock", exclusive=False) as lock:
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
