"""Counts what a tablet does, cheaply enough to count everything."""

from __future__ import annotations

from collections import deque

from percolator.world import Clock

WINDOW_SECONDS = 10


class Rate:
    """Events per second over the last ten seconds, in buckets of one second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic_seconds()
        self._buckets: deque[list[int]] = deque(maxlen=WINDOW_SECONDS + 1)

    def add(self, events: int) -> None:
        second = int(self._clock.monotonic_seconds())
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1][1] += events
        else:
            self._buckets.append([second, events])

    def per_second(self) -> float:
        now = self._clock.monotonic_seconds()
        oldest = now - WINDOW_SECONDS
        events = sum(count for second, count in self._buckets if second > oldest)
        return events / max(1.0, min(WINDOW_SECONDS, now - self._since))


class TabletCounts:
    """Counts since the tablet was opened, unless stated otherwise."""

    def __init__(self, clock: Clock) -> None:
        self.mutation_rate = Rate(clock)
        self.read_rate = Rate(clock)
        self.cells = 0
        """Stored cells except locks and notifications: an estimate that survives reopening."""
        self.bytes = 0
        """The size of the keys and values of these cells."""
        self.foreign_cells = 0
        self.foreign_bytes = 0
        """The estimated part of both that belongs to other tablets' rows (trimming.py)."""
        self.mutations_applied = 0
        self.mutations_refused = 0
        self.reads = 0
        self.rows_scanned = 0
        self.versions_skipped = 0
        self.batches_synced = 0
        self.notifications_written = 0
        self.locks_written = 0
        self.cells_collected = 0
        self.bytes_collected = 0
