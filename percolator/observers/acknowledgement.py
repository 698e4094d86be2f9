"""What an observer has seen of a cell: a hidden cell beside it, written by the observer's own runs.

    start_ts 8 | 01, if a change of the cell was put aside as a dead letter

A run whose snapshot is s has answered every change committed at or below s. It says so in the
transaction of its own writes, so that a change is answered by at most one committed run: two runs
for the same change both write this cell, and one of them is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from percolator.errors import InvariantViolation
from percolator.protocol.hidden_cells import ACKNOWLEDGED_BYTES, PUT_ASIDE


class Acknowledgement(NamedTuple):
    """All changes up to a start timestamp are answered."""

    start: int = 0
    has_dead_letter: bool = False
    """The run that answers the next change has to clear it away."""

    def encode(self) -> bytes:
        stored = self.start.to_bytes(ACKNOWLEDGED_BYTES, "big")
        return stored + PUT_ASIDE if self.has_dead_letter else stored

    @classmethod
    def decode(cls, stored: bytes) -> Acknowledgement:
        rest = stored[ACKNOWLEDGED_BYTES:]
        if len(stored) < ACKNOWLEDGED_BYTES or rest not in (b"", PUT_ASIDE):
            raise InvariantViolation(f"{len(stored)} bytes are no acknowledgement")
        return cls(int.from_bytes(stored[:ACKNOWLEDGED_BYTES], "big"), bool(rest))


NOTHING_SEEN = Acknowledgement()
