"""A master that no longer leads refuses nothing for good: the caller would ask nobody else."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from percolator.errors import DeadlineExceeded, NotReady, PercolatorError, SchemaError
from percolator.services.chassis.coordinator import LivedTime
from percolator.services.master.map_store import decoded
from percolator.services.master.master import Master
from percolator.services.master.registry import Registry
from percolator.v1.cluster_pb2 import SERVICE_KIND_GATEWAY, Server
from percolator.world import Random, World
from tests.simulation.virtual_time import VirtualClock


class _Leadership:
    """One that another master takes over while a call is in progress."""

    def __init__(self) -> None:
        self.is_lost = False

    async def check(self) -> None:
        if self.is_lost:
            raise NotReady("another master leads")


class _Term:
    def __init__(self) -> None:
        self.leadership = _Leadership()
        self.is_over = False


async def _called(problem: PercolatorError, *, is_lost: bool, is_over: bool = False) -> None:
    """A call that fails, at a master that is replaced in the middle of it, or is not."""
    anything = cast("Any", None)
    world = World(VirtualClock(asyncio.get_running_loop()), anything, Random(1))
    registry = Registry(
        world.clock, LivedTime(world.clock), silence_milliseconds=5_000, servers_max=100
    )
    master: Master[Any, Any] = Master(
        world, Server(address="a:1"), anything, registry, anything, anything
    )
    term = master.candidacy.term = _Term()
    async with master.leading():
        term.leadership.is_lost = is_lost
        term.is_over = is_over
        raise problem


@pytest.mark.parametrize(
    "problem", [SchemaError("there is no table 'new'"), PercolatorError("is closed")]
)
async def test_what_only_a_former_leader_refuses_is_asked_of_the_next_one(
    problem: PercolatorError,
) -> None:
    with pytest.raises(NotReady, match="another master leads"):
        await _called(problem, is_lost=True)


async def test_a_term_that_has_ended_refuses_nothing_for_good_either() -> None:
    """It closes what its calls in progress use, before it has given the leadership up."""
    with pytest.raises(NotReady):
        await _called(PercolatorError("is closed"), is_lost=False, is_over=True)


async def test_a_leader_refuses_as_it_is() -> None:
    with pytest.raises(SchemaError, match="no table"):
        await _called(SchemaError("there is no table 'new'"), is_lost=False)


async def test_what_may_have_been_executed_stays_unknown() -> None:
    """`NotReady` would say that it was not."""
    with pytest.raises(DeadlineExceeded):
        await _called(DeadlineExceeded("the oracle was late"), is_lost=True)


class _EndedTerm:
    """A term in which one server reports, until another master leads."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def begin(self) -> None:
        self._registry.report(
            Server(kind=SERVICE_KIND_GATEWAY, server_id="g", address="g:1", version="1")
        )

    async def until_over(self) -> None:
        raise NotReady("another master leads")


async def test_a_master_that_no_longer_leads_misses_nobody() -> None:
    """All servers report to its successor. `percolator status` called every one of them gone while
    no master could lead, as on a full disk."""
    world = World(VirtualClock(asyncio.get_running_loop()), cast("Any", None), Random(1))
    registry = Registry(
        world.clock, LivedTime(world.clock), silence_milliseconds=1_000, servers_max=100
    )
    coordinator, begin = AsyncMock(), AsyncMock(return_value=_EndedTerm(registry))
    master: Master[Any, Any] = Master(
        world, Server(address="a:1"), coordinator, registry, begin, decoded
    )
    with pytest.raises(NotReady):
        await master._serve_a_term()
    for _ in range(10):
        await asyncio.sleep(0.25)
        registry.forget_silent()
    assert registry.missed() == []
