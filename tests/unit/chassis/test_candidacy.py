"""One candidacy for every role: who serves, what a candidate answers, and how a term ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from percolator.errors import NotReady, StoreFault, StoreUnusable
from percolator.services.chassis.coordinator import Candidacy, Leadership
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
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
