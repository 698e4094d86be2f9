"""Time limits of observers: asynchronous functions are interrupted, and threads are given up.

The time lost to a silent cluster does not count, nor that in which the event loop was busy with
others.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import TracebackType

_LOOK_SECONDS_MIN = 0.01
"""While a call is in progress, its run is not given up; this is how often it is looked at."""
_OVER_SECONDS = 0.001
"""A time that is over so soon is over: timers fire a little early, too."""


class ClusterWaits:
    """The calls of one transaction. Belongs to one event loop."""

    __slots__ = ("_long_seconds", "_now", "_open", "_seconds", "_until")

    def __init__(self, now: Callable[[], float], long_seconds: float) -> None:
        """Calls that take `long_seconds` or more do not count."""
        self._now = now
        self._long_seconds = long_seconds
        self._open: dict[_Call, float] = {}
        """When each call in progress has begun, the first one first."""
        self._seconds = 0.0
        self._until = 0.0
        """Up to here, all that does not count is in `_seconds`."""

    def call(self) -> _Call:
        """A block that waits for the cluster."""
        return _Call(self)

    def begin(self, call: _Call) -> None:
        self._open[call] = self._now()

    def end(self, call: _Call) -> None:
        # As long as one call is late, no time counts, whichever ends first.
        now, first = self._now(), next(iter(self._open.values()))
        if now - first >= self._long_seconds:
            self._seconds += now - max(first, self._until)
            self._until = now
        del self._open[call]

    def seconds(self) -> float:
        """The time so far that does not count. The calls in progress may become long ones."""
        if not self._open:
            return self._seconds
        first = next(iter(self._open.values()))
        return self._seconds + self._now() - max(first, self._until)


class _Call:
    """A call in progress. A class, since a generator would cost every call of every run three times
    as much."""

    __slots__ = ("_waits",)

    def __init__(self, waits: ClusterWaits) -> None:
        self._waits = waits

    def __enter__(self) -> None:
        self._waits.begin(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waits.end(self)


class RunTime:
    """The time of one run, from now on.

    A run must not fail because servers do not answer: five such runs would put aside a change that
    only has to be tried later. So calls of its transaction that stay unanswered for long do not
    count. Other calls do: an observer that reads on and on runs too long.
    """

    __slots__ = ("_begun", "_loop", "_waited", "seconds")

    def __init__(self, seconds: float, waited: Callable[[], float]) -> None:
        """`waited` returns the seconds, since now, that do not count."""
        self.seconds = seconds
        self._waited = waited
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()

    @property
    def ends_no_sooner_than(self) -> float:
        """The time of the event loop at which it is over if no seconds turn out not to count."""
        return self._begun + self.seconds

    def look_again_seconds(self, late_seconds: float = 0.0) -> float:
        """The time until the next look; 0 if the time is over. `late_seconds` do not count."""
        left = self.seconds + self._waited() + late_seconds - (self._loop.time() - self._begun)
        return max(left, _LOOK_SECONDS_MIN) if left > _OVER_SECONDS else 0.0


TICK_SECONDS = 0.1
_LATE_SECONDS_MIN = 0.01
"""Any timer is a little late."""
LATE_PARTS_MAX = 9


class TookTooLong(Exception):
    """The function did not return by its deadline."""


class TimeLimits:
    """The functions in progress of one run pool. Belongs to its event loop.

    One timer serves all runs, because most end long before: a timer for each would cost as much as
    all of its reads of the clock.

    All runs of a worker share one event loop. While one computes, the others wait, and that is no
    time of theirs: of a hundred runs that compute for 20 ms each, the last would need two seconds.
    So while functions are in progress, another timer fires every tenth of a second, and how late it
    is says for how long the loop was busy. That does not count, up to `LATE_PARTS_MAX` times what
    the function may take: a function that computes forever, with short pauses, makes the loop late
    itself.
    """

    def __init__(self) -> None:
        self._open: dict[TimeLimit, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looks_at = inf
        """When the timer fires: never later than the end of the first time that may be over."""
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.TimerHandle | None = None
        self._late_seconds = 0.0
        """How late all ticks were together."""

    @property
    def late_seconds(self) -> float:
        """How long the loop was busy so far, while functions were in progress."""
        late = 0.0 if self._ticking is None else self._loop.time() - self._ticking.when()
        return self._late_seconds + (late if late >= _LATE_SECONDS_MIN else 0.0)

    def add(self, limit: TimeLimit) -> None:
        self._open[limit] = None
        if self._ticking is None:
            self._tick_after(TICK_SECONDS)
        ends = limit.time.ends_no_sooner_than
        if ends < self._looks_at:
            self._look_at(ends)

    def discard(self, limit: TimeLimit) -> None:
        self._open.pop(limit, None)

    def close(self) -> None:
        for timer in (self._timer, self._ticking):
            if timer is not None:
                timer.cancel()

    def _tick_after(self, seconds: float) -> None:
        self._ticking = self._loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._late_seconds, self._ticking = self.late_seconds, None
        if self._open:
            self._tick_after(TICK_SECONDS)

    def _look_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks_at = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer, self._looks_at = None, inf
        soonest = inf
        for limit in list(self._open):
            seconds = limit.look_again_seconds()
            if seconds:
                soonest = min(soonest, seconds)
            else:
                del self._open[limit]
                limit.interrupt()
        if soonest < inf:
            self._look_at(self._loop.time() + soonest)


class TimeLimit:
    """A block of the current task that is interrupted when its time is over.

    It raises `TookTooLong` then. Whatever else cancels the task passes through, as with
    `asyncio.timeout`.
    """

    __slots__ = ("_cancelling", "_is_over", "_late_before", "_limits", "_task", "time")

    def __init__(self, limits: TimeLimits, time: RunTime, task: asyncio.Task[None]) -> None:
        self.time = time
        self._limits = limits
        self._task = task
        self._cancelling = task.cancelling()
        self._is_over = False
        self._late_before = limits.late_seconds

    def look_again_seconds(self) -> float:
        """The time until the next look; 0 if the time is over."""
        late = self._limits.late_seconds - self._late_before
        return self.time.look_again_seconds(min(late, LATE_PARTS_MAX * self.time.seconds))

    def interrupt(self) -> None:
        self._is_over = True
        self._task.cancel()

    def __enter__(self) -> None:
        self._limits.add(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_over:
            self._limits.discard(self)
            return
        is_ours = self._task.uncancel() <= self._cancelling
        if (is_ours and kind is asyncio.CancelledError) or isinstance(error, TimeoutError):
            raise TookTooLong(f"it did not return within {self.time.seconds:g} s") from error


_IDLE_SECONDS = 10.0
"""How long an idle thread is kept; another one is started when needed."""


class _Job:
    __slots__ = ("function", "future", "is_back", "is_given_up", "on_late_return")

    def __init__(self, function: Callable[[], object], future: asyncio.Future[None]) -> None:
        self.function = function
        self.future = future
        self.is_given_up = False
        self.is_back = False
        """The function has returned."""
        self.on_late_return: Callable[[], None] = _nothing


def _nothing() -> None:
    pass


class Threads:
    """The threads in which blocking observers run: a bounded number, none of which is lost for
    good.

    A thread cannot be stopped from outside. If a run takes too long, its thread is given up. Until
    it returns, it counts against its own observer's concurrency, which bounds how many there can
    be. It no longer counts against other observers, since another thread takes its place.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._places = asyncio.Semaphore(threads_max)
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._threads = 0
        """Threads that have not been given up."""
        self._idle = 0
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def call(
        self,
        function: Callable[[], object],
        seconds: float,
        on_late_return: Callable[[], None],
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Returns when the function has returned. Raises what it raised, or `TookTooLong`.

        `waited` returns the seconds so far that do not count.

        After `TookTooLong`, `on_late_return` is called in the loop once the function returns. Time
        spent waiting for a thread does not count, since others may be using all of them.
        """
        async with self._places:
            job = _Job(function, self._loop.create_future())
            await self._call(job, seconds, on_late_return, waited)

    async def _call(
        self,
        job: _Job,
        seconds: float,
        on_late_return: Callable[[], None],
        waited: Callable[[], float],
    ) -> None:
        with self._changed:
            self._jobs.append(job)
            try:
                self._staff()
            except RuntimeError:  # no further thread can be started: the caller tries again
                self._jobs.remove(job)
                raise
        try:
            time = RunTime(seconds, waited)
            while not job.future.done() and (left := time.look_again_seconds()):
                await asyncio.wait([job.future], timeout=left)
        except asyncio.CancelledError:
            self._give_up(job, _nothing)
            raise
        if not job.future.done():
            self._give_up(job, on_late_return)
            raise TookTooLong(f"it did not return within {seconds:g} s")
        job.future.result()

    def _give_up(self, job: _Job, on_late_return: Callable[[], None]) -> None:
        with self._changed:
            if job in self._jobs:  # no thread has taken it yet
                self._jobs.remove(job)
                self._loop.call_soon(on_late_return)
                return
            job.is_given_up = True
            job.on_late_return = on_late_return
            if not job.is_back:
                self._threads -= 1
                # If no further thread can be started, the next job tries again.
                with suppress(RuntimeError):
                    self._staff()

    def _staff(self) -> None:
        """Makes sure that a thread takes the newest job, if the bound allows one."""
        if len(self._jobs) <= self._idle:
            self._changed.notify()
        elif self._threads < self._threads_max:
            threading.Thread(target=self._serve, name="observer", daemon=True).start()
            self._threads += 1  # not before: the machine may refuse it

    def close(self) -> None:
        """Ends idle threads. Those that were given up end when they return, or with the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ in the threads

    def _serve(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            error: BaseException | None = None
            try:
                job.function()
            except BaseException as problem:  # noqa: BLE001 - raised again in `call`
                error = problem
            with self._changed:
                job.is_back = True
                is_given_up = job.is_given_up
            try:
                self._loop.call_soon_threadsafe(_finish, job, error)
            except RuntimeError:  # the loop has ended, so nothing waits for the result
                return
            if is_given_up:
                return  # another thread has taken this one's place

    def _next(self) -> _Job | None:
        with self._changed:
            self._idle += 1
            try:
                while not self._jobs:
                    # A job may arrive after the wait has timed out and before it returns.
                    in_time = not self._closed and self._changed.wait(_IDLE_SECONDS)
                    if not in_time and not self._jobs:
                        self._threads -= 1
                        return None
                return self._jobs.popleft()
            finally:
                self._idle -= 1


def _finish(job: _Job, error: BaseException | None) -> None:
    """Delivers the result of a job. Runs in the event loop."""
    if job.is_given_up:
        job.on_late_return()
    elif error is None:
        job.future.set_result(None)
    elif isinstance(error, StopIteration | KeyboardInterrupt):
        # No future can carry the first. The second was not Ctrl-C, which only the main thread gets,
        # and would end the event loop.
        job.future.set_exception(RuntimeError(f"the observer raised {type(error).__name__}"))
    else:
        job.future.set_exception(error)
