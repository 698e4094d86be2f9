"""One candidacy for every role: who serves, what a candidate answers, and how a term ends.

A role whose newest directory was deleted, or is missing in a restored copy, has no leader.

A leader whose signs of life are a little late is not taken for dead.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from percolator.bigtable.admin import create_table
from percolator.bigtable.store import BigtableStore
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PermissionDenied,
    StoreFault,
    StoreUnusable,
    Unavailable,
)
from percolator.rowstore.identity import TABLE_ID
from percolator.rowstore.port import RowStore
from percolator.services.chassis.coordinator import (
    BEAT_SECONDS,
    GRACE_SECONDS_MIN,
    Candidacy,
    CoordinatorTimes,
    Leadership,
)
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import Files
from percolator.services.chassis.record_coordinator import STAMP, RecordCoordinator, role_key
from percolator.services.chassis.records import RowRecords
from percolator.services.chassis.settings import ServiceSettings, load
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import World
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


@pytest.fixture(name="role")
@asynccontextmanager
async def led_twice() -> AsyncIterator[Role]:
    role = Role()
    for value in (b"one", b"two"):
        await (await role.led(value)).close()
    yield role


async def test_nobody_leads_with_what_an_earlier_leader_left(role: Role) -> None:
    await role.files.rename(ROLE_LEADERSHIP / "e2", ROLE_LEADERSHIP / "elsewhere")
    for _ in range(2):
        with pytest.raises(StoreUnusable, match=LOST) as caught:
            await role.value()
        assert caught.value.fault is StoreFault.DAMAGED
    await role.files.rename(ROLE_LEADERSHIP / "elsewhere", ROLE_LEADERSHIP / "e2")
    assert await role.value() == b"two"


async def test_a_leader_whose_directory_is_lost_ends_and_nobody_leads_with_less(role: Role) -> None:
    leading = role.candidate()
    leadership = await leading.campaign("master", "a:1")
    await leadership.put("map", b"three")
    await role.files.rename(ROLE_LEADERSHIP / "e3", ROLE_LEADERSHIP / "elsewhere")
    with pytest.raises(NotReady):
        await leadership.put("map", b"four")
    await leading.close()
    with pytest.raises(StoreUnusable, match="e3 was in use, but"):
        await role.value()


async def test_who_gives_the_last_directory_up_gives_its_name_to_the_one_before(role: Role) -> None:
    """docs/formats.md tells operators to do this."""
    await role.files.rename(ROLE_LEADERSHIP / "e2", ROLE_LEADERSHIP / "elsewhere")
    await role.files.rename(ROLE_LEADERSHIP / "e1.sealed", ROLE_LEADERSHIP / "e2.sealed")
    assert await role.value() == b"one"


@pytest.mark.parametrize("signed", [b"", b"\0", b"1"])
async def test_a_power_cut_that_tears_the_lock_prevents_no_leader(
    role: Role, signed: bytes
) -> None:
    async with await role.files.create(ROLE_LEADERSHIP / "lock", exclusive=False) as lock:
        await lock.append(signed)
    assert await role.value() == b"two"


async def test_what_earlier_leaders_left_and_nobody_can_delete_prevents_no_leader(
    role: Role,
) -> None:
    """As after a run under another account: its directory can be renamed, and not emptied."""
    role.files.faults.fail("unlink", times=10**6, number=errno.EACCES)
    for value in (b"three", b"four"):
        await (await role.led(value)).close()
    assert await role.value() == b"four"
    role.files.faults.heal()
    await (await role.led(b"five")).close()
    assert await role.stages() == ["e5.sealed", "e6"], "deleted as soon as that is possible"


async def test_a_directory_that_cannot_be_deleted_does_not_keep_those_of_other_leaders(
    role: Role,
) -> None:
    for value in (b"three", b"four"):
        role.files.faults.fail("unlink", number=errno.EACCES)
        await (await role.led(value)).close()
    assert await role.stages() == ["e1.sealed", "e3.sealed", "e4"]


LATE_SECONDS = 0.6 * BEAT_SECONDS
"""The time that a busy machine adds to the interval between two signs of life."""


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


# A leader in a row store whose calls are lost, late, or never answered.
#
# Sessions are not synced: a power cut may leave one without its content, or with a part of it.

NO_BEATS = CoordinatorTimes(beat_seconds=1_000.0)


class Faulty:
    """A row store whose next calls go wrong, as the test says."""

    def __init__(self, store: BigtableStore) -> None:
        self._store = store
        self.faults: list[Callable[[Callable[[], Awaitable[bool]]], Awaitable[bool]]] = []
        self.read_error: Exception | None = None
        self.late: list[Callable[[], Awaitable[bool]]] = []

    async def check_and_mutate(self, *arguments: Any) -> bool:
        def call() -> Awaitable[bool]:
            return self._store.check_and_mutate(*arguments)

        return await (self.faults.pop(0)(call) if self.faults else call())

    async def read(self, *arguments: Any) -> Any:
        if self.read_error is not None:
            raise self.read_error
        return await self._store.read(*arguments)

    async def is_late(self, call: Callable[[], Awaitable[bool]]) -> bool:
        self.late.append(call)
        raise DeadlineExceeded("no answer in time")

    async def loses_the_answer(self, call: Callable[[], Awaitable[bool]]) -> bool:
        await call()
        raise Unavailable("the connection broke")

    async def refuses(self, call: Callable[[], Awaitable[bool]]) -> bool:
        raise PermissionDenied("the role has no such right")


class Scene:
    """A store, and processes that campaign."""

    def __init__(self) -> None:
        network = InProcessNetwork({MODEL.address: BigtableInMemory()})
        self.network = network
        self.faulty = Faulty(BigtableStore(network, MODEL))
        self.world = World(VirtualClock(asyncio.get_running_loop()), network, random.Random(3))
        self.records = RowRecords(cast("RowStore", self.faulty), self.world)

    def coordinator(self, times: CoordinatorTimes = NO_BEATS) -> RecordCoordinator:
        return RecordCoordinator(self.records, self.world, times)


@pytest.fixture(name="scene")
@asynccontextmanager
async def scene_of_one_table() -> AsyncIterator[Scene]:
    made = Scene()
    await create_table(made.network, MODEL, TABLE_ID, 1.0)
    yield made


async def put_late(scene: Scene, led: Leadership, key: str, value: bytes) -> list[Any]:
    """Fails to write the value. What arrives later is returned: one call for each attempt."""
    faulty = scene.faulty
    faulty.faults = [faulty.is_late] * 4
    with pytest.raises(StoreUnusable):
        await led.put(key, value)
    return faulty.late


async def test_a_write_that_arrives_late_changes_nothing_after_a_later_one(scene: Scene) -> None:
    led = await scene.coordinator().campaign("oracle", "a:1")
    late = await put_late(scene, led, "mark", b"200")
    await led.put("mark", b"300")
    assert [await call() for call in late] == [False] * 4
    assert await led.get("mark") == b"300"


async def test_what_is_found_after_a_write_that_failed_is_not_changed_by_it_any_more(
    scene: Scene,
) -> None:
    """The leading master makes its next change to what it finds."""
    led = await scene.coordinator().campaign("master", "a:1")
    await led.put("map", b"before")
    late = await put_late(scene, led, "map", b"after")
    found = await led.get("map")
    assert [await call() for call in late] == [False] * 4
    assert await led.get("map") == found == b"before"


async def test_a_write_that_arrives_before_the_next_one_does_not_stop_it(scene: Scene) -> None:
    led = await scene.coordinator().campaign("oracle", "a:1")
    late = await put_late(scene, led, "mark", b"200")
    assert [await call() for call in late] == [True, False, False, False]
    await led.put("mark", b"300")
    assert await led.get("mark") == b"300"


async def test_a_write_whose_answers_are_lost_is_made_once_and_succeeds(scene: Scene) -> None:
    led = await scene.coordinator().campaign("oracle", "a:1")
    before = await scene.records.read(role_key("oracle"), [STAMP])
    scene.faulty.faults = [scene.faulty.loses_the_answer]
    await led.put("mark", b"200")
    after = await scene.records.read(role_key("oracle"), [STAMP])
    counts = [int(one[STAMP].split()[2]) for one in (before, after)]
    assert counts[1] - counts[0] == 1
    assert await led.get("mark") == b"200"


async def test_a_candidate_whose_answer_was_lost_leads(scene: Scene) -> None:
    scene.faulty.faults = [scene.faulty.loses_the_answer]
    led = await asyncio.wait_for(scene.coordinator().campaign("oracle", "a:1"), 5.0)
    assert led.epoch == 1
    assert await led.is_held()


async def test_a_candidate_that_arrives_late_does_not_depose_the_one_that_leads(
    scene: Scene,
) -> None:
    scene.faulty.faults = [scene.faulty.is_late]
    late = asyncio.create_task(scene.coordinator().campaign("oracle", "a:1"))
    await asyncio.sleep(0.05)
    late.cancel()
    led = await scene.coordinator().campaign("oracle", "b:1")
    assert await scene.faulty.late[0]() is False
    assert await led.is_held()


async def test_while_the_store_does_not_answer_nobody_is_deposed_and_nothing_is_said(
    scene: Scene,
) -> None:
    led = await scene.coordinator().campaign("oracle", "a:1")
    scene.faulty.read_error = Unavailable("nothing listens")
    for ask in (led.is_held, led.check, lambda: led.get("mark"), lambda: led.put("mark", b"1")):
        with pytest.raises(StoreUnusable, match="nothing listens") as caught:
            await ask()
        assert caught.value.fault is StoreFault.INPUT_OUTPUT
    scene.faulty.read_error = None
    assert await led.is_held()
    await led.put("mark", b"2")


async def test_a_store_that_refuses_is_named_as_the_reason(scene: Scene) -> None:
    led = await scene.coordinator().campaign("oracle", "a:1")
    scene.faulty.faults = [scene.faulty.refuses]
    with pytest.raises(StoreUnusable, match="the row store: the role has no such right"):
        await led.put("mark", b"1")
    await led.put("mark", b"2")


async def test_a_leader_that_only_beats_keeps_its_role(scene: Scene) -> None:
    times = CoordinatorTimes(beat_seconds=0.5, grace_seconds=1.0)
    led = await scene.coordinator(times).campaign("oracle", "a:1")
    waiting = asyncio.create_task(scene.coordinator(times).campaign("oracle", "b:1"))
    await asyncio.sleep(100.0)
    assert not waiting.done()
    await led.resign()
    assert (await waiting).epoch == 2
    with pytest.raises(NotReady):
        await led.put("mark", b"late")


async def test_a_value_above_the_limit_of_stores_is_refused_by_name(scene: Scene) -> None:
    led = await scene.coordinator().campaign("master", "a:1")
    with pytest.raises(InvalidArgument, match="master/map would have 33554433 bytes"):
        await led.put("map", bytes((32 << 20) + 1))


@pytest.mark.parametrize("stored", [b"", b"7", b"0 0123456789abcdef 1", b"7 0123 1"])
async def test_a_stamp_that_nobody_wrote_is_refused(scene: Scene, stored: bytes) -> None:
    await scene.records.put(role_key("oracle"), {STAMP: stored})
    with pytest.raises(StoreUnusable, match="the stamp of the role 'oracle' is damaged") as caught:
        await scene.coordinator().campaign("oracle", "a:1")
    assert caught.value.fault is StoreFault.DAMAGED


SESSIONS = STORE / "coordinator" / "sessions"
LOOK_SECONDS = 0.1
FORGOTTEN_SECONDS = 61.0


@pytest.mark.parametrize("content", [b"", b"percolator-value 1 40 01"])
async def test_a_session_that_a_power_cut_has_torn_is_not_listed_and_removed_in_the_end(
    content: bytes,
) -> None:
    disk = MemoryDisk()
    disk.make_durable_directory(STORE)
    clock = VirtualClock(asyncio.get_running_loop())
    files = MemoryFiles(disk)
    coordinator = DirectoryCoordinator(files, clock, STORE)
    await coordinator.open_session("master-1", b"alive")
    async with await files.create(SESSIONS / "master-2") as torn:
        await torn.append(content)
    for _ in range(int(FORGOTTEN_SECONDS / LOOK_SECONDS)):
        assert await coordinator.sessions("master-") == {"master-1": b"alive"}
        await clock.sleep(LOOK_SECONDS)
    assert await files.list(SESSIONS) == ["master-1"]
    await coordinator.close()
