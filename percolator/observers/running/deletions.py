"""Deletes handled notifications in the background, many at a time.

Nothing depends on it. If a notification stays because this process ends or a server does not
answer, it is found again, and the acknowledgement says that nothing is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from percolator.observers.context import WorkerContext
from percolator.observers.port import Waiting
from percolator.observers.work import Work

_AT_ONCE_MAX = 1_024
_WAITING_MAX = 65_536
"""Above this, further notifications are not deleted, and will be found again."""
_TIMESTAMPS_PER_STEP_MAX = 128


class Deletions:
    """The deletions of one worker. Those requested while one batch is sent form the next one."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._waiting: list[Waiting] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, work: Work, timestamps: Sequence[int]) -> None:
        """Deletes exactly these notifications of this work."""
        for portion in _portions(timestamps):
            if len(self._waiting) >= _WAITING_MAX:
                return
            watched = work.watched
            self._waiting.append(
                Waiting(watched.table_id, work.row, work.column, watched.id, tuple(portion))
            )
        if self._sending is None and self._waiting:
            self._sending = self._context.env.background.start(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                portion = self._waiting[:_AT_ONCE_MAX]
                del self._waiting[:_AT_ONCE_MAX]
                # Errors are ignored: a notification that is not deleted is found again.
                await self._context.notifications.forget(portion, self._context.deadline())
        finally:
            self._sending = None

    async def done(self, seconds: float | None = None) -> None:
        """Returns when all deletions have been sent and answered, or after `seconds`.

        Notifications that are not deleted by then will be found again.
        """
        if self._sending is not None:
            await asyncio.wait([self._sending], timeout=seconds)
            self._waiting.clear()


def _portions(timestamps: Sequence[int]) -> Iterable[Sequence[int]]:
    step = _TIMESTAMPS_PER_STEP_MAX
    return (timestamps[at : at + step] for at in range(0, len(timestamps), step))
