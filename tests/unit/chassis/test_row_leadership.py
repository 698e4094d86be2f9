"""A leader in a row store whose calls are lost, late, or never answered.

Sessions are not synced: a power cut may leave one without its content, or with a part of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
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
from percolator.services.chassis.coordinator import CoordinatorTimes
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.row_coordinator import STAMP, Records, RowCoordinator, role_key
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import World
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock

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
        self.records = Records(cast("RowStore", self.faulty), self.world)

    def coordinator(self, times: CoordinatorTimes = NO_BEATS) -> RowCoordinator:
        return RowCoordinator(self.records, self.world, times)


async def scene_of_one_table() -> Scene:
    made = Scene()
    await create_table(made.network, MODEL, TABLE_ID, 1.0)
    return made


async def test_a_write_that_arrives_late_changes_nothing_after_a_later_one() -> None:
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("oracle", "a:1")
    faulty = scene.faulty
    faulty.faults = [faulty.is_late] * 4
    with pytest.raises(StoreUnusable):
        await led.put("mark", b"200")
    await led.put("mark", b"300")
    assert len(faulty.late) == 4
    assert [await call() for call in faulty.late] == [False] * 4
    assert await led.get("mark") == b"300"


async def test_what_is_found_after_a_write_that_failed_is_not_changed_by_it_any_more() -> None:
    """The leading master makes its next change to what it finds."""
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("master", "a:1")
    await led.put("map", b"before")
    faulty = scene.faulty
    faulty.faults = [faulty.is_late] * 4
    with pytest.raises(StoreUnusable):
        await led.put("map", b"after")
    found = await led.get("map")
    assert [await call() for call in faulty.late] == [False] * 4
    assert await led.get("map") == found == b"before"


async def test_a_write_that_arrives_before_the_next_one_does_not_stop_it() -> None:
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("oracle", "a:1")
    faulty = scene.faulty
    faulty.faults = [faulty.is_late] * 4
    with pytest.raises(StoreUnusable):
        await led.put("mark", b"200")
    assert [await call() for call in faulty.late] == [True, False, False, False]
    await led.put("mark", b"300")
    assert await led.get("mark") == b"300"


async def test_a_write_whose_answers_are_lost_is_made_once_and_succeeds() -> None:
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("oracle", "a:1")
    before = await scene.records.read(role_key("oracle"), [STAMP])
    scene.faulty.faults = [scene.faulty.loses_the_answer]
    await led.put("mark", b"200")
    after = await scene.records.read(role_key("oracle"), [STAMP])
    counts = [int(one[STAMP].split()[2]) for one in (before, after)]
    assert counts[1] - counts[0] == 1
    assert await led.get("mark") == b"200"


async def test_a_candidate_whose_answer_was_lost_leads() -> None:
    scene = await scene_of_one_table()
    scene.faulty.faults = [scene.faulty.loses_the_answer]
    led = await asyncio.wait_for(scene.coordinator().campaign("oracle", "a:1"), 5.0)
    assert led.epoch == 1
    assert await led.stands()


async def test_a_candidate_that_arrives_late_does_not_depose_the_one_that_leads() -> None:
    scene = await scene_of_one_table()
    scene.faulty.faults = [scene.faulty.is_late]
    late = asyncio.create_task(scene.coordinator().campaign("oracle", "a:1"))
    await asyncio.sleep(0.05)
    late.cancel()
    led = await scene.coordinator().campaign("oracle", "b:1")
    assert await scene.faulty.late[0]() is False
    assert await led.stands()


async def test_while_the_store_does_not_answer_nobody_is_deposed_and_nothing_is_said() -> None:
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("oracle", "a:1")
    scene.faulty.read_error = Unavailable("nothing listens")
    for ask in (led.stands, led.check, lambda: led.get("mark"), lambda: led.put("mark", b"1")):
        with pytest.raises(StoreUnusable, match="nothing listens") as caught:
            await ask()
        assert caught.value.fault is StoreFault.INPUT_OUTPUT
    scene.faulty.read_error = None
    assert await led.stands()
    await led.put("mark", b"2")


async def test_a_store_that_refuses_is_named_as_the_reason() -> None:
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("oracle", "a:1")
    scene.faulty.faults = [scene.faulty.refuses]
    with pytest.raises(StoreUnusable, match="the row store: the role has no such right"):
        await led.put("mark", b"1")
    await led.put("mark", b"2")


async def test_a_leader_that_only_beats_keeps_its_role() -> None:
    scene = await scene_of_one_table()
    times = CoordinatorTimes(beat_seconds=0.5, grace_seconds=1.0)
    led = await scene.coordinator(times).campaign("oracle", "a:1")
    waiting = asyncio.create_task(scene.coordinator(times).campaign("oracle", "b:1"))
    await asyncio.sleep(100.0)
    assert not waiting.done()
    await led.resign()
    assert (await waiting).epoch == 2
    with pytest.raises(NotReady):
        await led.put("mark", b"late")


async def test_a_value_above_the_limit_of_stores_is_refused_by_name() -> None:
    scene = await scene_of_one_table()
    led = await scene.coordinator().campaign("master", "a:1")
    with pytest.raises(InvalidArgument, match="master/map would have 33554433 bytes"):
        await led.put("map", bytes((32 << 20) + 1))


@pytest.mark.parametrize("stored", [b"", b"7", b"0 0123456789abcdef 1", b"7 0123 1"])
async def test_a_stamp_that_nobody_wrote_is_refused(stored: bytes) -> None:
    scene = await scene_of_one_table()
    await scene.records.put(role_key("oracle"), {STAMP: stored})
    with pytest.raises(StoreUnusable, match="the stamp of the role 'oracle' is damaged") as caught:
        await scene.coordinator().campaign("oracle", "a:1")
    assert caught.value.fault is StoreFault.DAMAGED


STORE = Path("/store")
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
