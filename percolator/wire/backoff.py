"""Pauses between attempts: doubled each time, and part chance, so that no crowd moves as one."""

from __future__ import annotations

from percolator.world import Clock, Random


class Backoff:
    """The pauses of one caller that tries again and again."""

    __slots__ = ("_clock", "_random", "_seconds", "_seconds_max", "rounds")

    def __init__(
        self, clock: Clock, random: Random, seconds_min: float, seconds_max: float
    ) -> None:
        self._clock = clock
        self._random = random
        self._seconds = seconds_min
        self._seconds_max = seconds_max
        self.rounds = 0
        """How many pauses there were."""

    def next_seconds(self) -> float:
        """The length of the next pause: at least half of it is sure."""
        seconds = self._seconds * (0.5 + 0.5 * self._random.random())
        self._seconds = min(self._seconds * 2, self._seconds_max)
        self.rounds += 1
        return seconds

    async def pause(self, deadline: float) -> bool:
        """Waits, but not beyond the deadline. False when that has come: no time for an attempt."""
        left = deadline - self._clock.monotonic_seconds()
        if left <= 0:
            return False
        await self._clock.sleep(min(self.next_seconds(), left))
        return self._clock.monotonic_seconds() < deadline
