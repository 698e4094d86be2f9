"""A worker: finds what its observers are to run for, and runs them, until it is stopped.

       streams ──┐                              ┌── deletions of notifications
                 ├── queue ── lanes ── commit ──┤
passes, locks ───┘      ▲         │             └── dead letters
                        └─ again ─┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from percolator.arguments import require_seconds, require_whole
from percolator.errors import InvalidArgument, UsageError
from percolator.observers.client import Client
from percolator.observers.counters import Counters
from percolator.observers.dead_letter import DeadLetters, dead_letters_table
from percolator.observers.definition import Observer, checked
from percolator.observers.deletions import Deletions
from percolator.observers.lanes import Lanes, Results
from percolator.observers.registration import Registrations, register
from percolator.observers.row_locks import RowLocks
from percolator.observers.scanner import Scanner
from percolator.observers.threads import Threads
from percolator.observers.watched import Watched
from percolator.observers.work import WorkQueue
from percolator.wire.notification_watch import WorkHints, watch_work

_log = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
_DELETION_SECONDS_MIN = 1.0
"""What deletions get at the end of a drain, however long the runs took."""


@dataclass(frozen=True)
class WorkerLimits:
    """What one worker has before it at most. Units are in the names."""

    concurrency_max: int = 1_024
    """Runs at one time, of all observers together: more than a few of them take that hang."""
    threads_max: int = 32
    """For blocking observers."""
    queue_rows_max: int = 10_000
    """Found, and not yet finished."""
    queue_bytes_max: int = 16 << 20
    scan_pause_seconds_max: float = 5.0
    """Between two passes over all tablets, when the last ones have found nothing."""

    def __post_init__(self) -> None:
        for name in ("concurrency_max", "threads_max", "queue_rows_max", "queue_bytes_max"):
            require_whole(getattr(self, name), name, 1)
        require_seconds(self.scan_pause_seconds_max, "scan_pause_seconds_max")


class Worker:
    """Runs observers in the event loop in which it was started. A block of it ends with `stop`.

    >>> async with db.run_observers([index, count]) as worker: ...
    """

    def __init__(
        self,
        client: Client,
        observers: Sequence[Observer],
        limits: WorkerLimits | None = None,
        *,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        if limits is not None and not isinstance(limits, WorkerLimits):
            raise InvalidArgument("limits", f"expected WorkerLimits, got {type(limits).__name__}")
        require_seconds(drain_seconds, "drain_seconds")
        self._client = client
        self._observers = checked(observers)
        self._limits = limits or WorkerLimits()
        self._drain_seconds = drain_seconds
        self._tasks: list[asyncio.Task[None]] = []
        self._parts: _Parts | None = None
        self._stopped: asyncio.Event | None = None
        self._ended = asyncio.Event()
        """It was stopped, or a part of it has failed."""
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Registers the observers, and returns when they are being run."""
        if self._parts is not None:
            raise UsageError("this worker was started already")
        client = self._client
        watched = await register(client, self._observers)
        letters = await dead_letters_table(client)
        self._stopped = asyncio.Event()
        self._parts = parts = _Parts(client, watched, self._limits, letters)
        for work in (
            self._listen(parts),
            parts.scanner.scan_forever(),
            parts.locks.keep_forever(),
            parts.registrations.keep_forever(),
            self._follow_changes(parts),
        ):
            self._begin(work)
        parts.scanner.wake()

    @property
    def counters(self) -> Mapping[tuple[str, str], Counters]:
        """What has been done, by table and observer."""
        watched = self._parts.registrations.watched if self._parts else ()
        return {(one.observer.table.name, one.observer.name): one.counters for one in watched}

    @property
    def backlog(self) -> Mapping[tuple[str, str], int]:
        """What is known to wait or to be running here, by table and observer."""
        if self._parts is None:
            return {}
        queue = self._parts.queue
        return {
            (one.observer.table.name, one.observer.name): queue.backlog(one)
            for one in self._parts.registrations.watched
        }

    async def stop(self, *, drain_seconds: float | None = None) -> bool:
        """Begins nothing more, lets what runs end, and gives up the rest after `drain_seconds`.

        Whether everything has ended by itself. Nothing is lost either way: what was not finished is
        found by another worker, or by the next one.
        """
        parts = self._parts
        if parts is None or self._stopped is None or self._stopped.is_set():
            return True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        seconds = self._drain_seconds if drain_seconds is None else drain_seconds
        ended = await parts.close(seconds)
        self._stopped.set()
        self._ended.set()
        return ended

    async def wait(self) -> None:
        """Returns when it was stopped. Raises what no part of it should ever raise."""
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

    # ------------------------------------------------------------------ tasks

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._part_ended)
        self._tasks.append(task)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._ended.set()
            _log.error("a part of the worker has failed", exc_info=self._failure)

    async def _listen(self, parts: _Parts) -> None:
        """Takes in what tablet servers tell."""
        client = self._client
        names: dict[int, list[bytes]] = {}
        for one in parts.registrations.watched:
            names.setdefault(one.table_id, []).append(one.id)
        by_name = {(one.table_id, one.id): one for one in parts.registrations.watched}
        find = client.catalog.all_tablets
        hints_of = watch_work(client.world, client.tablets, find, names)
        async with aclosing(hints_of) as stream:
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
            # What finds no room is found by the scan, which is woken when there is some.
            parts.queue.offer(watched, one.row, one.column, (one.timestamp,))

    async def _follow_changes(self, parts: _Parts) -> None:
        """After a pause, a removal, a resumption."""
        changed = parts.registrations.changed
        while True:
            await changed.wait()
            changed.clear()
            parts.queue.drop_inactive()
            parts.scanner.wake()
            parts.lanes.dispatch()


class _Parts:
    """What a started worker is made of."""

    def __init__(
        self, client: Client, watched: Sequence[Watched], limits: WorkerLimits, letters: int
    ) -> None:
        self.registrations = Registrations(client, watched)
        self.deletions = Deletions(client.around)
        self.threads = Threads(limits.threads_max)
        self.queue = WorkQueue(
            rows_max=limits.queue_rows_max,
            bytes_max=limits.queue_bytes_max,
            now=client.now,
            on_ready=self._dispatch,
            on_finished_before=self.deletions.add,
            on_room=self._look_again,
        )
        self.locks = RowLocks(client, self.queue)
        self.scanner = Scanner(
            client,
            self.queue,
            self.locks,
            lambda: self.registrations.active,
            pause_seconds_max=limits.scan_pause_seconds_max,
        )
        results = Results(
            self.queue, self.deletions, DeadLetters(client, letters), self.locks.release
        )
        self.lanes = Lanes(client, results, self.threads, lanes_max=limits.concurrency_max)

    def _dispatch(self) -> None:
        self.lanes.dispatch()

    def _look_again(self) -> None:
        self.scanner.wake()

    async def close(self, drain_seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + drain_seconds
        ended = await self.lanes.drain(drain_seconds)
        self.queue.close()
        self.threads.close()
        for work in self.queue.all():
            self.locks.release(work)
        await self.deletions.done(max(until - loop.time(), _DELETION_SECONDS_MIN))
        return ended
