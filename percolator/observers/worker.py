"""A worker: finds work for its observers and runs them, until it is stopped.

       streams ──┐                              ┌── deletions of notifications
                 ├── queue ── runs ─── commit ──┤
passes, locks ───┘      ▲         │             └── dead letters
                        └─ again ─┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from percolator.arguments import require_drain_seconds, require_seconds, require_whole
from percolator.errors import (
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    SchemaError,
    UsageError,
)
from percolator.observers.backfill import OwedBackfills
from percolator.observers.context import WorkerContext, WorkHints
from percolator.observers.dead_letters import DeadLetters, dead_letters_table
from percolator.observers.definition import Observer, checked
from percolator.observers.registration import Registrations, register
from percolator.observers.runs import Deletions, Results, RunPool
from percolator.observers.scanner import RowLocks, Scanner
from percolator.observers.time_limits import Threads
from percolator.observers.watched import Counters, Watched
from percolator.observers.work_queue import WorkQueue
from percolator.tasks import Tasks
from percolator.world import Clock

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
_BACKFILL_FRACTION = 5
"""The cells of one backfill may fill this fraction of the queue: the rest is for live changes."""
_DELETION_SECONDS_MIN = 1.0
"""The least time for deletions at the end of a drain, however long the runs took."""


@dataclass(frozen=True)
class WorkerLimits:
    """The most that one worker does and queues at a time. The names include the units."""

    concurrency_max: int = 1_024
    """Runs at a time, of all observers together: more than a few hanging observers can take."""
    threads_max: int = 32
    """Threads for blocking observers."""
    queue_rows_max: int = 10_000
    """Cells that were found and are not finished yet."""
    queue_bytes_max: int = 16 << 20
    scan_pause_seconds_max: float = 5.0
    """The longest pause between passes over all tablets, reached while they find nothing."""

    def __post_init__(self) -> None:
        for name in ("concurrency_max", "threads_max", "queue_rows_max", "queue_bytes_max"):
            require_whole(getattr(self, name), name, 1)
        require_seconds(self.scan_pause_seconds_max, "scan_pause_seconds_max")


class Worker:
    """Runs observers in the event loop in which it was started. As a block, it ends with `stop`.

    >>> async with db.run_observers([index, count]) as worker: ...
    """

    def __init__(
        self,
        context: WorkerContext,
        observers: Sequence[Observer],
        limits: WorkerLimits | None = None,
        *,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        if limits is not None and not isinstance(limits, WorkerLimits):
            raise InvalidArgument("limits", f"expected WorkerLimits, got {type(limits).__name__}")
        require_seconds(drain_seconds, "drain_seconds")
        self._context = context
        self._observers = checked(observers)
        self._limits = limits or WorkerLimits()
        self._drain_seconds = drain_seconds
        self._tasks = Tasks(self._task_failed)
        self._working: list[asyncio.Task[None]] = []
        """Its tasks, also those that have ended."""
        self._parts: _Parts | None = None
        self._stopped: asyncio.Event | None = None
        self._registered_in_advance: dict[str, None] = {}
        """Tables that will be created with its observers."""
        self._is_unwanted = False
        """It was stopped before it had started, as when its database is closed meanwhile."""
        self._ended = asyncio.Event()
        """Set when the worker was stopped, or a task of it has failed."""
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Registers the observers, and returns when they are running."""
        await self._start(None)

    async def _start(self, in_advance: dict[str, None] | None) -> None:
        if self._parts is not None:
            raise UsageError("this worker was already started")
        context = self._context
        watched = await register(context, self._observers, in_advance=in_advance)
        letters = await dead_letters_table(context)
        if self._is_unwanted:
            raise UsageError("this worker was stopped before it had started")
        if self._parts is not None:  # by another call meanwhile: its parts would not be stopped
            raise UsageError("this worker was already started")
        self._stopped = asyncio.Event()
        self._parts = parts = _Parts(
            context, watched, self._limits, letters, self._is_cancelled, self._tasks
        )
        for work in (
            self._listen(parts),
            parts.scanner.scan_forever(),
            parts.locks.keep_forever(),
            parts.registrations.keep_forever(),
            self._follow_changes(parts),
        ):
            self._working.append(self._tasks.start(work))
        parts.begin_backfills()
        parts.scanner.wake()

    @property
    def is_running(self) -> bool:
        """It was started, and neither stopped nor ended by an error."""
        return self._parts is not None and not self._ended.is_set()

    @property
    def counters(self) -> Mapping[tuple[str, str], Counters]:
        """The counters of the observers, by table and observer."""
        watched = self._parts.registrations.watched if self._parts else ()
        return {(one.observer.table.name, one.observer.name): one.counters for one in watched}

    @property
    def backlog(self) -> Mapping[tuple[str, str], int]:
        """The number of cells known to be queued or running here, by table and observer."""
        if self._parts is None:
            return {}
        queue = self._parts.queue
        return {
            (one.observer.table.name, one.observer.name): queue.backlog(one)
            for one in self._parts.registrations.watched
        }

    async def stop(self, *, drain_seconds: float | None = None) -> bool:
        """Starts no more runs, lets those in progress finish, and gives up after `drain_seconds`.

        Returns whether all have finished. Nothing is lost either way: another worker, or the next
        one, finds what was not finished.
        """
        if drain_seconds is not None:
            require_drain_seconds(drain_seconds)
        parts = self._parts
        if parts is None or self._stopped is None:
            self._is_unwanted = True
            return True
        if self._stopped.is_set():
            return True
        await self._tasks.cancel()
        seconds = self._drain_seconds if drain_seconds is None else drain_seconds
        ended = await parts.close(seconds)
        self._stopped.set()
        self._ended.set()
        return ended

    async def wait(self) -> None:
        """Returns when the worker was stopped. Raises the error if a task of it has failed."""
        if self._stopped is None:
            raise UsageError("this worker was not started")
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    def _is_cancelled(self) -> bool:
        return any(task.cancelled() or task.cancelling() for task in self._working)

    def _task_failed(self, _: asyncio.Task[Any], error: BaseException) -> None:
        self._failure = error
        self._ended.set()
        _log.error("a task of the worker has failed", exc_info=error)

    async def _listen(self, parts: _Parts) -> None:
        """Queues the work that the store announces."""
        names: dict[int, list[bytes]] = {}
        for one in parts.registrations.watched:
            names.setdefault(one.table_id, []).append(one.id)
        by_name = {(one.table_id, one.id): one for one in parts.registrations.watched}
        async with aclosing(self._context.notifications.hints(names)) as stream:
            async for hints in stream:
                self._take_in(parts, by_name, hints)

    def _take_in(
        self, parts: _Parts, by_name: Mapping[tuple[int, bytes], Watched], hints: WorkHints
    ) -> None:
        if hints.began or hints.left_out > 0:
            parts.scanner.wake()
        for one in hints.notifications:
            watched = by_name.get((one.table_id, one.observer))
            if watched is None or not watched.is_active:
                continue
            # If the queue is full, the scanner finds it: it is woken as soon as there is space.
            parts.queue.offer(watched, one.row, one.column, (one.timestamp,))

    async def _follow_changes(self, parts: _Parts) -> None:
        """Adjusts the queue when observers were paused, removed or resumed."""
        changed = parts.registrations.changed
        while True:
            await changed.wait()
            changed.clear()
            for dropped in parts.queue.drop_inactive():
                parts.locks.release(dropped)
            parts.scanner.wake()
            parts.pool.dispatch()


