"""The queue of a worker: each cell once, the oldest first, and never more than has room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator import Table, codecs, observes
from percolator.aio.connecting import connect_to
from percolator.aio.observing import new_worker
from percolator.limits import Limits
from percolator.observers import work_queue
from percolator.observers.definition import Observer
from percolator.observers.watched import Watched
from percolator.observers.work_queue import TIMESTAMPS_MAX, Work, WorkQueue
from percolator.observers.worker import Worker
from percolator.protocol.contention import HotCells
from percolator.retries import RetryPolicy
from percolator.testing.cluster_in_memory import ADDRESS
from tests.unit.observers.observed_cluster import Observed, copy, source, total

docs = Table("docs")
original = docs.column("source", codecs.integer)


def watched(name: str = "some", concurrency: int = 10, pause: float = 0.0) -> Watched:
    decorate = observes(original, name=name, concurrency=concurrency, pause=pause)
    return Watched(decorate(lambda tx, row: None), 1)


class Queue(WorkQueue):
    """A queue that records its callbacks."""

    def __init__(self, *, rows_max: int = 100, bytes_max: int = 1 << 20) -> None:
        self.ready = self.told_of_space = 0
        self.handled_before: list[tuple[bytes, Sequence[int]]] = []
        super().__init__(
            rows_max=rows_max,
            bytes_max=bytes_max,
            now=asyncio.get_running_loop().time,
            hot_cells=HotCells(),
            on_ready=self._count,
            on_finished_before=self._note,
            on_space=self._count_space,
        )

    def _count(self) -> None:
        self.ready += 1

    def _count_space(self) -> None:
        self.told_of_space += 1

    def _note(self, work: Work, timestamps: Sequence[int]) -> None:
        self.handled_before.append((work.row, timestamps))


def rows(queue: WorkQueue) -> list[bytes]:
    found = []
    while (work := queue.take()) is not None:
        found.append(work.row)
    return found


def taken(queue: Queue) -> Work:
    work = queue.take()
    assert work is not None
    return work


async def test_the_oldest_change_of_all_observers_goes_first() -> None:
    queue, one, other = Queue(), watched("one"), watched("other")
    queue.offer(one, b"c", b"source", [30])
    queue.offer(other, b"b", b"source", [20])
    queue.offer(one, b"a", b"source", [50, 10])
    assert rows(queue) == [b"a", b"b", b"c"]


async def test_a_known_cell_is_not_queued_again() -> None:
    queue, some = Queue(), watched()
    first = queue.offer(some, b"a", b"source", [10])
    assert queue.offer(some, b"a", b"source", [20]) is first
    assert rows(queue) == [b"a"]
    assert len(queue) == 1


async def test_notifications_after_the_snapshot_are_queued_again_and_earlier_ones_are_not() -> None:
    queue, some = Queue(), watched()
    queue.offer(some, b"a", b"source", [10])
    work = taken(queue)
    queue.offer(some, b"a", b"source", [20])
    queue.finished(work, 15)
    again = queue.take()
    assert again is work
    assert again.timestamps == {20}
    queue.finished(again, 25)
    assert len(queue) == 0
    assert queue.take() is None


async def test_a_notification_found_after_its_run_is_only_deleted() -> None:
    queue, some = Queue(), watched()
    queue.offer(some, b"a", b"source", [10])
    queue.finished(taken(queue), 15)
    assert queue.offer(some, b"a", b"source", [12]) is None
    assert queue.handled_before == [(b"a", [12])]
    assert queue.offer(some, b"a", b"source", [12, 16]) is not None


async def test_an_observer_at_its_concurrency_limit_holds_up_no_other() -> None:
    queue, narrow, wide = Queue(), watched("narrow", concurrency=1), watched("wide")
    for number in range(3):
        queue.offer(narrow, b"n%d" % number, b"source", [number + 1])
        queue.offer(wide, b"w%d" % number, b"source", [number + 100])
    assert rows(queue) == [b"n0", b"w0", b"w1", b"w2"]


async def test_hanging_threads_count_against_their_observer() -> None:
    queue, some = Queue(), watched(concurrency=2)
    some.counters.hung = 2
    queue.offer(some, b"a", b"source", [1])
    assert queue.take() is None
    some.counters.hung = 1
    assert rows(queue) == [b"a"]


async def test_a_full_queue_accepts_nothing_and_reports_when_there_is_room() -> None:
    queue, some = Queue(rows_max=4), watched()
    for number in range(4):
        assert queue.offer(some, b"%d" % number, b"source", [1]) is not None
    assert queue.offer(some, b"more", b"source", [1]) is None
    for told in (0, 1, 1):
        queue.finished(taken(queue), 2)
        assert queue.told_of_space == told


async def test_an_observer_whose_work_is_stuck_leaves_room_for_the_others() -> None:
    queue = Queue(rows_max=1_000)
    stuck = [watched(f"stuck{number}") for number in range(3)]
    for number in range(2_000):
        for one in stuck:
            queue.offer(one, b"%d" % number, b"source", [1])
    other = watched("other")
    for number in range(50):
        assert queue.offer(other, b"%d" % number, b"source", [1]) is not None
    assert len(queue) <= 1_000


async def test_rows_long_enough_to_fill_the_queue_leave_room_for_others_too() -> None:
    queue, stuck, other = Queue(bytes_max=100_000), watched("stuck"), watched("other")
    for number in range(100):
        queue.offer(stuck, b"%04d" % number * 1_000, b"source", [1])
    assert queue.offer(other, b"a", b"source", [1]) is not None


async def test_a_queue_is_bounded_in_bytes_as_well() -> None:
    queue, some = Queue(bytes_max=3_000), watched()
    assert queue.offer(some, b"x" * 4_000, b"source", [1]) is not None
    assert queue.offer(some, b"y", b"source", [1]) is None


async def test_work_to_be_retried_waits_for_its_pause() -> None:
    queue, some = Queue(), watched()
    queue.offer(some, b"a", b"source", [1])
    work = taken(queue)
    queue.again(work, 5.0)
    await asyncio.sleep(4.9)
    assert queue.take() is None
    await asyncio.sleep(0.2)
    assert queue.take() is work


async def test_work_of_a_paused_observer_is_dropped_from_the_queue() -> None:
    queue, some, other = Queue(), watched("some"), watched("other")
    queue.offer(some, b"a", b"source", [1])
    queue.offer(other, b"b", b"source", [2])
    some.is_active = False
    queue.drop_inactive()
    assert queue.offer(some, b"c", b"source", [3]) is None
    assert rows(queue) == [b"b"]
    assert queue.backlog(some) == 0
    assert queue.backlog(other) == 1


async def test_a_column_that_an_observer_does_not_watch_is_refused() -> None:
    assert Queue().offer(watched(), b"a", b"another", [1]) is None


async def test_the_newest_of_very_many_notifications_of_a_cell_is_always_kept() -> None:
    queue, some = Queue(), watched()
    last = 2 * TIMESTAMPS_MAX
    for timestamp in range(1, last + 1):
        queue.offer(some, b"a", b"source", [timestamp])
    work = taken(queue)
    assert len(work.timestamps) == TIMESTAMPS_MAX
    assert (min(work.timestamps), max(work.timestamps)) == (1, last)
    queue.finished(work, 500)
    assert queue.take() is work


def run(queue: Queue, seen: int) -> None:
    """One run, which takes no time."""
    queue.finished(taken(queue), seen)


async def test_after_a_run_the_next_one_for_the_cell_waits_for_the_pause() -> None:
    queue, some = Queue(), watched(pause=2.0)
    queue.offer(some, b"a", b"source", [10])
    run(queue, seen=10)
    for seen in (20, 30):
        queue.offer(some, b"a", b"source", [seen - 1])
        queue.offer(some, b"%d" % seen, b"source", [1])
        run(queue, seen)  # another cell does not wait
        await asyncio.sleep(1.9)
        queue.offer(some, b"a", b"source", [seen])
        assert queue.take() is None
        await asyncio.sleep(0.2)
        run(queue, seen)
        assert len(queue) == 0, "one run has handled both"
    await asyncio.sleep(2.1)
    queue.offer(some, b"a", b"source", [40])
    run(queue, seen=40)  # the pause was over


async def test_a_change_during_a_run_waits_for_the_pause_too() -> None:
    queue, some = Queue(), watched(pause=2.0)
    queue.offer(some, b"a", b"source", [1])
    work = taken(queue)
    queue.offer(some, b"a", b"source", [20])
    queue.finished(work, 10)
    assert queue.take() is None
    await asyncio.sleep(2.1)
    assert queue.take() is work


async def test_a_run_that_failed_is_repeated_without_the_pause() -> None:
    queue, some = Queue(), watched(pause=2.0)
    queue.offer(some, b"a", b"source", [1])
    work = taken(queue)
    queue.again(work, 0.0)
    assert queue.take() is work


async def test_work_that_waits_for_a_pause_is_dropped_with_its_observer() -> None:
    queue, some = Queue(), watched(pause=2.0)
    queue.offer(some, b"a", b"source", [1])
    run(queue, seen=10)
    queue.offer(some, b"a", b"source", [20])
    some.is_active = False
    queue.drop_inactive()
    assert len(queue) == 0
    await asyncio.sleep(2.1)
    assert queue.take() is None


async def test_a_run_handles_a_thousand_notifications_of_one_cell() -> None:
    """Unknown notifications are only found again by scans, a few at a time."""
    queue, some = Queue(), watched()
    for timestamp in range(1_000):
        queue.offer(some, b"a", b"source", [timestamp])
    work = taken(queue)
    assert len(work.timestamps) == 1_000
    queue.finished(work, 1_000)
    assert len(queue) == 0


async def test_timestamps_of_all_cells_together_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work_queue, "TIMESTAMPS_OF_ALL_MAX", 3_000)
    queue, some = Queue(), watched(concurrency=100)
    for row in range(20):
        for timestamp in range(1, 1_001):
            queue.offer(some, b"%02d" % row, b"source", [timestamp])
    works = [work for _ in range(20) if (work := queue.take())]
    assert sum(len(work.timestamps) for work in works) < 3_000 + 20 * 200
    assert all(max(work.timestamps) == 1_000 for work in works)
    for work in works[:19]:
        queue.finished(work, 1_000)
    queue.drop(works[19])
    for timestamp in range(1, 1_001):
        queue.offer(some, b"another", b"source", [timestamp])
    work = taken(queue)
    assert len(work.timestamps) == 1_000, "there is room again"


# Runs that have lost at a cell take turns there, and so do those that would lose.

DOCUMENTS = 200
TOTAL_ROW = "~total"
COLD_SECONDS = 1.0
RUNS_LOST = 12
SLOW_EVERY = 10
SLOW_SECONDS = 0.4
"""Longer than the turn of a run that has not lost yet."""


async def bump(tx: Any, row: str) -> None:
    await tx.set(TOTAL_ROW, total, await tx.get(TOTAL_ROW, total, default=0) + 1)


@observes(source, name="counting")
async def counting(tx: Any, row: str) -> None:
    await bump(tx, row)


async def put_documents(world: Observed, observer: Observer) -> None:
    await world.db.register_observers([observer])
    for number in range(DOCUMENTS):
        await world.put(f"{number:04}", number)


@asynccontextmanager
async def working(world: Observed, observer: Observer) -> AsyncIterator[Worker]:
    async with new_worker(world.db.internal.engine, [observer], None, 10.0) as worker:
        yield worker
    assert len(world.context.env.hot_cells) == 0


async def until_counted(world: Observed) -> None:
    async def is_counted() -> bool:
        return await world.get(TOTAL_ROW, total) == DOCUMENTS

    await world.until(is_counted)
    await world.until_nothing_waits()


async def test_documents_that_bump_one_counter_cost_little_more_than_a_run_each(
    world: Observed,
) -> None:
    await put_documents(world, counting)
    async with working(world, counting) as worker:
        await until_counted(world)
        counters = worker.counters["docs", "counting"]
    assert counters.commits == DOCUMENTS
    # Those that began at the same time, before it was known that they would lose.
    assert counters.conflicts <= counting.concurrency


async def test_a_run_that_takes_long_now_and_then_does_not_make_all_others_lose(
    world: Observed,
) -> None:
    """On a busy machine, any run may be stopped for a while."""

    @observes(source, name="counting", concurrency=10)
    async def sometimes_slow(tx: Any, row: str) -> None:
        found = await tx.get(TOTAL_ROW, total, default=0)
        if int(row) % SLOW_EVERY == 0:
            await asyncio.sleep(SLOW_SECONDS)
        await tx.set(TOTAL_ROW, total, found + 1)

    await put_documents(world, sometimes_slow)
    async with working(world, sometimes_slow) as worker:
        await until_counted(world)
        counters = worker.counters["docs", "counting"]
    assert counters.commits == DOCUMENTS
    # Those that began at the same time, and those that were slow.
    assert counters.conflicts <= sometimes_slow.concurrency + 2 * DOCUMENTS // SLOW_EVERY


async def test_a_worker_that_is_stopped_leaves_its_lines(world: Observed) -> None:
    @observes(source, name="counting")
    async def slowly(tx: Any, row: str) -> None:
        await bump(tx, row)
        await asyncio.sleep(0.01)

    await put_documents(world, slowly)
    async with working(world, slowly) as worker:

        async def is_hot() -> bool:
            return len(world.context.env.hot_cells) == 1

        await world.until(is_hot)
        await worker.stop(drain_seconds=0.1)
    async with working(world, slowly):
        await until_counted(world)


async def test_runs_of_other_cells_do_not_stand_in_line(world: Observed) -> None:
    """One document of eight bumps the counter; the others take long, and all at the same time."""

    @observes(source, name="counting")
    async def now_and_then(tx: Any, row: str) -> None:
        if int(row) % 8 == 0:
            await bump(tx, row)
        else:
            await asyncio.sleep(COLD_SECONDS)
            await tx.set(row, copy, 1)

    await put_documents(world, now_and_then)
    began = world.context.env.now()
    async with working(world, now_and_then) as worker:
        await world.until_nothing_waits()
        assert worker.counters["docs", "counting"].commits == DOCUMENTS
    at_best = COLD_SECONDS * DOCUMENTS / now_and_then.concurrency
    assert world.context.env.now() - began < 3 * at_best


async def test_a_failing_run_lets_the_next_in_line_go(world: Observed) -> None:
    failed: set[str] = set()

    @observes(source, name="counting")
    async def failing_once(tx: Any, row: str) -> None:
        await bump(tx, row)
        if row not in failed:
            failed.add(row)
            raise ValueError("the first run of every document")

    await put_documents(world, failing_once)
    async with working(world, failing_once) as worker:
        await until_counted(world)
        assert worker.counters["docs", "counting"].failures == DOCUMENTS


async def test_a_run_that_always_loses_to_what_it_starts_itself_pauses(world: Observed) -> None:
    """And what it starts does not wait for the end of its turn."""
    runs = 0

    async def inner(tx: Any) -> None:
        await bump(tx, "")

    @observes(source, name="counting")
    async def outer(tx: Any, row: str) -> None:
        nonlocal runs
        runs += 1
        await tx.get(TOTAL_ROW, total)
        if runs < RUNS_LOST:
            began = world.context.env.now()
            await world.db.run(inner)
            assert world.context.env.now() == began
        await bump(tx, row)

    await world.db.register_observers([outer])
    await world.put("doc", 1)
    async with working(world, outer):
        began = world.context.env.now()
        await world.until_nothing_waits()
    assert runs == RUNS_LOST
    assert world.context.env.now() - began > 1.0
    assert await world.get(TOTAL_ROW, total) == RUNS_LOST


async def test_two_workers_pause_after_they_have_lost_to_each_other(world: Observed) -> None:
    await put_documents(world, counting)
    async with await connect_to(world.context.world, [ADDRESS], Limits(), RetryPolicy()) as db:
        other = new_worker(db.internal.engine, [counting], None, 10.0)
        async with working(world, counting) as worker, other:
            await until_counted(world)
            both = [one.counters["docs", "counting"] for one in (worker, other)]
    assert sum(one.commits for one in both) == DOCUMENTS
    assert sum(one.runs for one in both) <= 3 * DOCUMENTS
