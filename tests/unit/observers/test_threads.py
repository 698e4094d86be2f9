"""The threads of blocking observers: bounded, and a hanging observer never costs one for good."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest

import percolator.testing
from percolator import Limits, Table, codecs, observes
from percolator.aio import Database
from percolator.errors import UsageError
from percolator.observers.dead_letters import DeadLetters
from percolator.observers.time_limits import NoThreadLeft, Threads, ThreadShare, TookTooLong
from percolator.observers.worker import WorkerLimits
from percolator.world import MachineClock

pytestmark = pytest.mark.real_time

docs = Table("docs")
source = docs.column("source", codecs.integer)
copy = docs.column("copy", codecs.integer)

WAIT_SECONDS = 20.0


@contextmanager
def gate() -> Iterator[threading.Event]:
    """An event that is set in the end, so that no thread that waits for it outlives the test."""
    event = threading.Event()
    try:
        yield event
    finally:
        event.set()


def nothing() -> None: ...


def no_space(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def threads_max() -> int:
    """How many threads there may be. A test may have another number as a parameter."""
    return 1


@pytest.fixture
@asynccontextmanager
async def threads(threads_max: int) -> AsyncIterator[Threads]:
    threads = Threads(threads_max)
    yield threads
    threads.close()


async def test_a_thread_that_is_given_up_is_replaced_and_ends_when_it_returns(
    threads: Threads,
) -> None:
    came_back = asyncio.Event()
    with gate() as hangs:
        with pytest.raises(TookTooLong):
            await threads.call(ThreadShare(9), hangs.wait, 0.05, came_back.set)
        await threads.call(ThreadShare(9), nothing, WAIT_SECONDS, nothing)
        assert not came_back.is_set()
        hangs.set()
        await asyncio.wait_for(came_back.wait(), WAIT_SECONDS)
        await threads.call(ThreadShare(9), nothing, WAIT_SECONDS, nothing)


async def test_a_job_that_arrives_when_an_idle_thread_is_about_to_end_is_done_by_it(
    threads: Threads,
) -> None:
    class Late(threading.Condition):
        """Every wait reports a time-out, even if a job arrived in the meantime."""

        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            return False

    threads._changed = Late()
    await threads.call(ThreadShare(9), nothing, WAIT_SECONDS, nothing)
    while threads._idle == 0:  # noqa: ASYNC110 - no event signals it
        await asyncio.sleep(0.001)
    await threads.call(ThreadShare(9), nothing, 1.0, nothing)


@pytest.mark.parametrize("threads_max", [2])
async def test_no_more_threads_run_than_are_allowed(threads: Threads) -> None:
    running, most = 0, 0
    lock = threading.Lock()
    both = threading.Barrier(2)

    def run() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait(WAIT_SECONDS)
        with lock:
            running -= 1

    await asyncio.gather(
        *(threads.call(ThreadShare(9), run, WAIT_SECONDS, nothing) for _ in range(8))
    )
    assert most == 2


async def test_a_machine_that_has_no_room_for_a_thread_costs_none_for_good(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what has failed for want of a thread run later, beside the next attempt at it."""
    calls = list[str]()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_space)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await threads.call(
                ThreadShare(9), lambda: calls.append("failed"), WAIT_SECONDS, nothing
            )
    await threads.call(ThreadShare(9), lambda: calls.append("first"), WAIT_SECONDS, nothing)
    await threads.call(ThreadShare(9), lambda: calls.append("second"), WAIT_SECONDS, nothing)
    assert calls == ["first", "second"]


