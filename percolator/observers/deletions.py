"""Deleting notifications that were answered: in the background, many at a time.

Nothing depends on it. A notification that stays, because this process ends or nobody answers, is
found again, and the acknowledgement says that nothing is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from percolator.observers.work import Work
from percolator.protocol import steps
from percolator.protocol.surroundings import Surroundings
from percolator.wire.questions import Step

_AT_ONCE_MAX = 1_024
_WAITING_MAX = 65_536
"""Above it, they are left to be found again."""
_TIMESTAMPS_PER_STEP_MAX = 128


class Deletions:
    """Of one worker. What is asked for while one portion is on its way, forms the next."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._waiting: list[Step] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, work: Work, timestamps: Sequence[int]) -> None:
        """These notifications of this work, and no others."""
        for portion in _portions(timestamps):
            if len(self._waiting) >= _WAITING_MAX:
                return
            step = steps.forget_notifications(work.row, work.column, work.watched.id, portion)
            self._waiting.append(Step(work.watched.table_id, step))
        if self._sending is None and self._waiting:
            self._sending = self._around.background.start(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                portion = self._waiting[:_AT_ONCE_MAX]
                del self._waiting[:_AT_ONCE_MAX]
                limits = self._around.limits
                deadline = self._around.clock.monotonic_seconds() + limits.call_seconds
                # Whatever is not deleted is found again.
                await self._around.cells.mutate(portion, deadline)
        finally:
            self._sending = None

    async def done(self, seconds: float | None = None) -> None:
        """Returns when everything that was asked for was sent and answered, or after so long: the
        rest is found again."""
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=seconds)
            self._waiting.clear()


def _portions(timestamps: Sequence[int]) -> Iterable[Sequence[int]]:
    step = _TIMESTAMPS_PER_STEP_MAX
    return (timestamps[at : at + step] for at in range(0, len(timestamps), step))
