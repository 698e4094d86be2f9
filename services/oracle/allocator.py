"""Handing out timestamps from a window: arithmetic only, without clock or disk.

Invariants:
- No number is handed out twice: each block begins above the end of the one before.
- No number at or above the *limit* is handed out. The limit is what a durable mark allows, so a
  successor that starts at the mark cannot hand out a number again.
- The limit only grows.
- However many are requested, their physical part runs at most `lead_milliseconds_max` ahead of
  time. Otherwise one greedy client would make all locks expire.
"""

from __future__ import annotations

from percolator.errors import InvariantViolation, Overloaded
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX, SEQUENCE_BITS


class Allocator:
    """Blocks of consecutive timestamps, each above all before it."""

    def __init__(self, mark_milliseconds: int, *, lead_milliseconds_max: int) -> None:
        """Starts at the persisted mark with an empty window, which `extend` opens."""
        self._next = mark_milliseconds << SEQUENCE_BITS
        self._limit = self._next
        self._lead_milliseconds_max = lead_milliseconds_max

    @property
    def limit_milliseconds(self) -> int:
        """The physical part of every timestamp stays below this."""
        return self._limit >> SEQUENCE_BITS

    def extend(self, mark_milliseconds: int) -> None:
        """Opens the window up to a mark, which must be durable already."""
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

        None if the window does not hold them; then none is taken. A block may run over into the
        following milliseconds, since their numbers are like any others.
        """
        first = max(self._next, now_milliseconds << SEQUENCE_BITS)
        after = first + count
        if after > now_milliseconds + self._lead_milliseconds_max << SEQUENCE_BITS:
            lead_milliseconds = (after >> SEQUENCE_BITS) - now_milliseconds
            raise Overloaded(
                "timestamps are requested faster than time passes: a millisecond has "
                f"{1 << SEQUENCE_BITS}",
                retry_after_seconds=(lead_milliseconds - self._lead_milliseconds_max + 1) / 1000,
            )
        if after > self._limit:
            return None
        self._next = after
        return first
