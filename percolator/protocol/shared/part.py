"""The lock on the primary of one part, as the process that has begun the part knows it.

Others replace the lock, too: readers push its least commit timestamp, and once the attempt has
finished, the driver and other tasks keep it alive. heartbeats.py says how it is replaced
nevertheless.
"""

from __future__ import annotations

from percolator.errors import ConflictError, PercolatorError, Retry
from percolator.formats.records import (
    TTL_MILLISECONDS_MAX,
    LockRecord,
    RecordKind,
    timestamp_bytes,
)
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.part_states import FINISHED, OPEN
from percolator.protocol.shared.closing import ended, look
from percolator.protocol.shared.names import Job, PartKey, PartName
from percolator.protocol.write_set import Lead, raised, raising
from percolator.routing.cells import APPLIED, Groups, Refused
from percolator.v1.cells_pb2 import SPACE_LOCK


class Part:
    """One part, from its beginning until its attempt has finished."""

    def __init__(
        self, env: Environment, groups: Groups, job: Job, name: PartName, start: int
    ) -> None:
        """Create it when its start timestamp has just been received: its lock lives from then."""
        self._env = env
        self._groups = groups
        self._job = job
        self.name = name
        self.start = start
        self.primary = job.primary(name)
        self._started_seconds = env.now()
        self._lock = LockRecord(
            start_timestamp=start,
            min_commit_timestamp=start + 1,
            ttl_milliseconds=self._ttl(),
            kind=RecordKind.PUT,
            session=b"",
            primary=self.primary,
            value=OPEN,
        )
        self._lead = Lead(env.limits)
        self._has_begun = False
        self._is_finishing = False
        self.is_lost = False
        """The lock is gone: the part was rolled back by others."""

    @property
    def key(self) -> PartKey:
        return PartKey(self.start, self.primary.column)

    async def begin(self, deadline: float) -> None:
        """Locks the primary, unless the transaction has ended. Until this has returned, nothing
        else may be locked for the part: a transaction that met such a lock could not push it."""
        _, row, column = self.primary
        step = steps.prewrite(row, column, self.start, self._lock.encode(), None)
        backoff = self._env.backoff()
        while True:
            try:
                looked, locked = await self._groups.mutate_together(
                    self._job.table_id, (look(self._job), step), deadline
                )
            except PercolatorError as problem:
                # A group that was applied without an answer is refused by its own lock.
                if problem.retry is Retry.USELESS or not await backoff.pause(deadline):
                    raise
                continue
            if locked is APPLIED:
                self._has_begun = True
                return
            if isinstance(looked, Refused):
                raise ended(self._job, looked, self.name.task)
            if isinstance(locked, Refused):
                if not self._learn(locked):
                    raise self.gone()
                self._has_begun = True
                return
            for answer in (looked, locked):
                if isinstance(answer, PercolatorError) and answer.retry is Retry.USELESS:
                    raise answer
            if not await backoff.pause(deadline):
                raise locked

    async def finish(self, deadline: float) -> None:
        """Notes that every cell of the attempt is locked. Raises `ConflictError` if the part was
        rolled back."""
        self._is_finishing = True
        backoff = self._env.backoff()
        while self._lock.value != FINISHED:
            try:
                await self._replace(FINISHED, deadline)
            except PercolatorError as problem:
                if problem.retry is not Retry.UNKNOWN or not await backoff.pause(deadline):
                    raise

    async def beat(self, deadline: float) -> None:
        """Raises the time to live. Raises `ConflictError` if the part was rolled back."""
        if not self._has_begun:
            return  # its lock may be on its way: that it is missing would prove nothing
        while not self._is_finishing and not await self._replace(OPEN, deadline):
            pass

    async def _replace(self, value: bytes, deadline: float) -> bool:
        """Replaces the lock, or learns what it is now. Returns whether it was replaced."""
        seen, began = self._lock, self._env.now()
        least = self._lead.above(seen.min_commit_timestamp)
        lock = raised(seen, least, max(self._ttl(), seen.ttl_milliseconds), value)
        (answer,) = await self._env.cells.mutate((raising(lock),), deadline)
        if answer is APPLIED:
            self._lead.applied()
            self._take(lock)
            return True
        if not isinstance(answer, Refused):
            raise answer
        self._lead.refused(self._env.now() - began)
        if not self._learn(answer):
            self.is_lost = True
            raise self.gone()
        return False

    def _learn(self, answer: Refused) -> bool:
        """Takes over the lock as it is stored. False if there is no lock of this part."""
        cell = answer.cell
        if cell is None or cell.space != SPACE_LOCK:
            return False
        if not cell.value.startswith(timestamp_bytes(self.start)):
            return False
        self._take(LockRecord.decode(cell.value))
        return True

    def _take(self, lock: LockRecord) -> None:
        """Numbers in the stored lock only grow, and answers may overtake each other."""
        known = self._lock
        if (lock.min_commit_timestamp, lock.ttl_milliseconds) >= (
            known.min_commit_timestamp,
            known.ttl_milliseconds,
        ):
            self._lock = lock

    def gone(self) -> ConflictError:
        """The error for a part whose lock is gone."""
        return ConflictError(
            f"part {self.name.number} of task {self.name.task!r}, begun at {self.start}, was "
            "rolled back: another attempt has taken its place, or it was presumed dead",
            cell=self.primary,
            start_timestamp=self.start,
        )

    def _ttl(self) -> int:
        seconds = self._env.now() - self._started_seconds + self._job.ttl_seconds
        return min(int(seconds * 1000), TTL_MILLISECONDS_MAX)
