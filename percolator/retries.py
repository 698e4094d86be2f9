"""How often a transaction is tried when it loses against another one."""

from __future__ import annotations

from dataclasses import dataclass

from percolator.errors import InvalidArgument, PercolatorError, Retry
from percolator.wire.backoff import Backoff
from percolator.world import Clock, Random


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long a transaction is tried.

    >>> percolator.connect(retry=RetryPolicy(deadline_seconds=5.0))
    >>> @transactional(retry=RetryPolicy(attempts_max=3))
    """

    attempts_max: int = 1_000
    deadline_seconds: float = 30.0
    """For all attempts together, and the pauses between them."""
    backoff_seconds_min: float = 0.002
    backoff_seconds_max: float = 1.0

    def __post_init__(self) -> None:
        if self.attempts_max < 1:
            raise InvalidArgument("attempts_max", f"expected at least 1, got {self.attempts_max}")
        if self.deadline_seconds <= 0:
            raise InvalidArgument("deadline_seconds", "expected a positive number")
        if not 0 < self.backoff_seconds_min <= self.backoff_seconds_max:
            raise InvalidArgument("backoff_seconds_min", "expected 0 < min <= max")

    def allows(self, error: PercolatorError, attempts: int) -> bool:
        """Whether running again makes sense: never when it may be committed already."""
        return error.retry is Retry.SAFE and attempts < self.attempts_max


class Attempts:
    """The attempts at one transaction."""

    def __init__(self, policy: RetryPolicy, clock: Clock, random: Random) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = clock.monotonic_seconds() + policy.deadline_seconds
        self._backoff = Backoff(
            clock, random, policy.backoff_seconds_min, policy.backoff_seconds_max
        )
        self._attempts = 0

    def seconds_left(self) -> float:
        return max(self._deadline - self._clock.monotonic_seconds(), 0.001)

    async def again(self, error: PercolatorError) -> bool:
        """After a failed attempt: pauses and allows another one, or does not."""
        self._attempts += 1
        return self._policy.allows(error, self._attempts) and await self._backoff.pause(
            self._deadline
        )
