"""Runs of observers: one change (or a batch of several), one transaction, and what follows.

How a run ends, and what follows:

    committed, or handled before       its notifications are deleted
    conflicted                         retried, from the head of the line at the cell where it lost;
                                       if another process won, after a short pause that grows
    the cluster did not answer         retried after a pause, even if it may have committed
    raised, wrote too much, too slow   retried, after a longer pause; in the end a dead letter

A batch that does not commit, whatever the reason, is retried change by change, and all of this
holds for each: a change that fails holds up no others, and what failed for several counts for none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Container, Sequence
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
    UsageError,
)
from percolator.observers import trace
from percolator.observers.context import RunTransaction, Waiting, WorkerContext
from percolator.observers.dead_letters import DeadLetters
from percolator.observers.time_limits import (
    NoThreadLeft,
    RunTime,
    Threads,
    TimeLimit,
    TimeLimits,
    TookTooLong,
)
from percolator.observers.watched_cell import NOTHING_SEEN, Acknowledgement, WatchedCell, look
from percolator.observers.work_queue import Work, WorkQueue
from percolator.protocol.contention import Contender, Loss
from percolator.protocol.environment import Environment
from percolator.retries import Inside
from percolator.routing.cells import KnownRows
from percolator.tasks import Tasks
from percolator.wire.backoff import pause_seconds


class ObserverRun:
    """One attempt to run an observer for a cell, from its snapshot to its commit: the paper's
    section 2.4. With a batch, for cells of several rows.

        begin    take a snapshot; read the cell and its acknowledgement; is there anything to do?
        (call)   call the observer's function, in this transaction
        commit   commit its writes and the acknowledgement together
        (later)  delete the notifications that the snapshot covers, in the background

    Rules, each with the failure that it prevents:

    - It runs only if the newest put or delete of the cell is newer than the last acknowledged
      snapshot. Otherwise, two workers that found the same notification would both do the work.
    - The acknowledgement is in the same transaction. If it were written before, a crash would lose
      the work; if after, a crash would repeat it.
    - Only notifications that are known and not newer than the snapshot are deleted, and only once
      the run that handled them has committed. A newer one is about a change that the snapshot
      lacks.
    - If it is unknown whether the run has committed, nothing is deleted: the notification is found
      again, and the acknowledgement says whether it was handled.
    - If deletes do not wake the observer and the snapshot shows no value, every change that it
      covers counts as handled: earlier values are gone. Nothing is written, since each look finds
      the same until the cell is written again. Only a dead letter of an earlier change is deleted.
    - The function must not commit: what it has not done yet, such as the other rows of a batch,
      would be acknowledged with the rest, and be lost if it then fails.
    - Weak observers acknowledge nothing, since their notifications come without a change.
    - Each cell of a batch has an acknowledgement of its own, in the same transaction. A cell with
      nothing to do takes no part: otherwise it would count as handled only if the others commit.
    """

    __slots__ = (
        "_context",
        "_dead_letters",
        "_known",
        "called",
        "cells",
        "handled",
        "open",
        "start",
        "transaction",
        "works",
    )

    def __init__(self, context: WorkerContext, dead_letters: DeadLetters, *works: Work) -> None:
        """All works are of one observer and column."""
        self._context = context
        self._dead_letters = dead_letters
        self._known: KnownRows | None = None
        self.works: Sequence[Work] = works
        self.open: Sequence[Work] = works
        """The works that are handled once it has committed."""
        self.handled: list[Work] = []
        """The others: there was nothing to do, whether it commits or not."""
        self.called: list[Work] = []
        """The works for which the function is called."""
        self.transaction: RunTransaction = context.begin(works[0])
        self.start = 0
        """The snapshot's timestamp; 0 until it has one."""
        self.cells: dict[Work, WatchedCell] = dict.fromkeys(works, WatchedCell(None, NOTHING_SEEN))
        """The cells as the snapshot shows them."""

    async def begin(self) -> bool:
        """False if there is nothing to do: the notifications have been handled already, or the cell
        was deleted and deletes do not wake the observer."""
        works, transaction = self.works, self.transaction
        self.start = await transaction.timestamp()
        cells = await look(self._context, works, transaction, self.start)
        self.cells = dict(zip(works, cells, strict=True))
        transaction.last_runs = {work: cell.acknowledged.start for work, cell in self.cells.items()}
        # If the table was dropped and created again, the function must not write into the new one.
        watched, internal = works[0].watched, transaction.internal
        internal.bind(watched.observer.table.name, watched.table_id)
        rows = {work.row: cell.known(work) for work, cell in self.cells.items()}
        self._known = KnownRows(watched.table_id, rows)
        internal.know(self._known)
        for work in works:
            self._begin_for(work)
        self.open = transaction.works = [work for work in works if work not in self.handled]
        if not self.open:
            transaction.rollback()
        elif not self.called:
            await transaction.commit()
        transaction.is_in_function = bool(self.called)
        return bool(self.called)

    def _begin_for(self, work: Work) -> None:
        watched, cell = work.watched, self.cells[work]
        is_weak = watched.observer.weak
        is_unwanted = not (watched.observer.deletes or cell.has_value)
        has_dead_letter = cell.acknowledged.has_dead_letter
        if (not is_weak and cell.is_handled) or (is_unwanted and not has_dead_letter):
            self.handled.append(work)
            return
        # Written before the function is called, so that its writes cannot be committed without it,
        # whatever the function does.
        if has_dead_letter:
            self._dead_letters.clear(self.transaction, work)
        if has_dead_letter or not is_weak:
            now = Acknowledgement(0 if is_weak else self.start).encode()
            address = watched.acknowledgement(work.row, work.column)
            self.transaction.internal.writes.put(address, now)
        if not is_unwanted:
            self.called.append(work)

    async def commit(self) -> int | None:
        """Commits. Returns the commit timestamp; None if nothing was written.

        Raises the error that prevented it; only `OutcomeUnknown` leaves open whether it committed.
        """
        transaction = self.transaction
        transaction.is_in_function = False
        if self._known is not None:
            self.works[0].watched.note_read(self._known.read)
        if not transaction.ended:
            await transaction.commit()
        elif transaction.internal.writes.cells:
            raise UsageError("the observer ended its own transaction without committing it")
        return transaction.commit_timestamp


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
    """The places to which work goes after a run."""

    queue: WorkQueue
    deletions: Deletions
    dead_letters: DeadLetters
    on_left: Callable[[Work], None]
    """Called with each work item that is finished, put aside or dropped."""


