"""Asking primaries, including those in tables that are being deleted.

Deleting a table does not wait for the transactions that write to it. Their locks in other tables
would hold up every reader if the cells that decide about them could no longer be asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from percolator.errors import CellAddress, SchemaError
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.routing.cells import Answer, CellMutation, Mutations, Refused


async def commits_of(
    cells: Mutations, transactions: Sequence[tuple[CellAddress, int]], deadline: float
) -> list[int]:
    """When these transactions have committed, as the primaries say that are given with their start
    timestamps; 0 for each that is not known to have. Changes nothing."""
    asked = [
        CellMutation(primary.table_id, steps.status(primary.row, primary.column, start))
        for primary, start in transactions
    ]
    return [
        answer.offender.timestamp
        if isinstance(answer, Refused) and answer.condition == steps.OWN_COMMIT
        else 0
        for answer in await cells.mutate(asked, deadline)
    ]


class Primaries:
    """Sends steps to the cells that decide, also in tables that are being deleted."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    async def mutate(self, steps: Sequence[CellMutation], deadline: float) -> list[Answer]:
        """Like `Mutations.mutate`."""
        answers = await self._env.cells.mutate(steps, deadline)
        deleted = self._env.deleted_tables
        if deleted is None:
            return answers
        places = [place for place, one in enumerate(answers) if isinstance(one, SchemaError)]
        if places:
            again = await deleted.mutate([steps[place] for place in places], deadline)
            for place, answer in zip(places, again, strict=True):
                answers[place] = answer
        return answers

    def is_gone(self, answer: Answer) -> bool:
        """Whether the cell no longer exists and never will, so that it decides nothing.

        A table is removed only when no lock has its primary in it. A lock that appears later was
        sent late, by a transaction that has not committed: until a transaction commits, its locks
        stay where they are.
        """
        return self._env.deleted_tables is not None and isinstance(answer, SchemaError)
