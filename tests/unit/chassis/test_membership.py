"""Finding the cluster and staying registered, on virtual time.

A service that is a client of its own cluster waits for what may come.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from percolator.errors import PercolatorError, PermissionDenied, Unavailable, WrongCluster
from percolator.services.chassis.cluster_client import connected
from percolator.services.chassis.membership import Membership, Registration
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.v1 import cluster_pb2
from percolator.v1 import cluster_pb2 as cluster
from percolator.wire.methods import DESCRIBE
from percolator.world import UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_network import UnaryNetwork
from tests.unit.unary_timeouts import UnaryTimeouts


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
    with pytest.raises(PercolatorError) as caught:
        await membership.find_cluster()
    assert isinstance(caught.value, WrongCluster)


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
