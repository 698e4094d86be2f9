"""Which tablet it is: its name in storage, orders and errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TabletIdentity:
    """Which tablet this is, and in which term of ownership."""

    table_id: int
    tablet_id: int
    epoch: int
    start: bytes
    end: bytes
    """Rows from start (included) to end (excluded); an empty end means up to the last row."""

    def __str__(self) -> str:
        return f"tablet {self.tablet_id} epoch {self.epoch}"
