"""How a commit waits: for other transactions' locks, and before it repeats what got no answer."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import DeadlineExceeded, PercolatorError
from percolator.protocol import conflicts
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.protocol.read_locks import locked_cell
from percolator.protocol.resolving.cleanup import Cleanup
from percolator.protocol.statistics import LockWait, Statistics

_LAST_SECONDS_MAX = 1.0
_LAST_SHARE = 0.2
"""What a wait for a lock leaves of the time, for the answer to the last attempt and for the marker.
A message that commits in one round may arrive late: without the marker, the outcome is unknown."""


class LockWaiting:
    """How long one transaction has waited so far, and for whose lock."""

    def __init__(self, env: Environment, start: int, statistics: Statistics) -> None:
        self._env = env
        self._start = start
        self._statistics = statistics
        self._began = env.now()
        self._backoff = env.backoff()
        self._wait: LockWait | None = None
        self._last_met: MetLock | None = None
        self._last_problem: PercolatorError | None = None

    async def settle(self, met: Sequence[MetLock], cleanup: Cleanup, deadline: float) -> None:
        """Resolves the locks that were met, if any. Raises when it has waited too long."""
        if not met:
            return
        waited = self._note(met[0])
        if waited > self._env.limits.lock_wait_seconds:
            raise conflicts.locked(self._env, self._start, met[0])
        until = self._until(deadline)
        try:
            await cleanup.resolve(met, deadline=until, known_now=self._start, waited_seconds=waited)
        except DeadlineExceeded as late:
            raise conflicts.locked(self._env, self._start, met[0]) from late

    async def pause(self, problem: PercolatorError | None, deadline: float) -> None:
        """Waits before the next attempt; `problem` is why this one got no answer. Raises if no time
        is left for another one."""
        self._statistics.retries += 1
        self._last_problem = problem or self._last_problem
        if await self._backoff.pause(deadline if problem else self._until(deadline)):
            return
        if self._last_met is not None:
            # Also if the time was up in the middle of an attempt, which then has no answer.
            raise conflicts.locked(self._env, self._start, self._last_met)
        raise self._last_problem or DeadlineExceeded("no time was left to prewrite")

    def _until(self, deadline: float) -> float:
        """When a wait for a lock ends."""
        return deadline - min(_LAST_SECONDS_MAX, _LAST_SHARE * (deadline - self._began))

    def _note(self, met: MetLock) -> float:
        """Records whose lock we wait for; returns the seconds waited, 0 at the first meeting."""
        self._last_met = met
        if self._wait is None:
            self._wait = LockWait(*locked_cell(met.address), met.lock.start_timestamp, 0.0)
            self._statistics.lock_waits.append(self._wait)
            return 0.0
        self._wait.seconds = self._env.now() - self._began
        return self._wait.seconds
