"""A service that is a client of its own cluster waits for what may come."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog

from percolator.errors import PermissionDenied
from percolator.services.chassis.cluster_client import connected
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.v1 import cluster_pb2
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.unary_timeouts import UnaryTimeouts


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
