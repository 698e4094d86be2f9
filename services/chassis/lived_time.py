"""Time as this process lived it: what it slept through does not count.

While a process is stopped nobody can report to it. If that time counted, the first thing that it
would do on waking is to declare everybody dead at once. So `tick` is to be asked often (many times
a second, by a task that does nothing else), and a longer gap between two questions counts only as
far as `GAP_SECONDS_MAX`. The wall clock plays no part: it jumps.
"""

from __future__ import annotations

from percolator.world import Clock

TICK_MILLISECONDS = 10
GAP_SECONDS_MAX = 0.25
"""Far above the intervals in which a healthy process asks, far below any time to live."""
ASK_SECONDS = GAP_SECONDS_MAX / 2
"""How often a task asks that lets time pass, and has nothing else to hurry for."""


class LivedTime:
    """Counts ticks of 10 ms since it was made; never goes back."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked_at = clock.monotonic_seconds()
        self._lived_seconds = 0.0

    def tick(self) -> int:
        """The present tick."""
        now = self._clock.monotonic_seconds()
        gap = now - self._asked_at
        if gap > 0.0:
            self._lived_seconds += min(GAP_SECONDS_MAX, gap)
        self._asked_at = now
        return int(self._lived_seconds * (1000 / TICK_MILLISECONDS))


def ticks_of(milliseconds: int) -> int:
    """As many ticks as surely last `milliseconds`, though the present tick is partly over."""
    return -(-milliseconds // TICK_MILLISECONDS) + 1


def milliseconds_between(earlier: int, later: int) -> int:
    """From one tick to another; 0 if that was before."""
    return max(later - earlier, 0) * TICK_MILLISECONDS
