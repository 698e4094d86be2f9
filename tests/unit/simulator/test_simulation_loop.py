"""One loop for many processes: each can be paused and ended, and chance plays no part."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

import pytest

from percolator.errors import InvariantViolation
from percolator.process import new_event_loop
from tests import loop_reports
from tests.simulation.loop import CURRENT_LIFE, Life, SimulationLoop, run_simulation
from tests.simulation.virtual_time import NothingLeftToHappen, run_virtually


def simulated(main: Callable[[SimulationLoop], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test that runs on a new loop."""
    return lambda: run_simulation(main)


@simulated
async def test_timers_of_one_instant_fire_in_the_order_in_which_they_were_set(
    loop: SimulationLoop,
) -> None:
    fired: list[float] = []
    for number in range(50):
        loop.call_later(1.0, fired.append, number)
        loop.deliver_at(1.0, fired.append, (100 + number,))
    await asyncio.sleep(2)
    assert fired == [n for number in range(50) for n in (number, 100 + number)]


@simulated
async def test_time_jumps_to_the_next_timer_and_never_stands_still_or_goes_back(
    loop: SimulationLoop,
) -> None:
    instants = []
    for seconds in (3600.0, 0.0, 0.25):
        await asyncio.sleep(seconds)
        instants.append(loop.time())
    assert instants == [3600.0, 3600.0, 3600.25]


@simulated
async def test_many_cancelled_timers_are_forgotten(loop: SimulationLoop) -> None:
    """Every time-out that was not needed leaves one behind."""
    for _ in range(10_000):
        loop.call_later(10.0, print).cancel()
    assert len(loop._timers) < 1_000


@simulated
async def test_a_sleep_and_a_cheap_timer_of_a_paused_process_end_when_it_goes_on(
    loop: SimulationLoop,
) -> None:
    """However cheap they are, no time passes for a process that is paused."""
    fired: list[float] = []
    life = Life(loop, "one")

    def note() -> None:
        fired.append(loop.now)

    async def sleeper() -> None:
        await loop.sleep(1.0)
        note()

    life.spawn(sleeper())
    loop.deliver_at(1.0, note, (), life.own_context)
    await asyncio.sleep(0.5)
    life.pause()
    await asyncio.sleep(2.0)
    before = list(fired)
    life.resume()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (before, fired) == ([], [2.5, 2.5])


@simulated
async def test_a_sleep_that_was_cancelled_wakes_no_task(loop: SimulationLoop) -> None:
    asyncio.ensure_future(loop.sleep(1.0)).cancel()
    await asyncio.sleep(2.0)
    assert loop.now == 2.0


@simulated
async def test_a_step_is_cancelled_by_its_handle_or_says_that_it_cannot_be(
    loop: SimulationLoop,
) -> None:
    ran: list[str] = []
    loop.call_soon(ran.append, "cancelled").cancel()
    own = loop.call_soon(ran.append, "with a context of its own", context=Context())
    with pytest.raises(InvariantViolation, match="cannot be cancelled"):
        own.cancel()
    await asyncio.sleep(0)
    assert ran == ["with a context of its own"]


@simulated
async def test_what_a_step_raises_goes_to_the_handler_of_the_loop_and_the_others_go_on(
    loop: SimulationLoop,
) -> None:
    raised: list[object] = []
    ran: list[str] = []
    loop.set_exception_handler(lambda _, context: raised.append(type(context["exception"])))
    loop.call_soon(ran.index, "missing")
    loop.call_soon(ran.append, "next")
    await asyncio.sleep(0)
    assert (raised, ran) == ([ValueError], ["next"])


def test_exceptions_that_nothing_retrieves_are_reported_without_a_garbage_collector() -> None:
    """Also of tasks in a reference cycle, and of those that were done long before the end."""
    reported: list[object] = []

    async def fail(number: int, holder: list[object]) -> None:
        raise ValueError(number)

    async def main(loop: SimulationLoop) -> None:
        loop.set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
        for number in range(600):
            holder: list[object] = []
            task = asyncio.create_task(fail(number, holder))
            holder += [task, holder]
            await asyncio.sleep(0)
            if number not in (7, 599):
                assert isinstance(task.exception(), ValueError)
            del task

    gc.disable()
    try:
        run_simulation(main)
    finally:
        gc.enable()
    assert reported == ["7", "599"]


def test_waiting_for_what_will_never_happen_is_an_error() -> None:
    async def main(loop: SimulationLoop) -> None:
        await loop.create_future()

    with pytest.raises(NothingLeftToHappen):
        run_simulation(main)


@simulated
async def test_what_a_process_starts_belongs_to_it(loop: SimulationLoop) -> None:
    seen: list[str | None] = []

    def note() -> None:
        life = CURRENT_LIFE.get()
        seen.append(None if life is None else life.name)

    async def child() -> None:
        note()
        loop.call_soon(note)
        loop.call_later(1.0, note)

    async def parent() -> None:
        await asyncio.create_task(child())

    life = Life(loop, "one")
    life.spawn(parent())
    await asyncio.sleep(2)
    note()
    assert seen == ["one", "one", "one", None]


async def _tick(log: list[tuple[str, float]], name: str, loop: SimulationLoop) -> None:
    while True:
        await asyncio.sleep(1)
        log.append((name, loop.time()))


