"""Promises of every back end of the coordinator. To add one, see `coordinators.py`."""

from __future__ import annotations

import asyncio
import inspect
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from percolator.bigtable.admin import create_table
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bucket.bucket import Bucket
from percolator.bucket.port import Attempts
from percolator.bucket.s3 import s3_attempts
from percolator.errors import NotReady, StoreFault, StoreUnusable
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.port import RowStore, SetCell
from percolator.services.chassis.coordinator import (
    Coordinator,
    CoordinatorTimes,
    Leadership,
)
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import FileLock, Files, RealFiles
from percolator.services.chassis.record_coordinator import RecordCoordinator, role_key, value_column
from percolator.services.chassis.records import BucketRecords, Records, RowRecords
from percolator.tasks import Tasks
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import Clock, MachineClock, Network, World
from tests.bucket.ceph import Ceph
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.doubles.s3_server import set_credentials
from tests.simulation.virtual_time import VirtualClock
from tests.unit.refusals import refused

# The back ends of the coordinator, and processes that a test can pause and kill.

TIMES = CoordinatorTimes(beat_seconds=0.02, grace_seconds=0.4, poll_seconds=0.01)
HOSTILE_TIMES = CoordinatorTimes(beat_seconds=1.0, grace_seconds=40.0, poll_seconds=0.5)
"""Here a call may take many attempts."""
CEPH_TIMES = CoordinatorTimes(beat_seconds=0.5, grace_seconds=4.0, poll_seconds=0.2)
HOSTILE = BucketFaults(
    lost_request=0.06,
    lost_answer=0.06,
    late_request=0.06,
    late_answer=0.06,
    failed_before=0.06,
    failed_after_success=0.06,
)


class Pausable:
    """A process's way to the store, which can be stopped between any two calls."""

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
        try:
            result = await found(*arguments, **named)
        finally:  # done or not: an error may follow what was done
            if self.pauses_after(name, *arguments):
                self.running.clear()
                await self.running.wait()
        if name == "lock":
            self.locks.append(result)
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
    times: CoordinatorTimes
    death_seconds: float
    """Within this time, a leader that was killed is replaced."""

    def process(self) -> Process: ...

    async def damage(self, led: Leadership, role: str, key: str, data: bytes | None) -> bytes:
        """The stored form of a value, which is replaced by `data` if there is any."""
        ...


class Directories:
    """The directory back end, on real files or in memory."""

    times = TIMES
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

    times = TIMES
    death_seconds = 3 * TIMES.grace_seconds
    """Only its silence tells that a process is dead."""

    def __init__(self, network: Network, place: Place, clock: Clock) -> None:
        self.clock = clock
        self._world = World(clock, network, random.Random(7))
        self._store = BigtableStore(network, place)

    def process(self) -> Process:
        reach = Pausable(self._store)
        records = RowRecords(cast("RowStore", reach), self._world)
        return Process(reach, RecordCoordinator(records, self._world, TIMES), _sets_value)

    async def damage(self, led: Leadership, role: str, key: str, data: bytes | None) -> bytes:
        return await _damage(RowRecords(self._store, self._world), role, key, data)


async def _damage(records: Records, role: str, key: str, data: bytes | None) -> bytes:
    record, column = role_key(role), value_column(key)
    if data is not None:
        await records.put(record, {column: data})
    return (await records.read(record, [column]))[column]


def _sets_value(name: str, *arguments: Any) -> bool:
    if name != "check_and_mutate":
        return False
    changes = arguments[3]
    return any(isinstance(one, SetCell) and one.column == value_column("map") for one in changes)


