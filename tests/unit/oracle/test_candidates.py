"""Several oracles on one store: one leads, and its successor hands out nothing twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from percolator.errors import DeadlineExceeded, NotReady, PercolatorError, UsageError
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.oracle.candidate import Candidate, Probe, Site
from percolator.services.oracle.oracle import OracleLimits
from percolator.world import Network, UnaryMethod, World
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.oracle.ledgers import STORE
from tests.unit.unary_network import UnaryNetwork

HOUR = 3_600_000
MASTER = "master:1"


class SlowingFiles(MemoryFiles):
    """The files of a process that can be paused: its next system call waits for `running`."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.running = asyncio.Event()
        self.running.set()

    async def step(self, operation: str, path: Path) -> None:
        await self.running.wait()
        await super().step(operation, path)


class Roads:
    """A network between oracles and a master, in which some addresses cannot be reached."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.cut: set[tuple[str, str]] = set()
        """Pairs of (caller, callee)."""

    def seen_from(self, caller: str) -> Network:
        return _Seen(self, caller)


class _Seen(UnaryNetwork):
    def __init__(self, roads: Roads, caller: str) -> None:
        self._roads = roads
        self._caller = caller

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        if (self._caller, address) in self._roads.cut:
            await asyncio.sleep(timeout)
            raise DeadlineExceeded("cut", where=address)
        if address != MASTER:
            await self._roads.processes[address].ask()
        return method.response()


class Process:
    """One oracle and its parts."""

    def __init__(
        self, disk: MemoryDisk, name: str, *, clock_back: int = 0, roads: Roads | None = None
    ) -> None:
        roads = roads or Roads()
        roads.processes[f"{name}:1"] = self
        self.files = SlowingFiles(disk)
        clock = VirtualClock(asyncio.get_running_loop())
        clock.set_wall_back(clock_back)
        self.coordinator = DirectoryCoordinator(self.files, clock, STORE)
        site = Site(clock, str(STORE), f"{name}:1", "", OracleLimits())
        world = World(clock, roads.seen_from(f"{name}:1"), random.Random(name))
        probe = Probe(world, [MASTER], grace_seconds=3.0)
        self.candidate = Candidate(site, self.coordinator, probe)
        self.running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.running = asyncio.create_task(self.candidate.run())

    async def ask(self) -> int:
        return await self.candidate.candidacy.serving().get_timestamps(1)

    async def until_it_leads(self) -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(20):
            while self.candidate.oracle is None:  # noqa: ASYNC110  # virtual time
                await asyncio.sleep(0.01)
        return loop.time() - started

    async def end(self) -> None:
        self.files.running.set()
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)
        await self.coordinator.close()


@asynccontextmanager
async def two(roads: Roads | None = None) -> AsyncIterator[tuple[Process, Process]]:
    """The first one leads. The clock of the second is an hour slow, so only the mark can help."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    roads = roads or Roads()
    first = Process(disk, "a", roads=roads)
    second = Process(disk, "b", clock_back=HOUR, roads=roads)
    first.start()
    await first.until_it_leads()
    second.start()
    await asyncio.sleep(1)
    yield first, second
    await first.end()
    await second.end()


async def test_a_standby_says_who_leads_and_answers_nothing_else() -> None:
    async with two() as (first, second):
        await first.ask()
        with pytest.raises(NotReady, match="the one at a:1 does"):
            await second.ask()


async def test_a_killed_oracle_is_replaced_at_once_and_time_goes_on_above_it() -> None:
    async with two() as (first, second):
        before = await first.ask()
        first.files.kill()
        assert await second.until_it_leads() < 0.5
        assert await second.ask() > before


async def test_a_paused_oracle_is_replaced_after_its_silence_and_refuses_when_it_wakes() -> None:
    async with two() as (first, second):
        before = await first.ask()
        first.files.running.clear()
        assert 2.5 < await second.until_it_leads() < 4
        after = await second.ask()
        assert after > before
        # Not even from the window that it had made durable before.
        with pytest.raises(PercolatorError):
            await first.ask()
        first.files.running.set()
        await asyncio.sleep(5)
        with pytest.raises(NotReady, match="the one at b:1 does"):
            await first.ask()
        assert await second.ask() > after


async def test_however_often_leaders_change_no_timestamp_is_handed_out_twice() -> None:
    async with two() as (first, second):
        given = [await first.ask()]
        for leader, other in [(first, second), (second, first)] * 4:
            leader.files.running.clear()
            await other.until_it_leads()
            leader.files.running.set()
            given += [await other.ask() for _ in range(100)]
            await asyncio.sleep(3)
        assert given == sorted(set(given))


async def test_a_leader_that_cannot_be_reached_is_replaced_though_it_writes_to_the_store() -> None:
    roads = Roads()
    async with two(roads) as (first, second):
        before = await first.ask()
        roads.cut |= {("b:1", "a:1")}
        assert 2.5 < await second.until_it_leads() < 6
        assert await second.ask() > before
        with pytest.raises(NotReady):
            await first.ask()


async def test_a_standby_that_is_cut_off_itself_does_not_depose_the_leader() -> None:
    roads = Roads()
    async with two(roads) as (first, second):
        roads.cut |= {("b:1", "a:1"), ("b:1", MASTER)}
        await asyncio.sleep(30)
        await first.ask()
        with pytest.raises(NotReady):
            await second.ask()


async def test_two_that_cannot_reach_each_other_take_turns_less_and_less_often() -> None:
    """Each change makes time jump, and makes clients wait."""
    roads = Roads()
    async with two(roads) as (first, _):
        roads.cut |= {("b:1", "a:1"), ("a:1", "b:1")}
        changes, leader = 0, "a:1"
        for _ in range(1_200):
            await asyncio.sleep(0.1)
            found = await first.coordinator.leader("oracle")
            if found is not None and found.holder != leader:
                changes, leader = changes + 1, found.holder
        # Without the growing pauses there would be one every three seconds, 40 in all.
        assert 1 <= changes <= 16


async def test_an_oracle_without_standby_refuses_to_start_when_another_one_leads() -> None:
    async with two() as (first, _):
        third = Process(first.files.disk, "c")
        with pytest.raises(UsageError, match=r"another oracle, the one at a:1; with --standby"):
            await third.candidate.lead_within(5)
        await first.ask()
        await third.end()


async def test_an_oracle_whose_store_was_emptied_goes_on_above_what_it_handed_out() -> None:
    """The process still knows what the store has lost."""
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    oracle = Process(disk, "a")
    oracle.start()
    await oracle.until_it_leads()
    await asyncio.sleep(3)
    mark = oracle.candidate.candidacy.serving().mark_milliseconds
    await oracle.files.rename(STORE / "coordinator", STORE / "elsewhere")
    with pytest.raises(NotReady):
        await oracle.ask()
    await asyncio.sleep(3)
    assert await oracle.ask() >= mark << 18
    await oracle.end()
