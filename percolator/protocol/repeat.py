"""A transaction that somebody else may have committed, or begun to commit, before.

A gateway's caller that got no answer sends its commit again, perhaps to another gateway, while the
first is still at it. Prewrite and commit bear that by themselves: both pick the same primary, and
each step finds what the other has done. What they cannot see is that the other one was about
*another write set*: a caller that changed its mind. So whoever does not know that it is the first
looks at the cells before it touches them.

Rules, each with the failure that it prevents:
- What is found on a cell has to be what this write set puts there, and a committed transaction has
  left something on every cell. Locking further cells of it would add to a commit that others have
  read already.
- Below the safe point nothing is concluded. The record of a commit may be collected, and what is
  asked then would answer "rolled back" for a transaction that is committed.
- Only a cell that decides is given a marker. Rolling back any other one would take a lock away from
  a transaction that then commits without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress, InvalidArgument, PercolatorError, Retry
from percolator.protocol import aftermath, steps
from percolator.protocol.aftermath import shown
from percolator.protocol.records import LockRecord
from percolator.protocol.same_writes import another, require_same
from percolator.protocol.surroundings import Surroundings
from percolator.protocol.verdicts import ROLLED_BACK
from percolator.protocol.write_steps import WriteSteps
from percolator.wire.questions import APPLIED, Answer, Refused, Step


async def former_outcome(around: Surroundings, write: WriteSteps, deadline: float) -> int | None:
    """What earlier commits of this transaction have come to: its commit timestamp, or ROLLED_BACK.

    None when nothing is decided. `AnotherWriteSet` when they were commits of something else.
    """
    known = around.verdicts.get(write.start)
    if known == ROLLED_BACK:
        return ROLLED_BACK
    answers = dict(
        zip(write.cells, await _status(around, write, write.cells, deadline), strict=True)
    )
    commit = 0
    for cell, answer in answers.items():
        commit = _checked(write, cell, answer) or commit
    if commit:
        # Asked again, now that the commit is known: those were asked while it was being made.
        missing = [cell for cell, answer in answers.items() if not _has_trace(answer)]
        again = await _status(around, write, missing, deadline)
        for cell, answer in zip(missing, again, strict=True):
            _checked(write, cell, answer)
            if not _has_trace(answer):
                raise another(write, cell, "was not among its writes")
        around.verdicts.put(write.start, commit)
        around.background.start(aftermath.commit_secondaries(around, write, commit))
        return commit
    of_primary = answers[write.primary]
    if isinstance(of_primary, Refused) and of_primary.condition == steps.OWN_ROLLBACK:
        around.verdicts.put(write.start, ROLLED_BACK)
        return ROLLED_BACK
    return None


async def resolve(
    around: Surroundings, start: int, primary: CellAddress, field: str, deadline: float
) -> int:
    """What became of the transaction whose primary this is; rolls it back if nothing did yet.

    `InvalidArgument` names `field` when another cell decides.
    """
    known = around.verdicts.get(start)
    if known is not None:
        return known
    return await _settle_primary(around, start, primary, field, deadline)


async def abandon(around: Surroundings, write: WriteSteps, deadline: float) -> None:
    """After `AnotherWriteSet`: takes back what was locked for this one, and nothing else.

    Its primary first, as ever: somebody may be committing the same writes at this moment.
    """
    try:
        outcome = await _settle_primary(around, write.start, write.primary, "writes", deadline)
    except InvalidArgument:
        pass  # the other one holds our primary, so nobody will ever commit these writes
    else:
        if outcome != ROLLED_BACK:
            return
    answers = await _status(around, write, write.cells, deadline)
    withdrawals = []
    for cell, answer in zip(write.cells, answers, strict=True):
        if isinstance(answer, Refused) and answer.condition > steps.OWN_ROLLBACK:
            seen = shown(answer).value
            if LockRecord.decode(seen).primary == write.primary:
                withdrawal = steps.roll_back_expired(cell.row, cell.column, write.start, seen)
                withdrawals.append(Step(cell.table_id, withdrawal))
    if withdrawals:
        await around.cells.mutate(withdrawals, deadline)


async def _settle_primary(
    around: Surroundings, start: int, primary: CellAddress, field: str, deadline: float
) -> int:
    table_id, row, column = primary
    while True:
        (answer,) = await _ask(around, [_question(primary, start)], deadline)
        burial = steps.roll_back_expired(row, column, start, b"")
        if isinstance(answer, Refused):
            if answer.condition == steps.OWN_COMMIT:
                return shown(answer).timestamp
            if answer.condition == steps.OWN_ROLLBACK:
                return ROLLED_BACK
            lock = LockRecord.decode(shown(answer).value)
            if lock.primary != primary:
                raise InvalidArgument(
                    field, f"transaction {start} is decided at {lock.primary}, not at {primary}"
                )
            burial = steps.roll_back(row, column, start)
        (answer,) = await _ask(around, [Step(table_id, burial)], deadline)
        if answer is APPLIED:
            return ROLLED_BACK
        if isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT:
            return shown(answer).timestamp
        # It was locked since it was looked at.


def _checked(write: WriteSteps, cell: CellAddress, answer: Answer) -> int:
    """The commit timestamp, if that is what was found. Raises for what is of another write set."""
    if not isinstance(answer, Refused) or answer.condition == steps.OWN_ROLLBACK:
        return 0
    require_same(write, cell, answer)
    return shown(answer).timestamp if answer.condition == steps.OWN_COMMIT else 0


def _has_trace(answer: Answer) -> bool:
    """Its commit record, or its lock."""
    return isinstance(answer, Refused) and answer.condition != steps.OWN_ROLLBACK


async def _status(
    around: Surroundings, write: WriteSteps, cells: Sequence[CellAddress], deadline: float
) -> list[Answer]:
    answers: list[Answer] = []
    for first in aftermath.portions(cells):
        some = aftermath.portion(cells, first)
        questions = [_question(cell, write.start) for cell in some]
        answers += await _ask(around, questions, deadline)
    return answers


def _question(cell: CellAddress, start: int) -> Step:
    question = steps.status(cell.row, cell.column, start)
    question.not_below = start
    return Step(cell.table_id, question)


async def _ask(
    around: Surroundings, questions: Sequence[Step], deadline: float
) -> Sequence[Answer]:
    """Each until it is answered. What is asked here may be asked twice without harm."""
    answers: list[Answer | None] = [None] * len(questions)
    backoff = around.backoff()
    while True:
        left = [place for place, answer in enumerate(answers) if answer is None]
        problem: PercolatorError | None = None
        told = await around.cells.mutate([questions[place] for place in left], deadline)
        for place, answer in zip(left, told, strict=True):
            if not isinstance(answer, PercolatorError):
                answers[place] = answer
            elif answer.retry is Retry.USELESS:
                raise answer
            else:
                problem = answer
        if problem is None:
            return [answer for answer in answers if answer is not None]
        if not await backoff.pause(deadline):
            raise problem
