"""After the decision: the cells that do not decide.

Committing them, or rolling them back, only spares others the work, since whoever meets a lock that
was left behind settles it. What must not be left out is the order: the primary's record is durable
before any other cell is committed, and its rollback marker before any other cell is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import (
    CellAddress,
    InvariantViolation,
    PercolatorError,
    Retry,
    SchemaChanged,
    SnapshotTooOld,
)
from percolator.protocol import steps
from percolator.protocol.primaries import Primaries
from percolator.protocol.surroundings import Surroundings
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.v1.cells_pb2 import Cell
from percolator.wire.questions import APPLIED, Refused, Step

STEPS_AT_ONCE_MAX = 4_096
"""A large transaction is sent in portions, so that not all its messages exist at one time."""


def portions(cells: Sequence[CellAddress]) -> range:
    """Where the portions begin."""
    return range(0, len(cells), STEPS_AT_ONCE_MAX)


def portion(cells: Sequence[CellAddress], first: int) -> Sequence[CellAddress]:
    """The one that begins there."""
    if len(cells) <= STEPS_AT_ONCE_MAX:
        return cells  # nearly always: nothing is copied
    return cells[first : first + STEPS_AT_ONCE_MAX]


def shown(answer: Refused) -> Cell:
    """The cell that failed a condition of absence."""
    if answer.cell is None:
        raise InvariantViolation(f"condition {answer.condition} failed on a cell that is not shown")
    return answer.cell


async def commit_secondaries(around: Surroundings, write: WriteSteps, commit: int) -> None:
    """After the commit point, for as long as `background_seconds`.

    Below the safe point all locks are settled before anything is collected, and what is not found
    any more may have been committed and collected.
    """
    deadline = background_deadline(around)
    pending = write.cells[1:]
    backoff = around.backoff()
    while pending:
        again: list[CellAddress] = []
        for first in portions(pending):
            cells = portion(pending, first)
            questions = []
            for cell in cells:
                schema = await around.schema(cell.table_id, deadline)
                question = write.commit_secondary(cell, schema, commit)
                question.mutation.not_below = write.start
                questions.append(question)
            answers = await around.cells.mutate(questions, deadline)
            for cell, answer in zip(cells, answers, strict=True):
                if isinstance(answer, Refused):
                    _check_secondary(write, cell, commit, answer)
                elif isinstance(answer, PercolatorError):
                    if isinstance(answer, SchemaChanged):
                        await around.schemas.refresh(cell.table_id, deadline)
                    if not isinstance(answer, SnapshotTooOld):
                        again.append(cell)
        pending = again
        if pending and not await backoff.pause(deadline):
            return


def _check_secondary(write: WriteSteps, cell: CellAddress, commit: int, answer: Refused) -> None:
    """Somebody else has committed it, at the same timestamp. Anything else is a torn commit."""
    if answer.condition == steps.OWN_COMMIT and shown(answer).timestamp == commit:
        return
    raise InvariantViolation(
        f"transaction {write.start} is committed at {commit}, but {cell} holds neither its lock "
        "nor that commit"
    )


async def mark_primary(around: Surroundings, write: WriteSteps, deadline: float) -> int:
    """Puts the rollback marker: from then on, the transaction can never commit.

    Returns 0 when the marker is durable, or the timestamp of the commit that was there before.
    Raises `SnapshotTooOld` below the safe point: there its commit may have been collected, and
    nobody can tell any more; and `SchemaError` when its table is gone for good: nor is there
    anything left then that would tell.
    """
    backoff = around.backoff()
    mark = write.roll_back(write.primary)
    mark.mutation.not_below = write.start
    primaries = Primaries(around)
    while True:
        (answer,) = await primaries.mutate([mark], deadline)
        if answer is APPLIED:
            around.verdicts.put(write.start, ROLLED_BACK)
            return 0
        if isinstance(answer, Refused):
            return shown(answer).timestamp
        if answer.retry is Retry.USELESS or not await backoff.pause(deadline):
            raise answer


async def roll_back_all(
    around: Surroundings, write: WriteSteps, touched: Sequence[CellAddress]
) -> None:
    """The marker on the primary, then the other cells that may carry a lock."""
    commit = await mark_primary(around, write, background_deadline(around))
    if commit:
        # Nobody was told that it is aborted: another committer of the same transaction was first.
        around.verdicts.put(write.start, commit)
    else:
        await roll_back_others(around, write, touched)


async def roll_back_others(
    around: Surroundings, write: WriteSteps, touched: Sequence[CellAddress]
) -> None:
    """After the marker on the primary."""
    deadline = background_deadline(around)
    pending = sorted(set(touched) - {write.primary})
    backoff = around.backoff()
    while pending:
        again: list[CellAddress] = []
        for first in portions(pending):
            cells = portion(pending, first)
            questions: list[Step] = [write.roll_back(cell) for cell in cells]
            answers = await around.cells.mutate(questions, deadline)
            for cell, answer in zip(cells, answers, strict=True):
                if isinstance(answer, Refused):
                    raise InvariantViolation(
                        f"{cell} is committed by the rolled back transaction {write.start}"
                    )
                # Below what was collected, all locks were settled by others.
                if answer is not APPLIED and not isinstance(answer, SnapshotTooOld):
                    again.append(cell)
        pending = again
        if pending and not await backoff.pause(deadline):
            return


def background_deadline(around: Surroundings) -> float:
    return around.clock.monotonic_seconds() + around.limits.background_seconds
