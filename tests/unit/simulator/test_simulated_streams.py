"""Streamed answers arrive in order, to their end or their error, or stop without a gap."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from percolator.errors import DeadlineExceeded, NotReady, Unavailable
from percolator.v1.tabletserver_pb2 import ScanRequest
from percolator.wire.methods import SCAN
from tests.simulation.network import STREAM_WINDOW_MESSAGES, Fault, NetworkFaults
from tests.simulation.process import Incarnation
from tests.unit.simulator.stage import SERVER, Stage, on_stage, pages


def test_pages_arrive_in_order_and_end() -> None:
    async def play(stage: Stage) -> list[int]:
        return await stage.run(lambda incarnation: pages(incarnation, 40))

    assert on_stage(play) == list(range(40))


def test_slow_pages_do_not_overtake_each_other() -> None:
    async def play(stage: Stage) -> list[int]:
        stage.wire.faults = NetworkFaults(slow=0.5, slow_seconds_max=1.0)
        return await stage.run(lambda incarnation: pages(incarnation, 40, timeout=1000.0))

    for seed in range(5):
        assert on_stage(play, seed=seed) == list(range(40))


def test_an_error_comes_after_the_pages_before_it() -> None:
    async def play(stage: Stage) -> list[int]:
        stage.handler.error = NotReady("draining", retry_after_seconds=0.25)
        seen: list[int] = []
        with pytest.raises(NotReady) as caught:
            await stage.run(lambda incarnation: pages(incarnation, 5, seen))
        assert caught.value.retry_after_seconds == 0.25
        return seen

    assert on_stage(play) == [0, 1]


def test_a_reader_that_stops_early_closes_the_handler() -> None:
    async def play(stage: Stage) -> list[str]:
        stage.handler.seconds = 1.0

        async def program(incarnation: Incarnation) -> None:
            scan = incarnation.world.network.stream(SERVER, SCAN)
            async with aclosing(scan(ScanRequest(row_limit=50), 100.0)) as found:
                async for _ in found:
                    break

        await stage.run(program)
        await asyncio.sleep(10)
        return stage.handler.log

    assert on_stage(play) == ["page 0", "closed"]


def test_a_slow_reader_holds_the_handler_back() -> None:
    async def play(stage: Stage) -> int:
        made_before_the_second_was_read = 0

        async def program(incarnation: Incarnation) -> int:
            nonlocal made_before_the_second_was_read
            read = 0
            scan = incarnation.world.network.stream(SERVER, SCAN)
            async for _ in scan(ScanRequest(row_limit=200), 1000.0):
                if read == 0:
                    await asyncio.sleep(10)
                    made_before_the_second_was_read = len(stage.handler.log)
                read += 1
            return read

        assert await stage.run(program) == 200
        return made_before_the_second_was_read

    # One was read, and one is in the handler's hand.
    assert on_stage(play) == STREAM_WINDOW_MESSAGES + 2


def test_after_a_lost_page_nothing_more_arrives() -> None:
    """A gap in a scan would look like a row that is not there."""

    async def play(stage: Stage) -> list[int]:
        stage.handler.seconds = 0.1
        stage.decide(None, None, None, Fault.REPLY_DROPPED)
        seen: list[int] = []
        with pytest.raises(DeadlineExceeded):
            await stage.run(lambda incarnation: pages(incarnation, 10, seen))
        return seen

    assert on_stage(play) == [0, 1]


def test_a_stream_breaks_with_its_connection_or_its_server() -> None:
    async def play(stage: Stage) -> None:
        stage.handler.seconds = 0.1
        stage.decide(None, None, Fault.BROKEN_AFTER)
        with pytest.raises(Unavailable, match="broke"):
            await stage.run(lambda incarnation: pages(incarnation, 10))
        await stage.client.ended()
        reading = stage.run(lambda incarnation: pages(incarnation, 10))
        await asyncio.sleep(0.35)
        stage.server.crash()
        with pytest.raises(Unavailable, match="reset"):
            await reading

    on_stage(play)


def test_a_stream_ends_at_the_time_out_of_its_caller() -> None:
    async def play(stage: Stage) -> list[str]:
        stage.handler.seconds = 1.0
        with pytest.raises(DeadlineExceeded):
            await stage.run(lambda incarnation: pages(incarnation, 10, timeout=2.5))
        await asyncio.sleep(1)
        return stage.handler.log

    assert on_stage(play) == ["page 0", "page 1", "closed"]
