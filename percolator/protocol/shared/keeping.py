"""Keeping finished parts alive until the driver decides.

An attempt keeps its own parts while it writes. Once it has finished, its process may end, so the
driver keeps them, and so does every attempt that is still under way: none of them knows which
processes are left. They are found by reading the transaction's row, whose locks they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from percolator.errors import InvalidArgument
from percolator.formats.records import TTL_MILLISECONDS_MAX, LockRecord
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.part_states import FINISHED
from percolator.protocol.shared.names import Job
from percolator.routing.cells import CellMutation, RowRequest
from percolator.timestamps import NEWEST, SEQUENCE_BITS
from percolator.v1.tabletserver_pb2 import RowRead


class Keeper:
    """Raises the time to live of the finished parts of one transaction."""

    def __init__(self, env: Environment, job: Job) -> None:
        self._env = env
        self._job = job

    async def beat(self) -> None:
        """Raises what has less than two thirds left."""
        deadline = self._env.now() + self._job.beat_seconds
        now = await _now(self._env, deadline)
        due: list[CellMutation] = []
        full = int(self._job.ttl_seconds * 1000)
        for lock in await locks_of(self._env, self._job, now, deadline):
            age = max((now >> SEQUENCE_BITS) - (lock.start_timestamp >> SEQUENCE_BITS), 0)
            ttl = min(age + full, TTL_MILLISECONDS_MAX)
            if lock.value == FINISHED and lock.ttl_milliseconds < ttl - full // 3:
                due.append(_raising(lock, ttl))
        if due:
            # One that a reader has pushed meanwhile is raised with the next beat.
            await self._env.cells.mutate(due, deadline)


async def locks_of(env: Environment, job: Job, now: int, deadline: float) -> Sequence[LockRecord]:
    """The locks on the primaries of all parts. They are read without a timestamp: readers push
    parts a little ahead of all timestamps, and no snapshot has the lock of such a part in its way.

    A server of an older release has no such reads. It reports the parts that were begun before
    `now`, but not those that were pushed above it.
    """
    try:
        return await _locks_at(NEWEST, env, job, deadline)
    except InvalidArgument as refused:
        if not refused.field.endswith(".timestamp"):
            raise
        return await _locks_at(now, env, job, deadline)


async def _locks_at(
    timestamp: int, env: Environment, job: Job, deadline: float
) -> Sequence[LockRecord]:
    read = RowRead(row=job.row, all_columns=True, timestamp=timestamp)
    (answer,) = await env.cells.read((RowRequest(job.table_id, read),), deadline)
    return [LockRecord.decode(cell.value) for cell in answer.locks]


async def _now(env: Environment, deadline: float) -> int:
    return await env.timestamps.get(timeout_seconds=max(deadline - env.now(), 0.001))


def _raising(lock: LockRecord, ttl_milliseconds: int) -> CellMutation:
    table_id, row, column = lock.primary
    raised = replace(lock, ttl_milliseconds=ttl_milliseconds)
    return CellMutation(table_id, steps.replace_lock(row, column, lock.prefix, raised.encode()))
