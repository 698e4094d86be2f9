"""Finding work by scanning: rows that others have locked are skipped, and no place is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import Mock, patch

from hypothesis import given
from hypothesis import strategies as st

from percolator import observes
from percolator.errors import DeadlineExceeded, TabletLocation
from percolator.observers.backfill import backfill_owed
from percolator.observers.registration import register
from percolator.observers.scanner import QueueAdmission, RowLocks, Scanner, lock_name
from percolator.observers.tablet_notifications import TabletPass
from percolator.observers.watched import Watched
from percolator.observers.work_queue import WorkQueue
from percolator.observers.worker import Worker, WorkerLimits
from percolator.v1.master_pb2 import ChangeObserversRequest
from percolator.wire.advisory_locks import AdvisoryLocks

from .observed_cluster import Observed, copy, observed, source, total


class Locks(AdvisoryLocks):
    """The locks of one of several workers. Each name is held by at most one of them."""

    def __init__(self, holders: dict[bytes, object]) -> None:
        self._holders = holders
        self.asked: list[bytes] = []

    async def try_lock(self, names: Sequence[bytes]) -> list[bool]:
        self.asked += names
        return [self._holders.setdefault(name, self) is self for name in names]

    async def renew(self, names: Sequence[bytes]) -> list[bool]:
        return [self._holders.get(name) is self for name in names]

    async def unlock(self, names: Sequence[bytes]) -> None:
        for name in names:
            if self._holders.get(name) is self:
                del self._holders[name]


@observes(source, name="copying")
async def copying(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


ROWS = [f"{letter}{number}" for letter in "aghmtz" for number in range(10)]


async def backlog(world: Observed) -> Watched:
    """Creates a backlog in two tablets. Returns the observer that it is for."""
    (watched,) = await register(world.context, [copying])
    await backfill_owed(world.context, watched)
    for row in ROWS:
        await world.put(row, 1)
    await world.db.internal.engine.env.background.drain(1.0)
    return watched


async def one_pass(world: Observed, watched: Watched, locks: Locks) -> set[bytes]:
    """The rows that a worker takes in one pass that begins now."""
    context = replace(world.context, locks=locks)
    queue = WorkQueue(
        rows_max=1_000,
        bytes_max=1 << 20,
        now=context.now,
        hot_cells=context.env.hot_cells,
        on_ready=lambda: None,
        on_finished_before=Mock(),
        on_space=Mock(),
    )
    admission = QueueAdmission(queue, RowLocks(context, queue), [watched])
    await context.notifications.look(admission, everything=True)
    return {work.row for work in queue.all()}


async def test_a_pass_finds_everything_wherever_it_begins() -> None:
    for seed in range(10):
        async with observed(seed=seed) as world:
            watched = await backlog(world)
            taken = await one_pass(world, watched, Locks({}))
            assert taken == {row.encode() for row in ROWS}


async def test_locks_that_cannot_be_resolved_hold_up_a_pass_once_and_nothing_is_missed() -> None:
    async with observed() as world:
        watched = await backlog(world)
        background = world.db.internal.engine.env.background
        with patch.object(background, "start", lambda work: work.close()):
            for row in ("a-locked", "z-locked"):
                tx = world.db.transaction()
                tx._only_two_phases = True  # only they leave locks
                await tx.set("0", total, 1)
                await tx.set(row, source, 7)
                await tx.commit()
        await asyncio.sleep(2.0)
        silent = DeadlineExceeded("no server has the primary")
        with patch.object(world.context.cleanup, "resolve", side_effect=silent) as resolve:
            taken = await one_pass(world, watched, Locks({}))
        assert taken == {row.encode() for row in ROWS}
        assert resolve.call_count == 1


async def test_rows_that_another_worker_has_locked_are_left_to_it_and_no_row_is_taken_twice() -> (
    None
):
    for seed in range(10):
        async with observed(seed=seed) as world:
            watched = await backlog(world)
            holders: dict[bytes, object] = {lock_name(watched, b"h5"): "another worker"}
            first = await one_pass(world, watched, Locks(holders))
            second = await one_pass(world, watched, Locks(holders))
            assert first
            assert b"h5" not in first | second
            assert not first & second


async def test_locks_are_released_when_the_work_is_done() -> None:
    holders: dict[bytes, object] = {}
    async with observed() as world:
        await backlog(world)
        locks = Locks(holders)
        worker = Worker(replace(world.context, locks=locks), [copying])
        async with worker:
            await world.until_nothing_waits()
        await world.db.internal.engine.env.background.drain(1.0)
        assert locks.asked
        assert holders == {}


async def test_a_worker_that_is_started_twice_at_once_starts_once() -> None:
    async with observed() as world:
        worker = Worker(world.context, [copying])
        started = await asyncio.gather(worker.start(), worker.start(), return_exceptions=True)
        assert [str(one) for one in started if one] == ["this worker was already started"]
        assert await worker.stop()


@observes(source, name="copying")
async def never_copying(tx: Any, row: str) -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_worker_that_stops_releases_the_locks_of_runs_that_it_gives_up() -> None:
    """Otherwise, other workers would leave the rows alone until the locks expire."""
    holders: dict[bytes, object] = {}
    async with observed() as world:
        await backlog(world)
        worker = Worker(replace(world.context, locks=Locks(holders)), [never_copying])
        async with worker:
            await asyncio.sleep(5.0)
            assert len(holders) == len(ROWS)
            assert not await worker.stop(drain_seconds=0.5)
        await world.db.internal.engine.env.background.drain(1.0)
        assert holders == {}


async def test_a_worker_releases_the_locks_of_an_observer_that_is_paused() -> None:
    holders: dict[bytes, object] = {}
    async with observed() as world:
        await backlog(world)
        limits = WorkerLimits(concurrency_max=1)
        worker = Worker(replace(world.context, locks=Locks(holders)), [never_copying], limits)
        async with worker:
            await asyncio.sleep(5.0)
            assert len(holders) == len(ROWS)
            pause = ChangeObserversRequest(table="docs", pause=["copying"])
            await world.context.catalog.change_observers(pause, world.context.deadline())
            await asyncio.sleep(5.0)
            assert len(holders) == 1, "the one whose run is in progress"
            await worker.stop(drain_seconds=0.0)


async def test_work_that_a_dead_worker_had_locked_is_found_once_its_locks_are_gone() -> None:
    holders: dict[bytes, object] = {}
    async with observed() as world:
        watched = await backlog(world)
        holders |= {lock_name(watched, row.encode()): "dead" for row in ROWS}
        worker = Worker(
            replace(world.context, locks=Locks(holders)),
            [copying],
            WorkerLimits(scan_pause_seconds_max=2.0),
        )
        async with worker:
            await asyncio.sleep(10.0)
            assert worker.counters["docs", "copying"].runs == 0
            holders.clear()
            await world.until_nothing_waits()
            assert worker.counters["docs", "copying"].commits == len(ROWS)


async def test_young_notifications_are_left_to_the_worker_that_was_told_of_them() -> None:
    async with observed() as world:
        watched = await backlog(world)
        queue = WorkQueue(
            rows_max=1_000,
            bytes_max=1 << 20,
            now=world.context.now,
            hot_cells=world.context.env.hot_cells,
            on_ready=lambda: None,
            on_finished_before=Mock(),
            on_space=Mock(),
        )
        admission = QueueAdmission(queue, RowLocks(world.context, queue), [watched])
        assert await world.context.notifications.look(admission, everything=False) == 0
        await asyncio.sleep(3.0)
        admission = QueueAdmission(queue, RowLocks(world.context, queue), [watched])
        assert await world.context.notifications.look(admission, everything=False) == len(ROWS)


async def test_a_scanner_with_nothing_to_do_scans_less_and_less_often() -> None:
    async with observed() as world:
        (watched,) = await register(world.context, [copying])
        queue = Mock()
        scanner = Scanner(world.context, queue, Mock(), lambda: [watched], pause_seconds_max=5.0)
        async with _running(scanner.scan_forever):
            await asyncio.sleep(100.0)
            before = scanner.passes
            await asyncio.sleep(100.0)
            assert 20 <= scanner.passes - before <= 41
            scanner.wake()
            await asyncio.sleep(0.01)
            assert scanner.passes - before <= 42


@asynccontextmanager
async def _running(work: Callable[[], Any]) -> Any:
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()


@given(st.binary(max_size=12), st.binary(max_size=12), st.integers())
def test_a_random_row_is_inside_its_tablet(one: bytes, other: bytes, seed: int) -> None:
    start, end = min(one, other), max(one, other)
    if end and start == end:
        return
    tablet = TabletLocation(1, 1, 1, start, end, "somewhere")
    context = Mock()
    context.world.random = Random(seed)
    row = TabletPass(context, QueueAdmission(Mock(), Mock(), []))._random_row(tablet)
    if row is not None:
        assert start < row
        assert not end or row < end
    else:
        assert end


async def test_a_worker_that_ends_with_a_long_run_leaves_the_rest_to_others_at_once() -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    @observes(source, name="slow", concurrency=1, deadline=1_000.0)
    async def slow(tx: Any, row: str) -> None:
        if not began.is_set():
            began.set()
            await may_end.wait()
        await tx.set(row, copy, 1)

    async with observed() as world:
        await register(world.context, [slow])
        for row in ROWS:
            await world.put(row, 1)
        holders: dict[bytes, object] = {}
        first, second = (
            Worker(replace(world.context, locks=Locks(holders)), [slow]) for _ in range(2)
        )
        await first.start()
        await began.wait()
        await asyncio.sleep(5.0)  # by now, everything in its queue is locked
        stopping = asyncio.create_task(first.stop(drain_seconds=500.0))
        async with second:

            async def is_done() -> bool:
                return len(await world.waiting()) == 1

            await world.until(is_done)
            assert not stopping.done()
            may_end.set()
            assert await stopping
            await world.until_nothing_waits()