class RunPool:
    """At most `runs_max` runs at a time. Each task makes one run after another."""

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
        self._line = HotCellLine(context.env, results.queue)
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
        """Waits for the runs in progress, once closed. True if all ended by themselves."""
        try:
            return await self._runs.drain(seconds, cancelled_seconds=_CANCELLED_SECONDS)
        finally:
            self._time_limits.close()

    async def _serve(self, first: Work) -> None:
        task = _own_task()
        work: Work | None = first
        while work is not None:
            works = self._results.queue.take_along(work, self._context.tablet_of)
            try:
                await self._attempt(works, task)
            except asyncio.CancelledError:
                for one in works:
                    self._drop(one)
                raise
            for one in works:
                if self._closing or not one.watched.is_active:
                    self._drop(one)  # it came back after the others had been dropped
            # One that was cancelled ends: at the end of `asyncio.run`, all tasks are, and awaited.
            is_over = self._closing or task.cancelling()
            work = None if is_over else self._results.queue.take()

    def _drop(self, work: Work) -> None:
        self._results.on_left(work)
        self._results.queue.drop(work)

    async def _attempt(self, works: Sequence[Work], task: asyncio.Task[Any]) -> None:
        work, queue = works[0], self._results.queue
        if len(works) == 1 and self._line.waits(work):
            queue.again(work, 0.0)
            return
        watched, counters = work.watched, work.watched.counters
        run = ObserverRun(self._context, self._results.dead_letters, *works)
        ended, began = trace.Ended.COMMITTED, self._context.env.now()
        is_called = False
        try:
            if not await run.begin():
                ended = trace.Ended.HANDLED
                counters.acknowledged += len(works)
            else:
                counters.acknowledged += len(run.handled)
                counters.runs += len(run.open)
                is_called = True
                await self._call(run, task)
                commit = await run.commit()
                for one in run.open:
                    counters.committed(one.seconds_until(commit))
                watched.batch_max = min(watched.batch_max + 1, watched.observer.batch or 1)
                self._line.committed(work, run.transaction.internal.writes.cells)
        except asyncio.CancelledError as error:
            if self._closing or not is_called or self._is_cancelled():
                raise
            # By the observer. If this were no failure, the change would be tried forever.
            failure = RuntimeError(
                "the task in which the observer runs was cancelled, as by itself"
            )
            failure.__cause__ = error
            self._note(run, trace.Ended.FAILED, began)
            await self._failed(run, failure)
        except ConflictError as error:
            self._note(run, trace.Ended.CONFLICTED, began)
            counters.conflicts += len(run.open)
            if error.cell is not None:
                counters.cells.lost_at(error.cell)
            if len(run.open) > 1:
                watched.batch_max = max(watched.batch_max // 2, 1)
                self._run_each_alone(run.open)
            elif self._line.lost(run.open[0], error):
                self._repeat(run.open[0], _CONFLICT_SECONDS)
            else:
                queue.again(run.open[0], 0.0)
        except NoThreadLeft:
            counters.runs -= len(run.open)
            for one in run.open:
                queue.again(one, 0.0)
        except Exception as error:  # noqa: BLE001 - whatever an observer may raise
            if _will_pass(error):
                self._note(run, trace.Ended.POSTPONED, began)
                counters.postponed += len(run.open)
                for one in run.open:
                    _log.debug("%r is postponed: %s", one, error)
                    one.is_alone |= len(run.open) > 1
                    one.leave()
                    self._repeat(one, _POSTPONED_SECONDS)
            else:
                self._note(run, trace.Ended.FAILED, began)
                await self._failed(run, error)
        else:
            self._note(run, ended, began)
            for one in run.open:
                self._handled(one, run.start)
        finally:
            if not run.transaction.ended:
                run.transaction.rollback()
            for one in run.handled:  # not before: another task would take what has changed since
                self._handled(one, run.start)

    def _run_each_alone(self, works: Sequence[Work]) -> None:
        """Runs each of a batch alone: one of them may keep the others from committing."""
        for one in works:
            one.is_alone = True
            self._results.queue.again(one, 0.0)

    def _note(self, run: ObserverRun, ended: trace.Ended, began: float) -> None:
        """Counts what an attempt has cost, before its changes are forgotten."""
        counters, transaction = run.works[0].watched.counters, run.transaction
        counters.rows_read += transaction.statistics.rows_read
        counters.round_trips += transaction.statistics.round_trips
        counters.cells_written += len(transaction.internal.writes.cells)
        trace.note(transaction, run.works, run.start, ended, self._context.env.now() - began)

    async def _call(self, run: ObserverRun, task: asyncio.Task[Any]) -> None:
        """Calls the function, and turns whatever ends it into a failure of the observer.

        Otherwise `sys.exit` in an observer would end the worker, and then every other worker that
        finds the same change. And if something that the observer awaits is cancelled, it would look
        as if this task had been cancelled, and the change would be tried forever. Whatever else is
        no `Exception` (extensions in Rust raise such) would end this task, which has the only
        reference to the work.
        """
        try:
            await self._call_function(run, task)
        except SystemExit as error:
            raise RuntimeError(f"the observer tried to exit the process: {error}") from error
        except asyncio.CancelledError as error:
            if task.cancelling():
                raise
            raise RuntimeError("something that the observer awaited was cancelled") from error
        except (Exception, GeneratorExit):
            raise  # the last one comes from outside: a task that is thrown away
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (
                threading.current_thread() is threading.main_thread()
            ):
                raise  # from outside: Ctrl-C interrupts no other thread than the main one
            raise RuntimeError(f"the observer raised {summary_of(error)}") from error

    async def _call_function(self, run: ObserverRun, task: asyncio.Task[Any]) -> None:
        work, waits = run.called[0], run.transaction.waits
        watched, observer, counters = work.watched, work.watched.observer, work.watched.counters
        arguments = watched.arguments([one.row for one in run.called], work.column)
        if not observer.is_async:
            blocking = self._context.blocking
            call = partial(
                _inside, work, partial(blocking.call, observer, run.transaction, arguments)
            )
            try:
                await self._threads.call(
                    watched.threads,
                    call,
                    observer.deadline_seconds,
                    partial(self._returned_late, work),
                    waits.seconds,
                )
            except TookTooLong:
                counters.abandoned += 1
                counters.hung += 1
                raise
            finally:
                watched.runs_max = min(watched.threads.runs_max, observer.concurrency)
            self.dispatch()  # it may be more than before
            return
        time = RunTime(observer.deadline_seconds, waits.seconds)
        try:
            with TimeLimit(self._time_limits, time, task), Inside(work):
                await observer.function(run.transaction, *arguments)
        except TookTooLong:
            counters.abandoned += 1
            raise

    def _returned_late(self, work: Work) -> None:
        """Notes that the thread of a run that was given up has returned after all."""
        work.watched.counters.hung -= 1
        self.dispatch()

    def _handled(self, work: Work, seen: int) -> None:
        handled = [timestamp for timestamp in work.timestamps if timestamp <= seen]
        self._results.deletions.add(work, handled)
        self._results.on_left(work)
        self._results.queue.finished(work, seen)

    def _repeat(self, work: Work, pauses: tuple[float, float]) -> None:
        seconds = pause_seconds(self._context.world.random, *pauses, doublings=work.retries)
        work.retries += 1
        self._results.queue.again(work, seconds)

    async def _failed(self, run: ObserverRun, error: Exception) -> None:
        works, work = run.open, run.open[0]
        observer, counters = work.watched.observer, work.watched.counters
        if not run.transaction.ended:
            run.transaction.rollback()  # a thread that was given up may use it while this one waits
        text = summary_of(error)[:_ERROR_CHARACTERS_MAX]
        if len(works) > 1:
            _log.warning(
                "observer %s failed for %d rows at once, and runs for each of them: %s",
                observer.name,
                len(works),
                text,
            )
            self._run_each_alone(works)
            return
        counters.failures += 1
        work.leave()
        if run.cells[work].commit != work.tried_commit:
            work.tried_commit, work.attempts = run.cells[work].commit, 0
        work.attempts += 1
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
    come with the next call."""
    if _own_task().cancelling():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


def _inside(work: Work, function: Callable[[], object]) -> object:
    with Inside(work):
        return function()


def _run_failed(_: asyncio.Task[Any], error: BaseException) -> None:
    _log.error("a task that runs observers has failed", exc_info=error)


def _will_pass(error: Exception, raised_from_it: tuple[Exception, ...] = ()) -> bool:
    """The cluster, not the observer, caused the error, so that a retry may succeed.

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


EXPECTED_SECONDS = 0.25
"""How long work that has not lost yet is alone at the head. Others wait no longer for it."""


class HotCellLine:
    """The line of runs at a cell where they have lost, or where they would lose.

    If a thousand documents bump one counter, nearly all of their runs would lose. A run that has
    lost stands in line (hot_cells.py). While there is a line, new work is expected to lose there,
    too, if the last run of its observer that lost did so at this cell, and all runs since have
    written it: then it stands in line before its first run.

    That may be a mistake, for an observer that writes one hot cell among many cold ones. A run that
    commits without the cell shows it: then all that was only expected to lose runs at once, and
    until the next run loses, nothing is expected. A run that takes long at the head proves nothing:
    on a busy machine any may, and if all ran at once, nearly all would lose. The next one takes its
    place.
    """

    def __init__(self, env: Environment, queue: WorkQueue) -> None:
        self._env = env
        self._queue = queue

    def waits(self, work: Work) -> bool:
        """True if the work has to stand in line before its first run; makes it a contender."""
        cell = work.watched.hot_cell
        if work.contender is not None or cell is None or cell not in self._env.hot_cells.lines:
            return False
        work.contender = Contender(
            self._env.hot_cells,
            work.watched,
            work.found_seconds,
            seconds=EXPECTED_SECONDS,
        )
        work.contender.lost_at(cell)
        return True

    def lost(self, work: Work, error: ConflictError) -> bool:
        """Makes the work a contender. Returns True if it is to pause before it stands in line."""
        loss = Loss.reported_by(error)
        if loss is None:
            work.leave()
            return True
        work.has_lost, cell = True, loss.cell
        if cell != work.watched.acknowledgement(work.row, work.column):
            work.watched.hot_cell = cell  # a cell that other rows' runs may write, too
        if work.contender is None:
            work.contender = Contender(self._env.hot_cells, work.watched, work.found_seconds)
        contender = work.contender
        lost_in_turn = contender.is_granted_at(cell)
        contender.lost_at(cell)
        if not self._env.knows_winner(loss):
            return True
        if lost_in_turn:  # to one that takes none, perhaps to a call of its own function
            contender.leave()
        return lost_in_turn

    def committed(self, work: Work, written: Container[CellAddress]) -> None:
        """Takes note of the cells that a run has written."""
        cell = work.watched.hot_cell
        if cell is not None and cell not in written:
            work.watched.hot_cell = None
            for one in self._queue.in_line(work.watched):
                if not one.has_lost:
                    one.leave()


_AT_ONCE_MAX = 1_024
_GATHER_SECONDS = 0.1
_WAITING_MAX = 65_536
"""Above this, further notifications are not deleted, and will be found again."""
_TIMESTAMPS_PER_STEP_MAX = 128


class Deletions:
    """The deletions of handled notifications, in the background, many at a time.

    Each batch costs every tablet that it touches a synced write, as a batch of commits does. So
    while there is more work, deletions are gathered for a tenth of a second.

    Nothing depends on it. If a notification stays because this process ends or a server does not
    answer, it is found again, and the acknowledgement says that nothing is left to do.
    """

    def __init__(
        self, context: WorkerContext, *, more_to_come: Callable[[], bool] = lambda: False
    ) -> None:
        """`more_to_come`: there is work whose notifications will soon be deleted, too."""
        self._context = context
        self._more_to_come = more_to_come
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        """Set when there is enough for a whole batch, or somebody waits for all of them."""
        self._is_awaited = False

    def add(self, work: Work, timestamps: Sequence[int]) -> None:
        """Deletes exactly these notifications of this work."""
        watched, step = work.watched, _TIMESTAMPS_PER_STEP_MAX
        for at in range(0, len(timestamps), step):
            if len(self._waiting) >= _WAITING_MAX:
                return
            portion = tuple(timestamps[at : at + step])
            self._waiting.append(
                Waiting(watched.table_id, work.row, work.column, watched.id, portion)
            )
        if len(self._waiting) >= _AT_ONCE_MAX:
            self._hurry.set()
        if self._sending is None and self._waiting:
            self._sending = self._context.env.background.start(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                if self._more_to_come():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_GATHER_SECONDS):
                            await self._hurry.wait()
                portion = self._waiting[:_AT_ONCE_MAX]
                del self._waiting[:_AT_ONCE_MAX]
                # Errors are ignored: a notification that is not deleted is found again.
                await self._context.notifications.forget(portion, self._context.env.deadline())
                if len(self._waiting) < _AT_ONCE_MAX and not self._is_awaited:
                    self._hurry.clear()
        finally:
            self._sending = None

    async def done(self, seconds: float | None = None) -> None:
        """Returns when all deletions have been sent and answered, or after `seconds`.

        Notifications that are not deleted by then will be found again.
        """
        self._is_awaited = True
        self._hurry.set()
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=seconds)
            self._waiting.clear()