class Objects:
    """The back end in a bucket: in a model, which may be hostile, or in Ceph."""

    def __init__(self, attempts: Attempts, clock: Clock, times: CoordinatorTimes) -> None:
        self.times = times
        self.death_seconds = 3 * times.grace_seconds
        self.clock = clock
        self._world = World(clock, InProcessNetwork({}), random.Random(7))
        self._attempts = attempts

    def process(self) -> Process:
        reach = Pausable(self._attempts)
        records = self._records(cast("Attempts", reach))
        return Process(reach, RecordCoordinator(records, self._world, self.times), _puts_value)

    async def damage(self, led: Leadership, role: str, key: str, data: bytes | None) -> bytes:
        return await _damage(self._records(self._attempts), role, key, data)

    def _records(self, attempts: Attempts) -> BucketRecords:
        chance = self._world.random
        bucket = Bucket(attempts, self.clock, chance, attempt_seconds=1.0, seconds=600.0)
        return BucketRecords(bucket, bucket, chance)


def _puts_value(name: str, *arguments: Any) -> bool:
    return name in ("create", "replace") and b'"=map"' in arguments[1]


BACK_ENDS = [
    pytest.param("memory", id="directory in memory"),
    pytest.param("real", id="directory", marks=pytest.mark.real_time),
    pytest.param("model", id="rows in the model"),
    pytest.param("emulator", id="rows in the emulator", marks=pytest.mark.bigtable),
    pytest.param("bucket", id="objects in the model"),
    pytest.param("hostile", id="objects in the hostile model"),
    pytest.param("ceph", id="objects in Ceph", marks=pytest.mark.bucket),
]


@asynccontextmanager
async def _opened(kind: str, root: Path, fixture: Callable[[str], Any]) -> AsyncIterator[BackEnd]:
    if kind in ("memory", "real"):
        disk = None
        if kind == "memory":
            disk = MemoryDisk()
            disk.make_durable_directory(root)
        yield Directories(root, disk)
        return
    if kind in ("bucket", "hostile"):
        faults, times = (BucketFaults(), TIMES) if kind == "bucket" else (HOSTILE, HOSTILE_TIMES)
        virtual = VirtualClock(asyncio.get_running_loop())
        model = BucketInMemory(virtual, random.Random(3), Tasks(), faults)
        yield Objects(model, virtual, times)
        return
    if kind == "ceph":
        ceph: Ceph = fixture("ceph")
        set_credentials(fixture("monkeypatch"), ceph.account.access_key_id, ceph.account.secret)
        attempts = s3_attempts(ceph.new_bucket(), attempt_seconds=5.0)
        yield Objects(attempts, MachineClock(), CEPH_TIMES)
        return
    if kind == "model":
        place = MODEL
        clock: Clock = VirtualClock(asyncio.get_running_loop())
        network: Network = InProcessNetwork({place.address: BigtableInMemory()})
    else:
        address, instance = fixture("emulator_address"), f"i{uuid.uuid4().hex}"
        place = Place(address, "contracts", instance, scans_backwards=False)
        clock, network = MachineClock(), BigtableNetwork()
    await create_table(network, place, TABLE_ID, 10.0)
    yield Rows(network, place, clock)
    await network.close()


@pytest.fixture(params=BACK_ENDS)
@asynccontextmanager
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BackEnd]:
    async with _opened(request.param, tmp_path, request.getfixturevalue) as store:
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


async def soon(work: Awaitable[Leadership]) -> Leadership:
    return await asyncio.wait_for(work, 1_000)


async def is_waiting(task: asyncio.Task[Any], clock: Clock, seconds: float) -> bool:
    await clock.sleep(seconds)
    return not task.done()


async def test_what_a_leader_wrote_is_read_by_it_and_by_all_others(store: BackEnd) -> None:
    leader, other = store.process(), store.process()
    led = await soon(leader.coordinator.campaign("master", "a:1"))
    assert await led.get("map") is None
    await led.put("map", b"one")
    await led.put("map", b"two")
    assert await led.get("map") == b"two"
    assert await other.coordinator.read("master", "map") == b"two"
    found = await other.coordinator.leader("master")
    assert found is not None
    assert (found.epoch, found.holder) == (led.epoch, "a:1")


async def test_a_role_that_never_had_a_leader_has_no_values(store: BackEnd) -> None:
    coordinator = store.process().coordinator
    assert await coordinator.leader("master") is None
    assert await coordinator.read("master", "map") is None


