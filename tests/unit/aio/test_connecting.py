"""Connecting to a cluster whose servers are still finding each other."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from percolator import aio
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.errors import Unavailable, UsageError
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import cluster_pb2, lockservice_pb2
from percolator.world import Clock, World
from tests.simulation.virtual_time import VirtualClock


class YoungCluster(ClusterInMemory):
    """A cluster whose master learns of the oracle only after a while, as a standby does."""

    def __init__(self, clock: Clock, known_after_seconds: float) -> None:
        super().__init__(clock)
        self._time = clock
        self._known_after_seconds = known_after_seconds

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        described = await super().describe(request)
        if self._time.monotonic_seconds() < self._known_after_seconds:
            oracles = [
                server
                for server in described.servers
                if server.kind == cluster_pb2.SERVICE_KIND_ORACLE
            ]
            for oracle in oracles:
                described.servers.remove(oracle)
        return described


async def connect(known_after_seconds: float, timeout_seconds: float) -> Database:
    clock = VirtualClock(asyncio.get_running_loop())
    network = InProcessNetwork({ADDRESS: YoungCluster(clock, known_after_seconds)})
    world = World(clock, network, random.Random(1))
    return await connect_to(
        world, [ADDRESS], Limits(), RetryPolicy(), timeout_seconds=timeout_seconds
    )


async def test_connecting_waits_for_the_oracle_of_a_cluster_that_is_just_starting() -> None:
    database = await connect(known_after_seconds=3.0, timeout_seconds=10.0)
    assert await database.timestamp() > 0
    await database.close()


async def test_connecting_to_a_cluster_without_an_oracle_ends_at_the_time_out() -> None:
    with pytest.raises(Unavailable, match="no oracle"):
        await connect(known_after_seconds=1_000.0, timeout_seconds=5.0)
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.2)


class SlowLockService(ClusterInMemory):
    """A cluster whose lock service takes a second to open a session."""

    live = 0

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        described = await super().describe(request)
        described.servers.add(kind=cluster_pb2.SERVICE_KIND_LOCK_SERVICE, address=ADDRESS)
        return described

    async def open_session(
        self, request: lockservice_pb2.OpenSessionRequest
    ) -> lockservice_pb2.OpenSessionResponse:
        await asyncio.sleep(1.0)
        self.live += 1
        return lockservice_pb2.OpenSessionResponse(session_id=b"session")

    async def end_session(
        self, request: lockservice_pb2.EndSessionRequest
    ) -> lockservice_pb2.EndSessionResponse:
        self.live -= 1
        return lockservice_pb2.EndSessionResponse()


@pytest.mark.parametrize("seconds", [0.5, 1.0])
async def test_who_gives_up_connecting_leaves_no_session_behind(seconds: float) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = SlowLockService(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    connecting = asyncio.create_task(connect_to(world, [ADDRESS], Limits(), RetryPolicy()))
    await asyncio.sleep(seconds)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.sleep(10.0)
    assert not cluster.live
    assert asyncio.all_tasks() == {asyncio.current_task()}


class ListedAtTimes(ClusterInMemory):
    """A cluster whose master does not know the lock service for a while."""

    def __init__(self, clock: Clock, unknown_from: float, unknown_until: float) -> None:
        super().__init__(clock)
        self._time = clock
        self._unknown_from = unknown_from
        self._unknown_until = unknown_until
        self.calls: list[str] = []

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        described = await super().describe(request)
        if not self._unknown_from <= self._time.monotonic_seconds() < self._unknown_until:
            described.servers.add(kind=cluster_pb2.SERVICE_KIND_LOCK_SERVICE, address=ADDRESS)
        return described

    async def open_session(
        self, request: lockservice_pb2.OpenSessionRequest
    ) -> lockservice_pb2.OpenSessionResponse:
        self.calls.append("open")
        return lockservice_pb2.OpenSessionResponse(session_id=b"session")

    async def renew_session(
        self, request: lockservice_pb2.RenewSessionRequest
    ) -> lockservice_pb2.RenewSessionResponse:
        self.calls.append("renew")
        return lockservice_pb2.RenewSessionResponse()

    async def end_session(
        self, request: lockservice_pb2.EndSessionRequest
    ) -> lockservice_pb2.EndSessionResponse:
        self.calls.append("end")
        return lockservice_pb2.EndSessionResponse()


async def test_who_connects_before_the_lock_service_is_listed_opens_a_session_when_it_is() -> None:
    """Without one, nothing keeps the history that its snapshots need."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = ListedAtTimes(clock, 0.0, 3.0)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    database = await connect_to(world, [ADDRESS], Limits(), RetryPolicy())
    owners = database.internal.engine.env.owners
    assert not cluster.calls
    await asyncio.sleep(20.0)
    assert owners.session_id == b"session"
    assert cluster.calls.count("open") == 1
    assert cluster.calls.count("renew") > 5
    await database.close()
    assert cluster.calls[-1] == "end"
    await asyncio.sleep(20.0)
    assert cluster.calls[-1] == "end"


async def test_a_session_lasts_though_a_master_lists_no_lock_service_for_a_moment() -> None:
    """As one that has just begun to lead. If the client believed it until it asks again, others
    would roll back its transactions."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = ListedAtTimes(clock, 4.0, 6.0)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    database = await connect_to(world, [ADDRESS], Limits(), RetryPolicy())
    owners = database.internal.engine.env.owners
    for _ in range(200):
        assert owners.session_id == b"session"
        await asyncio.sleep(0.1)
    await database.close()


def test_a_connection_that_was_neither_awaited_nor_entered_says_what_to_write() -> None:
    db: Any = aio.connect("localhost:7100")
    with pytest.raises(AttributeError, match=r"'transaction' of a database: .*async with"):
        db.transaction()
    with pytest.raises(UsageError, match=r"has not connected yet: .*async with"), db:
        pass
    assert not hasattr(db, "snapshot")
