"""Handing out timestamps from a window: arithmetic, no clock, no disk.

Invariants:
- No number is handed out twice: each block begins above the end of the one before.
- No number at or above the *limit* is handed out. The limit is what a durable mark allows, so a
  successor that starts at the mark cannot meet a number of ours.
- The limit only grows.
- However many are asked for, their physical part runs ahead of the time by `lead_milliseconds_max`
  at most: else a greedy client would make everybody's locks expire.
"""

from __future__ import annotations

from percolator.errors import InvariantViolation, Overloaded
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX, SEQUENCE_BITS


class Allocator:
    """Blocks of consecutive timestamps, each above all before it."""

    def __init__(self, mark_milliseconds: int, *, lead_milliseconds_max: int) -> None:
        """Begins at the persisted mark, with an empty window: `extend` opens it."""
        self._next = mark_milliseconds << SEQUENCE_BITS
        self._limit = self._next
        self._lead_milliseconds_max = lead_milliseconds_max

    @property
    def limit_milliseconds(self) -> int:
        """Every timestamp's physical part stays below this."""
        return self._limit >> SEQUENCE_BITS

    def extend(self, mark_milliseconds: int) -> None:
        """Opens the window up to a mark that is durable by now."""
        if mark_milliseconds > PHYSICAL_MILLISECONDS_MAX:
            raise InvariantViolation(f"the mark {mark_milliseconds} ms does not fit a timestamp")
        limit = mark_milliseconds << SEQUENCE_BITS
        if limit < self._limit:
            raise InvariantViolation(
                f"the mark would go back from {self.limit_milliseconds} to {mark_milliseconds} ms"
            )
        self._limit = limit

    def allocate(self, count: int, now_milliseconds: int) -> int | None:
        """The first of `count` consecutive timestamps, not older than `now_milliseconds`.

        None if the window does not hold them: nothing was taken then. A block may run over into
        the following milliseconds: they are numbers like any others.
        """
        first = max(self._next, now_milliseconds << SEQUENCE_BITS)
        after = first + count
        if after > now_milliseconds + self._lead_milliseconds_max << SEQUENCE_BITS:
            lead_milliseconds = (after >> SEQUENCE_BITS) - now_milliseconds
            raise Overloaded(
                f"more timestamps are asked for than time has room for: {1 << SEQUENCE_BITS} in a "
                "millisecond",
                retry_after_seconds=(lead_milliseconds - self._lead_milliseconds_max + 1) / 1000,
            )
        if after > self._limit:
            return None
        self._next = after
        return first