async def test_while_a_leader_lives_candidates_wait(store: BackEnd) -> None:
    led = await soon(store.process().coordinator.campaign("master", "a:1"))
    waiting = asyncio.create_task(store.process().coordinator.campaign("master", "b:1"))
    assert await is_waiting(waiting, store.clock, 3 * store.times.grace_seconds)
    assert await led.is_held()
    waiting.cancel()


async def test_a_leader_that_a_candidate_knows_to_be_lost_is_replaced_though_it_lives(
    store: BackEnd,
) -> None:
    first = await soon(store.process().coordinator.campaign("oracle", "a:1"))
    await first.put("mark", b"one")
    lost = [""]
    candidate = store.process().coordinator
    waiting = asyncio.create_task(candidate.campaign("oracle", "b:1", lambda: lost[-1]))
    assert await is_waiting(waiting, store.clock, 2 * store.times.grace_seconds)
    lost.append("another:1")
    assert await is_waiting(waiting, store.clock, 2 * store.times.grace_seconds)
    lost.append("a:1")
    assert await (await soon(waiting)).get("mark") == b"one"
    assert not await first.is_held()
    with pytest.raises(NotReady):
        await first.put("mark", b"late")


async def test_after_a_leader_resigned_the_next_one_has_its_values(store: BackEnd) -> None:
    first = await soon(store.process().coordinator.campaign("master", "a:1"))
    await first.put("map", b"one")
    await first.resign()
    second = await soon(store.process().coordinator.campaign("master", "b:1"))
    assert second.epoch > first.epoch
    assert await second.get("map") == b"one"
    for late in (first.check(), first.put("map", b"late")):
        with pytest.raises(NotReady):
            await late
    assert await second.get("map") == b"one"


async def test_a_process_that_leads_term_after_term_keeps_only_the_last(store: BackEnd) -> None:
    coordinator: Any = store.process().coordinator
    for _ in range(5):
        led = await soon(coordinator.campaign("master", "a:1"))
        await led.resign()
    led = await soon(coordinator.campaign("master", "a:1"))
    assert coordinator._led == [led]
    await coordinator.close()
    assert not await led.is_held(), "the last one is resigned with its process"


async def test_a_killed_leader_is_replaced(store: BackEnd) -> None:
    killed = store.process()
    await soon(killed.coordinator.campaign("master", "a:1"))
    killed.kill()
    started = store.clock.monotonic_seconds()
    await soon(store.process().coordinator.campaign("master", "b:1"))
    assert store.clock.monotonic_seconds() - started < store.death_seconds


async def test_a_paused_leader_is_replaced_and_refuses_to_answer_when_it_wakes(
    store: BackEnd,
) -> None:
    paused = store.process()
    first = await soon(paused.coordinator.campaign("oracle", "a:1"))
    await first.put("mark", b"100")
    paused.pause()
    late = asyncio.create_task(first.put("mark", b"200"))
    second = await soon(store.process().coordinator.campaign("oracle", "b:1"))
    assert await second.get("mark") == b"100"
    paused.resume()
    assert not await first.is_held()
    with pytest.raises((NotReady, StoreUnusable)):
        await late
    with pytest.raises(NotReady):
        await first.get("mark")
    assert await second.get("mark") == b"100"
    assert await second.is_held()


async def test_a_leader_paused_after_its_value_was_durable_does_not_say_so(store: BackEnd) -> None:
    """Its successor may have read the value or not: only a check after the pause can tell."""
    paused = store.process()
    first = await soon(paused.coordinator.campaign("master", "a:1"))
    paused.pause_after_value()
    late = asyncio.create_task(first.put("map", b"one"))
    second = await soon(store.process().coordinator.campaign("master", "b:1"))
    await second.put("map", b"two")
    paused.resume()
    with pytest.raises(NotReady):
        await late
    assert await second.get("map") == b"two"


