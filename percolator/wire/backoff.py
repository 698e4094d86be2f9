"""Pauses between attempts: doubled each time, and partly random, so that callers spread out."""

from __future__ import annotations

from percolator.world import Clock, Random

_DOUBLINGS_MAX = 64
"""With many more, the number would not fit into a float; by then the longest applies."""


def doubled_seconds(seconds_min: float, seconds_max: float, *, doublings: int) -> float:
    """`seconds_min` doubled this many times, but not above `seconds_max`."""
    return min(seconds_min * 2.0 ** min(doublings, _DOUBLINGS_MAX), seconds_max)


def pause_seconds(
    randomness: Random,
    seconds_min: float,
    seconds_max: float,
    *,
    doublings: int,
    asked_seconds: float = 0.0,
) -> float:
    """The pause after `doublings` earlier ones, or the one that a server asked for if that is
    longer. Up to half of it is taken off at random."""
    seconds = doubled_seconds(seconds_min, seconds_max, doublings=doublings)
    return max(seconds, asked_seconds) * (0.5 + 0.5 * randomness.random())


def asked_pause_seconds(randomness: Random, asked_seconds: float) -> float:
    """The pause that a server asked for, never shorter, and up to a quarter longer at random."""
    return asked_seconds * (1.0 + 0.25 * randomness.random())


class Backoff:
    """The pauses of one caller that keeps retrying."""

    __slots__ = ("_clock", "_random", "_seconds_max", "_seconds_min", "rounds")

    def __init__(
        self, clock: Clock, random: Random, seconds_min: float, seconds_max: float
    ) -> None:
        self._clock = clock
        self._random = random
        self._seconds_min = seconds_min
        self._seconds_max = seconds_max
        self.rounds = 0
        """How many pauses there have been."""

    def next_seconds(self) -> float:
        """The length of the next pause."""
        seconds = pause_seconds(
            self._random, self._seconds_min, self._seconds_max, doublings=self.rounds
        )
        self.rounds += 1
        return seconds

    async def pause(self, deadline: float) -> bool:
        """Waits, but not beyond the deadline. False if no time is left for another attempt."""
        left = deadline - self._clock.monotonic_seconds()
        if left <= 0:
            return False
        await self._clock.sleep(min(self.next_seconds(), left))
        return self._clock.monotonic_seconds() < deadline
