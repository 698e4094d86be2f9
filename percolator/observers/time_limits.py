"""Time limits of observers: asynchronous functions are interrupted, and threads are given up.

The time lost to a silent cluster does not count, nor that in which the event loop was busy with
others.

    RunTime       the time of one run
    TimeLimits    looks at the time of all runs of a worker
    TimeLimit     interrupts an asynchronous function
    Threads       call blocking functions, and are given up with those that take too long
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Protocol

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

    def begin(self) -> None:
        """It begins only now. Works in any thread."""
        self._begun = self._loop.time()

    @property
    def ends_no_sooner_than(self) -> float:
        """The time of the event loop at which it is over if no seconds turn out not to count."""
        return self._begun + self.seconds

    @property
    def elapsed(self) -> float:
        """The seconds since it has begun, whether they count or not."""
        return self._loop.time() - self._begun

    def look_again_seconds(self, late_seconds: float = 0.0) -> float:
        """The time until the next look; 0 if the time is over. `late_seconds` do not count."""
        left = self.seconds + self._waited() + late_seconds - self.elapsed
        return max(left, _LOOK_SECONDS_MIN) if left > _OVER_SECONDS else 0.0


TICK_SECONDS = 0.1
_LATE_SECONDS_MIN = 0.01
"""Any timer is a little late."""
LATE_PARTS_MAX = 9


class TookTooLong(Exception):
    """The function did not return by its deadline."""


class _Limited(Protocol):
    """A function in progress."""

    @property
    def time(self) -> RunTime: ...

    def look_again_seconds(self) -> float:
        """The time until the next look; 0 if the time is over."""

    def interrupt(self) -> None:
        """Its time is over."""


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
        self._open: dict[_Limited, None] = {}
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

    def add(self, limit: _Limited) -> None:
        self._open[limit] = None
        if self._ticking is None:
            self._tick_after(TICK_SECONDS)
        ends = limit.time.ends_no_sooner_than
        if ends < self._looks_at:
            self._look_at(ends)

    def discard(self, limit: _Limited) -> None:
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
_AHEAD_SECONDS = 0.05
"""For about how long a run that has begun may wait for a thread: its snapshot gets older meanwhile,
and it would conflict more often."""
_WEIGHT_OF_NEWEST = 0.1
"""The weight of the last call in the mean of all."""


class NoThreadLeft(Exception):
    """All threads of this observer hang, so its function was not called."""


class ThreadShare:
    """The threads that one observer may use at a time."""

    __slots__ = ("hung", "mean_seconds", "most", "used", "waiting")

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        """Jobs that are queued or in progress, and those that were given up and are not back."""
        self.hung = 0
        """Jobs that were given up and are not back."""
        self.waiting: deque[_Job] = deque()
        """Jobs above `most`."""
        self.mean_seconds = 0.0
        """How long its function takes, roughly; 0 if it was not called yet."""

    def took(self, seconds: float) -> None:
        mean = self.mean_seconds
        self.mean_seconds = mean + _WEIGHT_OF_NEWEST * (seconds - mean) if mean else seconds

    @property
    def runs_max(self) -> int:
        """How many runs to begin: no more than would soon get a thread."""
        ahead = _AHEAD_SECONDS / max(self.mean_seconds, 1e-6) if self.mean_seconds else 0.0
        return self.most + int(self.most * ahead)


class _Job:
    """A function for a thread to call, and its time, which begins when it is called."""

    __slots__ = (
        "_threads",
        "error",
        "function",
        "future",
        "has_begun",
        "is_back",
        "is_given_up",
        "on_late_return",
        "share",
        "time",
    )

    def __init__(
        self,
        threads: Threads,
        share: ThreadShare,
        function: Callable[[], object],
        time: RunTime,
        on_late_return: Callable[[], None],
    ) -> None:
        self._threads = threads
        self.share = share
        self.function = function
        self.time = time
        self.on_late_return = on_late_return
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_begun = False
        """A thread calls it, or was woken or started for it. If none comes, its time ends, too."""
        self.is_back = False
        """The function has returned."""
        self.is_given_up = False
        self.error: BaseException | None = None

    def look_again_seconds(self) -> float:
        return self.time.look_again_seconds() if self.has_begun else self.time.seconds

    def interrupt(self) -> None:
        if not self.future.done() and self._threads.give_up(self):
            late = f"it did not return within {self.time.seconds:g} s"
            self.future.set_exception(TookTooLong(late))


def _nothing() -> None:
    pass


class Threads:
    """The threads in which blocking observers run: a bounded number, none of which is lost for
    good.

    A thread cannot be stopped from outside. If a run takes too long, its thread is given up. Until
    it returns, it counts against its own observer's share, which bounds how many there can be. It
    no longer counts against other observers, since another thread takes its place.

    Most functions are short, and waking a thread costs more than they do. So jobs that are queued
    together wake one thread. It calls one after another, and wakes the next thread as long as it
    leaves jobs behind: short functions have been called by then, and while one takes long, others
    are called. The event loop is woken once for all results that it has not seen yet.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._jobs: deque[_Job] = deque()
        """Jobs for the next free threads."""
        self._changed = threading.Condition()
        self._threads = 0
        """Threads that have not been given up."""
        self._idle = 0
        self._is_waking = False
        """An idle thread was woken, and has not looked yet."""
        self._back: list[_Job] = []
        """Jobs that have ended, and whose results the event loop has not seen."""
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._limits = TimeLimits()

    async def call(
        self,
        share: ThreadShare,
        function: Callable[[], object],
        seconds: float,
        on_late_return: Callable[[], None],
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Returns when the function has returned. Raises what it raised, or `TookTooLong`, or
        `NoThreadLeft`.

        `waited` returns the seconds so far that do not count.

        After `TookTooLong`, `on_late_return` is called in the loop once the function returns. Time
        spent waiting for a thread does not count, since others may be using all of them.
        """
        job = _Job(self, share, function, RunTime(seconds, waited), on_late_return)
        with self._changed:
            self._add(job)
        self._limits.add(job)
        try:
            await job.future
        except asyncio.CancelledError:
            job.on_late_return = _nothing
            if job.future.cancelled():  # otherwise it was given up, or sent back, just before
                self.give_up(job)
            raise
        finally:
            self._limits.discard(job)

    def _add(self, job: _Job) -> None:
        share = job.share
        if share.used >= share.most:
            if share.hung >= share.most:
                raise NoThreadLeft
            share.waiting.append(job)
            return
        self._jobs.append(job)
        try:
            job.has_begun = self._staff()
        except RuntimeError:  # no further thread can be started
            if not self._threads:  # the caller tries again
                self._jobs.remove(job)
                raise
        share.used += 1

    def _staff(self) -> bool:
        """Makes sure that a thread takes the newest job. Returns False if the bound allows none."""
        if len(self._jobs) <= self._idle:
            self._wake()
        elif self._threads < self._threads_max:
            threading.Thread(target=self._serve, name="observer", daemon=True).start()
            self._threads += 1  # not before: the machine may refuse it
        else:
            return False
        return True

    def _wake(self) -> None:
        """Wakes one idle thread if there are jobs, unless one is about to look anyway."""
        if self._jobs and self._idle and not self._is_waking:
            self._is_waking = True
            self._changed.notify()

    def _leave(self, share: ThreadShare) -> None:
        """A job of this share no longer counts, so the next one may be called."""
        if share.waiting:
            self._jobs.append(share.waiting.popleft())
        else:
            share.used -= 1

    def give_up(self, job: _Job) -> bool:
        """Leaves the job to its thread, in whose place another one is started. Returns False if the
        job has just ended."""
        share = job.share
        with self._changed:
            if job.is_back:
                return False
            if job in share.waiting:
                share.waiting.remove(job)
            elif job in self._jobs:  # no thread has taken it yet
                self._jobs.remove(job)
                self._leave(share)
                self._loop.call_soon(job.on_late_return)
            else:
                job.is_given_up = True
                share.hung += 1
                self._threads -= 1
                if share.hung >= share.most:
                    for one in share.waiting:
                        if not one.future.done():
                            one.future.set_exception(NoThreadLeft())
                    share.waiting.clear()
                # If no further thread can be started, the next job tries again, or this one's takes
                # its own place once it returns.
                with suppress(RuntimeError):
                    self._staff()
        return True

    def close(self) -> None:
        """Ends idle threads. Those that were given up end when they return, or with the process."""
        self._limits.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _finish(self) -> None:
        """Delivers the results of the jobs that have ended."""
        with self._changed:
            back, self._back = self._back, []
        for job in back:
            error, job.error = job.error, None
            if job.is_given_up:
                job.on_late_return()
            elif job.future.done():
                continue  # its caller was cancelled
            elif error is None:
                job.future.set_result(None)
            elif isinstance(error, StopIteration | KeyboardInterrupt):
                # No future can carry the first. The second was not Ctrl-C, which only the main
                # thread gets, and would end the event loop.
                name = type(error).__name__
                job.future.set_exception(RuntimeError(f"the observer raised {name}"))
            else:
                job.future.set_exception(error)

    # ------------------------------------------------------------------ in the threads

    def _serve(self) -> None:
        job: _Job | None = None
        while (job := self._next(job)) is not None:
            try:
                job.function()
            except BaseException as problem:  # noqa: BLE001 - raised again in `call`
                job.error = problem

    def _next(self, done: _Job | None) -> _Job | None:
        """The next job, once the last one is noted as done; None if this thread is to end."""
        with self._changed:
            if done is not None and not self._note_end(done):
                return None
            self._idle += 1
            try:
                while not self._jobs:
                    # A job may arrive after the wait has timed out and before it returns.
                    in_time = not self._closed and self._changed.wait(_IDLE_SECONDS)
                    self._is_waking = False
                    if not in_time and not self._jobs:
                        self._threads -= 1
                        return None
                job = self._jobs.popleft()
            finally:
                self._idle -= 1
            self._wake()
            job.time.begin()
            job.has_begun = True
            return job

    def _note_end(self, job: _Job) -> bool:
        """Returns whether the thread goes on."""
        job.is_back = True
        job.share.took(job.time.elapsed)
        if job.is_given_up:
            job.share.hung -= 1
        self._leave(job.share)
        self._back.append(job)
        if len(self._back) == 1:
            try:
                self._loop.call_soon_threadsafe(self._finish)
            except RuntimeError:  # the loop has ended, so nothing waits for the result
                return False
        if job.is_given_up and self._threads >= self._threads_max:
            self._wake()  # for what has waited until this one's thread is back
            return False  # others have taken its place
        self._threads += job.is_given_up
        return True
