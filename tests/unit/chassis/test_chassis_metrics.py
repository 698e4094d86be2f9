"""Figures of calls, as Prometheus reads them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from percolator.services.chassis.metrics import watch_event_loop
from percolator.services.chassis.rpc import BUCKETS_SECONDS, RpcMetrics
from tests.simulation.virtual_time import VirtualClock


@given(st.lists(st.floats(min_value=0, max_value=20), max_size=50))
def test_a_histogram_counts_every_call_in_each_bucket_that_it_fits(seconds: list[float]) -> None:
    calls = RpcMetrics()
    registry = CollectorRegistry()
    registry.register(calls)
    method = calls.method("Shop", "Sell")
    for spent in seconds:
        method.in_flight += 1
        method.finished("OK", spent)
    labels = {"service": "Shop", "method": "Sell"}
    for bound in BUCKETS_SECONDS:
        found = registry.get_sample_value(
            "percolator_rpc_seconds_bucket", {**labels, "le": str(bound)}
        )
        assert found == sum(spent <= bound for spent in seconds)
    assert registry.get_sample_value("percolator_rpc_seconds_count", labels) == len(seconds)
    assert registry.get_sample_value("percolator_rpc_in_flight", labels) == 0


async def test_the_event_loops_lateness_is_measured() -> None:
    registry = CollectorRegistry()
    clock = VirtualClock(asyncio.get_running_loop())
    watching = asyncio.create_task(watch_event_loop(registry, clock))
    await asyncio.sleep(1.1)
    watching.cancel()
    assert registry.get_sample_value("percolator_event_loop_lag_seconds_count") == 4
    assert registry.get_sample_value("percolator_event_loop_lag_seconds_sum") == 0


class SlowClock(VirtualClock):
    """The clock of a loop that is so busy that its timers fire late."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + 0.03)


async def test_a_busy_event_loop_shows_by_its_lateness_and_its_tasks() -> None:
    registry = CollectorRegistry()
    clock = SlowClock(asyncio.get_running_loop())
    watching = asyncio.create_task(watch_event_loop(registry, clock))
    busy = [asyncio.create_task(asyncio.sleep(10)) for _ in range(5)]
    await asyncio.sleep(0.3)
    lag = registry.get_sample_value("percolator_event_loop_lag_seconds_sum")
    assert lag == pytest.approx(0.03)
    assert registry.get_sample_value("percolator_event_loop_tasks") == 7  # this one, the watch, 5
    for task in (watching, *busy):
        task.cancel()
