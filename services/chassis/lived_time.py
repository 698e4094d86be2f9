"""The time during which this process was running: time while it was stopped does not count.

While a process is stopped, no other can report to it. If that time counted, the first thing it
would do on waking is to declare all others dead. So `tick` has to be called often (many times a
second, by a task that does nothing else), and a longer gap between two calls counts only up to
`GAP_SECONDS_MAX`. The wall clock plays no part, because it jumps.
"""

from __future__ import annotations

from percolator.world import Clock

TICK_MILLISECONDS = 10
GAP_SECONDS_MAX = 0.25
"""Far above the intervals in which a healthy process calls `tick`, far below any time to live."""
ASK_SECONDS = GAP_SECONDS_MAX / 2
"""How often a task calls `tick` that has no other reason to do so more often."""


class LivedTime:
    """Counts ticks of 10 ms since it was created; never goes back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked_at = clock.monotonic_seconds()
        self._lived_seconds = 0.0

    def tick(self) -> int:
        """The current tick."""
        now = self._clock.monotonic_seconds()
        gap = now - self._asked_at
        if gap > 0.0:
            self._lived_seconds += min(GAP_SECONDS_MAX, gap)
        self._asked_at = now
        return int(self._lived_seconds * (1000 / TICK_MILLISECONDS))


def ticks_of(milliseconds: int) -> int:
    """The ticks that last at least `milliseconds`, even if the current one is partly over."""
    return -(-milliseconds // TICK_MILLISECONDS) + 1


def milliseconds_between(earlier: int, later: int) -> int:
    """The time from one tick to another; 0 if `later` is the earlier one."""
    return max(later - earlier, 0) * TICK_MILLISECONDS
