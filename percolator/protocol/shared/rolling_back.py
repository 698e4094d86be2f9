"""Rolling back the parts of a shared transaction: one of them, or all that are left of it."""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress, InvariantViolation, Retry
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.shared.keeping import locks_of
from percolator.protocol.shared.names import CLOSED, Job, PartKey
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.routing.cells import APPLIED, CellMutation, Refused


async def roll_back_part(
    env: Environment, primary: CellAddress, start: int, deadline: float
) -> int:
    """Puts the marker on a part's primary: from then on, neither it nor the transaction that it is
    part of can commit. Returns 0, or the timestamp of the commit that was there before."""
    backoff = env.backoff()
    while True:
        step = steps.roll_back(primary.row, primary.column, start)
        (answer,) = await env.cells.mutate((CellMutation(primary.table_id, step),), deadline)
        if answer is APPLIED:
            env.verdicts.put(start, ROLLED_BACK)
            return 0
        if isinstance(answer, Refused) and answer.cell is not None:
            env.verdicts.put(start, answer.cell.timestamp)
            return int(answer.cell.timestamp)
        if isinstance(answer, Refused):
            raise InvariantViolation(f"{primary} refused a rollback without naming a commit")
        if answer.retry is Retry.USELESS or not await backoff.pause(deadline):
            raise answer


async def roll_back_all(
    env: Environment, job: Job, named: Sequence[PartKey], deadline: float
) -> int:
    """Closes the transaction, and rolls back every part that was begun. Returns 0, or the commit
    timestamp if the transaction turns out to be committed: then nothing is undone.

    `named` are parts that are known already, such as those that may have been sent to be committed.
    """
    closed = CellAddress(job.table_id, job.row, CLOSED)
    commit = await roll_back_part(env, closed, job.began, deadline)
    if commit:
        return commit
    for part in named:
        primary = CellAddress(job.table_id, job.row, part.column)
        await roll_back_part(env, primary, part.start, deadline)
    await roll_back_left(env, job, deadline)
    return 0


async def roll_back_left(env: Environment, job: Job, deadline: float) -> None:
    """Rolls back the parts of a closed transaction that the driver has not chosen."""
    while True:
        left = max(deadline - env.now(), 0.001)
        # Above the start of every part: none can begin once the transaction is closed.
        now = await env.timestamps.get(timeout_seconds=left)
        found = await locks_of(env, job, now, deadline)
        if not found:
            return
        for lock in found:
            await roll_back_part(env, lock.primary, lock.start_timestamp, deadline)
