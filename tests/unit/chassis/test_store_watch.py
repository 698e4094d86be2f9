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
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from percolator.bigtable.admin import delete_table
from percolator.errors import (
    PermissionDenied,
    StoreFault,
    StoreUnusable,
    Unavailable,
    WrongCluster,
)
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID
from percolator.services.chassis import cluster_store
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.cluster_store import IdentityWatch, RowClusterStore, RowIdentity
from percolator.services.chassis.epoch_directory import SharedLook, take_over
from percolator.services.chassis.files import DiskThreads
from percolator.services.chassis.membership import Membership, Registration
from percolator.services.chassis.records import RowRecords
from percolator.services.chassis.store_watch import (
    LASTING_SECONDS,
    LOOK_SECONDS,
    STALLED_SECONDS,
    StoreWatch,
)
from percolator.services.tabletserver.storage import Ancestry, SharedDirectoryStore, clone_leveldb
from percolator.tablet.state import TabletIdentity
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.v1 import cluster_pb2
from percolator.v1 import cluster_pb2 as cluster
from percolator.wire.methods import DESCRIBE
from percolator.world import UnaryMethod, World
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock, VirtualTimeLoop
from tests.unit.unary_network import UnaryNetwork, UnaryTimeouts

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
    """The notes of a process about its store."""

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


@pytest.fixture
@asynccontextmanager
async def at() -> AsyncIterator[Watched]:
    """The notes of a process that watches its store."""
    watched = Watched()
    async with watched.watching():
        yield watched


async def test_a_store_that_hangs_is_told_of_and_so_is_its_return(at: Watched) -> None:
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


async def test_a_process_that_was_itself_paused_does_not_say_that_the_store_hangs(
    at: Watched,
) -> None:
    """SIGSTOP, or a suspended machine: afterwards a check seems to have taken as long."""
    at.files.answers.clear()
    await at.clock.sleep(LOOK_SECONDS)
    pause(MINUTE)
    await at.clock.sleep(LOOK_SECONDS / 2)
    at.files.answers.set()
    await at.clock.sleep(MINUTE)
    assert at.stalled == []


async def test_a_store_that_hangs_is_told_of_even_after_a_pause_of_the_process(
    at: Watched,
) -> None:
    at.files.answers.clear()
    await at.clock.sleep(LOOK_SECONDS)
    pause(MINUTE)
    await at.clock.sleep(STALLED_SECONDS + LOOK_SECONDS)
    assert at.stalled == [True]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESHUTDOWN])
async def test_a_store_that_was_shut_down_is_gone_at_once(at: Watched, number: int) -> None:
    at.files.faults.fail("create", number=number)
    await at.clock.sleep(2)
    assert len(at.gone) == 1
    assert str(ROOT) in at.gone[0]


async def test_a_store_that_hangs_and_then_dies_is_gone(at: Watched) -> None:
    at.files.answers.clear()
    await at.clock.sleep(MINUTE)
    at.files.faults.fail("create", number=errno.ENOTCONN)
    at.files.answers.set()
    await at.clock.sleep(1)
    assert at.gone


async def test_input_and_output_that_go_on_failing_mean_that_the_store_is_gone(
    at: Watched,
) -> None:
    at.files.faults.fail("fsync", times=1_000, number=errno.EIO)
    await at.clock.sleep(LASTING_SECONDS)
    assert not at.gone
    await at.clock.sleep(LASTING_SECONDS)
    assert len(at.gone) == 1


async def test_an_error_that_passes_is_survived_however_often(at: Watched) -> None:
    for _ in range(10):
        at.files.faults.fail("append", times=5, number=errno.EIO)
        await at.clock.sleep(LASTING_SECONDS)
    assert not at.gone


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
async def test_a_store_that_takes_nothing_more_is_not_gone(at: Watched, number: int) -> None:
    """The store can still be read, and space may be freed."""
    at.files.faults.fail("create", times=1_000, number=number)
    await at.clock.sleep(10 * LASTING_SECONDS)
    assert not at.gone
    assert os.strerror(number) in at.trouble()


async def test_a_store_that_was_unmounted_is_gone(at: Watched) -> None:
    """Its root was a directory of what is no longer there."""
    await at.clock.sleep(MINUTE)
    at.files.disk.root.change({ROOT.name: None})
    await at.clock.sleep(2)
    assert len(at.gone) == 1
    assert f"{ROOT} is no longer" in at.gone[0]


