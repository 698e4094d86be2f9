"""Interrupts asynchronous functions whose time is over. One timer serves all runs, because most end
long before: a timer for each would cost as much as all of its reads of the clock.

All runs of a worker share one event loop. While one computes, the others wait, and that is no time
of theirs: of a hundred runs that compute for 20 ms each, the last would need two seconds. So while
functions are in progress, another timer fires every tenth of a second, and how late it is says for
how long the loop was busy. That does not count, up to `LATE_PARTS_MAX` times what the function may
take: a function that computes forever, with short pauses, makes the loop late itself.
"""

from __future__ import annotations

import asyncio
from math import inf
from types import TracebackType

from percolator.observers.run_time import RunTime

TICK_SECONDS = 0.1
_LATE_SECONDS_MIN = 0.01
"""Any timer is a little late."""
LATE_PARTS_MAX = 9


class TookTooLong(Exception):
    """The function did not return by its deadline."""


class TimeLimits:
    """The functions in progress of one run pool. Belongs to its event loop."""

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
        """When to look again whether the time is over; 0 if it is."""
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
