"""Running what waits: so many at a time, each to its commit, to another attempt, or aside.

What ends a run, and what follows:

    committed, or answered before      its notifications are deleted
    lost against another transaction   again, after a short pause that grows and is part chance
    the cluster did not answer         the same; also when nobody knows whether it has committed
    raised, wrote too much, too slow   again, after a longer pause; at last a dead letter
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from percolator.errors import ConflictError, PercolatorError, Retry, SnapshotTooOld
from percolator.observers.client import Client, RunTransaction
from percolator.observers.dead_letter import DeadLetters
from percolator.observers.deletions import Deletions
from percolator.observers.run import ObserverRun
from percolator.observers.threads import Threads, TookTooLong
from percolator.observers.work import Work, WorkQueue

_log = logging.getLogger(__name__)

_CONFLICT_SECONDS = (0.005, 1.0)
_POSTPONED_SECONDS = (0.05, 5.0)
_FAILED_SECONDS = (0.1, 10.0)
"""The first pause and the longest."""
_ERROR_CHARACTERS_MAX = 500
_CANCELLED_SECONDS = 1.0
"""How long a run that was given up is waited for: an observer may take no notice of it."""


@dataclass(frozen=True)
class Results:
    """Where lanes leave what they have done."""

    queue: WorkQueue
    deletions: Deletions
    dead_letters: DeadLetters
    on_left: Callable[[Work], None]
    """Told of every work that is finished, put aside or dropped."""


class Lanes:
    """At most `lanes_max` runs at one time. A lane takes one work after the other."""

    def __init__(
        self, client: Client, results: Results, threads: Threads, *, lanes_max: int
    ) -> None:
        self._client = client
        self._results = results
        self._threads = threads
        self._lanes_max = lanes_max
        self._lanes: dict[asyncio.Task[None], None] = {}
        """In the order in which they began, which is the one in which they are given up."""
        self._closing = False

    @property
    def running(self) -> int:
        return len(self._lanes)

    def dispatch(self) -> None:
        """Starts as many lanes as there is work for."""
        while not self._closing and len(self._lanes) < self._lanes_max:
            work = self._results.queue.take()
            if work is None:
                return
            lane = asyncio.get_running_loop().create_task(self._serve(work))
            self._lanes[lane] = None
            lane.add_done_callback(self._ended)

    def _ended(self, lane: asyncio.Task[None]) -> None:
        self._lanes.pop(lane, None)
        if not lane.cancelled() and lane.exception() is not None:
            _log.error("a lane of observers has failed", exc_info=lane.exception())
        self.dispatch()

    async def drain(self, seconds: float) -> bool:
        """Begins nothing more, and waits for what runs. Whether all of it has ended by itself."""
        self._closing = True
        if not self._lanes:
            return True
        lanes = list(self._lanes)
        await asyncio.wait(lanes, timeout=seconds)
        pending = [lane for lane in lanes if not lane.done()]
        for lane in pending:
            lane.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_CANCELLED_SECONDS)
        return not pending

    async def _serve(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            await self._attempt(work)
            work = None if self._closing else self._results.queue.take()

    # ------------------------------------------------------------------ one attempt

    async def _attempt(self, work: Work) -> None:
        counters = work.watched.counters
        run = ObserverRun(self._client, self._results.dead_letters, work)
        try:
            if not await run.begin():
                counters.acknowledged += 1
            else:
                counters.runs += 1
                await self._call(run, work)
                counters.committed(await run.commit())
        except asyncio.CancelledError:
            self._results.queue.drop(work)
            raise
        except ConflictError:
            counters.conflicts += 1
            self._repeat(work, _CONFLICT_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever an observer may raise
            if _will_pass(error):
                counters.postponed += 1
                _log.debug("%r is postponed: %s", work, error)
                self._repeat(work, _POSTPONED_SECONDS)
            else:
                await self._failed(work, run, error)
        else:
            self._answered(work, run.start)
        finally:
            if not run.transaction.ended:
                run.transaction.rollback()

    async def _call(self, run: ObserverRun, work: Work) -> None:
        """Whatever ends the function is its failure. Else `sys.exit` in an observer would end the
        worker, and every other one that finds the same change; and something cancelled that it
        waited for would look like the end of the lane, and the change be tried without end."""
        lane = asyncio.current_task()
        try:
            await self._call_function(run, work)
        except SystemExit as error:
            raise RuntimeError(f"the observer has called for an exit: {error}") from error
        except asyncio.CancelledError as error:
            if lane is not None and lane.cancelling():
                raise
            raise RuntimeError("what the observer waited for was cancelled") from error

    async def _call_function(self, run: ObserverRun, work: Work) -> None:
        observer = work.watched.observer
        arguments: list[object] = [observer.table.key.decode(work.row)]
        if observer.wants_column:
            arguments.append(work.watched.column(work.column))
        if not observer.is_async:
            call = partial(self._call_blocking, run.transaction, work, arguments)
            counters = work.watched.counters
            try:
                await self._threads.call(
                    call, observer.deadline_seconds, partial(self._came_back, work)
                )
            except TookTooLong:
                counters.abandoned += 1
                counters.hung += 1
                raise
            return
        limit = asyncio.timeout(observer.deadline_seconds)
        try:
            async with limit:
                await observer.function(run.transaction, *arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            work.watched.counters.abandoned += 1
            text = f"it has not returned after {observer.deadline_seconds:g} s"
            raise TookTooLong(text) from error

    def _call_blocking(
        self, transaction: RunTransaction, work: Work, arguments: list[object]
    ) -> None:
        """In a thread."""
        work.watched.observer.call_blocking(self._client.as_blocking(transaction), *arguments)

    def _came_back(self, work: Work) -> None:
        """A thread that was given up has returned after all."""
        work.watched.counters.hung -= 1
        self.dispatch()

    # ------------------------------------------------------------------ what follows

    def _answered(self, work: Work, seen: int) -> None:
        settled = [timestamp for timestamp in work.timestamps if timestamp <= seen]
        self._results.deletions.add(work, settled)
        self._results.on_left(work)
        self._results.queue.finished(work, seen)

    def _repeat(self, work: Work, pauses: tuple[float, float]) -> None:
        shortest, longest = pauses
        seconds = min(shortest * 2 ** min(work.retries, 20), longest)
        work.retries += 1
        chance = self._client.world.random.random()
        self._results.queue.again(work, seconds * (0.5 + 0.5 * chance))

    async def _failed(self, work: Work, run: ObserverRun, error: Exception) -> None:
        observer, counters = work.watched.observer, work.watched.counters
        counters.failures += 1
        if run.change.commit != work.tried_commit:
            work.tried_commit, work.attempts = run.change.commit, 0
        work.attempts += 1
        text = f"{type(error).__name__}: {_said_by(error)}"[:_ERROR_CHARACTERS_MAX]
        _log.warning(
            "observer %s failed for row %r, attempt %d of %d: %s",
            observer.name,
            work.row,
            work.attempts,
            observer.attempts,
            text,
            exc_info=error if work.attempts == 1 else None,
        )
        if work.attempts < observer.attempts:
            self._repeat(work, _FAILED_SECONDS)
            return
        try:
            parked = await self._results.dead_letters.park(work, text)
        except PercolatorError as problem:
            _log.warning("%r cannot be put aside now: %s", work, problem)
            self._repeat(work, _FAILED_SECONDS)
            return
        if not parked.seen:
            self._repeat(work, _CONFLICT_SECONDS)
            return
        counters.dead_letters += parked.is_put_aside
        self._answered(work, parked.seen)


def _said_by(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever somebody's own class does
        return "(it does not say what)"


def _will_pass(error: Exception) -> bool:
    """Whether it is the cluster's doing and not the observer's."""
    return isinstance(error, SnapshotTooOld) or (
        isinstance(error, PercolatorError) and error.retry is not Retry.USELESS
    )
