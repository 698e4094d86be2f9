"""The queue of a worker: each cell once, the oldest first, and never more than has room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from percolator import Table, codecs, observes
from percolator.observers import work_queue
from percolator.observers.watched import Watched
from percolator.observers.work_queue import TIMESTAMPS_MAX, Work, WorkQueue
from percolator.protocol.contention import HotCells

docs = Table("docs")
source = docs.column("source", codecs.integer)


def watched(name: str = "some", concurrency: int = 10, pause: float = 0.0) -> Watched:
    decorate = observes(source, name=name, concurrency=concurrency, pause=pause)
    return Watched(decorate(lambda tx, row: None), 1)


class Queue(WorkQueue):
    """A queue that records its callbacks."""

    def __init__(self, *, rows_max: int = 100, bytes_max: int = 1 << 20) -> None:
        self.ready = self.told_of_room = 0
        self.handled_before: list[tuple[bytes, Sequence[int]]] = []
        super().__init__(
            rows_max=rows_max,
            bytes_max=bytes_max,
            now=asyncio.get_running_loop().time,
            hot_cells=HotCells(),
            on_ready=self._count,
            on_finished_before=self._note,
            on_space=self._count_room,
        )

    def _count(self) -> None:
        self.ready += 1

    def _count_room(self) -> None:
        self.told_of_room += 1

    def _note(self, work: Work, timestamps: Sequence[int]) -> None:
        self.handled_before.append((work.row, timestamps))


def rows(queue: WorkQueue) -> list[bytes]:
    found = []
    while (work := queue.take()) is not None:
        found.append(work.row)
    return found


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
    work = queue.take()
    assert work is not None
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
    work = queue.take()
    assert work is not None
    queue.finished(work, 15)
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
        work = queue.take()
        assert work is not None
        queue.finished(work, 2)
        assert queue.told_of_room == told


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
    work = queue.take()
    assert work is not None
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
    queue = Queue()
    assert queue.offer(watched(), b"a", b"another", [1]) is None


async def test_the_newest_of_very_many_notifications_of_a_cell_is_always_kept() -> None:
    queue, some = Queue(), watched()
    last = 2 * TIMESTAMPS_MAX
    for timestamp in range(1, last + 1):
        queue.offer(some, b"a", b"source", [timestamp])
    work = queue.take()
    assert work is not None
    assert len(work.timestamps) == TIMESTAMPS_MAX
    assert (min(work.timestamps), max(work.timestamps)) == (1, last)
    queue.finished(work, 500)
    assert queue.take() is work


def run(queue: Queue, seen: int) -> None:
    """One run, which takes no time."""
    work = queue.take()
    assert work is not None
    queue.finished(work, seen)


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
    work = queue.take()
    assert work is not None
    queue.offer(some, b"a", b"source", [20])
    queue.finished(work, 10)
    assert queue.take() is None
    await asyncio.sleep(2.1)
    assert queue.take() is work


async def test_a_run_that_failed_is_repeated_without_the_pause() -> None:
    queue, some = Queue(), watched(pause=2.0)
    queue.offer(some, b"a", b"source", [1])
    work = queue.take()
    assert work is not None
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
    """What is not known is only found again by scans, a few at a time."""
    queue, some = Queue(), watched()
    for timestamp in range(1_000):
        queue.offer(some, b"a", b"source", [timestamp])
    work = queue.take()
    assert work is not None
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
    taken = [work for _ in range(20) if (work := queue.take())]
    assert sum(len(work.timestamps) for work in taken) < 3_000 + 20 * 200
    assert all(max(work.timestamps) == 1_000 for work in taken)
    for work in taken[:19]:
        queue.finished(work, 1_000)
    queue.drop(taken[19])
    for timestamp in range(1, 1_001):
        queue.offer(some, b"another", b"source", [timestamp])
    work = queue.take()
    assert work is not None
    assert len(work.timestamps) == 1_000, "there is room again"
