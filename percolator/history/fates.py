"""Outcomes of the transactions that have left intents, as far as their cells tell.

A cell tells only what is final: one that has a transaction's commit never gets its marker, nor the
other way round. percolator/observers/intent_notifications.py says what follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from percolator.errors import PercolatorError, SchemaError, SnapshotTooOld
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.routing.cells import APPLIED, CellMutation, Refused
from percolator.rowstore.intents import Intent
from percolator.v1.cells_pb2 import Cell

ObservedCell = tuple[int, bytes, bytes, bytes]
"""Table, row, column and observer."""


@dataclass
class Judged:
    """Outcomes of the transactions of some intents."""

    committed: dict[ObservedCell, dict[int, list[Intent]]] = field(default_factory=dict)
    """Intents by the commit timestamps of their transactions, or what stands for them."""
    rolled_back: list[Intent] = field(default_factory=list)
    locked: list[tuple[Intent, Cell]] = field(default_factory=list)
    without_trace: list[Intent] = field(default_factory=list)
    without_table: list[Intent] = field(default_factory=list)
    """The store does not have the tables of these."""
    problem: PercolatorError | None = None
    """The reason why nothing is known of some of them, if that is so."""

    def commit(self, intent: Intent, timestamp: int) -> None:
        cell = intent.table_id, intent.row, intent.column, intent.observer
        by_commit = self.committed.setdefault(cell, {})
        by_commit.setdefault(timestamp, []).append(intent)


class Fates:
    """Looks into cells, and puts markers into those without a trace."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    async def judge(self, found: Sequence[Intent]) -> Judged:
        """Intents whose cells do not answer are left out: the `problem` says why."""
        judged = Judged()
        asked: list[Intent] = []
        for intent in found:
            if intent.is_certain:
                judged.commit(intent, intent.timestamp)
            else:
                asked.append(intent)
        questions = [
            CellMutation(one.table_id, steps.status(one.row, one.column, one.timestamp))
            for one in asked
        ]
        answers = await self._env.cells.mutate(questions, self._env.deadline())
        for intent, answer in zip(asked, answers, strict=True):
            if answer is APPLIED:
                judged.without_trace.append(intent)
            elif isinstance(answer, SchemaError):
                judged.without_table.append(intent)
            elif not isinstance(answer, Refused):
                judged.problem = answer  # a pass finds it again
            elif answer.condition == steps.OWN_COMMIT:
                judged.commit(intent, answer.offender.timestamp)
            elif answer.condition == steps.OWN_ROLLBACK:
                judged.rolled_back.append(intent)
            else:
                judged.locked.append((intent, answer.offender))
        return judged

    async def put_markers(self, dead: Sequence[Intent], judged: Judged) -> list[Intent]:
        """Puts a marker into the cells of these, which refuses a late prewrite. Returns those of
        which it is known now what became of them; `judged` says what.

        A prewrite may have come after the cell was looked at. Its lock stays: the cell may be one
        of many, and its transaction may commit.
        """
        markers = [
            CellMutation(
                one.table_id, steps.roll_back_expired(one.row, one.column, one.timestamp, b"")
            )
            for one in dead
        ]
        answers = await self._env.cells.mutate(markers, self._env.deadline()) if markers else []
        known = []
        for intent, answer in zip(dead, answers, strict=True):
            if answer is APPLIED:
                judged.rolled_back.append(intent)
            elif isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT:
                judged.commit(intent, answer.offender.timestamp)
            elif isinstance(answer, SnapshotTooOld):
                # Collected: whatever it was, a run that begins now sees it.
                judged.commit(intent, intent.timestamp)
            else:
                continue
            known.append(intent)
        return known
