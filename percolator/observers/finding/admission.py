"""What a worker does with the work that a pass finds: it locks it, many cells at a time, and queues
it. What another worker has locked is that worker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from percolator.observers.finding.row_locks import RowLocks, lock_name
from percolator.observers.port import Claim, Waiting
from percolator.observers.watched import Watched
from percolator.observers.work_queue import WorkQueue


class QueueAdmission:
    """What one pass has found, on its way into the queue."""

    def __init__(self, queue: WorkQueue, locks: RowLocks, watched: Sequence[Watched]) -> None:
        """`watched` are the observers to run at the moment."""
        self._queue = queue
        self._locks = locks
        self.watched = watched
        self.admitted = 0
        self._by_name = {(one.table_id, one.id): one for one in watched}

    def observer(self, table_id: int, observer: bytes) -> Watched | None:
        return self._by_name.get((table_id, observer))

    def has_room(self, watched: Watched) -> bool:
        return self._queue.has_room(watched)

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
