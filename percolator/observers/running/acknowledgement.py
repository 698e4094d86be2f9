"""Which changes of a cell an observer has handled: a hidden cell next to it, written by its runs.

    start_ts 8 | 01, if a change of the cell was put aside as a dead letter

A run whose snapshot is s has handled every change committed at or below s. It says so in the same
transaction as its own writes, so at most one committed run handles a change: two runs for the same
change both write this cell, and one of them is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from percolator.errors import InvariantViolation
from percolator.formats.hidden_cells import ACKNOWLEDGED_BYTES, PUT_ASIDE


class Acknowledgement(NamedTuple):
    """Says that all changes up to a start timestamp have been handled."""

    start: int = 0
    has_dead_letter: bool = False
    """A dead letter exists for the cell. The run that handles the next change has to delete it."""

    def encode(self) -> bytes:
        stored = self.start.to_bytes(ACKNOWLEDGED_BYTES, "big")
        return stored + PUT_ASIDE if self.has_dead_letter else stored

    @classmethod
    def decode(cls, stored: bytes) -> Acknowledgement:
        rest = stored[ACKNOWLEDGED_BYTES:]
        if len(stored) < ACKNOWLEDGED_BYTES or rest not in (b"", PUT_ASIDE):
            raise InvariantViolation(f"{len(stored)} bytes are not an acknowledgement")
        return cls(int.from_bytes(stored[:ACKNOWLEDGED_BYTES], "big"), bool(rest))


NOTHING_SEEN = Acknowledgement()
