"""What the observers of one worker have done: plain numbers, updated only in its event loop."""

from __future__ import annotations

from bisect import bisect_left

from percolator.protocol.tally import ContendedCells

LATENCY_BOUNDS_SECONDS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper bounds of the histogram of latencies."""


class Counters:
    """The counters of one observer, since the worker was started."""

    __slots__ = (
        "abandoned",
        "acknowledged",
        "cells",
        "cells_written",
        "commits",
        "conflicts",
        "dead_letters",
        "failures",
        "hung",
        "latencies",
        "latency_seconds",
        "postponed",
        "round_trips",
        "rows_read",
        "runs",
    )

    def __init__(self) -> None:
        self.runs = 0
        """How often the function was called."""
        self.commits = 0
        """Runs that committed."""
        self.conflicts = 0
        """Runs that conflicted with another transaction, and are retried."""
        self.cells = ContendedCells()
        """Where they conflicted."""
        self.postponed = 0
        """Attempts that the cluster did not answer in time, and that are retried."""
        self.failures = 0
        """Runs that raised, wrote too much, or took too long."""
        self.abandoned = 0
        """Failures because the run took too long."""
        self.hung = 0
        """Threads that are currently still busy with a run that was given up."""
        self.dead_letters = 0
        """Changes that were put aside."""
        self.acknowledged = 0
        """Notifications with nothing left to do: a run had committed already, or the cell was
        deleted and deletes do not wake the observer."""
        self.rows_read = 0
        """Rows that its runs have asked for or scanned, including those that did not commit."""
        self.round_trips = 0
        """How often they have waited for answers; parallel requests count once."""
        self.cells_written = 0
        """Cells that they have put, deleted or locked, with their acknowledgements."""
        self.latencies = [0] * (len(LATENCY_BOUNDS_SECONDS) + 1)
        """Runs by the time from the change to their commit; the last bucket has no upper bound."""
        self.latency_seconds = 0.0
        """The sum of all latencies."""

    def committed(self, latency_seconds: float | None) -> None:
        """Counts a committed run. The latency is None if it wrote nothing and has no timestamp."""
        self.commits += 1
        if latency_seconds is not None:
            self.latencies[bisect_left(LATENCY_BOUNDS_SECONDS, latency_seconds)] += 1
            self.latency_seconds += latency_seconds
