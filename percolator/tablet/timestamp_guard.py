"""Refuses timestamps that no oracle can have issued yet.

A server cannot know what the oracle has issued; it refuses only the absurd: more than an hour
ahead of every timestamp that it has seen and of its own clock. One absurd timestamp taken for
real would park a cell, and whoever waits for it, until that time comes.
"""

from __future__ import annotations

from percolator.errors import InvalidArgument
from percolator.world import Clock

SEQUENCE_BITS = 18
"""A timestamp is milliseconds since 1970 << 18 | sequence."""


class TimestampGuard:
    """Knows the largest timestamp seen, and lets others in only when they are plausible."""

    def __init__(self, clock: Clock, lead_milliseconds: int) -> None:
        self._clock = clock
        self._lead_milliseconds = lead_milliseconds
        self.newest = 0
        """Whatever is not above it needs no further look."""

    def admit(self, timestamp: int, field: str) -> int:
        """The newest timestamp seen, this one included. Raises `InvalidArgument`."""
        if timestamp > self.newest:
            reference = max(self.newest >> SEQUENCE_BITS, self._clock.wall_milliseconds())
            ahead = (timestamp >> SEQUENCE_BITS) - reference
            if ahead > self._lead_milliseconds:
                raise InvalidArgument(
                    field, f"{timestamp} lies {ahead / 1000:.0f} s ahead of every timestamp seen"
                )
            self.newest = timestamp
        return self.newest

    def check_read(self, timestamp: int, field: str) -> None:
        """Of a read: every one has a timestamp."""
        if not timestamp:
            raise InvalidArgument(field, "missing")
        if timestamp > self.newest:
            self.admit(timestamp, field)
