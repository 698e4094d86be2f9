"""Looks for work again and again: a safety net for hints, and how workers share a backlog.

What a pass finds is locked, many cells at a time, and queued. What another worker has locked is
left to it. How a pass looks is the engine's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from percolator.errors import PercolatorError
from percolator.observers.context import Claim, Waiting, WorkerContext
from percolator.observers.watched import Watched
from percolator.observers.work_queue import Work, WorkQueue
from percolator.protocol.environment import Environment
from percolator.wire.advisory_locks import row_name
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
        """`watched` returns the observers to run now."""
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
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_seconds()):
                    await self._woken.wait()

    def _new_backoff(self) -> Backoff:
        world = self._context.world
        return Backoff(world.clock, world.random, _PAUSE_SECONDS_MIN, self._pause_seconds_max)


class QueueAdmission:
    """Work that one pass has found, on its way into the queue."""

    def __init__(self, queue: WorkQueue, locks: RowLocks, watched: Sequence[Watched]) -> None:
        """`watched` are the observers to run now."""
        self._queue = queue
        self._locks = locks
        self.watched = watched
        self.admitted = 0
        self._by_name = {(one.table_id, one.id): one for one in watched}

    def observer(self, table_id: int, observer: bytes) -> Watched | None:
        return self._by_name.get((table_id, observer))

    def has_space(self, watched: Watched) -> bool:
        return self._queue.has_space(watched)

    async def take(self, found: Iterable[Waiting]) -> bool:
        fresh: list[tuple[Claim, Waiting]] = []
        for one in found:
            watched = self.observer(one.table_id, one.observer)
            if watched is None:
                continue
            if (watched, one.row, one.column) in self._queue:
                self._queue.offer(watched, one.row, one.column, one.timestamps)
            else:
                fresh.append((Claim(watched, one.row, one.column), one))
        held = await self.claim([claim for claim, _ in fresh])
        for (claim, one), is_held in zip(fresh, held, strict=True):
            if is_held:
                self.admit(claim, one.timestamps)
        return all(held)

    def knows(self, claim: Claim) -> bool:
        return claim in self._queue

    async def claim(self, claims: Sequence[Claim]) -> list[bool]:
        if not claims:
            return []
        return await self._locks.take([lock_name(one.watched, one.row) for one in claims])

    def admit(self, claim: Claim, timestamps: Iterable[int]) -> None:
        work = self._queue.offer(claim.watched, claim.row, claim.column, timestamps)
        if work is None:
            self.release([claim])
        else:
            work.is_locked = True
            self.admitted += 1

    def release(self, claims: Iterable[Claim]) -> None:
        self._locks.release_names([lock_name(one.watched, one.row) for one in claims])


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
    """Advisory locks on the work that this worker has queued, so that other workers do other work.

    There is one lock per row and observer, where the paper has one per row: two observers of a row
    do not wait for each other, which matters most if one of them hangs. Locks are only hints: a
    lost lock costs a run that finds its work already done.

    The lock of handled work is kept for one or two rounds longer. Released at once, it would be
    taken by a worker whose pass has just seen the notification, before it was deleted.
    """

    def __init__(self, context: WorkerContext, queue: WorkQueue) -> None:
        self._context = context
        self._queue = queue
        self._env: Environment = context.env
        self._handled: dict[bytes, None] = {}
        """Locks of work that was handled since the last round."""
        self._due: dict[bytes, None] = {}
        """Locks of work that was handled in the round before: the next round releases them."""
        self._releasing: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None

    async def take(self, names: Sequence[bytes]) -> list[bool]:
        """Tries to take these locks. Says for each whether this worker now holds it."""
        held = await self._context.locks.try_lock(names)
        for name in names:  # what is taken again is not to be released
            self._handled.pop(name, None)
            self._due.pop(name, None)
        return held

    async def extend(self, names: Sequence[bytes]) -> list[bool]:
        """Keeps these locks longer. Says for each whether this worker still held it."""
        return await self._context.locks.renew(names)

    def release_later(self, work: Work) -> None:
        """Releases the lock of work that is done, when its notification will have been deleted."""
        if work.is_locked:
            work.is_locked = False
            self._handled[_name(work)] = None

    def release(self, work: Work) -> None:
        """Releases the lock of work that is dropped, for other workers to take."""
        if work.is_locked:
            work.is_locked = False
            self.release_names([_name(work)])

    def release_handled(self) -> None:
        """Releases the locks of handled work now, because this worker ends."""
        names = [*self._due, *self._handled]
        self._due, self._handled = {}, {}
        self.release_names(names)

    def release_names(self, names: Sequence[bytes]) -> None:
        """Releases locks for which there is no work. Releases are sent in batches."""
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
        """Extends the locks that are held, locks work that has waited long, and releases the locks
        of work that was handled before the last round."""
        for number in itertools.count():
            await self._context.world.clock.sleep(_ROUND_SECONDS)
            due, self._due, self._handled = self._due, self._handled, {}
            self.release_names(list(due))
            works = list(self._queue.all())
            if number % _ROUNDS_PER_EXTENSION == 0:
                held = [work for work in works if work.is_locked]
                for work, still in zip(held, await self._renew(held), strict=True):
                    work.is_locked = work.is_locked and still
            since = self._context.env.now() - _LONG_SECONDS
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
