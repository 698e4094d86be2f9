"""How much sweeps have deleted in a tablet since its last compaction, and where."""

from __future__ import annotations

from collections.abc import Sequence

_BOUNDARIES_MAX = 4_096


class Tombstones:
    """Deletions since the last compaction, or since the tablet was opened."""

    def __init__(self) -> None:
        self.deletions = 0
        self.bytes = 0
        self.boundaries: list[bytes] = []
        """The first and last key that each write deleted; thinned out when there are many."""

    def add(self, keys: Sequence[bytes], size: int) -> None:
        """Records the keys that one write has deleted."""
        self.deletions += len(keys)
        self.bytes += size
        self.boundaries += (min(keys), max(keys))
        if len(self.boundaries) > _BOUNDARIES_MAX:
            ordered = sorted(self.boundaries)
            self.boundaries = [*ordered[::2], ordered[-1]]
