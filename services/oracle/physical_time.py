"""The physical part of timestamps: this machine's wall clock, protected against its jumps.

Rules, in the order in which they are applied at each reading:
- It never goes back.
- A wall clock that is ahead by at most `jump_seconds_max` is followed at once.
- One that is further ahead has jumped: an operator's slip, a bad time server. Following it would
  expire every lock and all history, and the way back is closed for ever. So the physical part goes
  on with the monotonic clock instead, unless following was asked for.
- While the wall clock lags (it was set back, or the oracle was restarted and began above its mark),
  the physical part goes on with the monotonic clock, so that locks still expire; it goes 1 % slower
  than that, so that the lead melts away instead of adding up over restarts.
"""

from __future__ import annotations

from percolator.world import Clock

LEADING_SPEED = 0.99
"""Milliseconds per millisecond while the wall clock lags: a lead of an hour is gone in 4 days."""


class PhysicalTime:
    """Milliseconds since 1970-01-01 UTC that only grow."""

    def __init__(
        self,
        clock: Clock,
        *,
        not_before_milliseconds: int,
        jump_seconds_max: float,
        follow_jumps: bool,
    ) -> None:
        self._clock = clock
        self._jump_milliseconds_max = float("inf") if follow_jumps else jump_seconds_max * 1000
        self._read_at = clock.monotonic_seconds()
        # A start cannot tell a jump from a long stop: it begins with the wall clock.
        self._now = float(max(clock.wall_milliseconds(), not_before_milliseconds))
        self._wall_lead = clock.wall_milliseconds() - self._now

    def now_milliseconds(self) -> int:
        """The present physical part."""
        monotonic = self._clock.monotonic_seconds()
        elapsed = (monotonic - self._read_at) * 1000
        self._read_at = monotonic
        wall = self._clock.wall_milliseconds()
        steady = self._now + elapsed
        if wall - steady > self._jump_milliseconds_max:
            self._now = steady
        else:
            self._now = max(float(wall), self._now + elapsed * LEADING_SPEED)
        self._wall_lead = wall - self._now
        return int(self._now)

    @property
    def wall_lead_seconds(self) -> float:
        """How far the wall clock was ahead at the last reading; negative while it lags."""
        return self._wall_lead / 1000

    @property
    def is_ignoring_a_jump(self) -> bool:
        """Whether the wall clock was too far ahead to be followed at the last reading."""
        return self._wall_lead > self._jump_milliseconds_max
