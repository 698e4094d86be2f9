"""Deletes handled notifications in the background, many at a time.

Nothing depends on it. If a notification stays because this process ends or a server does not
answer, it is found again, and the acknowledgement says that nothing is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from percolator.observers.work import Work
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.routing.cells import CellMutation

_AT_ONCE_MAX = 1_024
_WAITING_MAX = 65_536
"""Above this, further notifications are not deleted, and will be found again."""
_TIMESTAMPS_PER_STEP_MAX = 128


class Deletions:
    """The deletions of one worker. Those requested while one batch is sent form the next one."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._waiting: list[CellMutation] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, work: Work, timestamps: Sequence[int]) -> None:
        """Deletes exactly these notifications of this work."""
        for portion in _portions(timestamps):
            if len(self._waiting) >= _WAITING_MAX:
                return
            step = steps.forget_notifications(work.row, work.column, work.watched.id, portion)
            self._waiting.append(CellMutation(work.watched.table_id, step))
        if self._sending is None and self._waiting:
            self._sending = self._env.background.start(self._send())

    async def _send(self) -> None:
        try:
            while self._waiting:
                portion = self._waiting[:_AT_ONCE_MAX]
                del self._waiting[:_AT_ONCE_MAX]
                limits = self._env.limits
                deadline = self._env.clock.monotonic_seconds() + limits.call_seconds
                # Errors are ignored: a notification that is not deleted is found again.
                await self._env.cells.mutate(portion, deadline)
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
