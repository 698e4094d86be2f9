"""Transactions that have announced changes and are still open: each is looked at, at its primary.

A worker that finds a cell locked has to come back to it. If it did so cell by cell, a job that
changes a million observed cells in one transaction would cost each worker a million looks in every
pass, for as long as the job runs. So a pass leaves the intents of such a transaction alone, and its
low-water mark goes past them. Instead, it asks the primary what has become of the transaction: the
longer that is open, the less often. Once it is decided, the passes begin at its intents again.

Only the delay of a change depends on this. Cells are judged by themselves, as before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from percolator.errors import CellAddress, PercolatorError, SchemaError
from percolator.formats.records import LockRecord
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.met_lock import MetLock
from percolator.routing.cells import Answer, CellMutation, Refused
from percolator.rowstore.intents import Intent
from percolator.v1.cells_pb2 import Cell

_OF_ITS_AGE = 1 / 8
"""A transaction that has been known for so long is looked at again after this part of the time."""
_AGAIN_SECONDS_MAX = 2.0
_KNOWN_MAX = 65_536
"""Those beyond are looked at cell by cell. Also the most that are remembered as decided."""


@dataclass(slots=True)
class _Open:
    """A transaction that was open when somebody looked last."""

    primary: CellAddress
    since: float
    due: float


class Undecided:
    """The open transactions that one worker knows, by their starts."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._open: dict[int, _Open] = {}
        self._decided: OrderedDict[int, None] = OrderedDict()
        """Their cells may still be locked, and have to be looked at one by one."""

    def knows(self, intent: Intent) -> bool:
        """Whether it is of such a transaction: then it can be left alone."""
        return not intent.is_certain and intent.timestamp in self._open

    def learn(self, locked: Sequence[tuple[Intent, Cell]]) -> None:
        """These cells were found with locks of their transactions."""
        now = self._env.now()
        for intent, cell in locked:
            start = intent.timestamp
            if start in self._decided or start in self._open or len(self._open) >= _KNOWN_MAX:
                continue
            self._open[start] = _Open(LockRecord.decode(cell.value).primary, now, now)

    async def look(self, deadline: float) -> tuple[list[int], list[MetLock]]:
        """Looks at those that are due. Returns the starts of those that are open no more, or of
        which the primary does not tell; and the primaries' locks of the others."""
        now = self._env.now()
        due = [(start, one) for start, one in self._open.items() if one.due <= now]
        if not due:
            return [], []
        questions = [
            CellMutation(
                one.primary.table_id, steps.status(one.primary.row, one.primary.column, start)
            )
            for start, one in due
        ]
        answers = await self._env.cells.mutate(questions, deadline)
        decided: list[int] = []
        locks: list[MetLock] = []
        for (start, one), answer in zip(due, answers, strict=True):
            if isinstance(answer, PercolatorError) and not isinstance(answer, SchemaError):
                continue  # it did not answer: it is asked again in the next pass
            if _is_locked(answer):
                one.due = now + min((now - one.since) * _OF_ITS_AGE, _AGAIN_SECONDS_MAX)
                locks.append(MetLock.of(one.primary.table_id, answer.offender))
            else:
                decided.append(start)
                del self._open[start]
                self._decided[start] = None
        while len(self._decided) > _KNOWN_MAX:
            self._decided.popitem(last=False)
        return decided, locks


def _is_locked(answer: Answer) -> TypeGuard[Refused]:
    if not isinstance(answer, Refused):
        return False
    return answer.condition not in (steps.OWN_COMMIT, steps.OWN_ROLLBACK)
