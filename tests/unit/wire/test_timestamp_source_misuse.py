"""Misuse of the source of timestamps is refused by name, and harms no other call."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest

from percolator import errors
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.wire.fake_oracles import ROUND_TRIP_SECONDS, Oracles, source_of


@pytest.mark.parametrize("count", [0, -1, 11])
async def test_a_count_outside_its_limits_is_refused_by_name(count: int) -> None:
    oracles = Oracles()
    source = source_of(oracles, count_max=10)
    with pytest.raises(errors.InvalidArgument) as refused:
        await source.get(count)
    assert refused.value.field == "count"
    assert oracles.requests == []


async def test_at_least_one_address_is_required() -> None:
    world = World(VirtualClock(asyncio.get_running_loop()), Oracles(), random.Random(1))
    with pytest.raises(errors.InvalidArgument, match="addresses: is empty"):
        TimestampSource(world, [])


@pytest.mark.parametrize("count", [1.5, 1.0, "1", None, math.nan])
async def test_a_count_that_is_not_a_whole_number_is_refused_and_harms_no_other_call(
    count: Any,
) -> None:
    """In a shared request, it would make the other calls fail too."""
    source = source_of(Oracles())
    other = source.get()
    with pytest.raises(errors.InvalidArgument) as refused:
        source.get(count)
    assert refused.value.field == "count"
    assert await other == 1000


@pytest.mark.parametrize("seconds", [math.nan, "1"])
async def test_a_timeout_that_is_not_a_number_is_refused_by_name(seconds: Any) -> None:
    """With NaN, the call would never learn that no oracle answers."""
    source = source_of(Oracles())
    with pytest.raises(errors.InvalidArgument) as refused:
        source.get(1, seconds)
    assert refused.value.field == "timeout_seconds"
    world = World(VirtualClock(asyncio.get_running_loop()), Oracles(), random.Random(1))
    with pytest.raises(errors.InvalidArgument, match="timeout_seconds"):
        TimestampSource(world, ["a:1"], timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", [0.0, -1.0, -math.inf])
async def test_a_timeout_that_has_passed_already_ends_the_wait_at_once(seconds: float) -> None:
    source = source_of(Oracles())
    started = asyncio.get_running_loop().time()
    with pytest.raises(errors.DeadlineExceeded):
        await source.get(1, seconds)
    assert asyncio.get_running_loop().time() == started
    assert await source.get() > 0


async def test_one_address_in_place_of_a_list_is_refused() -> None:
    """Each of its characters would be taken for an address."""
    world = World(VirtualClock(asyncio.get_running_loop()), Oracles(), random.Random(1))
    with pytest.raises(errors.InvalidArgument, match=r"addresses: expected a list .* 'a:1'"):
        TimestampSource(world, "a:1")
    with pytest.raises(errors.InvalidArgument, match="count_max"):
        source_of(Oracles(), count_max=0)


@pytest.mark.parametrize("seconds", [None, 0.0, ROUND_TRIP_SECONDS / 4])
async def test_no_call_is_forgotten_when_other_code_cancels_the_tasks_of_the_loop(
    seconds: float | None,
) -> None:
    """Nor does the source stop asking, even if its task is cancelled before its first step."""
    oracles = Oracles()
    source = source_of(oracles)
    asked = source.get()
    if seconds is not None:
        await asyncio.sleep(seconds)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    assert await source.get() > await asked


def test_a_source_used_outside_its_event_loop_raises_an_error() -> None:
    async def made() -> TimestampSource:
        return source_of(Oracles())

    async def used(source: TimestampSource) -> None:
        source.get()

    source = run_virtually(made())
    with pytest.raises(errors.UsageError, match="one event loop"):
        run_virtually(used(source))
    with pytest.raises(errors.UsageError, match="within an event loop"):
        source.get()