async def test_a_store_in_whose_place_something_else_is_mounted_is_gone_and_nothing_written(
    at: Watched,
) -> None:
    """As when the root was the mount point itself: the directory below it appears."""
    await at.clock.sleep(MINUTE)
    below = at.files.disk.new_directory()
    at.files.disk.root.change({ROOT.name: below})
    await at.clock.sleep(2)
    assert len(at.gone) == 1
    assert not below.names


async def test_a_store_that_is_mounted_again_is_the_same_store(at: Watched) -> None:
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
    assert await owner.is_held()
    hanging.answers.set()
    assert await (await taking).is_held()


async def test_an_owner_answers_nothing_while_its_store_hangs_and_nothing_old_afterwards() -> None:
    disk = MemoryDisk()
    files, others = files_on(disk), files_on(disk)
    disk.make_durable_directory(ROOT / "7")
    clock = VirtualClock(asyncio.get_running_loop())
    owner = await take_over(files, ROOT / "7", 1, clone_leveldb)
    files.answers.clear()
    asked = asyncio.create_task(owner.is_held())
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
        self.records = RowRecords(self.store.store, world)
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


@pytest.fixture
@asynccontextmanager
async def one() -> AsyncIterator[WatchedWatch]:
    """A store of the model, which is watched."""
    one = WatchedWatch()
    identity = await one.store.establish_identity()
    made = partial(
        IdentityWatch,
        one.look,
        identity,
        str(MODEL),
        "its tables were deleted",
        LOOK_SECONDS,
        one.world.clock,
        structlog.get_logger(),
    )
    running = asyncio.create_task(made(stalled=one.stalled.append, gone=one.gone.append).run())
    try:
        await one.looks()
        assert not one.gone
        yield one
    finally:
        running.cancel()


async def test_a_store_without_its_tables_is_gone(one: WatchedWatch) -> None:
    await delete_table(one.network, MODEL, TABLE_ID, 1.0)
    await one.looks()
    (reason,) = one.gone
    assert reason.startswith(f"{MODEL} now belongs to no cluster: its tables were deleted")
    assert one.stalled == []


async def test_a_store_that_another_cluster_has_taken_is_gone_and_the_other_is_named(
    one: WatchedWatch,
) -> None:
    other = {"cluster_id": "another", "format": 1, "epoch_milliseconds": 1}
    await one.records.put(CLUSTER, {IDENTITY: json.dumps(other).encode()})
    await one.looks()
    (reason,) = one.gone
    assert "now belongs to cluster another" in reason


@pytest.mark.parametrize(("seconds", "told"), [(1.0, []), (2 * STALLED_SECONDS, [True, False])])
async def test_a_store_that_is_silent_for_long_stalls_the_process_until_it_answers(
    one: WatchedWatch,
    seconds: float,
    told: list[bool],
) -> None:
    one.is_silent = True
    await one.looks(seconds)
    assert one.stalled == told[:1]
    one.is_silent = False
    await one.looks()
    assert (one.stalled, one.gone) == (told, [])


# Finding the cluster and staying registered, on virtual time.
#
# A service that is a client of its own cluster waits for what may come.


class Masters(UnaryNetwork):
    """A network of masters: those in `cluster_ids` are up."""

    def __init__(self, **cluster_ids: str) -> None:
        self.cluster_ids = cluster_ids
        self.interval_milliseconds = 1000
        self.registered: list[tuple[float, str, cluster.RegisterRequest]] = []
        self.asked: list[tuple[float, str]] = []

    async def answer(
        self, address: str, method: UnaryMethod[Any, Any], request: Any, timeout: float
    ) -> Any:
        now = asyncio.get_running_loop().time()
        self.asked.append((now, address))
        if address not in self.cluster_ids:
            raise Unavailable("connection refused", where=address)
        own = self.cluster_ids[address]
        if method.path == DESCRIBE.path:
            return cluster.DescribeResponse(cluster_id=own)
        if request.cluster_id != own:
            raise WrongCluster("refused", expected=own, found=request.cluster_id)
        copy = cluster.RegisterRequest.FromString(request.SerializeToString())
        self.registered.append((now, address, copy))
        return cluster.RegisterResponse(
            cluster_id=own, interval_milliseconds=self.interval_milliseconds
        )


