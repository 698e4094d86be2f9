"""Interrupts asynchronous functions whose time is over. One timer serves all runs, because most end
long before: a timer for each would cost as much as all of its reads of the clock.
"""

from __future__ import annotations

import asyncio
from math import inf
from types import TracebackType

from percolator.observers.run_time import RunTime


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

    def add(self, limit: TimeLimit) -> None:
        self._open[limit] = None
        ends = limit.time.ends_no_sooner_than
        if ends < self._looks_at:
            self._look_at(ends)

    def discard(self, limit: TimeLimit) -> None:
        self._open.pop(limit, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, when: float) -> None:
        self.close()
        self._looks_at = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer, self._looks_at = None, inf
        soonest = inf
        for limit in list(self._open):
            seconds = limit.time.look_again_seconds()
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

    __slots__ = ("_cancelling", "_is_over", "_limits", "_task", "time")

    def __init__(self, limits: TimeLimits, time: RunTime, task: asyncio.Task[None]) -> None:
        self.time = time
        self._limits = limits
        self._task = task
        self._cancelling = task.cancelling()
        self._is_over = False

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
