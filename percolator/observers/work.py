"""One observer's notifications about one cell, as the worker that has found them knows them."""

from __future__ import annotations

from collections.abc import Iterable

from percolator.observers.watched import Watched
from percolator.protocol.contention.hot_cells import Contender
from percolator.row_text import quoted

TIMESTAMPS_MAX = 2_048
"""The most timestamps kept for one work item. Those above it are found again by scans, a few at a
time: a cell that is notified very often would be looked at for minutes after its last run."""
_OTHER_BYTES = 400
"""The memory of one work item, besides row and column."""

Key = tuple[Watched, bytes, bytes]


class Work:
    """One observer's notifications about one cell."""

    __slots__ = (
        "attempts",
        "column",
        "contender",
        "found_seconds",
        "has_lost",
        "is_known",
        "is_locked",
        "is_running",
        "key",
        "retries",
        "row",
        "size_bytes",
        "timestamps",
        "tried_commit",
        "watched",
    )

    def __init__(self, watched: Watched, row: bytes, column: bytes, found_seconds: float) -> None:
        self.watched = watched
        self.row = row
        self.column = column
        self.key: Key = (watched, row, column)
        self.size_bytes = len(row) + len(column) + _OTHER_BYTES
        self.found_seconds = found_seconds
        """When this worker learned of it, by its monotonic clock."""
        self.timestamps: set[int] = set()
        """The timestamps of its known notifications."""
        self.is_known = False
        """It is in the queue: not finished, and not dropped."""
        self.is_running = False
        self.is_locked = False
        """This worker holds the advisory lock."""
        self.attempts = 0
        """Failed runs for the change at `tried_commit`."""
        self.tried_commit = 0
        self.retries = 0
        """Consecutive runs that conflicted, or that the cluster did not answer."""
        self.contender: Contender | None = None
        """Set while it takes turns at cells where it has lost, or where it would lose."""
        self.has_lost = False
        """A run has lost to another transaction, and none has committed since."""

    @property
    def in_line(self) -> bool:
        """Whether it stands in line at hot cells, or has its turn there."""
        return self.contender is not None and self.contender.in_line

    def leave(self) -> None:
        """Ends its turn, or its place in line: if it was waiting, it runs without a turn."""
        if self.contender is not None:
            self.contender.leave()
            self.contender = None

    def note(self, timestamps: Iterable[int], most: int = TIMESTAMPS_MAX) -> None:
        """Adds notifications. If there are too many, the newest is always kept, since it decides
        whether another run is due. The others are found again."""
        known = self.timestamps
        for timestamp in timestamps:
            if len(known) >= most:
                newest = max(known)
                if timestamp <= newest:
                    continue
                known.discard(newest)
            known.add(timestamp)

    def __repr__(self) -> str:
        return f"Work({self.watched.observer.name!r}, {quoted(self.row)}, {quoted(self.column)})"