_ERRORS_MAX = 10
"""The most errors that are shown: one that was raised from another, and that from another."""


def traceback_of(error: BaseException) -> str:
    """The errors from the first to the one that ended the run, each with its lines of code.

    It comes without the marks below the code, which are different in each release of Python, and
    without the values of variables, which may be secret.
    """
    chain: list[BaseException] = []
    _collect(error, chain)
    return "\n".join(_lines_of(one) for one in reversed(chain))


def _collect(error: BaseException | None, chain: list[BaseException]) -> None:
    """Adds the error, those of a group, and what it was raised from, to the latest ones first."""
    while error is not None and len(chain) < _ERRORS_MAX and error not in chain:
        chain.append(error)
        if isinstance(error, BaseExceptionGroup):
            for one in reversed(error.exceptions[:_ERRORS_MAX]):
                _collect(one, chain)
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)


def summary_of(error: BaseException) -> str:
    """The error in one line. A group's own message does not say what has happened."""
    texts: list[str] = []
    while len(texts) < _ERRORS_MAX:
        texts.append(f"{type(error).__name__}: {message_of(error)}")
        if not isinstance(error, BaseExceptionGroup):
            break
        error = error.exceptions[0]
    return ": ".join(texts)


def message_of(error: BaseException) -> str:
    """The error's text, whatever its class does, and whatever the text contains."""
    try:
        return _storable(str(error))
    except Exception:  # noqa: BLE001 - the __str__ of a user's class may raise anything
        return "(it has no message)"


def _lines_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = traceback.format_list(
        [(one.filename, one.lineno or 0, one.name, one.line) for one in frames]
    )
    text = "".join([*lines, f"{type(error).__name__}: {message_of(error)}"])
    notes = getattr(error, "__notes__", ())
    found = [one for one in notes if isinstance(one, str)] if isinstance(notes, list) else []
    return _storable("\n".join([text, *found]))


def _storable(text: str) -> str:
    """Names of files may hold halves of surrogate pairs, which cannot be stored as text."""
    return text.encode(errors="backslashreplace").decode()
