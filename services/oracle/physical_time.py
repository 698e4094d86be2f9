"""The physical part of timestamps: this machine's wall clock, protected against its jumps.

Rules, in the order in which they are applied at each reading:
- It never goes back.
- A wall clock that is ahead by at most `jump_seconds_max` is followed at once.
- A wall clock that is further ahead has jumped: an operator's mistake, or a bad time server.
  Following it would expire every lock and all history, and could never be undone. So the physical
  part advances with the monotonic clock instead, unless following was asked for.
- While the wall clock lags (it was set back, or the oracle restarted and began above its mark), the
  physical part advances with the monotonic clock, so that locks still expire. It runs slower than
  that clock, by 1 % unless it is told otherwise, so that the lead shrinks instead of adding up over
  restarts.
"""

from __future__ import annotations

from percolator.world import Clock

LEADING_SPEED = 0.99
"""Relative speed while the wall clock lags: a lead of an hour is gone in about 4 days. An operator
may have it slower, to get rid of a lead sooner."""


class PhysicalTime:
    """Milliseconds since 1970-01-01 UTC that only grow."""

    def __init__(
        self,
        clock: Clock,
        *,
        begin_milliseconds: int,
        jump_seconds_max: float,
        follow_jumps: bool,
        leading_speed: float = LEADING_SPEED,
    ) -> None:
        self._clock = clock
        self._jump_milliseconds_max = float("inf") if follow_jumps else jump_seconds_max * 1000
        self._read_at = clock.monotonic_seconds()
        self._leading_speed = leading_speed
        self._now = float(begin_milliseconds)
        self._wall_lead = clock.wall_milliseconds() - self._now

    def now_milliseconds(self) -> int:
        """The current physical part."""
        monotonic = self._clock.monotonic_seconds()
        elapsed = (monotonic - self._read_at) * 1000
        self._read_at = monotonic
        wall = self._clock.wall_milliseconds()
        steady = self._now + elapsed
        if wall - steady > self._jump_milliseconds_max:
            self._now = steady
        else:
            self._now = max(float(wall), self._now + elapsed * self._leading_speed)
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
