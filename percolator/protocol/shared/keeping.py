"""Keeping finished parts alive until the driver decides.

An attempt keeps its own parts while it writes. Once it has finished, its process may end, so the
driver keeps them, and so does every attempt that is still under way: none of them knows which
processes are left. They are found by reading the transaction's row, whose locks they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.formats.records import LockRecord, timestamp_bytes
from percolator.protocol.environment import Environment
from percolator.protocol.part_states import FINISHED
from percolator.protocol.shared.names import Job
from percolator.protocol.write_set import Lead, raised, raising
from percolator.routing.cells import Answer, Refused, RowRequest
from percolator.timestamps import NEWEST, SEQUENCE_BITS
from percolator.v1.cells_pb2 import SPACE_LOCK
from percolator.v1.tabletserver_pb2 import RowRead


class Keeper:
    """Raises the time to live of the finished parts of one transaction."""

    def __init__(self, env: Environment, job: Job) -> None:
        self._env = env
        self._job = job

    async def beat(self) -> None:
        """Raises what has less than two thirds left."""
        env = self._env
        deadline = env.now() + self._job.beat_seconds
        now = await _now(env, deadline)
        full = int(self._job.ttl_seconds * 1000)
        due: dict[LockRecord, int] = {}
        for lock in await locks_of(env, self._job, deadline):
            ttl = max((now >> SEQUENCE_BITS) - (lock.start_timestamp >> SEQUENCE_BITS), 0) + full
            if lock.value == FINISHED and lock.ttl_milliseconds < ttl - full // 3:
                due[lock] = ttl
        lead = Lead(env.limits)
        while due and env.now() < deadline:
            began = env.now()
            sent = [
                raised(lock, lead.above(lock.min_commit_timestamp), ttl, FINISHED)
                for lock, ttl in due.items()
            ]
            answers = await env.cells.mutate([raising(lock) for lock in sent], deadline)
            lead.refused(env.now() - began)
            # One without an answer is looked at again with the next beat.
            due = {
                there: lock.ttl_milliseconds
                for lock, answer in zip(sent, answers, strict=True)
                if (there := _there(lock, answer)) is not None
            }


def _there(lock: LockRecord, answer: Answer) -> LockRecord | None:
    """The lock that a reader has pushed above this one; None if there is none of the part."""
    if not isinstance(answer, Refused) or answer.cell is None:
        return None
    there = answer.cell
    if there.space != SPACE_LOCK or not there.value.startswith(
        timestamp_bytes(lock.start_timestamp)
    ):
        return None
    return LockRecord.decode(there.value)


async def locks_of(env: Environment, job: Job, deadline: float) -> Sequence[LockRecord]:
    """The locks on the primaries of all parts. They are read without a timestamp: readers push
    parts a little ahead of all timestamps, and no snapshot has the lock of such a part in its way.
    """
    read = RowRead(row=job.row, all_columns=True, timestamp=NEWEST)
    (answer,) = await env.cells.read((RowRequest(job.table_id, read),), deadline)
    return [LockRecord.decode(cell.value) for cell in answer.locks]


async def _now(env: Environment, deadline: float) -> int:
    return await env.timestamps.get(timeout_seconds=max(deadline - env.now(), 0.001))