async def start_in_advance(worker: Worker) -> None:
    """Starts a worker. If a table does not exist, it raises, and the table will be created with
    the worker's observers."""
    await worker._start(worker._registered_in_advance)


def known_observers(worker: Worker) -> Collection[tuple[str, str]]:
    """Its observers, by table and name, that the cluster knows: paused ones, too, but not those
    that were removed, or whose table was dropped."""
    watched = worker._parts.registrations.watched if worker._parts else ()
    return {(one.observer.table.name, one.observer.name) for one in watched if not one.is_gone}


class _Parts:
    """The parts of a started worker."""

    def __init__(
        self,
        context: WorkerContext,
        watched: Sequence[Watched],
        limits: WorkerLimits,
        letters: int,
        is_cancelled: Callable[[], bool],
        tasks: Tasks,
    ) -> None:
        self.registrations = Registrations(context, watched, self.begin_backfills)
        self.deletions = Deletions(context, more_to_come=lambda: bool(len(self.queue)))
        self.threads = Threads(limits.threads_max)
        self.queue = WorkQueue(
            rows_max=limits.queue_rows_max,
            bytes_max=limits.queue_bytes_max,
            now=context.env.now,
            hot_cells=context.env.hot_cells,
            on_ready=self._dispatch,
            on_finished_before=self.deletions.add,
            on_space=self._look_again,
        )
        self.locks = RowLocks(context, self.queue)
        self.backfills = OwedBackfills(
            context,
            self.locks,
            tasks.start,
            unhandled_max=limits.queue_rows_max // _BACKFILL_FRACTION,
        )
        self.scanner = Scanner(
            context,
            self.queue,
            self.locks,
            lambda: self.registrations.active,
            pause_seconds_max=limits.scan_pause_seconds_max,
        )
        results = Results(
            self.queue, self.deletions, DeadLetters(context, letters), self.locks.release_later
        )
        self.pool = RunPool(
            context,
            results,
            self.threads,
            runs_max=limits.concurrency_max,
            is_cancelled=is_cancelled,
        )

    def begin_backfills(self) -> None:
        self.backfills.begin(self.registrations.watched)

    def _dispatch(self) -> None:
        self.pool.dispatch()

    def _look_again(self) -> None:
        self.scanner.wake()

    async def close(self, drain_seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + drain_seconds
        self.pool.close()
        for work in self.queue.drop_idle():
            self.locks.release(work)  # now, or other workers would wait for the runs in progress
        ended = await self.pool.drain(drain_seconds)
        self.queue.close()
        self.threads.close()
        for work in self.queue.all():
            self.locks.release(work)
        self.locks.release_handled()
        await self.deletions.done(max(until - loop.time(), _DELETION_SECONDS_MIN))
        return ended


_AGAIN_SECONDS = 0.25


async def start_when_ready(worker: Worker, clock: Clock, say: Callable[[str], None]) -> None:
    """Starts a worker that may be earlier than its tables, and returns when it runs. Meanwhile,
    `say` gets each new reason why it does not.

    The worker's tables are created with its observers, so it misses nothing that is written before
    it notices them.

    Programs of an application are started in any order. So a worker is not refused because the
    program that creates its tables has not run yet, or because no master answers right now. An
    error that no waiting mends, such as another observer with the same name, is raised.
    """
    said = ""
    while True:
        try:
            await start_in_advance(worker)
        except (SchemaError, NotExecuted, ExecutionUnknown) as error:
            if str(error) != said:
                said = str(error)
                say(said)
            await clock.sleep(_AGAIN_SECONDS)
        else:
            return