@pytest.mark.parametrize("threads_max", [2])
async def test_a_run_takes_too_long_also_where_there_is_no_room_for_a_thread_in_place_of_its_own(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread was not counted as hanging then, and was taken off that count all the same."""
    starts = list[threading.Thread]()

    def slow_then_refused(thread: threading.Thread) -> None:
        starts.append(thread)
        if len(starts) > 1:
            raise RuntimeError("can't start new thread")

    with gate() as hangs, monkeypatch.context() as patch:
        hanging = asyncio.ensure_future(threads.call(ThreadShare(9), hangs.wait, 0.05, nothing))
        await asyncio.sleep(0)
        patch.setattr(threading.Thread, "start", slow_then_refused)
        waiting = asyncio.ensure_future(threads.call(ThreadShare(9), nothing, 0.2, nothing))
        with pytest.raises(TookTooLong):
            await hanging
        with pytest.raises(TookTooLong):
            await waiting
    assert len(starts) == 2


async def test_waiting_for_a_thread_is_not_a_failure(threads: Threads) -> None:
    with gate() as hangs:
        first = asyncio.ensure_future(
            threads.call(ThreadShare(9), hangs.wait, WAIT_SECONDS, nothing)
        )
        second = asyncio.ensure_future(
            threads.call(ThreadShare(9), nothing, WAIT_SECONDS / 2, nothing)
        )
        await asyncio.sleep(0.05)
        assert not second.done()
        hangs.set()
        await asyncio.gather(first, second)


async def test_a_caller_that_is_cancelled_while_waiting_takes_no_thread_from_others(
    threads: Threads,
) -> None:
    with gate() as hangs:
        first = asyncio.ensure_future(
            threads.call(ThreadShare(9), hangs.wait, WAIT_SECONDS, nothing)
        )
        second = asyncio.ensure_future(threads.call(ThreadShare(9), nothing, WAIT_SECONDS, nothing))
        await asyncio.sleep(0.05)
        second.cancel()
        hangs.set()
        await first
        await threads.call(ThreadShare(9), nothing, WAIT_SECONDS, nothing)
        assert second.cancelled()


@pytest.mark.parametrize(
    "error", [ValueError("raised"), SystemExit(3), StopIteration(), KeyboardInterrupt()]
)
async def test_whatever_a_function_raises_propagates(
    error: BaseException, threads: Threads
) -> None:

    def fail() -> None:
        raise error

    cannot = isinstance(error, StopIteration | KeyboardInterrupt)
    expected = RuntimeError if cannot else type(error)
    with pytest.raises(expected):
        await threads.call(ThreadShare(9), fail, WAIT_SECONDS, nothing)
    await threads.call(ThreadShare(9), nothing, WAIT_SECONDS, nothing)


@pytest.mark.parametrize("threads_max", [4])
async def test_one_observer_has_no_more_threads_than_its_share_and_the_rest_wait(
    threads: Threads,
) -> None:
    share, ends = ThreadShare(2), list[str]()
    with gate() as hangs:

        def wait(name: str) -> None:
            hangs.wait(WAIT_SECONDS)
            ends.append(name)

        slow = [threads.call(share, partial(wait, name), 0.2, nothing) for name in "abc"]
        waiting = [asyncio.ensure_future(one) for one in slow]
        await threads.call(ThreadShare(2), partial(ends.append, "other"), WAIT_SECONDS, nothing)
        assert (share.used, len(share.waiting), ends) == (2, 1, ["other"])
        hangs.set()
        await asyncio.gather(*waiting)
    assert (share.used, len(share.waiting)) == (0, 0)
    assert sorted(ends) == ["a", "b", "c", "other"]


@pytest.mark.parametrize("threads_max", [4])
async def test_what_waits_for_threads_that_all_hang_is_sent_back(threads: Threads) -> None:
    share, came_back = ThreadShare(2), asyncio.Event()
    with gate() as hangs:
        calls = [threads.call(share, hangs.wait, 0.05, came_back.set) for _ in range(2)]
        calls += [threads.call(share, nothing, 0.05, nothing) for _ in range(2)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in ended] == [TookTooLong] * 2 + [NoThreadLeft] * 2
        with pytest.raises(NoThreadLeft):
            await threads.call(share, nothing, WAIT_SECONDS, nothing)
        # Others have all four threads.
        all_four = threading.Barrier(4)
        others = ThreadShare(4)
        wait = partial(all_four.wait, WAIT_SECONDS)
        await asyncio.gather(*(threads.call(others, wait, 30.0, nothing) for _ in range(4)))
        hangs.set()
        await asyncio.wait_for(came_back.wait(), WAIT_SECONDS)
        while share.hung:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.001)
        await threads.call(share, nothing, WAIT_SECONDS, nothing)


@pytest.mark.parametrize("threads_max", [4])
async def test_what_waited_for_a_thread_that_hung_does_not_wait_for_other_threads_as_well(
    threads: Threads,
) -> None:
    share, came_back = ThreadShare(2), asyncio.Event()
    with gate() as hangs, gate() as is_slow:
        with pytest.raises(TookTooLong):
            await threads.call(share, hangs.wait, 0.05, came_back.set)
        slow = asyncio.ensure_future(threads.call(share, is_slow.wait, WAIT_SECONDS, nothing))
        waiting = asyncio.ensure_future(threads.call(share, nothing, WAIT_SECONDS, nothing))
        await asyncio.sleep(0)
        hangs.set()
        await asyncio.wait_for(waiting, WAIT_SECONDS / 2)
        assert not slow.done()
        is_slow.set()
        await slow
    assert (share.used, share.hung, threads._threads) == (0, 0, 2)


@pytest.mark.parametrize("threads_max", [4])
async def test_a_job_waits_for_a_busy_thread_where_no_further_one_can_be_started(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed instead, and soon became a dead letter."""
    share = ThreadShare(4)

    with gate() as is_slow:
        slow = asyncio.ensure_future(threads.call(share, is_slow.wait, WAIT_SECONDS, nothing))
        await asyncio.sleep(0)
        monkeypatch.setattr(threading.Thread, "start", no_space)
        waiting = asyncio.ensure_future(threads.call(share, nothing, WAIT_SECONDS, nothing))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        is_slow.set()
        await asyncio.gather(slow, waiting)


async def test_a_thread_that_could_not_be_replaced_goes_on_once_it_returns(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that waited for it would otherwise wait forever."""
    share = ThreadShare(2)

    with gate() as hangs:
        hanging = asyncio.ensure_future(threads.call(share, hangs.wait, 0.05, nothing))
        waiting = asyncio.ensure_future(threads.call(share, nothing, 0.2, nothing))
        await asyncio.sleep(0)
        monkeypatch.setattr(threading.Thread, "start", no_space)
        with pytest.raises(TookTooLong):
            await hanging
        hangs.set()
        await asyncio.wait_for(waiting, WAIT_SECONDS / 2)
    assert (share.used, share.hung, threads._threads) == (0, 0, 1)


async def test_a_caller_cancelled_just_after_its_time_was_over_is_not_counted_twice(
    threads: Threads,
) -> None:
    share = ThreadShare(2)
    with gate() as hangs:
        hanging = asyncio.ensure_future(threads.call(share, hangs.wait, WAIT_SECONDS, nothing))
        await asyncio.sleep(0.05)
        (job,) = threads._limits._open
        job.interrupt()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (share.used, share.hung, threads._threads) == (1, 1, 0)


@pytest.mark.parametrize("threads_max", [16])
async def test_short_jobs_are_done_by_few_threads_and_many_results_wake_the_loop_once(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set[int]()
    share, wakes = ThreadShare(16), 0
    deliver = threads._finish

    def count() -> None:
        nonlocal wakes
        wakes += 1
        deliver()

    monkeypatch.setattr(threads, "_finish", count)
    calls = [
        threads.call(share, lambda: used.add(threading.get_ident()), WAIT_SECONDS, nothing)
        for _ in range(500)
    ]
    await asyncio.gather(*calls)
    assert len(used) <= 16
    assert wakes < 250


def test_the_longer_a_function_takes_the_fewer_runs_begin_before_they_have_a_thread() -> None:
    share = ThreadShare(16)
    assert share.runs_max == 16
    share.took(0.01)
    assert share.runs_max == 16 + 80
    for _ in range(100):
        share.took(1.0)
    assert share.runs_max == 16


async def test_once_its_function_turns_out_to_be_short_more_runs_of_a_backlog_begin() -> None:
    """Nothing that is written meanwhile has to start them."""
    in_progress = list[int]()
    async with percolator.testing.connect_async() as db:
        await db.create_table(docs)
        await db.set_many((f"row {number}", {source: number}) for number in range(400))

        @observes(source)
        def quick(tx: Any, row: str) -> None:
            in_progress.append(parts.pool.running)

        async with db.run_observers([quick]) as worker:
            parts: Any = worker._parts
            (counters,) = worker.counters.values()
            async with asyncio.timeout(WAIT_SECONDS):
                while counters.commits < 400:
                    await MachineClock().sleep(0.01)
    assert max(in_progress) == quick.concurrency


async def until_copied(db: Database, row: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            if await db.get(row, copy) is not None:
                return
            await asyncio.sleep(0.01)


async def test_a_hanging_blocking_observer_is_given_up_and_the_others_continue() -> None:
    used_late: list[BaseException] = []
    with gate() as hangs:

        @observes(source, name="hanging", deadline=0.1, attempts=1, concurrency=1)
        def hanging(tx: Any, row: str) -> None:
            hangs.wait()
            try:
                tx.set(row, copy, 99)
            except UsageError as error:
                used_late.append(error)

        @observes(source, name="copying")
        def copying(tx: Any, row: str) -> None:
            tx.set(row, copy, tx.get(row, source))

        async with percolator.testing.connect_async() as db:
            await db.create_table(docs)
            limits = WorkerLimits(threads_max=1)
            async with db.run_observers([hanging, copying], limits=limits) as worker:
                for row in ("a", "b"):
                    async with db.transaction() as tx:
                        await tx.set(row, source, 1)
                    await until_copied(db, row)
                counters = worker.counters["docs", "hanging"]
                assert (counters.runs, counters.abandoned, counters.hung) == (1, 1, 1)
                hangs.set()
                async with asyncio.timeout(WAIT_SECONDS):
                    while counters.hung or counters.runs < 2:
                        await MachineClock().sleep(0.01)
                assert "begin a new one" in str(used_late[0])
                assert await db.get("a", copy) == 1


async def test_a_run_that_was_given_up_reads_and_writes_nothing_while_it_becomes_a_dead_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_aside, refused = DeadLetters.put_aside, list[str]()
    is_over = threading.Event()
    with gate() as hangs:

        @observes(source, deadline=0.1, attempts=1)
        def hanging(tx: Any, row: str) -> None:
            hangs.wait()
            for use in (partial(tx.get, row, source), partial(tx.set, row, copy, 1), tx.commit):
                try:
                    use()
                except UsageError as error:
                    refused.append(str(error))
            is_over.set()

        async def slow(self: DeadLetters, *arguments: Any) -> Any:
            hangs.set()
            await asyncio.to_thread(is_over.wait, WAIT_SECONDS)
            return await put_aside(self, *arguments)

        monkeypatch.setattr(DeadLetters, "put_aside", slow)
        async with percolator.testing.connect_async() as db:
            await db.create_table(docs)
            async with db.run_observers([hanging]) as worker:
                async with db.transaction() as tx:
                    await tx.set("a", source, 1)
                (counters,) = worker.counters.values()
                async with asyncio.timeout(WAIT_SECONDS):
                    while not counters.dead_letters:
                        await MachineClock().sleep(0.01)
            assert await db.get("a", copy) is None
    assert len(refused) == 3


async def test_a_thread_that_waits_for_a_silent_cluster_is_not_given_up(threads: Threads) -> None:
    waited = 0.0
    with gate() as hangs:
        call = threads.call(ThreadShare(9), hangs.wait, 0.05, nothing, lambda: waited)
        waited = WAIT_SECONDS
        running = asyncio.ensure_future(call)
        await asyncio.sleep(0.2)
        assert not running.done()
        hangs.set()
        await running


async def test_a_blocking_observer_is_not_given_up_while_the_cluster_is_silent() -> None:
    is_silent = threading.Event()
    limits = Limits(silence_seconds=0.1)
    async with percolator.testing.connect_async(limits=limits) as db:
        await db.create_table(docs)
        network: Any = db.internal.engine.world.network
        (cluster,) = network.handlers.values()
        read = cluster.read

        async def read_late(request: Any) -> Any:
            if is_silent.is_set():
                is_silent.clear()
                await asyncio.sleep(1.0)
            return await read(request)

        cluster.read = read_late

        @observes(source, deadline=0.4, attempts=1)
        def reading(tx: Any, row: str) -> None:
            is_silent.set()
            assert tx.get("another row", source) is None
            tx.set(row, copy, 1)

        async with db.run_observers([reading]) as worker:
            async with db.transaction() as tx:
                await tx.set("a", source, 1)
            await until_copied(db, "a")
            (counters,) = worker.counters.values()
            assert (counters.failures, counters.commits) == (0, 1)
