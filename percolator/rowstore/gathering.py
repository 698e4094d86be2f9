"""A read of rows that others join before it is sent: one leads, and makes the call for all.

All of them want the same columns, each at a timestamp of its own. The call selects what the latest
of them has to see: the locks that began by then, and the newest versions by then. Whatever of that
is later than another's timestamp is nothing to that one. Only a later *version* is in its way: it
hides the one below, which is then read by itself. Notes of collection are asked for from the
earliest timestamp on.

All have their timestamps before the call is sent, so each row is read at a moment that is good for
all of them. The deadline is that of whoever leads: only those join that have as much time or more.
If the call fails, each reads for itself: the reason may be another's row.
"""

from __future__ import annotations

import asyncio
from typing import Final

from percolator.rowstore.port import StoredCell

ROWS_MAX: Final = 32
"""Larger calls would hardly save more, and everybody waits for the slowest row."""

Cells = dict[bytes, list[StoredCell]]
"""What was found, by the key of its row."""


class Gathering:
    """The keys of one call that is not sent yet."""

    def __init__(self, key: bytes, timestamp: int, deadline: float) -> None:
        self.keys: dict[bytes, None] = {key: None}
        self.earliest = self.latest = timestamp
        self._deadline = deadline
        self._answer: asyncio.Future[Cells | None] | None = None
        """Only if somebody follows: many calls are made by one for itself."""

    def admits(self, deadline: float) -> bool:
        return self._deadline <= deadline and len(self.keys) < ROWS_MAX

    async def follow(self, key: bytes, timestamp: int) -> Cells | None:
        """The answer of the call, which also asks for this key; None if it failed, or whoever led
        was cancelled."""
        self.keys[key] = None
        self.earliest = min(self.earliest, timestamp)
        self.latest = max(self.latest, timestamp)
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await asyncio.wait([answer])  # a caller that is cancelled does not cancel the others
        return answer.result()

    def end(self, cells: Cells | None) -> None:
        if self._answer is not None:
            self._answer.set_result(cells)
