"""What sweeps have deleted in a tablet since its last compaction: how much, and where."""

from __future__ import annotations

from collections.abc import Sequence

_BOUNDARIES_MAX = 4_096


class Tombstones:
    """Since the tablet was opened, at most."""

    def __init__(self) -> None:
        self.deletions = 0
        self.bytes = 0
        self.boundaries: list[bytes] = []
        """Of each write, the first and the last key that it deleted; fewer, when they are many."""

    def add(self, keys: Sequence[bytes], size: int) -> None:
        """One write has deleted these."""
        self.deletions += len(keys)
        self.bytes += size
        self.boundaries += (min(keys), max(keys))
        if len(self.boundaries) > _BOUNDARIES_MAX:
            ordered = sorted(self.boundaries)
            self.boundaries = [*ordered[::2], ordered[-1]]