@simulated
async def test_a_paused_process_does_nothing_while_others_go_on_and_then_is_late(
    loop: SimulationLoop,
) -> None:
    log: list[tuple[str, float]] = []
    paused, other = Life(loop, "paused"), Life(loop, "other")
    paused.spawn(_tick(log, "paused", loop))
    other.spawn(_tick(log, "other", loop))
    await asyncio.sleep(1.5)
    paused.pause()
    await asyncio.sleep(2)
    assert len(paused.held) == 1
    paused.resume()
    await asyncio.sleep(1.25)
    assert log == [
        ("paused", 1.0),
        ("other", 1.0),
        ("other", 2.0),
        ("other", 3.0),
        ("paused", 3.5),
        ("other", 4.0),
        ("paused", 4.5),
    ]


@simulated
async def test_an_ended_process_is_gone_at_that_instant_with_all_its_tasks(
    loop: SimulationLoop,
) -> None:
    log: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append("cleaning up")
            await loop.create_future()

    async def parent() -> None:
        asyncio.create_task(stubborn())  # noqa: RUF006  # the life holds it
        await stubborn()

    life = Life(loop, "one")
    life.at_end(lambda: log.append("ended"))
    life.spawn(parent())
    await asyncio.sleep(1)
    life.end()
    life.end()
    await life.ended()
    assert life.tasks() == []
    assert (log, loop.time()) == (["ended", "cleaning up", "cleaning up"], 1.0)


@simulated
async def test_a_timer_of_an_ended_process_starts_nothing_that_stays(loop: SimulationLoop) -> None:
    life = Life(loop, "one")

    async def start_later() -> None:
        loop.call_later(2, lambda: loop.create_task(asyncio.sleep(100)))

    life.spawn(start_later())
    await asyncio.sleep(1)
    life.end()
    await life.ended()
    await asyncio.sleep(2)
    assert life.tasks() == []


@simulated
async def test_a_paused_process_can_be_ended(loop: SimulationLoop) -> None:
    log: list[tuple[str, float]] = []
    life = Life(loop, "one")
    life.spawn(_tick(log, "one", loop))
    life.pause()
    await asyncio.sleep(5)
    life.end()
    await life.ended()
    assert log == []


@simulated
async def test_a_task_that_swallows_its_cancellation_is_found_out(loop: SimulationLoop) -> None:
    """In production it would keep a draining server from stopping."""
    stop = False

    async def immortal() -> None:
        while not stop:
            try:
                await loop.create_future()
            except asyncio.CancelledError:
                continue

    life = Life(loop, "one")
    task = life.spawn(immortal())
    await asyncio.sleep(0)
    life.end()
    with pytest.raises(InvariantViolation, match="one refuse to be cancelled") as caught:
        await life.ended()
    stop = True
    task.cancel()
    assert "immortal" in str(caught.value)


@simulated
async def test_what_need_not_wait_becomes_no_task(loop: SimulationLoop) -> None:
    log: list[str] = []

    async def answer() -> None:
        life = CURRENT_LIFE.get()
        log.append("no life" if life is None else life.name)

    loop.deliver_at(1.0, lambda: log.append(str(Life(loop, "one").begin(answer()))), ())
    await asyncio.sleep(2)
    assert log == ["one", "None"]


@simulated
async def test_a_limit_that_is_set_before_the_first_wait_counts(loop: SimulationLoop) -> None:
    ended: list[float] = []

    async def answer() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                await loop.create_future()
        ended.append(loop.time())

    loop.deliver_at(1.0, Life(loop, "one").begin, (answer(),))
    await asyncio.sleep(10)
    assert ended == [4.0]


@simulated
async def test_what_is_cancelled_after_its_first_step_may_wait_anew(loop: SimulationLoop) -> None:
    """Though the cancellation comes before its task has even waited for the first thing."""
    log: list[tuple[str, float]] = []

    async def answer() -> None:
        try:
            await loop.sleep(5)
        except asyncio.CancelledError:
            log.append(("cancelled", loop.time()))
        await loop.sleep(2)
        log.append(("cleaned up", loop.time()))

    def begin_and_cancel() -> None:
        task = Life(loop, "one").begin(answer())
        assert task is not None
        task.cancel()

    loop.deliver_at(1.0, begin_and_cancel, ())
    await asyncio.sleep(10)
    assert log == [("cancelled", 1.0), ("cleaned up", 3.0)]


@simulated
async def test_what_waits_after_its_first_step_ends_with_its_process(loop: SimulationLoop) -> None:
    log: list[str] = []
    life = Life(loop, "one")

    async def answer(*, deadly: bool) -> None:
        try:
            if deadly:
                life.end()
            await loop.sleep(5)
            log.append("answered")
        finally:
            log.append("cleaned up")

    loop.deliver_at(1.0, life.begin, (answer(deadly=False),))
    loop.deliver_at(2.0, life.begin, (answer(deadly=True),))
    await asyncio.sleep(10)
    assert log == ["cleaned up", "cleaned up"]


# No test passes in which an exception went unretrieved: conftest.py looks at each.


async def leave_a_failure_alone() -> None:
    async def fail(itself: list[object]) -> None:
        itself.append(asyncio.current_task())
        raise ValueError("not retrieved")

    holder: list[object] = []
    holder.append(holder)
    await asyncio.wait([asyncio.create_task(fail(holder))])


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
