"""The back ends of the coordinator, and processes that a test can pause and kill."""

from __future__ import annotations

import asyncio
import inspect
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from percolator.bigtable.admin import create_table
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.port import RowStore, SetCell
from percolator.services.chassis.coordinator import Coordinator, CoordinatorTimes, Leadership
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import FileLock, Files, RealFiles
from percolator.services.chassis.row_coordinator import (
    Records,
    RowCoordinator,
    role_key,
    value_column,
)
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import Clock, MachineClock, Network, World
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.simulation.virtual_time import VirtualClock

TIMES = CoordinatorTimes(beat_seconds=0.02, grace_seconds=0.4, poll_seconds=0.01)


class Pausable:
    """What a process reaches the store through. It can be stopped between any two calls."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.running = asyncio.Event()
        self.running.set()
        self.locks: list[FileLock] = []
        self.pauses_after: Callable[..., bool] = lambda name, *arguments: False
        """The call after which the process pauses."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if inspect.isasyncgenfunction(found):
            return partial(self._streamed, found)
        if not inspect.iscoroutinefunction(found):
            return found
        return partial(self._called, name, found)

    async def _called(self, name: str, found: Any, *arguments: Any, **named: Any) -> Any:
        await self.running.wait()
        result = await found(*arguments, **named)
        if name == "lock":
            self.locks.append(result)
        if self.pauses_after(name, *arguments):
            self.running.clear()
            await self.running.wait()
        return result

    async def _streamed(self, found: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        await self.running.wait()
        async for each in found(*arguments, **named):
            yield each


class Process:
    """One process, with its own access to the coordinator."""

    def __init__(
        self,
        reach: Pausable,
        coordinator: Coordinator,
        writes_value: Callable[..., bool],
    ) -> None:
        """`writes_value` says of a call whether a leader's value is durable after it."""
        self.reach = reach
        self.coordinator = coordinator
        self._writes_value = writes_value

    def pause(self) -> None:
        self.reach.running.clear()

    def pause_after_value(self) -> None:
        self.reach.pauses_after = self._writes_value

    def resume(self) -> None:
        self.reach.pauses_after = lambda name, *arguments: False
        self.reach.running.set()

    def kill(self) -> None:
        """It does nothing more, and the operating system frees what it held for it."""
        self.pause()
        for lock in self.reach.locks:
            lock.release()


class BackEnd(Protocol):
    """A store, and processes that share it."""

    clock: Clock
    death_seconds: float
    """Within this time, a leader that was killed is replaced."""

    def process(self) -> Process: ...

    async def damage(self, led: Leadership, role: str, key: str, data: bytes | None) -> bytes:
        """What is stored for a value, which is replaced by `data` if there is any."""
        ...


class Directories:
    """The directory back end, on real files or in memory."""

    death_seconds = TIMES.grace_seconds
    """A killed process has no lock any more: nobody waits for it to be silent."""

    def __init__(self, root: Path, disk: MemoryDisk | None) -> None:
        self._root = root
        self._disk = disk
        self.clock: Clock = (
            MachineClock() if disk is None else VirtualClock(asyncio.get_running_loop())
        )

    def _files(self) -> Files:
        return RealFiles() if self._disk is None else MemoryFiles(self._disk)

    def process(self) -> Process:
        reach = Pausable(self._files())
        coordinator = DirectoryCoordinator(cast("Files", reach), self.clock, self._root, TIMES)
        return Process(reach, coordinator, lambda name, *arguments: name == "fsync_directory")

    async def damage(self, led: Leadership, role: str, key: str, data: bytes | None) -> bytes:
        path = self._root / "coordinator" / role / f"e{led.epoch}" / key
        files = self._files()
        if data is not None:
            async with await files.create(path, exclusive=False) as file:
                await file.append(data)
        return await files.read(path, bytes_max=1000)


class Rows:
    """The back end in a row store: in a model of Bigtable, or in its emulator."""

    death_seconds = 3 * TIMES.grace_seconds
    """Only its silence tells that a process is dead."""

    def __init__(self, network: Network, place: Place, clock: Clock) -> None:
        self.clock = clock
        self._world = World(clock, network, random.Random(7))
        self._store = BigtableStore(network, place)

    def process(self) -> Process:
        reach = Pausable(self._store)
        records = Records(cast("RowStore", reach), self._world)
        return Process(reach, RowCoordinator(records, self._world, TIMES), _sets_value)

    async def damage(self, led: Leadership, role: str, key: str, data: bytes | None) -> bytes:
        records, row, column = Records(self._store, self._world), role_key(role), value_column(key)
        if data is not None:
            await records.put(row, {column: data})
        return (await records.read(row, [column]))[column]


def _sets_value(name: str, *arguments: Any) -> bool:
    if name != "check_and_mutate":
        return False
    changes = arguments[3]
    return any(isinstance(one, SetCell) and one.column == value_column("map") for one in changes)


BACK_ENDS = [
    pytest.param("memory", id="directory in memory"),
    pytest.param("real", id="directory", marks=pytest.mark.real_time),
    pytest.param("model", id="rows in the model"),
    pytest.param("emulator", id="rows in the emulator", marks=pytest.mark.bigtable),
]


@asynccontextmanager
async def _opened(kind: str, root: Path, emulator: Callable[[], str]) -> AsyncIterator[BackEnd]:
    if kind in ("memory", "real"):
        disk = None
        if kind == "memory":
            disk = MemoryDisk()
            disk.make_durable_directory(root)
        yield Directories(root, disk)
        return
    if kind == "model":
        place = MODEL
        clock: Clock = VirtualClock(asyncio.get_running_loop())
        network: Network = InProcessNetwork({place.address: BigtableInMemory()})
    else:
        place = Place(emulator(), "contracts", f"i{uuid.uuid4().hex}", scans_backwards=False)
        clock, network = MachineClock(), BigtableNetwork()
    await create_table(network, place, TABLE_ID, 10.0)
    yield Rows(network, place, clock)
    await network.close()


Opened = Callable[[], AbstractAsyncContextManager[BackEnd]]


@pytest.fixture(params=BACK_ENDS, name="back_end")
def any_back_end(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    @asynccontextmanager
    async def opened() -> AsyncIterator[BackEnd]:
        emulator = partial(request.getfixturevalue, "emulator_address")
        async with _opened(request.param, tmp_path, emulator) as store:
            started: list[Process] = []
            start = store.process

            def process() -> Process:
                started.append(start())
                return started[-1]

            store.process = process  # type: ignore[method-assign]
            yield store
            for one in started:
                one.resume()
                await one.coordinator.close()

    return opened


async def soon(work: Awaitable[Leadership]) -> Leadership:
    return await asyncio.wait_for(work, 10)


async def is_waiting(task: asyncio.Task[Any], clock: Clock, seconds: float) -> bool:
    await clock.sleep(seconds)
    return not task.done()
