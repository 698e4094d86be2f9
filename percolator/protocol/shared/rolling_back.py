"""Rolling back the parts of a shared transaction: one of them, or all that are left of it.

That the transaction was committed does not mean that a part of it was. Its ticket may be in the
hands of two drivers, and the one that came first has committed the parts that it had chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import (
    CellAddress,
    InvariantViolation,
    OtherDriverCommitted,
    PercolatorError,
    Retry,
)
from percolator.protocol import steps
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.shared.keeping import locks_of
from percolator.protocol.shared.names import CLOSED, Job, PartKey, PartName
from percolator.routing.cells import APPLIED, CellMutation, Refused


async def roll_back_part(
    env: Environment, primary: CellAddress, start: int, deadline: float
) -> int:
    """Puts the marker on a part's primary: from then on, neither it nor the transaction that it is
    part of can commit. Returns 0, or the timestamp of the commit that was there before."""
    (commit,) = await _roll_back_parts(env, [(primary, start)], deadline)
    return commit


async def _roll_back_parts(
    env: Environment, parts: Sequence[tuple[CellAddress, int]], deadline: float
) -> list[int]:
    """`roll_back_part` for many, with few messages."""
    backoff = env.backoff()
    commits = [0] * len(parts)
    left = list(range(len(parts)))
    while left:
        sent = [
            CellMutation(primary.table_id, steps.roll_back(primary.row, primary.column, start))
            for primary, start in (parts[at] for at in left)
        ]
        answers = dict(zip(left, await env.cells.mutate(sent, deadline), strict=True))
        problem: PercolatorError | None = None
        left = []
        for at, answer in answers.items():
            primary, start = parts[at]
            if answer is APPLIED:
                env.verdicts.put(start, ROLLED_BACK)
            elif not isinstance(answer, Refused):
                left.append(at)
                problem = answer
                if answer.retry is Retry.USELESS:
                    raise answer
            elif answer.cell is None:
                raise InvariantViolation(f"{primary} refused a rollback without naming a commit")
            else:
                commits[at] = int(answer.cell.timestamp)
                env.verdicts.put(start, commits[at])
        if problem is not None and not await backoff.pause(deadline):
            raise problem
    return commits


async def roll_back_all(
    env: Environment, job: Job, named: Sequence[PartKey], deadline: float
) -> int:
    """Closes the transaction, and rolls back every part that was begun. Returns 0, or the commit
    timestamp if the transaction turns out to be committed: then nothing is undone.

    `named` are parts that are known already, such as those that may have been sent to be committed.
    Raises `OtherDriverCommitted` if the transaction was committed without one of them.
    """
    closed = CellAddress(job.table_id, job.row, CLOSED)
    commit = await roll_back_part(env, closed, job.began, deadline)
    if commit:
        await require_committed(env, job, named, commit, deadline)
        return commit
    parts = [(job.primary_of(part), part.start) for part in named]
    await _roll_back_parts(env, parts, deadline)
    await roll_back_left(env, job, deadline)
    return 0


async def require_committed(
    env: Environment, job: Job, named: Sequence[PartKey], commit: int, deadline: float
) -> None:
    """Returns if all these parts of a transaction that was committed are committed with it. Rolls
    back the others, which never can be, and raises `OtherDriverCommitted`."""
    parts = [(job.primary_of(part), part.start) for part in named]
    commits = await _roll_back_parts(env, parts, deadline)
    without = [
        str(PartName.decode(part.column))
        for part, own in zip(named, commits, strict=True)
        if not own
    ]
    if without:
        raise OtherDriverCommitted(commit, without, of=len(named))


async def roll_back_left(env: Environment, job: Job, deadline: float) -> None:
    """Rolls back the parts of a closed transaction that the driver has not chosen."""
    while True:
        found = await locks_of(env, job, deadline)
        if not found:
            return
        parts = [(lock.primary, lock.start_timestamp) for lock in found]
        await _roll_back_parts(env, parts, deadline)