async def test_a_successor_of_a_paused_leader_is_itself_replaced_when_killed(
    store: BackEnd,
) -> None:
    """In a directory at once. It did not get the lock of the paused leader, and gets it as soon as
    that one wakes."""
    paused, second = store.process(), store.process()
    first = await soon(paused.coordinator.campaign("master", "a:1"))
    paused.pause()
    await soon(second.coordinator.campaign("master", "b:1"))
    paused.resume()
    await first.resign()
    await store.clock.sleep(5 * store.times.beat_seconds)
    second.kill()
    started = store.clock.monotonic_seconds()
    await soon(store.process().coordinator.campaign("master", "c:1"))
    assert store.clock.monotonic_seconds() - started < store.death_seconds


async def test_of_many_candidates_one_leads_at_a_time(store: BackEnd) -> None:
    order: list[int] = []

    async def serve_a_term(number: int) -> None:
        led = await soon(store.process().coordinator.campaign("master", f"h:{number}"))
        await led.put("terms", (await led.get("terms") or b"") + b"%d," % number)
        order.append(number)
        await led.resign()

    await asyncio.gather(*(serve_a_term(number) for number in range(1, 6)))
    found = await store.process().coordinator.read("master", "terms")
    assert found == b"".join(b"%d," % number for number in order)
    assert len(order) == 5


async def test_roles_do_not_touch_each_other(store: BackEnd) -> None:
    coordinator = store.process().coordinator
    master = await soon(coordinator.campaign("master", "a:1"))
    oracle = await soon(coordinator.campaign("oracle", "a:2"))
    await master.put("mark", b"m")
    assert await oracle.get("mark") is None
    assert await master.is_held()
    assert await oracle.is_held()


async def test_watching_shows_the_value_now_and_every_later_change(store: BackEnd) -> None:
    led = await soon(store.process().coordinator.campaign("master", "a:1"))
    values = store.process().coordinator.watch("master", "map")
    assert await anext(values) is None
    await led.put("map", b"one")
    assert await anext(values) == b"one"
    await led.put("map", b"two")
    assert await anext(values) == b"two"
    await values.aclose()


async def test_sessions_are_listed_while_their_owners_live(store: BackEnd) -> None:
    stays, leaves, dies = (store.process() for _ in range(3))
    await stays.coordinator.open_session("master-1", b"stays")
    left = await leaves.coordinator.open_session("master-2", b"leaves")
    await dies.coordinator.open_session("master-3", b"dies")
    await stays.coordinator.open_session("worker-1", b"another kind")
    reader = store.process().coordinator
    assert set((await reader.sessions("master-")).values()) == {b"stays", b"leaves", b"dies"}
    await left.close()
    dies.kill()
    assert set(await reader.sessions("master-")) == {"master-1", "master-3"}
    async with asyncio.timeout(100 * store.times.grace_seconds):
        while await reader.sessions("master-") != {"master-1": b"stays"}:
            await store.clock.sleep(store.times.grace_seconds / 20)


@pytest.mark.parametrize("name", ["", "Map", "../map", "a/b", "x" * 101, "-", "a.new"])
async def test_names_that_no_back_end_could_store_are_refused(name: str, store: BackEnd) -> None:
    coordinator = store.process().coordinator
    with refused("role"):
        await coordinator.campaign(name, "a:1")
    led = await soon(coordinator.campaign("master", "a:1"))
    with refused("key"):
        await led.put(name, b"")


async def test_a_damaged_value_is_refused_and_never_guessed(store: BackEnd) -> None:
    led = await soon(store.process().coordinator.campaign("master", "a:1"))
    await led.put("map", b"all tablets")
    whole = await store.damage(led, "master", "map", None)
    for damaged in (b"", whole[:-1], whole + b"x", whole.replace(b"all", b"few")):
        await store.damage(led, "master", "map", damaged)
        with pytest.raises(StoreUnusable) as caught:
            await led.get("map")
        assert caught.value.fault is StoreFault.DAMAGED
