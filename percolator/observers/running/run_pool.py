"""Runs queued work, a limited number at a time, until it commits, is retried, or is put aside.

How a run ends, and what follows:

    committed, or handled before       its notifications are deleted
    conflicted                         retried, when it has its turn at the cell where it lost; if
                                       another process won, after a short pause that grows
    the cluster did not answer         retried after a pause, even if it may have committed
    raised, wrote too much, too slow   retried, after a longer pause; in the end a dead letter
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from percolator.errors import (
    CellAddress,
    ConflictError,
    InvariantViolation,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    SnapshotTooOld,
)
from percolator.observers.context import WorkerContext
from percolator.observers.run_time import RunTime
from percolator.observers.running import trace
from percolator.observers.running.dead_letter import DeadLetters
from percolator.observers.running.deletions import Deletions
from percolator.observers.running.run import ObserverRun
from percolator.observers.running.threads import Threads
from percolator.observers.running.time_limits import TimeLimit, TimeLimits, TookTooLong
from percolator.observers.running.tracebacks import summary_of, traceback_of
from percolator.observers.running.turns import Turns
from percolator.observers.work import Work
from percolator.observers.work_queue import WorkQueue
from percolator.protocol.contention.nested_calls import Inside
from percolator.tasks import Tasks
from percolator.wire.backoff import pause_seconds

_log = logging.getLogger(__name__)

_CONFLICT_SECONDS = (0.005, 1.0)
_POSTPONED_SECONDS = (0.05, 5.0)
_FAILED_SECONDS = (0.1, 10.0)
"""The first pause and the longest one."""
_ERROR_CHARACTERS_MAX = 500
_CANCELLED_SECONDS = 1.0
"""How long to wait for a cancelled run: an observer may ignore cancellation."""


@dataclass(frozen=True)
class Results:
    """What happens to work after a run."""

    queue: WorkQueue
    deletions: Deletions
    dead_letters: DeadLetters
    on_left: Callable[[Work], None]
    """Called with each work item that is finished, put aside or dropped."""


class RunPool:
    """At most `runs_max` runs at a time. Each task runs one work item after another."""

    def __init__(
        self,
        context: WorkerContext,
        results: Results,
        threads: Threads,
        *,
        runs_max: int,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """`is_cancelled`: whether somebody cancels the tasks of the worker, as `asyncio.run` does
        at its end: a run that is cancelled then has not failed."""
        self._context = context
        self._results = results
        self._threads = threads
        self._runs_max = runs_max
        self._is_cancelled = is_cancelled
        self._time_limits = TimeLimits()
        self._turns = Turns(context.env, results.queue)
        self._runs = Tasks(_run_failed)
        self._closing = False

    @property
    def running(self) -> int:
        return len(self._runs)

    def dispatch(self) -> None:
        """Starts as many tasks as there is work for."""
        while not self._closing and len(self._runs) < self._runs_max:
            work = self._results.queue.take()
            if work is None:
                return
            task = self._runs.start(self._serve(work))
            task.add_done_callback(lambda _: self.dispatch())

    def close(self) -> None:
        """Starts no more runs."""
        self._closing = True

    async def drain(self, seconds: float) -> bool:
        """Waits for the runs in progress, once closed. Whether all ended by themselves."""
        try:
            return await self._runs.drain(seconds, cancelled_seconds=_CANCELLED_SECONDS)
        finally:
            self._time_limits.close()

    async def _serve(self, first: Work) -> None:
        task = _own_task()
        work: Work | None = first
        while work is not None:
            try:
                await self._attempt(work, task)
            except asyncio.CancelledError:
                self._drop(work)
                raise
            if self._closing or not work.watched.is_active:
                self._drop(work)  # it came back after the others had been dropped
            # One that was cancelled ends: at the end of `asyncio.run`, all tasks are, and awaited.
            is_over = self._closing or task.cancelling()
            work = None if is_over else self._results.queue.take()

    def _drop(self, work: Work) -> None:
        self._results.on_left(work)
        self._results.queue.drop(work)

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, work: Work, task: asyncio.Task[Any]) -> None:
        if self._turns.waits(work):
            self._results.queue.again(work, 0.0)
            return
        counters = work.watched.counters
        run = ObserverRun(self._context, self._results.dead_letters, work)
        ended, began = trace.Ended.COMMITTED, self._context.now()
        is_called = False
        try:
            if not await run.begin():
                ended = trace.Ended.HANDLED
                counters.acknowledged += 1
            else:
                counters.runs += 1
                is_called = True
                await self._call(run, work, task)
                counters.committed(await run.commit())
                self._turns.committed(work, run.transaction.internal.writes.cells)
        except asyncio.CancelledError as error:
            if self._closing or not is_called or self._is_cancelled():
                raise
            # By the observer. If this were no failure, the change would be tried forever.
            failure = RuntimeError(
                "the task in which the observer runs was cancelled, as by itself"
            )
            failure.__cause__ = error
            self._note(run, work, trace.Ended.FAILED, began)
            await self._failed(work, run, failure)
        except ConflictError as error:
            self._note(run, work, trace.Ended.CONFLICTED, began)
            counters.conflicts += 1
            if error.cell is not None:
                counters.cells.lost_at(error.cell)
            if self._turns.lost(work, error):
                self._repeat(work, _CONFLICT_SECONDS)
            else:
                self._results.queue.again(work, 0.0)
        except Exception as error:  # noqa: BLE001 - whatever an observer may raise
            if _will_pass(error):
                self._note(run, work, trace.Ended.POSTPONED, began)
                counters.postponed += 1
                _log.debug("%r is postponed: %s", work, error)
                work.leave()
                self._repeat(work, _POSTPONED_SECONDS)
            else:
                self._note(run, work, trace.Ended.FAILED, began)
                await self._failed(work, run, error)
        else:
            self._note(run, work, ended, began)
            self._handled(work, run.start)
        finally:
            if not run.transaction.ended:
                run.transaction.rollback()

    def _note(self, run: ObserverRun, work: Work, ended: trace.Ended, began: float) -> None:
        """Counts what an attempt has cost, before its changes are forgotten."""
        counters, transaction = work.watched.counters, run.transaction
        counters.rows_read += transaction.statistics.rows_read
        counters.round_trips += transaction.statistics.round_trips
        counters.cells_written += len(transaction.internal.writes.cells)
        trace.note(run, work, ended, self._context.now() - began)

    async def _call(self, run: ObserverRun, work: Work, task: asyncio.Task[Any]) -> None:
        """Calls the function, and turns whatever ends it into a failure of the observer.

        Otherwise `sys.exit` in an observer would end the worker, and then every other worker that
        finds the same change. And if something that the observer awaits is cancelled, it would look
        as if this task had been cancelled, and the change would be tried forever. Whatever else is
        no `Exception` (extensions in Rust raise such) would end this task, which has the only
        reference to the work.
        """
        try:
            await self._call_function(run, work, task)
        except SystemExit as error:
            raise RuntimeError(f"the observer tried to exit the process: {error}") from error
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise
            raise RuntimeError("something that the observer awaited was cancelled") from error
        except (Exception, GeneratorExit):
            raise  # the last one comes from outside: a task that is thrown away
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and _may_be_from_outside():
                raise
            raise RuntimeError(f"the observer raised {summary_of(error)}") from error

    async def _call_function(self, run: ObserverRun, work: Work, task: asyncio.Task[Any]) -> None:
        observer, waits = work.watched.observer, run.transaction.waits
        arguments: list[object] = [observer.table.key.decode(work.row)]
        if observer.wants_column:
            arguments.append(work.watched.column(work.column))
        if not observer.is_async:
            blocking = self._context.blocking
            call = partial(
                _inside, work, partial(blocking.call, observer, run.transaction, arguments)
            )
            counters = work.watched.counters
            try:
                await self._threads.call(
                    call,
                    observer.deadline_seconds,
                    partial(self._returned_late, work),
                    waits.seconds,
                )
            except TookTooLong:
                counters.abandoned += 1
                counters.hung += 1
                raise
            return
        time = RunTime(observer.deadline_seconds, waits.seconds)
        try:
            with TimeLimit(self._time_limits, time, task), Inside(work):
                await observer.function(run.transaction, *arguments)
        except TookTooLong:
            work.watched.counters.abandoned += 1
            raise

    def _returned_late(self, work: Work) -> None:
        """Notes that the thread of a run that was given up has returned after all."""
        work.watched.counters.hung -= 1
        self.dispatch()

    # ------------------------------------------------------------------ what follows

    def _handled(self, work: Work, seen: int) -> None:
        handled = [timestamp for timestamp in work.timestamps if timestamp <= seen]
        self._results.deletions.add(work, handled)
        self._results.on_left(work)
        self._results.queue.finished(work, seen)

    def _repeat(self, work: Work, pauses: tuple[float, float]) -> None:
        seconds = pause_seconds(self._context.world.random, *pauses, doublings=work.retries)
        work.retries += 1
        self._results.queue.again(work, seconds)

    async def _failed(self, work: Work, run: ObserverRun, error: Exception) -> None:
        observer, counters = work.watched.observer, work.watched.counters
        counters.failures += 1
        work.leave()
        if run.cell.commit != work.tried_commit:
            work.tried_commit, work.attempts = run.cell.commit, 0
        work.attempts += 1
        text = summary_of(error)[:_ERROR_CHARACTERS_MAX]
        cell = CellAddress(work.watched.table_id, work.row, work.column)
        is_last = work.attempts >= observer.attempts
        _log.warning(
            "observer %s failed for %s, attempt %d of %d%s: %s",
            observer.name,
            self._context.env.described(cell),
            work.attempts,
            observer.attempts,
            ", and the change becomes a dead letter" if is_last else "",
            text,
            exc_info=error if work.attempts == 1 else None,
        )
        if not is_last:
            self._repeat(work, _FAILED_SECONDS)
            return
        if not (self._closing or self._is_cancelled()):
            await _pending_cancellation()
        try:
            result = await self._results.dead_letters.put_aside(work, text, traceback_of(error))
        except PercolatorError as problem:
            _log.warning("%r cannot be put aside now: %s", work, problem)
            self._repeat(work, _FAILED_SECONDS)
            return
        if not result.seen:
            self._repeat(work, _CONFLICT_SECONDS)
            return
        counters.dead_letters += result.is_put_aside
        # What a weak notification announces cannot be looked up: one that came after the last run
        # has begun was never tried.
        self._handled(work, run.start if observer.weak else result.seen)


def _own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    if task is None:
        raise InvariantViolation("a run needs a task that can be interrupted")
    return task


async def _pending_cancellation() -> None:
    """Takes note of a cancellation by an observer that has ended before it heard of it: it would
    strike with the next call."""
    if _own_task().cancelling():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


def _may_be_from_outside() -> bool:
    """Whether Ctrl-C may have interrupted this thread: no other than the main one ever is."""
    return threading.current_thread() is threading.main_thread()


def _inside(work: Work, function: Callable[[], object]) -> object:
    with Inside(work):
        return function()


def _run_failed(_: asyncio.Task[Any], error: BaseException) -> None:
    _log.error("a task that runs observers has failed", exc_info=error)


def _will_pass(error: Exception, raised_from_it: tuple[Exception, ...] = ()) -> bool:
    """Whether the cluster, not the observer, caused the error, so that a retry may succeed.

    This also holds if all errors of a group are such errors, or the observer raised its own from
    one. Causes may form a circle.
    """
    if any(error is one for one in raised_from_it):
        return False
    chain = (*raised_from_it, error)
    if isinstance(error, ExceptionGroup):
        return all(_will_pass(one, chain) for one in error.exceptions)
    if not isinstance(error, PercolatorError) and isinstance(error.__cause__, Exception):
        return _will_pass(error.__cause__, chain)
    return isinstance(error, SnapshotTooOld | OutcomeUnknown) or (
        isinstance(error, PercolatorError) and error.retry is not Retry.USELESS
    )
