"""How long a caller waits for the store, and which errors it outlasts."""

from __future__ import annotations

from copy import copy

from percolator.errors import DeadlineExceeded, PercolatorError, Retry, SchemaError
from percolator.limits import Limits
from percolator.wire.backoff import Backoff, asked_pause_seconds
from percolator.world import World

_TIMEOUT_SECONDS_MIN = 0.001
_NO_TABLE = (
    "it was dropped; but if `percolator tables list` shows it, somebody has deleted it in the "
    "store itself: restore it there, or `percolator tables delete` it here, too"
)


class Patience:
    """One caller's attempts until its deadline, an instant of the monotonic clock."""

    def __init__(self, world: World, limits: Limits, deadline: float) -> None:
        self._clock = world.clock
        self._random = world.random
        self._attempt_seconds_max = limits.attempt_seconds_max
        self._deadline = deadline
        self._was_refused = False
        self._backoff = Backoff(
            world.clock, world.random, limits.backoff_seconds_min, limits.backoff_seconds_max
        )

    @property
    def attempt_seconds(self) -> float:
        """The time-out of the next attempt."""
        left = self._deadline - self._clock.monotonic_seconds()
        return max(min(left, self._attempt_seconds_max), _TIMEOUT_SECONDS_MIN)

    def refused(self) -> None:
        """A check has refused its changes. Of a call that reached the store twice, the other copy
        may have made them, and be the very reason; or it may still arrive, and make them. So from
        now on no error says that nothing was executed: only the row tells."""
        self._was_refused = True

    async def outlast(self, problem: PercolatorError, *, is_read: bool) -> None:
        """Returns when the call may be sent again: it was not executed, or it changes nothing.
        Raises the error if that is not so, and `DeadlineExceeded` if the time is up."""
        if isinstance(problem, SchemaError):
            gone = SchemaError(f"{problem.message}: {_NO_TABLE}", where=problem.where)
            raise self._judged(gone) from problem
        if problem.retry is Retry.USELESS or (problem.retry is Retry.UNKNOWN and not is_read):
            raise self._judged(problem)
        await self.keep_pause(problem.retry_after_seconds)
        await self.again(problem)

    async def keep_pause(self, asked_seconds: float) -> None:
        """Returns after a pause that the store has asked for; at the deadline at the latest."""
        if asked_seconds:
            seconds = asked_pause_seconds(self._random, asked_seconds)
            left = self._deadline - self._clock.monotonic_seconds()
            await self._clock.sleep(max(min(seconds, left), 0.0))

    async def again(self, problem: PercolatorError | None = None) -> None:
        """Returns after a pause. Raises `DeadlineExceeded` if no time is left: whatever was
        attempted has not been executed, unless a check has refused it."""
        if not await self._backoff.pause(self._deadline):
            last = f"; last error: {problem.message}" if problem else ""
            late = DeadlineExceeded(
                f"no answer in time{last}", where=problem.where if problem else ""
            )
            late.retry = Retry.SAFE
            raise self._judged(late)

    def _judged(self, problem: PercolatorError) -> PercolatorError:
        if self._was_refused and problem.retry is not Retry.UNKNOWN:
            problem = copy(problem)  # others may have received the same object
            problem.retry = Retry.UNKNOWN
        return problem