def world_of(masters: Masters) -> World:
    return World(VirtualClock(asyncio.get_running_loop()), masters, random.Random(1))


class Belonging:
    """Notes what the registration says about belonging to the cluster."""

    def __init__(self) -> None:
        self.told: list[WrongCluster | None] = []

    async def __call__(self, error: WrongCluster | None) -> None:
        self.told.append(error)


@asynccontextmanager
async def registered(
    masters: Masters, addresses: tuple[str, ...], belonging: Belonging
) -> AsyncIterator[None]:
    """A process that has found its cluster and keeps itself registered."""
    world = world_of(masters)
    membership = Membership(world, addresses)
    await membership.find_cluster()
    server = cluster.Server(kind=cluster.SERVICE_KIND_ORACLE, server_id="me", address="o:1")
    registration = Registration(world, membership, server, belonging)
    await registration.until_accepted()
    keeping = asyncio.create_task(registration.keep())
    try:
        yield
    finally:
        keeping.cancel()


async def test_it_waits_as_long_as_no_master_answers_and_says_so_every_5_seconds() -> None:
    masters = Masters()
    membership = Membership(world_of(masters), ("a:1", "b:1"))
    with structlog.testing.capture_logs() as log:
        finding = asyncio.create_task(membership.find_cluster())
        await asyncio.sleep(12)
        assert not finding.done()
        assert [entry["waited_seconds"] for entry in log] == [0.0, 5.0, 10.0]
        assert "connection refused" in log[0]["last_error"]
        masters.cluster_ids["b:1"] = "shop"
        await finding
    assert membership.cluster_id == "shop"
    assert {address for _, address in masters.asked} == {"a:1", "b:1"}


async def test_without_masters_nothing_is_waited_for() -> None:
    membership = Membership(world_of(Masters()), ())
    await membership.find_cluster()
    assert membership.cluster_id == ""


async def test_it_registers_as_often_as_the_master_wants() -> None:
    masters = Masters(**{"a:1": "shop"})
    masters.interval_milliseconds = 2000
    async with registered(masters, ("a:1",), Belonging()):
        await asyncio.sleep(5)
    assert [at for at, _, _ in masters.registered] == [0.0, 2.0, 4.0]
    assert [request.server.uptime_milliseconds for _, _, request in masters.registered] == [
        0,
        2000,
        4000,
    ]
    assert {request.cluster_id for _, _, request in masters.registered} == {"shop"}


@pytest.mark.parametrize("interval_milliseconds", [0, 2**32 - 1])
async def test_an_absurd_interval_neither_floods_the_master_nor_loses_the_process(
    interval_milliseconds: int,
) -> None:
    masters = Masters(**{"a:1": "shop"})
    masters.interval_milliseconds = interval_milliseconds
    async with registered(masters, ("a:1",), Belonging()):
        await asyncio.sleep(125)
    assert 13 <= len(masters.registered) <= 1251


async def test_a_master_that_fails_is_replaced_by_another_and_that_one_kept() -> None:
    masters = Masters(**{"a:1": "shop", "b:1": "shop"})
    async with registered(masters, ("a:1", "b:1"), Belonging()):
        del masters.cluster_ids["a:1"]
        await asyncio.sleep(1.5)
        masters.asked.clear()
        await asyncio.sleep(3)
    assert {address for _, address in masters.asked} == {"b:1"}


async def test_without_any_master_it_goes_on_and_says_it_once() -> None:
    masters = Masters(**{"a:1": "shop"})
    belonging = Belonging()
    with structlog.testing.capture_logs() as log:
        async with registered(masters, ("a:1",), belonging):
            log.clear()
            masters.cluster_ids.clear()
            await asyncio.sleep(60)
            assert [entry["event"] for entry in log] == ["not registered"]
            masters.cluster_ids["a:1"] = "shop"
            await asyncio.sleep(1)
            assert [entry["event"] for entry in log] == ["not registered", "registered again"]
    assert belonging.told == []


