"""A store that hangs, dies and comes back, as the process that uses it sees it.

A process notices that its row store is silent, and that it is not its cluster's any more.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import structlog

from percolator.bigtable.admin import delete_table
from percolator.errors import StoreFault, StoreUnusable, Unavailable
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID
from percolator.services.chassis import cluster_store
from percolator.services.chassis.cluster_store import (
    RowClusterStore,
    RowIdentity,
    RowStoreWatch,
)
from percolator.services.chassis.epoch_directory import take_over
from percolator.services.chassis.files import DiskThreads
from percolator.services.chassis.row_coordinator import Records
from percolator.services.chassis.store_watch import (
    LASTING_SECONDS,
    LOOK_SECONDS,
    STALLED_SECONDS,
    StoreWatch,
)
from percolator.services.tabletserver.storage import Ancestry, SharedDirectoryStore, clone_leveldb
from percolator.tablet.state import TabletIdentity
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import World
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop

ROOT = Path("/store")
MINUTE = 60


def files_on(disk: MemoryDisk) -> MemoryFiles:
    disk.make_durable_directory(ROOT)
    return MemoryFiles(disk)


def pause(seconds: float) -> None:
    """Time goes by, and nothing of this process runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.now += seconds


class Watched:
    """What a process learns about its store."""

    def __init__(self) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.files = files_on(MemoryDisk())
        self.stalled: list[bool] = []
        self.gone: list[str] = []
        self.trouble: Callable[[], str] = str

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        log = structlog.stdlib.get_logger("test")
        watch = StoreWatch(
            self.files,
            ROOT,
            self.clock,
            log,
            stalled=self.stalled.append,
            gone=self.gone.append,
        )
        self.trouble = lambda: watch.trouble
        running = asyncio.create_task(watch.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_store_that_hangs_is_told_of_and_so_is_its_return() -> None:
    at = Watched()
    async with at.watching():
        await at.clock.sleep(MINUTE)
        assert at.stalled == []
        assert at.trouble() == ""
        at.files.answers.clear()
        await at.clock.sleep(2 * STALLED_SECONDS)
        assert at.stalled == [True]
        assert at.trouble() == f"the store hangs: {ROOT} gives no answer"
        await at.clock.sleep(MINUTE)
        at.files.answers.set()
        await at.clock.sleep(STALLED_SECONDS)
        assert at.stalled == [True, False]
        assert at.trouble() == ""
        assert at.gone == []


async def test_a_process_that_was_itself_paused_does_not_say_that_the_store_hangs() -> None:
    """SIGSTOP, or a suspended machine: afterwards a check seems to have taken as long."""
    at = Watched()
    async with at.watching():
        at.files.answers.clear()
        await at.clock.sleep(LOOK_SECONDS)
        pause(MINUTE)
        await at.clock.sleep(LOOK_SECONDS / 2)
        at.files.answers.set()
        await at.clock.sleep(MINUTE)
        assert at.stalled == []


async def test_a_store_that_hangs_is_told_of_even_after_a_pause_of_the_process() -> None:
    at = Watched()
    async with at.watching():
        at.files.answers.clear()
        await at.clock.sleep(LOOK_SECONDS)
        pause(MINUTE)
        await at.clock.sleep(STALLED_SECONDS + LOOK_SECONDS)
        assert at.stalled == [True]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESHUTDOWN])
async def test_a_store_that_was_shut_down_is_gone_at_once(number: int) -> None:
    at = Watched()
    async with at.watching():
        at.files.faults.fail("create", number=number)
        await at.clock.sleep(2)
        assert len(at.gone) == 1
        assert str(ROOT) in at.gone[0]


async def test_a_store_that_hangs_and_then_dies_is_gone() -> None:
    at = Watched()
    async with at.watching():
        at.files.answers.clear()
        await at.clock.sleep(MINUTE)
        at.files.faults.fail("create", number=errno.ENOTCONN)
        at.files.answers.set()
        await at.clock.sleep(1)
        assert at.gone


async def test_input_and_output_that_go_on_failing_mean_that_the_store_is_gone() -> None:
    at = Watched()
    async with at.watching():
        at.files.faults.fail("fsync", times=1_000, number=errno.EIO)
        await at.clock.sleep(LASTING_SECONDS)
        assert not at.gone
        await at.clock.sleep(LASTING_SECONDS)
        assert len(at.gone) == 1


async def test_an_error_that_passes_is_survived_however_often() -> None:
    at = Watched()
    async with at.watching():
        for _ in range(10):
            at.files.faults.fail("append", times=5, number=errno.EIO)
            await at.clock.sleep(LASTING_SECONDS)
        assert not at.gone


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
async def test_a_store_that_takes_nothing_more_is_not_gone(number: int) -> None:
    """What is stored there can be read, and space may be freed."""
    at = Watched()
    async with at.watching():
        at.files.faults.fail("create", times=1_000, number=number)
        await at.clock.sleep(10 * LASTING_SECONDS)
        assert not at.gone
        assert os.strerror(number) in at.trouble()


async def test_a_store_that_was_unmounted_is_gone() -> None:
    """Its root was a directory of what is no longer there."""
    at = Watched()
    async with at.watching():
        await at.clock.sleep(MINUTE)
        at.files.disk.root.change({ROOT.name: None})
        await at.clock.sleep(2)
        assert len(at.gone) == 1
        assert f"{ROOT} is no longer" in at.gone[0]


