"""The time that an observer's function may take, not counting the time lost to a silent cluster,
nor that in which the event loop was busy with others (running/time_limits.py).

A run must not fail because servers do not answer: five such runs would put aside a change that only
has to be tried later. So calls of its transaction that stay unanswered for long do not count. Other
calls do: an observer that reads on and on runs too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
    """The time of one run, from now on."""

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
        """When to look again whether the time is over; 0 if it is. `late_seconds` do not count."""
        left = self.seconds + self._waited() + late_seconds - (self._loop.time() - self._begun)
        return max(left, _LOOK_SECONDS_MIN) if left > _OVER_SECONDS else 0.0
