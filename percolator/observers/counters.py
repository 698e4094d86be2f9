"""What the observers of one worker have done: plain numbers, touched by its event loop only."""

from __future__ import annotations

from bisect import bisect_left

LATENCY_BOUNDS_SECONDS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper bounds of the histogram of latencies."""


class Counters:
    """Of one observer, since the worker was started."""

    __slots__ = (
        "abandoned",
        "acknowledged",
        "commits",
        "conflicts",
        "dead_letters",
        "failures",
        "hung",
        "latencies",
        "latency_seconds",
        "postponed",
        "runs",
    )

    def __init__(self) -> None:
        self.runs = 0
        """Times that the function was called."""
        self.commits = 0
        """Runs that committed."""
        self.conflicts = 0
        """Runs that lost against another transaction, and are repeated."""
        self.postponed = 0
        """Attempts that the cluster did not answer in time, and that are repeated."""
        self.failures = 0
        """Runs that raised, wrote too much, or took too long."""
        self.abandoned = 0
        """Of these, the ones that took too long."""
        self.hung = 0
        """Threads that have not come back from a run that was given up, at this moment."""
        self.dead_letters = 0
        """Changes that were put aside."""
        self.acknowledged = 0
        """Notifications for which a run had committed already: nothing was left to do."""
        self.latencies = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
        """How many runs committed so long after the change they answered; see the bounds."""
        self.latency_seconds = 0.0
        """The sum of all."""

    def committed(self, latency_seconds: float | None) -> None:
        """A run has committed; with None, it has written nothing and has no commit timestamp."""
        self.commits += 1
        if latency_seconds is not None:
            self.latencies[bisect_left(LATENCY_BOUNDS_SECONDS, latency_seconds)] += 1
            self.latency_seconds += latency_seconds
