"""Refuses timestamps that no oracle can have issued yet.

A server cannot know what the oracle has issued; it refuses only the absurd: more than an hour
ahead of every timestamp that it has seen and of its own clock. One absurd timestamp taken for
real would park a cell, and whoever waits for it, until that time comes.
"""

from __future__ import annotations

from percolator.errors import InvalidArgument
from percolator.timestamps import SEQUENCE_BITS
from percolator.world import Clock


class TimestampGuard:
    """Knows the largest timestamp seen, and lets others in only when they are plausible."""

    def __init__(self, clock: Clock, lead_milliseconds: int) -> None:
        self._clock = clock
        self._lead_milliseconds = lead_milliseconds
        self.newest = 0
        """Whatever is not above it needs no further look."""

    def admit(self, timestamp: int, field: str, *places: int) -> int:
        """The newest timestamp seen, this one included. Raises `InvalidArgument`.

        Nearly every mutation brings a timestamp newer than all before: the clock is asked only when
        those do not speak for it, and the field's `places` are written into it only when it fails.
        """
        newest = self.newest
        if timestamp > newest:
            ahead = (timestamp >> SEQUENCE_BITS) - (newest >> SEQUENCE_BITS)
            if ahead > self._lead_milliseconds:
                self._require_near_the_clock(timestamp, ahead, field % places)
            self.newest = newest = timestamp
        return newest

    def _require_near_the_clock(self, timestamp: int, ahead: int, field: str) -> None:
        """`ahead`: of the timestamps seen, in milliseconds."""
        now = self._clock.wall_milliseconds()
        ahead = min(ahead, (timestamp >> SEQUENCE_BITS) - now)
        if ahead > self._lead_milliseconds:
            raise InvalidArgument(
                field, f"{timestamp} lies {ahead / 1000:.0f} s ahead of every timestamp seen"
            )

    def check_read(self, timestamp: int, field: str, *places: int) -> None:
        """Of a read: every one has a timestamp."""
        if not timestamp:
            raise InvalidArgument(field % places, "missing")
        if timestamp > self.newest:
            self.admit(timestamp, field, *places)
