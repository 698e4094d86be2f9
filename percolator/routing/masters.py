"""Calls to the masters, of which one leads and the others stand by."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotReady,
    PercolatorError,
    Unavailable,
)
from percolator.wire.backoff import Backoff
from percolator.world import RequestT, ResponseT, UnaryMethod, World

_RETRY_SECONDS_MIN = 0.02
_RETRY_SECONDS_MAX = 0.5
_ATTEMPT_SECONDS_MAX = 2.0
_AGAIN_SECONDS_MIN = 0.5
"""With less time left, a change that a master has made, and waited for in vain, is not requested
again. A master answers 0.2 s before the caller's deadline, and after a minute at the latest."""


class Masters:
    """Calls any master that answers: one that does not lead says so, and the next is tried."""

    def __init__(self, world: World, addresses: Sequence[str]) -> None:
        self._world = world
        self._addresses = addresses
        self._turn = 0

    async def call(
        self,
        method: UnaryMethod[RequestT, ResponseT],
        request: RequestT,
        deadline: float,
        *,
        attempt_seconds_max: float = _ATTEMPT_SECONDS_MAX,
    ) -> ResponseT:
        """Calls until one answers or the deadline passes. Repeating these calls does no harm.

        One that is given all of the time is a change: at the end, the error says what the master
        has said of it, such as that the change was made.
        """
        clock = self._world.clock
        backoff = Backoff(clock, self._world.random, _RETRY_SECONDS_MIN, _RETRY_SECONDS_MAX)
        failed = 0
        while True:
            left = deadline - clock.monotonic_seconds()
            turn = self._turn
            address = self._addresses[turn % len(self._addresses)]
            try:
                call = self._world.network.unary(address, method)
                return await call(request, min(max(left, 0.001), attempt_seconds_max))
            except (ExecutionUnknown, NotReady) as error:
                problem: PercolatorError = error
            if attempt_seconds_max == inf and not isinstance(problem, (NotReady, Unavailable)):
                left = deadline - clock.monotonic_seconds()
                if left < _AGAIN_SECONDS_MIN:
                    raise DeadlineExceeded(problem.message, where=problem.where) from problem
            failed += 1
            if self._turn == turn:  # if several calls fail together, only the first moves on
                self._turn += 1
            if failed % len(self._addresses) == 0 and not await backoff.pause(deadline):
                raise DeadlineExceeded(
                    f"no master answered in time; last error: {problem.message}",
                    where=problem.where,
                )
