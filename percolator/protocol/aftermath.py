"""After the decision: the cells that do not decide.

Committing them, or rolling them back, only saves others the work, since every client resolves the
abandoned locks that it meets. The order is what matters: the primary's commit record is durable
before any other cell is committed, and its rollback marker before any other cell is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import (
    CellAddress,
    InvariantViolation,
    PercolatorError,
    Retry,
    SnapshotTooOld,
)
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.portions import portion, portions
from percolator.protocol.resolving.primaries import Primaries
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.routing.cells import APPLIED, CellMutation, Refused


async def commit_secondaries(env: Environment, write: WriteSteps, commit: int) -> None:
    """Commits the other cells after the commit point, trying for `background_seconds`.

    Below the safe point it stops: there, all locks are resolved before anything is collected, and a
    record that is missing may have been written and collected.
    """
    deadline = background_deadline(env)
    pending = write.cells[1:]
    backoff = env.backoff()
    while pending:
        again: list[CellAddress] = []
        for first in portions(pending):
            cells = portion(pending, first)
            requests = []
            for cell in cells:
                schema = await env.schema(cell.table_id, deadline)
                requests.append(write.commit_secondary(cell, schema, commit))
            answers = await env.cells.mutate(requests, deadline)
            for cell, answer in zip(cells, answers, strict=True):
                if isinstance(answer, Refused):
                    _check_secondary(write, cell, commit, answer)
                elif isinstance(answer, PercolatorError) and not isinstance(answer, SnapshotTooOld):
                    again.append(cell)
            await env.refresh_schemas(requests, answers, deadline)
        pending = again
        if pending and not await backoff.pause(deadline):
            return


def _check_secondary(write: WriteSteps, cell: CellAddress, commit: int, answer: Refused) -> None:
    """Another client may have committed it, at the same timestamp; otherwise the commit is torn."""
    if answer.condition == steps.OWN_COMMIT and answer.offender.timestamp == commit:
        return
    raise InvariantViolation(
        f"transaction {write.start} is committed at {commit}, but {cell} holds neither its lock "
        "nor that commit"
    )


async def mark_primary(env: Environment, write: WriteSteps, deadline: float) -> int:
    """Puts the rollback marker: from then on, the transaction can never commit.

    Returns 0 when the marker is durable, or the timestamp of the commit that was there before.
    Raises `SnapshotTooOld` below the safe point, where its commit may have been collected, so that
    the outcome can no longer be learned; and `SchemaError` when its table is gone for good, and
    the outcome with it.
    """
    backoff = env.backoff()
    mark = write.roll_back(write.primary, not_below=write.start)
    primaries = Primaries(env)
    while True:
        (answer,) = await primaries.mutate([mark], deadline)
        if answer is APPLIED:
            env.verdicts.put(write.start, ROLLED_BACK)
            return 0
        if isinstance(answer, Refused):
            return answer.offender.timestamp
        if answer.retry is Retry.USELESS or not await backoff.pause(deadline):
            raise answer


async def roll_back_all(
    env: Environment, write: WriteSteps, touched: Sequence[CellAddress]
) -> None:
    """Puts the marker on the primary, then rolls back the other cells that may carry a lock."""
    commit = await mark_primary(env, write, background_deadline(env))
    if commit:
        # Another committer of this transaction was first. It was not reported as aborted, so this
        # is no contradiction.
        env.verdicts.put(write.start, commit)
    else:
        await roll_back_others(env, write, touched)


async def roll_back_others(
    env: Environment, write: WriteSteps, touched: Sequence[CellAddress]
) -> None:
    """Rolls back the other cells, once the marker on the primary is durable."""
    deadline = background_deadline(env)
    pending = sorted(set(touched) - {write.primary})
    backoff = env.backoff()
    while pending:
        again: list[CellAddress] = []
        for first in portions(pending):
            cells = portion(pending, first)
            requests: list[CellMutation] = [write.roll_back(cell) for cell in cells]
            answers = await env.cells.mutate(requests, deadline)
            for cell, answer in zip(cells, answers, strict=True):
                if isinstance(answer, Refused):
                    raise InvariantViolation(
                        f"{cell} is committed by the rolled back transaction {write.start}"
                    )
                # Where history was collected, all locks were resolved before.
                if answer is not APPLIED and not isinstance(answer, SnapshotTooOld):
                    again.append(cell)
        pending = again
        if pending and not await backoff.pause(deadline):
            return


def background_deadline(env: Environment) -> float:
    return env.now() + env.limits.background_seconds
