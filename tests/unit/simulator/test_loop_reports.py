"""No test passes in which an exception went unretrieved: conftest.py looks at each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from percolator.event_loop import new_event_loop
from tests import loop_reports
from tests.simulation.virtual_time import run_virtually


async def leave_a_failure_alone() -> None:
    async def fail(itself: list[object]) -> None:
        itself.append(asyncio.current_task())
        raise ValueError("not retrieved")

    holder: list[object] = []
    holder.append(holder)
    task = asyncio.create_task(fail(holder))
    await asyncio.wait([task])


def test_an_exception_that_nothing_retrieves_fails_a_test() -> None:
    with pytest.raises(AssertionError, match="never retrieved") as failed, loop_reports.refused():
        run_virtually(leave_a_failure_alone())
    assert "not retrieved" in str(failed.value)


def test_so_does_one_in_the_loop_of_another_thread() -> None:
    with (
        pytest.raises(AssertionError, match="never retrieved"),
        loop_reports.refused(),
        ThreadPoolExecutor(1) as thread,
    ):
        thread.submit(lambda: asyncio.run(leave_a_failure_alone()))


def test_an_exception_that_is_retrieved_fails_nothing() -> None:
    async def fail() -> None:
        raise ValueError("heard")

    async def main() -> None:
        with pytest.raises(ValueError, match="heard"):
            await asyncio.create_task(fail())

    with loop_reports.refused():
        run_virtually(main())


class PollerCompletionQueue:
    """Stands for gRPC's, whose callback fails when its event is for a loop that was closed."""

    def _handle_events(self) -> None:
        raise RuntimeError("Event loop is closed")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, new_event_loop])
def test_the_poller_of_grpc_fails_nothing_but_another_callback_does(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    def fail() -> None:
        raise RuntimeError("Event loop is closed")

    def call(callback: Callable[[], None]) -> None:
        loop.call_soon(callback)
        loop.run_until_complete(asyncio.sleep(0))

    loop = new_loop()
    try:
        with loop_reports.refused():
            call(PollerCompletionQueue()._handle_events)
        with pytest.raises(AssertionError, match="loop is closed"), loop_reports.refused():
            call(fail)
    finally:
        loop.close()
