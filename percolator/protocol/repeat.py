"""A transaction that another process may already have committed, or begun to commit.

A gateway's caller that got no answer sends its commit again, perhaps to another gateway, while the
first is still working on it. Prewrite and commit tolerate that by themselves: both pick the same
primary, and each step finds what the other has done. What they cannot see is that the other commit
had *another write set*, because the caller changed its mind. So a committer that may not be the
first looks at the cells before it touches them.

Rules, each with the failure that it prevents:
- What is found on a cell has to be what this write set puts there, and a committed transaction has
  left a lock or record on every cell. Locking a cell that has neither would add to a commit that
  others have read already.
- Below the safe point nothing is concluded. The commit record may have been collected, and the
  cell would then answer "rolled back" for a transaction that is committed.
- The marker is put only on a cell that decides. Rolling back any other cell would take a lock away
  from a transaction that then commits without it.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress, InvalidArgument, PercolatorError, Retry
from percolator.formats.records import LockRecord
from percolator.protocol import steps
from percolator.protocol.commit import portions, start_secondaries
from percolator.protocol.conflicts import another, require_same
from percolator.protocol.environment import ROLLED_BACK, Environment
from percolator.protocol.write_set import WriteSteps
from percolator.routing.cells import APPLIED, Answer, CellMutation, Refused


async def former_outcome(env: Environment, write: WriteSteps, deadline: float) -> int | None:
    """The outcome of earlier commits of this transaction: its commit timestamp, or ROLLED_BACK.

    Returns None when nothing is decided. Raises `AnotherWriteSet` if they had other writes.
    """
    known = env.verdicts.get(write.start)
    if known == ROLLED_BACK:
        return ROLLED_BACK
    answers = dict(zip(write.cells, await _status(env, write, write.cells, deadline), strict=True))
    commit_ts = 0
    for cell, answer in answers.items():
        commit_ts = _checked(write, cell, answer) or commit_ts
    if commit_ts:
        # Ask again, now that the commit is known: the first time, it may have been in progress.
        missing = [cell for cell, answer in answers.items() if not _has_trace(answer)]
        again = await _status(env, write, missing, deadline)
        for cell, answer in zip(missing, again, strict=True):
            _checked(write, cell, answer)
            if not _has_trace(answer):
                raise another(write, cell, "was not among its writes")
        env.verdicts.put(write.start, commit_ts)
        start_secondaries(env, write, commit_ts)
        return commit_ts
    of_primary = answers[write.primary]
    if isinstance(of_primary, Refused) and of_primary.condition == steps.OWN_ROLLBACK:
        env.verdicts.put(write.start, ROLLED_BACK)
        return ROLLED_BACK
    return None


async def resolve(
    env: Environment, start: int, primary: CellAddress, field: str, deadline: float
) -> int:
    """The outcome of the transaction with this primary; rolls it back if nothing is decided yet.

    Raises `InvalidArgument`, naming `field`, if another cell decides.
    """
    known = env.verdicts.get(start)
    if known is not None:
        return known
    return await _settle_primary(env, start, primary, field, deadline)


async def abandon(env: Environment, write: WriteSteps, deadline: float) -> None:
    """After `AnotherWriteSet`: releases the locks of this write set, and nothing else.

    The primary comes first, as always: another process may be committing the same writes now.
    """
    try:
        outcome = await _settle_primary(env, write.start, write.primary, "writes", deadline)
    except InvalidArgument:
        pass  # the other write set holds our primary, so these writes can never be committed
    else:
        if outcome != ROLLED_BACK:
            return
    answers = await _status(env, write, write.cells, deadline)
    withdrawals = []
    for cell, answer in zip(write.cells, answers, strict=True):
        if isinstance(answer, Refused) and answer.condition > steps.OWN_ROLLBACK:
            seen = answer.offender.value
            if LockRecord.decode(seen).primary == write.primary:
                withdrawal = steps.roll_back_expired(cell.row, cell.column, write.start, seen)
                withdrawals.append(CellMutation(cell.table_id, withdrawal))
    if withdrawals:
        await env.cells.mutate(withdrawals, deadline)


async def _settle_primary(
    env: Environment, start: int, primary: CellAddress, field: str, deadline: float
) -> int:
    table_id, row, column = primary
    while True:
        (answer,) = await _ask(env, [_request(primary, start)], deadline)
        marker = steps.roll_back_expired(row, column, start, b"")
        if isinstance(answer, Refused):
            if answer.condition == steps.OWN_COMMIT:
                return answer.offender.timestamp
            if answer.condition == steps.OWN_ROLLBACK:
                return ROLLED_BACK
            lock = LockRecord.decode(answer.offender.value)
            if lock.primary != primary:
                raise InvalidArgument(
                    field, f"transaction {start} is decided at {lock.primary}, not at {primary}"
                )
            marker = steps.roll_back(row, column, start)
        (answer,) = await _ask(env, [CellMutation(table_id, marker)], deadline)
        if answer is APPLIED:
            return ROLLED_BACK
        if isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT:
            return answer.offender.timestamp
        # The cell was locked between the two steps: look again.


def _checked(write: WriteSteps, cell: CellAddress, answer: Answer) -> int:
    """The commit timestamp if the cell is committed, else 0. Raises if the write set is another."""
    if not isinstance(answer, Refused) or answer.condition == steps.OWN_ROLLBACK:
        return 0
    require_same(write, cell, answer)
    return answer.offender.timestamp if answer.condition == steps.OWN_COMMIT else 0


def _has_trace(answer: Answer) -> bool:
    """True if the cell has the transaction's commit record or its lock."""
    return isinstance(answer, Refused) and answer.condition != steps.OWN_ROLLBACK


async def _status(
    env: Environment, write: WriteSteps, cells: Sequence[CellAddress], deadline: float
) -> list[Answer]:
    answers: list[Answer] = []
    for some in portions(cells):
        requests = [_request(cell, write.start) for cell in some]
        answers += await _ask(env, requests, deadline)
    return answers


def _request(cell: CellAddress, start: int) -> CellMutation:
    request = steps.status(cell.row, cell.column, start)
    request.not_below = start
    return CellMutation(cell.table_id, request)


async def _ask(
    env: Environment, requests: Sequence[CellMutation], deadline: float
) -> Sequence[Answer]:
    """Repeats each request until it is answered. Repeating these requests does no harm."""
    answers: list[Answer | None] = [None] * len(requests)
    backoff = env.backoff()
    while True:
        left = [place for place, answer in enumerate(answers) if answer is None]
        problem: PercolatorError | None = None
        told = await env.cells.mutate([requests[place] for place in left], deadline)
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
