"""What counts as the time of a run: not the calls that the cluster leaves unanswered."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from percolator import Limits, codecs, observes
from percolator.errors import Unavailable
from percolator.observers.time_limits import ClusterWaits
from percolator.recipes import CombineQueue
from percolator.v1 import tabletserver_pb2 as pb

from .observed_cluster import Observed, copy, observed, source, total

LIMITS = Limits(call_seconds=100.0, attempt_seconds_max=50.0)


class Slow:
    """Reads of a cluster that take long from the time on that an observer says so."""

    def __init__(self, world: Observed, seconds: float) -> None:
        self._read = world.cluster.read
        self._seconds = seconds
        self.is_slow = False
        world.cluster.read = self.read  # type: ignore[method-assign]

    async def read(self, request: pb.ReadRequest) -> pb.ReadResponse:
        if self.is_slow:
            await asyncio.sleep(self._seconds)
        return await self._read(request)


async def run(own: float, unanswered: float, reads: int = 1, limits: Limits = LIMITS) -> list[str]:
    """Runs an observer that spends `own` seconds before and after these reads. Returns the errors
    of its dead letters."""

    @observes(source, name="slow", deadline=2.0, attempts=1)
    async def slow(tx: Any, row: str) -> None:
        cluster.is_slow = True
        await asyncio.sleep(own)
        for _ in range(reads):
            await tx.get(row, total)
        await asyncio.sleep(own)
        cluster.is_slow = False
        await tx.set(row, copy, 1)

    async with observed(limits=limits) as world:
        cluster = Slow(world, unanswered)
        async with world.db.run_observers([slow]):
            await world.put("a", 1)
            async with asyncio.timeout(1_000.0):
                while await world.waiting():
                    cluster.is_slow = False
                    await asyncio.sleep(10.0)
            return [letter.error for letter in await world.dead_letters()]


async def test_waiting_for_a_cluster_that_does_not_answer_is_no_time_of_the_observer() -> None:
    assert await run(0.5, 9.0) == []


async def test_nor_is_waiting_inside_a_recipe() -> None:
    sums = CombineQueue("sums", key=codecs.text, value=codecs.integer, combine=sum)

    @observes(source, name="adding", deadline=2.0, attempts=1)
    async def adding(tx: Any, row: str) -> None:
        await sums.add(tx, row, 1)

    async with observed(limits=LIMITS) as world:
        await sums.create(world.db)
        declare = world.cluster.declare_codecs

        async def declare_late(request: Any) -> Any:
            await asyncio.sleep(9.0)
            return await declare(request)

        async with world.db.run_observers([adding]):
            await world.put("a", 1)
            world.cluster.declare_codecs = declare_late  # type: ignore[method-assign]
            await world.until_nothing_waits()
        assert await world.dead_letters() == []
        async with world.db.snapshot() as snapshot:
            assert await sums.get(snapshot, "a") == 1


async def test_its_own_time_still_counts_before_and_after() -> None:
    assert await run(1.5, 9.0) == ["TookTooLong: it did not return within 2 s"]


async def test_a_cluster_that_answers_slowly_is_no_excuse() -> None:
    assert await run(0.0, 0.2, reads=1_000) == ["TookTooLong: it did not return within 2 s"]


async def test_a_call_that_fails_for_lack_of_an_answer_is_no_failure_whatever_it_becomes() -> None:
    attempts = 0

    @observes(source, name="wrapping", attempts=1)
    async def wrapping(tx: Any, row: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ExceptionGroup("of a group of tasks", [Unavailable("gone"), Unavailable("gone")])
        if attempts == 2:
            raise ValueError("its own error") from Unavailable("gone")
        raise ExceptionGroup("of a group of tasks", [Unavailable("gone"), ValueError("a bug")])

    async with observed() as world, world.db.run_observers([wrapping]):
        await world.put("a", 1)
        await world.until_nothing_waits()
        (letter,) = await world.dead_letters()
        assert (attempts, letter.attempts) == (3, 1)
        assert letter.error.startswith("ExceptionGroup")


def test_waits_that_overlap_count_once_and_short_ones_not_at_all() -> None:
    now = 100.0
    waits = ClusterWaits(lambda: now, 1.0)
    first, second = waits.call(), waits.call()
    first.__enter__()
    now += 0.5
    assert waits.seconds() == 0.5  # it may become a long one
    second.__enter__()
    now += 0.4
    second.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(0.9)
    now += 3.1
    first.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(4.0)
    with waits.call():
        now += 0.9
    assert waits.seconds() == pytest.approx(4.0)
    first, second = waits.call(), waits.call()
    first.__enter__()
    now += 2.0
    second.__enter__()
    now += 0.5
    second.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(6.5)
    now += 1.0
    first.__exit__(None, None, None)
    assert waits.seconds() == pytest.approx(7.5)


async def test_a_slow_run_is_logged_with_its_observer_and_cell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @observes(source, name="slow")
    async def slow(tx: Any, row: str) -> None:
        await tx.set(row, copy, 1)
        await asyncio.sleep(1.5)

    async with observed() as world, world.db.run_observers([slow]):
        with caplog.at_level(logging.WARNING, "percolator.transactions"):
            await world.put("a", 1)
            await world.until_copied("a", 1)
    (line,) = caplog.messages
    assert "slow transaction: committed after 1.5" in line
    assert "2 cells, observer 'slow' for row 'a', column 'source' of table 'docs', " in line
