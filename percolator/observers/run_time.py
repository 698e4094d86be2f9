"""The time that an observer's function may take, not counting the time lost to a silent cluster.

A run must not fail because servers do not answer: five such runs would put aside a change that only
has to be tried later. So calls of its transaction that stay unanswered for long do not count. Other
calls do: an observer that reads on and on runs too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_SECONDS_MIN = 0.01
"""While a call is in progress, its run is not given up; this is how often it is looked at."""


class ClusterWaits:
    """The calls of one transaction. Belongs to one event loop."""

    __slots__ = ("_long_seconds", "_now", "_open", "_seconds", "_until")

    def __init__(self, now: Callable[[], float], long_seconds: float) -> None:
        """Calls that take `long_seconds` or more do not count."""
        self._now = now
        self._long_seconds = long_seconds
        self._open: dict[object, float] = {}
        """When each call in progress has begun, the first one first."""
        self._seconds = 0.0
        self._until = 0.0
        """Up to here, all that does not count is in `_seconds`."""

    @contextmanager
    def call(self) -> Iterator[None]:
        """A block that waits for the cluster."""
        me = object()
        self._open[me] = self._now()
        try:
            yield
        finally:
            # As long as one call is late, no time counts, whichever ends first.
            now, first = self._now(), next(iter(self._open.values()))
            if now - first >= self._long_seconds:
                self._seconds += now - max(first, self._until)
                self._until = now
            del self._open[me]

    def seconds(self) -> float:
        """The time so far that does not count. The calls in progress may become long ones."""
        if not self._open:
            return self._seconds
        first = next(iter(self._open.values()))
        return self._seconds + self._now() - max(first, self._until)


class RunTime:
    """The time of one run, from now on."""

    def __init__(self, seconds: float, waited: Callable[[], float]) -> None:
        """`waited` returns the seconds, since now, that do not count."""
        self._seconds = seconds
        self._waited = waited
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def look_again_seconds(self) -> float:
        """When to look again whether the time is over; 0 if it is."""
        left = self._seconds + self._waited() - (self._loop.time() - self._begun)
        return max(left, _LOOK_SECONDS_MIN) if left > 0.0 else 0.0

    @contextmanager
    def ends(self, limit: asyncio.Timeout) -> Iterator[None]:
        """A block that this limit interrupts when the time is over."""
        self._look(limit)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _look(self, limit: asyncio.Timeout) -> None:
        seconds = self.look_again_seconds()
        if seconds:
            self._timer = self._loop.call_later(seconds, self._look, limit)
        else:
            limit.reschedule(self._loop.time())
