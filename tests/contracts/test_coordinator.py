"""What every back end of the coordinator promises. To add one, add a line to `BACK_ENDS`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from percolator.errors import InvalidArgument, NotReady, StoreFault, StoreUnusable
from percolator.testing.simulator.virtual_time import VirtualClock
from percolator.world import Clock, MachineClock
from services.chassis.coordinator.directory import CoordinatorTimes, DirectoryCoordinator
from services.chassis.coordinator.interface import Coordinator, Leadership
from services.chassis.store.files import FileLock, Files
from services.chassis.store.real_files import RealFiles
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles

TIMES = CoordinatorTimes(beat_seconds=0.02, grace_seconds=0.4, poll_seconds=0.01)


class PausableFiles:
    """The files of a process that can be stopped between any two system calls."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.running = asyncio.Event()
        self.running.set()
        self.locks: list[FileLock] = []
        self.pause_after = ""
        """The system call after which the process pauses."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments: Any, **named: Any) -> Any:
            await self.running.wait()
            result = await found(*arguments, **named)
            if name == "lock":
                self.locks.append(result)
            if name == self.pause_after:
                self.running.clear()
                await self.running.wait()
            return result

        return call


class Process:
    """One process, with its own access to the coordinator."""

    def __init__(self, files: Files, clock: Clock, root: Path) -> None:
        self.files = PausableFiles(files)
        self.coordinator: Coordinator = DirectoryCoordinator(
            cast("Files", self.files), clock, root, TIMES
        )

    def pause(self) -> None:
        self.files.running.clear()

    def resume(self) -> None:
        self.files.running.set()

    def kill(self) -> None:
        """It does nothing more, and the operating system frees what it held for it."""
        self.pause()
        for lock in self.files.locks:
            lock.release()


class Directories:
    """The directory back end, on real files or in memory."""

    def __init__(self, root: Path, disk: MemoryDisk | None) -> None:
        self._root = root
        self._disk = disk
        self.clock: Clock = (
            MachineClock() if disk is None else VirtualClock(asyncio.get_running_loop())
        )
        self._started: list[Process] = []

    def process(self) -> Process:
        files: Files = RealFiles() if self._disk is None else MemoryFiles(self._disk)
        started = Process(files, self.clock, self._root)
        self._started.append(started)
        return started

    async def close(self) -> None:
        for process in self._started:
            process.resume()
            await process.coordinator.close()


BackEnd = Callable[[], Any]

BACK_ENDS = [
    pytest.param("memory", id="directory in memory"),
    pytest.param("real", id="directory", marks=pytest.mark.real_time),
]


@pytest.fixture(params=BACK_ENDS)
def back_end(request: pytest.FixtureRequest, tmp_path: Path) -> BackEnd:
    @asynccontextmanager
    async def opened() -> AsyncIterator[Directories]:
        disk = None
        if request.param == "memory":
            disk = MemoryDisk()
            disk.make_durable_directory(tmp_path)
        directories = Directories(tmp_path, disk)
        yield directories
        await directories.close()

    return opened


async def soon(work: Awaitable[Leadership]) -> Leadership:
    return await asyncio.wait_for(work, 10)


async def is_waiting(task: asyncio.Task[Any], clock: Clock, seconds: float) -> bool:
    await clock.sleep(seconds)
    return not task.done()


async def test_what_a_leader_wrote_is_read_by_it_and_by_all_others(back_end: BackEnd) -> None:
    async with back_end() as directories:
        leader, other = directories.process(), directories.process()
        led = await soon(leader.coordinator.campaign("master", "a:1"))
        assert await led.get("map") is None
        await led.put("map", b"one")
        await led.put("map", b"two")
        assert await led.get("map") == b"two"
        assert await other.coordinator.read("master", "map") == b"two"
        found = await other.coordinator.leader("master")
        assert found is not None
        assert (found.epoch, found.holder) == (led.epoch, "a:1")


async def test_a_role_that_never_had_a_leader_has_no_values(back_end: BackEnd) -> None:
    async with back_end() as directories:
        coordinator = directories.process().coordinator
        assert await coordinator.leader("master") is None
        assert await coordinator.read("master", "map") is None


async def test_while_a_leader_lives_candidates_wait(back_end: BackEnd) -> None:
    async with back_end() as directories:
        led = await soon(directories.process().coordinator.campaign("master", "a:1"))
        waiting = asyncio.create_task(directories.process().coordinator.campaign("master", "b:1"))
        assert await is_waiting(waiting, directories.clock, 3 * TIMES.grace_seconds)
        assert await led.stands()
        waiting.cancel()


async def test_a_leader_that_a_candidate_knows_to_be_lost_is_replaced_though_it_lives(
    back_end: BackEnd,
) -> None:
    async with back_end() as directories:
        first = await soon(directories.process().coordinator.campaign("oracle", "a:1"))
        await first.put("mark", b"one")
        lost = [""]
        candidate = directories.process().coordinator
        waiting = asyncio.create_task(candidate.campaign("oracle", "b:1", lambda: lost[-1]))
        assert await is_waiting(waiting, directories.clock, 2 * TIMES.grace_seconds)
        lost.append("another:1")
        assert await is_waiting(waiting, directories.clock, 2 * TIMES.grace_seconds)
        lost.append("a:1")
        second = await soon(waiting)
        assert await second.get("mark") == b"one"
        assert not await first.stands()
        with pytest.raises(NotReady):
            await first.put("mark", b"late")


async def test_after_a_leader_resigned_the_next_one_has_its_values(back_end: BackEnd) -> None:
    async with back_end() as directories:
        first = await soon(directories.process().coordinator.campaign("master", "a:1"))
        await first.put("map", b"one")
        await first.resign()
        second = await soon(directories.process().coordinator.campaign("master", "b:1"))
        assert second.epoch > first.epoch
        assert await second.get("map") == b"one"
        with pytest.raises(NotReady):
            await first.check()
        with pytest.raises(NotReady):
            await first.put("map", b"late")
        assert await second.get("map") == b"one"


async def test_a_killed_leader_is_replaced_long_before_the_grace_is_over(
    back_end: BackEnd,
) -> None:
    async with back_end() as directories:
        killed = directories.process()
        await soon(killed.coordinator.campaign("master", "a:1"))
        killed.kill()
        started = directories.clock.monotonic_seconds()
        await soon(directories.process().coordinator.campaign("master", "b:1"))
        assert directories.clock.monotonic_seconds() - started < TIMES.grace_seconds


async def test_a_paused_leader_is_replaced_and_refuses_to_answer_when_it_wakes(
    back_end: BackEnd,
) -> None:
    async with back_end() as directories:
        paused = directories.process()
        first = await soon(paused.coordinator.campaign("oracle", "a:1"))
        await first.put("mark", b"100")
        paused.pause()
        late = asyncio.create_task(first.put("mark", b"200"))
        second = await soon(directories.process().coordinator.campaign("oracle", "b:1"))
        assert await second.get("mark") == b"100"
        paused.resume()
        assert not await first.stands()
        with pytest.raises((NotReady, StoreUnusable)):
            await late
        with pytest.raises(NotReady):
            await first.get("mark")
        assert await second.get("mark") == b"100"
        assert await second.stands()


async def test_a_leader_paused_after_its_value_was_durable_does_not_say_so(
    back_end: BackEnd,
) -> None:
    """Its successor may have read the value or not: only a check after the pause can tell."""
    async with back_end() as directories:
        paused = directories.process()
        first = await soon(paused.coordinator.campaign("master", "a:1"))
        paused.files.pause_after = "fsync_directory"
        late = asyncio.create_task(first.put("map", b"one"))
        second = await soon(directories.process().coordinator.campaign("master", "b:1"))
        await second.put("map", b"two")
        paused.resume()
        with pytest.raises(NotReady):
            await late
        assert await second.get("map") == b"two"


async def test_a_successor_of_a_paused_leader_is_itself_replaced_at_once_when_killed(
    back_end: BackEnd,
) -> None:
    """It did not get the lock of the paused leader, and gets it as soon as that one wakes."""
    async with back_end() as directories:
        paused, second = directories.process(), directories.process()
        first = await soon(paused.coordinator.campaign("master", "a:1"))
        paused.pause()
        await soon(second.coordinator.campaign("master", "b:1"))
        paused.resume()
        await first.resign()
        await directories.clock.sleep(5 * TIMES.beat_seconds)
        second.kill()
        started = directories.clock.monotonic_seconds()
        await soon(directories.process().coordinator.campaign("master", "c:1"))
        assert directories.clock.monotonic_seconds() - started < TIMES.grace_seconds


async def test_of_many_candidates_one_leads_at_a_time(back_end: BackEnd) -> None:
    async with back_end() as directories:
        order: list[int] = []

        async def serve_a_term(number: int) -> None:
            led = await soon(directories.process().coordinator.campaign("master", f"h:{number}"))
            value = await led.get("terms") or b""
            await led.put("terms", value + b"%d," % number)
            order.append(number)
            await led.resign()

        await asyncio.gather(*(serve_a_term(number) for number in range(1, 6)))
        found = await directories.process().coordinator.read("master", "terms")
        assert found == b"".join(b"%d," % number for number in order)
        assert len(order) == 5


async def test_roles_do_not_touch_each_other(back_end: BackEnd) -> None:
    async with back_end() as directories:
        coordinator = directories.process().coordinator
        master = await soon(coordinator.campaign("master", "a:1"))
        oracle = await soon(coordinator.campaign("oracle", "a:2"))
        await master.put("mark", b"m")
        assert await oracle.get("mark") is None
        assert await master.stands()
        assert await oracle.stands()


async def test_watching_shows_the_value_now_and_every_later_change(back_end: BackEnd) -> None:
    async with back_end() as directories:
        led = await soon(directories.process().coordinator.campaign("master", "a:1"))
        values = directories.process().coordinator.watch("master", "map")
        assert await anext(values) is None
        await led.put("map", b"one")
        assert await anext(values) == b"one"
        await led.put("map", b"two")
        assert await anext(values) == b"two"
        await values.aclose()


async def test_sessions_are_listed_while_their_owners_live(back_end: BackEnd) -> None:
    async with back_end() as directories:
        stays, leaves, dies = (directories.process() for _ in range(3))
        await stays.coordinator.open_session("master-1", b"stays")
        left = await leaves.coordinator.open_session("master-2", b"leaves")
        await dies.coordinator.open_session("master-3", b"dies")
        await stays.coordinator.open_session("worker-1", b"another kind")
        reader = directories.process().coordinator
        assert set((await reader.sessions("master-")).values()) == {b"stays", b"leaves", b"dies"}
        await left.close()
        dies.kill()
        assert set(await reader.sessions("master-")) == {"master-1", "master-3"}
        for _ in range(40):
            await directories.clock.sleep(TIMES.grace_seconds / 20)
            await reader.sessions("master-")
        assert await reader.sessions("master-") == {"master-1": b"stays"}


@pytest.mark.parametrize("name", ["", "Map", "../map", "a/b", "x" * 101, "-", "a.new"])
async def test_names_that_no_back_end_could_store_are_refused(back_end: BackEnd, name: str) -> None:
    async with back_end() as directories:
        coordinator = directories.process().coordinator
        with pytest.raises(InvalidArgument) as role:
            await coordinator.campaign(name, "a:1")
        assert role.value.field == "role"
        led = await soon(coordinator.campaign("master", "a:1"))
        with pytest.raises(InvalidArgument) as key:
            await led.put(name, b"")
        assert key.value.field == "key"


async def test_a_damaged_value_is_refused_and_never_guessed(
    back_end: BackEnd, tmp_path: Path
) -> None:
    async with back_end() as directories:
        process = directories.process()
        led = await soon(process.coordinator.campaign("master", "a:1"))
        await led.put("map", b"all tablets")
        path = tmp_path / "coordinator" / "master" / f"e{led.epoch}" / "map"
        whole = await process.files.read(path, bytes_max=1000)
        for damaged in (b"", whole[:-1], whole + b"x", whole.replace(b"all", b"few")):
            async with await process.files.create(path, exclusive=False) as file:
                await file.append(damaged)
            with pytest.raises(StoreUnusable) as caught:
                await led.get("map")
            assert caught.value.fault is StoreFault.DAMAGED
