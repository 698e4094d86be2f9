"""How long a commit has waited for the locks of others, and for whose."""

from __future__ import annotations

from percolator.protocol.cleanup import MetLock
from percolator.protocol.surroundings import LockWait, Statistics, Surroundings


class LockWaiting:
    """The patience of one prewrite."""

    def __init__(self, around: Surroundings) -> None:
        self._clock = around.clock
        self._began = around.clock.monotonic_seconds()
        self._wait: LockWait | None = None
        self.backoff = around.backoff()

    def note(self, met: MetLock, statistics: Statistics) -> float:
        """Writes down whose lock is waited for; returns for how long, 0 at the first meeting."""
        if self._wait is None:
            self._wait = LockWait(*met.address, met.lock.start_timestamp, 0.0)
            statistics.lock_waits.append(self._wait)
            return 0.0
        self._wait.seconds = self._clock.monotonic_seconds() - self._began
        return self._wait.seconds