async def test_a_store_in_whose_place_something_else_is_mounted_is_gone_and_nothing_written() -> (
    None
):
    """As when the root was the mount point itself: the directory below it appears."""
    at = Watched()
    async with at.watching():
        await at.clock.sleep(MINUTE)
        below = at.files.disk.new_directory()
        at.files.disk.root.change({ROOT.name: below})
        await at.clock.sleep(2)
        assert len(at.gone) == 1
        assert not below.names


async def test_a_store_that_is_mounted_again_is_the_same_store() -> None:
    at = Watched()
    async with at.watching():
        await at.clock.sleep(LOOK_SECONDS / 2)
        root = at.files.disk.find(ROOT)
        at.files.disk.root.change({ROOT.name: None})
        at.files.disk.root.change({ROOT.name: root})
        await at.clock.sleep(MINUTE)
        assert not at.gone


async def test_a_takeover_on_a_store_that_hangs_goes_on_when_it_comes_back() -> None:
    disk = MemoryDisk()
    hanging, served = files_on(disk), files_on(disk)
    clock = VirtualClock(asyncio.get_running_loop())
    store = SharedDirectoryStore(hanging, ROOT, DiskThreads(0, "none"), owned=served)
    first = TabletIdentity(table_id=1, tablet_id=7, epoch=1, start=b"", end=b"")
    owner = await store.take_over(first, Ancestry())
    hanging.answers.clear()
    second = TabletIdentity(table_id=1, tablet_id=8, epoch=1, start=b"", end=b"")
    taking = asyncio.create_task(store.take_over(second, Ancestry()))
    await clock.sleep(MINUTE)
    assert not taking.done()
    # The tablet that is served does not notice: its looks have threads of their own.
    assert await owner.stands()
    hanging.answers.set()
    assert await (await taking).stands()


async def test_an_owner_answers_nothing_while_its_store_hangs_and_nothing_old_afterwards() -> None:
    disk = MemoryDisk()
    files, others = files_on(disk), files_on(disk)
    disk.make_durable_directory(ROOT / "7")
    clock = VirtualClock(asyncio.get_running_loop())
    owner = await take_over(files, ROOT / "7", 1, clone_leveldb)
    files.answers.clear()
    asked = asyncio.create_task(owner.stands())
    await clock.sleep(MINUTE)
    assert not asked.done()
    await take_over(others, ROOT / "7", 2, clone_leveldb)
    files.answers.set()
    assert not await asked


async def test_a_takeover_from_a_store_that_died_fails_with_its_reason() -> None:
    files = files_on(MemoryDisk())
    store = SharedDirectoryStore(files, ROOT, DiskThreads(0, "none"))
    files.faults.fail("make_directory", number=errno.ENOTCONN)
    tablet = TabletIdentity(table_id=1, tablet_id=7, epoch=1, start=b"", end=b"")
    with pytest.raises(StoreUnusable, match="not connected"):
        await store.take_over(tablet, Ancestry())


class WatchedWatch:
    """A store of the model, the process that watches it, and what that was told."""

    def __init__(self) -> None:
        clock = VirtualClock(asyncio.get_running_loop())
        self.network = InProcessNetwork({MODEL.address: BigtableInMemory()})
        world = World(clock, self.network, random.Random(1))
        self.store = RowClusterStore(self.network, MODEL, world)
        self.records = Records(self.store.store, world)
        self.world = world
        self.is_silent = False
        self.stalled: list[bool] = []
        self.gone: list[str] = []

    async def look(self) -> RowIdentity | None:
        if self.is_silent:
            raise StoreUnusable("no answer", fault=StoreFault.INPUT_OUTPUT) from Unavailable(
                "no answer"
            )
        return await cluster_store.read(self.records, str(MODEL))

    async def looks(self, seconds: float = 2 * LOOK_SECONDS) -> None:
        await self.world.clock.sleep(seconds)


@asynccontextmanager
async def _watched() -> AsyncIterator[WatchedWatch]:
    one = WatchedWatch()
    identity = await one.store.establish_identity()
    made = partial(
        RowStoreWatch, one.look, identity, str(MODEL), one.world.clock, structlog.get_logger()
    )
    running = asyncio.create_task(made(stalled=one.stalled.append, gone=one.gone.append).run())
    try:
        await one.looks()
        assert not one.gone
        yield one
    finally:
        running.cancel()


async def test_a_store_without_its_tables_is_gone() -> None:
    async with _watched() as one:
        await delete_table(one.network, MODEL, TABLE_ID, 1.0)
        await one.looks()
        (reason,) = one.gone
        assert reason.startswith(f"{MODEL} now belongs to no cluster: its tables were deleted")
        assert one.stalled == []


async def test_a_store_that_another_cluster_has_taken_is_gone_and_the_other_is_named() -> None:
    async with _watched() as one:
        other = {"cluster_id": "another", "format": 1, "epoch_milliseconds": 1}
        await one.records.put(CLUSTER, {IDENTITY: json.dumps(other).encode()})
        await one.looks()
        (reason,) = one.gone
        assert "now belongs to cluster another" in reason


@pytest.mark.parametrize(("seconds", "told"), [(1.0, []), (2 * STALLED_SECONDS, [True, False])])
async def test_a_store_that_is_silent_for_long_stalls_the_process_until_it_answers(
    seconds: float, told: list[bool]
) -> None:
    async with _watched() as one:
        one.is_silent = True
        await one.looks(seconds)
        assert one.stalled == told[:1]
        one.is_silent = False
        await one.looks()
        assert (one.stalled, one.gone) == (told, [])
