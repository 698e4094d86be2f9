"""Locks of the same shared transaction that another attempt has left where this one writes.

Rules, each with the failure that it prevents:
- A cell that has a lock of another part of the same transaction is written twice. If the attempt of
  that part has been replaced (an earlier attempt at the same task, or one of an earlier
  generation), it is rolled back first, the part before its cells; otherwise this is an error.
- An attempt that has finished may have been chosen already. It is replaced only after a while,
  which gives the scheduler of the tasks time to end one of the two. That time is added to the
  caller's deadline: otherwise a shorter deadline would end each try before it replaced anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import ConflictError, UsageError, WrittenTwice
from percolator.formats.records import LockRecord
from percolator.protocol import steps
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.part_states import FINISHED
from percolator.protocol.shared.names import Job, PartName
from percolator.protocol.shared.rolling_back import roll_back_part
from percolator.routing.cells import APPLIED, CellMutation, Refused


class OtherAttempts:
    """The attempts that one attempt meets, at its own task and at others."""

    def __init__(
        self,
        env: Environment,
        job: Job,
        task: str,
        generation: int,
        replace_after_seconds: float,
    ) -> None:
        self._env = env
        self._job = job
        self._task = task
        self._generation = generation
        self._replace_after_seconds = replace_after_seconds
        self._spared_since: dict[int, float] = {}
        """Since when finished attempts are in the way, by their first start timestamps."""

    async def replace(self, met: Sequence[MetLock], own: int, deadline: float) -> float:
        """Rolls back the parts, among the owners of these locks, that the attempt begun at `own`
        replaces. Returns until when finished attempts are spared, or 0. Raises if a part is not to
        be replaced."""
        spared_until = 0.0
        siblings: dict[PartName, MetLock] = {}
        for one in met:
            name = self._job.part_of(one.lock.primary)
            if name is not None:
                siblings.setdefault(name, one)
        for name, one in siblings.items():
            spared_until = max(spared_until, await self._replace(name, one, own, deadline))
        return spared_until

    async def _replace(self, other: PartName, met: MetLock, own: int, deadline: float) -> float:
        """Rolls back another attempt's part if this attempt replaces it, or raises. Returns until
        when the other one is spared, or 0."""
        lock = met.lock
        is_finished = await self._is_finished(lock, deadline)
        verdict = self._env.verdicts.get(lock.start_timestamp)
        if verdict == ROLLED_BACK or is_finished is None:
            return 0.0
        if verdict is not None:
            raise UsageError("the shared transaction was committed while this task was writing")
        if other.generation == self._generation and other.task != self._task:
            cell = self._env.described(met.address)
            raise WrittenTwice(
                f"tasks {other.task!r} and {self._task!r} both write {cell}",
                cell=met.address,
            )
        if (other.generation, other.attempt) > (self._generation, own):
            raise ConflictError(
                f"a later attempt at task {self._task!r} has begun",
                cell=met.address,
                start_timestamp=own,
                other_start_timestamp=lock.start_timestamp,
            )
        if is_finished:
            now = self._env.now()
            since = self._spared_since.setdefault(other.attempt, now)
            spared_until = since + self._replace_after_seconds
            if now < spared_until:
                return spared_until
        await roll_back_part(self._env, lock.primary, lock.start_timestamp, deadline)
        return 0.0

    async def _is_finished(self, lock: LockRecord, deadline: float) -> bool | None:
        """Whether the attempt of another part has locked all of its cells; None if there is no
        answer. If the part is decided, that is known afterwards."""
        verdicts, start = self._env.verdicts, lock.start_timestamp
        if verdicts.get(start) is not None:
            return True
        (answer,) = await self._env.cells.mutate((_status(lock),), deadline)
        if answer is APPLIED:
            return False
        if not isinstance(answer, Refused):
            return None
        if answer.condition == steps.OWN_COMMIT:
            verdicts.put(start, answer.offender.timestamp)
            return True
        if answer.condition == steps.OWN_ROLLBACK:
            verdicts.put(start, ROLLED_BACK)
            return True
        return LockRecord.decode(answer.offender.value).value == FINISHED


def _status(lock: LockRecord) -> CellMutation:
    table_id, row, column = lock.primary
    return CellMutation(table_id, steps.status(row, column, lock.start_timestamp))
