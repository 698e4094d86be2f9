"""What goes wrong again and again is logged when it begins and when it ends, not each time."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import structlog

from percolator.errors import DeadlineExceeded, StoreFault, StoreUnusable
from percolator.services.chassis.coordinator import REASONS_MAX, Trouble
from percolator.v1 import cluster_pb2
from tests.unit.master.cluster_world import cluster
from tests.unit.master.model_oracle import ORACLE, SERVER
from tests.unit.master.tables_of_rows import create, served


def events(log: Sequence[Mapping[str, object]]) -> Counter[object]:
    return Counter(entry["event"] for entry in log)


def test_a_trouble_is_logged_with_each_new_reason_and_when_it_comes_back() -> None:
    trouble = Trouble(structlog.get_logger(), "broken", "works", part="a")
    with structlog.testing.capture_logs() as log:
        trouble.is_over()
        for reason in ("full", "full", "gone", "full", "gone"):
            trouble.lasts(OSError(reason))
        trouble.is_over()
        trouble.is_over()
        trouble.lasts(OSError("gone"))
    assert [(entry["event"], entry.get("error"), entry["part"]) for entry in log] == [
        ("broken", "full", "a"),
        ("broken", "gone", "a"),
        ("works", None, "a"),
        ("broken", "gone", "a"),
    ]


def test_a_trouble_whose_reason_is_another_each_time_does_not_fill_the_log() -> None:
    trouble = Trouble(structlog.get_logger(), "broken")
    with structlog.testing.capture_logs() as log:
        for attempt in range(1_000):
            trouble.lasts(f"no answer to attempt {attempt}")
    assert len(log) == REASONS_MAX


async def test_a_master_without_an_oracle_names_each_of_two_once() -> None:
    """Whichever it has asked last when its time is up: it wrote a line every few seconds."""
    async with cluster("a:1") as world:
        other = cluster_pb2.Server(server_id="oracle:2", address="oracle:2")
        other.MergeFrom(cluster_pb2.Server(kind=SERVER.kind, version=SERVER.version))
        world.parts.append(other)
        await asyncio.sleep(3)
        del world.network.handlers[ORACLE]
        with structlog.testing.capture_logs() as log:
            await asyncio.sleep(600)
        assert events(log)["the oracle does not answer this master"] == 2


async def test_masters_on_a_full_disk_do_not_fill_it_with_their_logs() -> None:
    """Each of them tries to lead, and to show that it lives, several times a second."""
    async with cluster("a:1") as world:
        world.start_master()
        table = await create(world)
        await asyncio.sleep(3)
        for process in world.masters:
            for operation in ("append", "create"):
                process.files.faults.fail(operation, times=10**9, number=errno.ENOSPC)
        with structlog.testing.capture_logs() as log:
            await asyncio.sleep(60)
            found = events(log)
            assert found["this master cannot lead"] == 2
            assert found.total() < 10, found
            for process in world.masters:
                process.files.faults.heal()
            await world.until(lambda: served(world, table))
            await asyncio.sleep(1)
        assert events(log)["session renewed again"] == 2


async def test_one_master_on_a_full_disk_does_not_fill_it_with_its_logs() -> None:
    """It leads on, since no other one does, and servers come and go meanwhile."""
    async with cluster("a:1") as world:
        await create(world)
        await asyncio.sleep(3)
        faults = world.masters[0].files.faults
        for operation in ("append", "create"):
            faults.fail(operation, times=10**9, number=errno.ENOSPC)
        with structlog.testing.capture_logs() as log:
            world.start_server("b:1")
            await asyncio.sleep(600)
        assert events(log)["the list of servers for standbys was not stored"] == 1


async def test_a_tablet_that_cannot_be_opened_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried again every few seconds, and a disk may have thousands of tablets."""

    def full(*_: object) -> None:
        raise StoreUnusable("no space left", fault=StoreFault.DISK_FULL)

    async with cluster("a:1") as world:
        monkeypatch.setattr(world.store, "take_over", full)
        with structlog.testing.capture_logs() as log:
            with pytest.raises(DeadlineExceeded):
                await create(world)
            await asyncio.sleep(600)
        assert events(log)["tablet not opened"] == 6


async def test_a_tablet_that_cannot_be_opened_is_logged_once_and_when_it_is_open() -> None:
    """It is tried again every few seconds, for as long as it takes to repair it."""
    async with cluster("a:1") as world:
        table = await create(world)
        with structlog.testing.capture_logs() as log:
            for stored in world.store.tablets.values():
                stored.unreadable = True
            world.kill_server("a:1")
            world.start_server("a:1")
            await asyncio.sleep(60)
            assert events(log)["tablet not opened"] == len(world.store.tablets)
            for stored in world.store.tablets.values():
                stored.unreadable = False
            await world.until(lambda: served(world, table))
            await asyncio.sleep(1)
        assert events(log)["tablet opened"] == len(world.store.tablets)
