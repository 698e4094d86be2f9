"""Advisory locks on what this worker has before it, so that others do something else meanwhile.

One lock per row and observer, as in the paper one per row: two observers of a row do not wait for
each other, least of all for one that hangs. All of it is hints: a lock that was lost costs a run
that finds its work done.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from percolator.observers.client import Client
from percolator.observers.watched import Watched
from percolator.observers.work import Work, WorkQueue
from percolator.protocol.surroundings import Surroundings
from percolator.wire.advisory_locks import row_name

_ROUND_SECONDS = 1.0
_ROUNDS_PER_EXTENSION = 3
"""So locks, which live for ten seconds, are extended three times in their life."""
_LONG_SECONDS = 1.0
"""What was told by a stream, and has waited for so long, is locked: others may come to find it."""


def lock_name(watched: Watched, row: bytes) -> bytes:
    return row_name(watched.table_id, watched.id + b"\x00" + row)


def _name(work: Work) -> bytes:
    return lock_name(work.watched, work.row)


class RowLocks:
    """Of one worker."""

    def __init__(self, client: Client, queue: WorkQueue) -> None:
        self._client = client
        self._queue = queue
        self._around: Surroundings = client.around
        self._letting_go: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    async def take(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these nobody else holds."""
        return await self._client.locks.try_lock(names)

    def release(self, work: Work) -> None:
        """The work has left. Lets go of many locks at a time."""
        if not work.is_locked:
            return
        work.is_locked = False
        self.release_names([_name(work)])

    def release_names(self, names: Sequence[bytes]) -> None:
        """The same, of locks without work."""
        self._letting_go += names
        if self._sending is None and self._letting_go:
            self._sending = self._around.background.start(self._let_go())

    async def _let_go(self) -> None:
        try:
            while self._letting_go:
                names, self._letting_go = self._letting_go, []
                await self._client.locks.unlock(names)
        finally:
            self._sending = None

    async def keep_forever(self) -> None:
        """Extends what is held, and locks what has waited for long."""
        for number in itertools.count():
            await self._client.world.clock.sleep(_ROUND_SECONDS)
            works = list(self._queue.all())
            if number % _ROUNDS_PER_EXTENSION == 0:
                held = [work for work in works if work.is_locked]
                for work, still in zip(held, await self._renew(held), strict=True):
                    work.is_locked = work.is_locked and still
            since = self._client.now() - _LONG_SECONDS
            await self._lock([w for w in works if not w.is_locked and w.found_seconds < since])

    async def _renew(self, works: Sequence[Work]) -> list[bool]:
        return await self._client.locks.renew([_name(work) for work in works]) if works else []

    async def _lock(self, works: Sequence[Work]) -> None:
        """What somebody else has by now is left to him."""
        if not works:
            return
        taken_now = await self.take([_name(work) for work in works])
        for work, taken in zip(works, taken_now, strict=True):
            if work.key not in self._queue:
                continue  # it has left meanwhile; the lock expires
            work.is_locked = taken
            if not taken and not work.is_running:
                self._queue.drop(work)