async def test_another_cluster_is_told_until_the_right_one_is_back() -> None:
    masters = Masters(**{"a:1": "shop"})
    belonging = Belonging()
    async with registered(masters, ("a:1",), belonging):
        masters.cluster_ids["a:1"] = "robbers"
        await asyncio.sleep(5)
        assert {type(told) for told in belonging.told} == {WrongCluster}
        masters.cluster_ids["a:1"] = "shop"
        await asyncio.sleep(5)
    assert belonging.told[-1] is None
    assert len(masters.registered) > 1


async def test_at_the_start_another_cluster_is_an_error() -> None:
    masters = Masters(**{"a:1": "shop"})
    world = world_of(masters)
    membership = Membership(world, ("a:1",))
    await membership.find_cluster()
    masters.cluster_ids["a:1"] = "robbers"
    with pytest.raises(WrongCluster):
        await Registration(world, membership, cluster.Server(), Belonging()).until_accepted()


async def test_a_master_that_answers_with_another_id_is_refused() -> None:
    """Even one that does not compare ids itself."""
    masters = Masters(**{"a:1": "shop"})
    membership = Membership(world_of(masters), ("a:1",))
    await membership.find_cluster()
    masters.cluster_ids["a:1"] = "robbers"
    with pytest.raises(WrongCluster):
        await membership.find_cluster()


class _Silent:
    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody resolves it")


class _Strict:
    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        raise PermissionDenied("not this certificate")


def _host(handlers: dict[str, object]) -> tuple[Any, UnaryTimeouts, VirtualClock]:
    clock, network = VirtualClock(asyncio.get_running_loop()), UnaryTimeouts(handlers)
    settings = SimpleNamespace(masters=("first:1", ADDRESS), service="gateway")
    host = SimpleNamespace(
        world=World(clock, network, random.Random(1)),
        settings=settings,
        announced=SimpleNamespace(address="g:1"),
        log=structlog.get_logger("test"),
    )
    return cast(Any, host), network, clock


async def test_masters_that_restart_while_a_service_starts_are_waited_for() -> None:
    host, network, clock = _host({})
    starting = asyncio.create_task(connected(host))
    await asyncio.sleep(30.0)
    assert not starting.done()
    network.handlers[ADDRESS] = ClusterInMemory(clock)
    database = await starting
    assert clock.monotonic_seconds() < 32.0
    await database.close()


async def test_a_silent_master_costs_a_service_seconds() -> None:
    host, network, clock = _host({"first:1": _Silent()})
    network.handlers[ADDRESS] = ClusterInMemory(clock)
    database = await connected(host)
    assert clock.monotonic_seconds() < 10.0
    await database.close()


async def test_what_no_waiting_mends_ends_the_start() -> None:
    host, _, clock = _host({"first:1": _Strict()})
    with pytest.raises(PermissionDenied):
        await connected(host)
    assert clock.monotonic_seconds() < 1.0


# A shared look: no caller gets one that began before its call, and none is forgotten.


class Store:
    """Answers with the number of the look, once it is let."""

    def __init__(self) -> None:
        self.looks = 0
        self.answers = asyncio.Event()
        self.error: Exception | None = None

    async def look(self) -> int:
        self.looks += 1
        number = self.looks
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_all_who_ask_in_one_round_share_one_look() -> None:
    store = Store()
    store.answers.set()
    look = SharedLook(store.look)
    assert await asyncio.gather(*(look() for _ in range(50))) == [1] * 50


async def test_a_caller_that_comes_during_a_look_gets_the_next_one() -> None:
    """The one under way may have seen a moment before the work of this caller was done."""
    store = Store()
    look = SharedLook(store.look)
    first = look()
    await asyncio.sleep(0)
    late = [look(), look()]
    store.answers.set()
    assert await first == 1
    assert await asyncio.gather(*late) == [2, 2]


async def test_cancelling_one_caller_does_not_affect_the_others() -> None:
    store = Store()
    look = SharedLook(store.look)
    leaving, staying = look(), look()
    await asyncio.sleep(0)
    leaving.cancel()
    store.answers.set()
    assert await staying == 1
    assert await look() == 2


async def test_an_error_reaches_all_who_wait_and_the_next_look_is_made() -> None:
    store = Store()
    store.error = RuntimeError("a bug")
    look = SharedLook(store.look)
    first = look()
    await asyncio.sleep(0)
    second = look()
    store.answers.set()
    for future in (first, second):
        with pytest.raises(RuntimeError):
            await future
    store.error = None
    assert await look() == 2
