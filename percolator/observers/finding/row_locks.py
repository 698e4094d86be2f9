"""Advisory locks on the work that this worker has queued, so that other workers do other work.

There is one lock per row and observer, where the paper has one per row: two observers of a row do
not wait for each other, which matters most if one of them hangs. Locks are only hints: a lost lock
costs a run that finds its work already done.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from percolator.observers.context import WorkerContext
from percolator.observers.watched import Watched
from percolator.observers.work import Work
from percolator.observers.work_queue import WorkQueue
from percolator.protocol.environment import Environment
from percolator.wire.advisory_locks import row_name

_ROUND_SECONDS = 1.0
_ROUNDS_PER_EXTENSION = 3
"""Locks last ten seconds, so each is extended about three times before it would expire."""
_LONG_SECONDS = 1.0
"""Work learned from a stream is locked once it has waited this long: other workers may find it."""


def lock_name(watched: Watched, row: bytes) -> bytes:
    return row_name(watched.table_id, watched.id + b"\x00" + row)


def _name(work: Work) -> bytes:
    return lock_name(work.watched, work.row)


class RowLocks:
    """The advisory locks of one worker."""

    def __init__(self, context: WorkerContext, queue: WorkQueue) -> None:
        self._context = context
        self._queue = queue
        self._env: Environment = context.env
        self._releasing: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    async def take(self, names: Sequence[bytes]) -> list[bool]:
        """Tries to take these locks. Says for each whether this worker now holds it."""
        return await self._context.locks.try_lock(names)

    async def extend(self, names: Sequence[bytes]) -> list[bool]:
        """Keeps these locks longer. Says for each whether this worker still held it."""
        return await self._context.locks.renew(names)

    def release(self, work: Work) -> None:
        """Releases the lock of work that is done or dropped. Releases are sent in batches."""
        if not work.is_locked:
            return
        work.is_locked = False
        self.release_names([_name(work)])

    def release_names(self, names: Sequence[bytes]) -> None:
        """Releases locks for which there is no work."""
        self._releasing += names
        if self._sending is None and self._releasing:
            self._sending = self._env.background.start(self._send_releases())

    async def _send_releases(self) -> None:
        try:
            while self._releasing:
                names, self._releasing = self._releasing, []
                await self._context.locks.unlock(names)
        finally:
            self._sending = None

    async def keep_forever(self) -> None:
        """Extends the locks that are held, and locks work that has waited long."""
        for number in itertools.count():
            await self._context.world.clock.sleep(_ROUND_SECONDS)
            works = list(self._queue.all())
            if number % _ROUNDS_PER_EXTENSION == 0:
                held = [work for work in works if work.is_locked]
                for work, still in zip(held, await self._renew(held), strict=True):
                    work.is_locked = work.is_locked and still
            since = self._context.now() - _LONG_SECONDS
            await self._lock([w for w in works if not w.is_locked and w.found_seconds < since])

    async def _renew(self, works: Sequence[Work]) -> list[bool]:
        return await self._context.locks.renew([_name(work) for work in works]) if works else []

    async def _lock(self, works: Sequence[Work]) -> None:
        """Locks work. Work that another worker has locked by now is left to that worker."""
        if not works:
            return
        taken_now = await self.take([_name(work) for work in works])
        for work, taken in zip(works, taken_now, strict=True):
            if work.key not in self._queue:
                continue  # it was done or dropped meanwhile; the lock expires
            work.is_locked = taken
            if not taken and not work.is_running:
                self._queue.drop(work)
