"""Calls go to the master that leads, whichever others are silent."""

from __future__ import annotations

import asyncio
import random

import pytest

from percolator.errors import DeadlineExceeded, NotReady, PercolatorError
from percolator.routing.catalog import Masters
from percolator.v1 import master_pb2 as pb
from percolator.wire.methods import LIST_TABLES
from percolator.world import RequestT, ResponseT, UnaryCall, UnaryMethod, World
from tests.simulation.virtual_time import VirtualClock

from .test_catalog import SlowMaster


class _SomeMasters(SlowMaster):
    """Those at some addresses do not lead, or do not answer at all."""

    def __init__(self, **problems: PercolatorError) -> None:
        super().__init__(0.01, pb.ListTablesResponse())
        self.problems = problems
        self.asked: list[str] = []

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT]
    ) -> UnaryCall[RequestT, ResponseT]:
        answered = super().unary(address, method)

        async def call(request: RequestT, timeout: float) -> ResponseT:
            self.asked.append(address)
            problem = self.problems.get(address)
            if isinstance(problem, DeadlineExceeded):
                await asyncio.sleep(timeout)
            if problem is not None:
                raise problem
            return await answered(request, timeout)

        return call


def _masters(network: _SomeMasters, *addresses: str) -> tuple[Masters, VirtualClock]:
    clock = VirtualClock(asyncio.get_running_loop())
    return Masters(World(clock, network, random.Random(1)), addresses), clock


@pytest.mark.parametrize("callers", [1, 2, 3, 4, 8])
async def test_a_silent_master_costs_one_attempt_however_many_call_at_a_time(callers: int) -> None:
    network = _SomeMasters(a=DeadlineExceeded("no answer in time"))
    masters, clock = _masters(network, "a", "b")
    calls = [
        masters.call(LIST_TABLES, pb.ListTablesRequest(), clock.monotonic_seconds() + 5.0)
        for _ in range(callers)
    ]
    await asyncio.gather(*calls)
    assert clock.monotonic_seconds() == pytest.approx(2.0, abs=0.1)
    await masters.call(LIST_TABLES, pb.ListTablesRequest(), clock.monotonic_seconds() + 5.0)
    assert network.asked == ["a"] * callers + ["b"] * (callers + 1)


async def test_callers_pause_when_they_have_asked_all_masters() -> None:
    network = _SomeMasters(a=NotReady("starting"), b=NotReady("starting"))
    masters, clock = _masters(network, "a", "b")
    calls = [
        masters.call(LIST_TABLES, pb.ListTablesRequest(), clock.monotonic_seconds() + 5.0)
        for _ in range(10)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} == {DeadlineExceeded}
    assert clock.monotonic_seconds() == pytest.approx(5.0, abs=0.1)
    assert len(network.asked) < 10 * 2 * 25
