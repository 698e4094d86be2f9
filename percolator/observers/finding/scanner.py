"""Looks for work again and again: a safety net for hints, and how workers share a backlog.

How a pass looks is the engine's: `tablet_pass.py` visits tablets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from percolator.errors import PercolatorError
from percolator.observers.context import WorkerContext
from percolator.observers.finding.admission import QueueAdmission
from percolator.observers.finding.row_locks import RowLocks
from percolator.observers.watched import Watched
from percolator.observers.work_queue import WorkQueue
from percolator.wire.backoff import Backoff

_log = logging.getLogger(__name__)

_PAUSE_SECONDS_MIN = 0.2


class Scanner:
    """The scanner of one worker."""

    def __init__(
        self,
        context: WorkerContext,
        queue: WorkQueue,
        locks: RowLocks,
        watched: Callable[[], Sequence[Watched]],
        *,
        pause_seconds_max: float,
    ) -> None:
        """`watched` returns the observers to run at the moment."""
        self._context = context
        self._queue = queue
        self._locks = locks
        self._watched = watched
        in_time = context.notifications.pause_seconds_max
        self._pause_seconds_max = min(pause_seconds_max, in_time)
        self._woken = asyncio.Event()
        self.passes = 0
        """The number of finished passes."""

    def wake(self) -> None:
        """Starts the next pass at once, without leaving anything out: work may have been missed."""
        self._woken.set()

    async def scan_forever(self) -> None:
        backoff = self._new_backoff()
        while True:
            everything = self._woken.is_set()
            self._woken.clear()
            try:
                admission = QueueAdmission(self._queue, self._locks, self._watched())
                found = await self._context.notifications.look(admission, everything=everything)
            except PercolatorError as error:
                # The oracle or the masters do not answer, so no transaction could run either.
                _log.debug("a pass was interrupted: %s", error)
                found = 0
            self.passes += 1
            if found:
                backoff = self._new_backoff()
            await self._sleep(backoff.next_seconds())

    def _new_backoff(self) -> Backoff:
        world = self._context.world
        return Backoff(world.clock, world.random, _PAUSE_SECONDS_MIN, self._pause_seconds_max)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return
