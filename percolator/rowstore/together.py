"""`percolator.routing.cells.Groups` on a row store: steps of a row, made together or not at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from percolator.errors import InvalidArgument, NotExecuted, PercolatorError
from percolator.limits import Limits
from percolator.routing.cells import APPLIED, Answer
from percolator.rowstore.collected import transactions_collected_above
from percolator.rowstore.grouping import grouped
from percolator.rowstore.judging import refusal
from percolator.rowstore.layout import (
    COLLECTED,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    row_key,
    stored_column,
)
from percolator.rowstore.mapping import Step, mapped
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Selection, StoredCell
from percolator.rowstore.times import Times
from percolator.v1.tabletserver_pb2 import Mutation
from percolator.world import World

_JUDGED = tuple(Selection(one) for one in (LOCKS, WRITES, LOCK_ONLY, ROLLBACKS))
"""A group may be about so many cells that a call could not name them."""
_OTHERS_REFUSED = "another mutation of the group was not applied"


class RowGroups:
    """The groups of one client."""

    def __init__(self, store: RowStore, times: Times, world: World, limits: Limits) -> None:
        self._store = store
        self._times = times
        self._world = world
        self._limits = limits

    async def mutate_together(
        self, table_id: int, mutations: Sequence[Mutation], deadline: float
    ) -> list[Answer]:
        """Answers in the order of the mutations. Raises an error with `Retry.UNKNOWN` if the group
        may have been made."""
        key = row_key(mutations[0].row)
        if any(row_key(one.row) != key for one in mutations):
            raise InvalidArgument("mutations", "a group is of one row")
        steps = [mapped(one, self._times) for one in mutations]
        check, changes = grouped(steps, self._store.ranges_max, self._times)
        patience = Patience(self._world, self._limits, deadline)
        while True:
            try:
                made = await self._store.check_and_mutate(
                    table_id, key, check, changes, patience.attempt_seconds
                )
            except PercolatorError as error:
                await patience.outlast(error, is_read=False)
                continue
            if made:
                return [APPLIED] * len(steps)
            patience.refused()
            answers = self._judged(steps, await self._look(table_id, key, patience))
            if answers:
                return answers
            await patience.again()  # what was in the way is gone already

    def _judged(self, steps: Sequence[Step], cells: Sequence[StoredCell]) -> list[Answer]:
        """The answers, if one of the steps is not possible in the row as it is now."""
        by_column: defaultdict[bytes, list[StoredCell]] = defaultdict(list)
        for cell in cells:
            by_column[cell.column].append(cell)
        notes = [cell for cell in cells if cell.family == COLLECTED]
        answers: list[Answer] = []
        for step in steps:
            # A step that expects its lock is about its own cell; a prewrite, about others, too.
            own = by_column[stored_column(step.mutation.column)]
            found = [*own, *notes] if step.expects_lock else cells
            refused = refusal(step.mutation, found, self._times)
            answers.append(refused or NotExecuted(_OTHERS_REFUSED))
        return answers if any(not isinstance(one, NotExecuted) for one in answers) else []

    async def _look(self, table_id: int, key: bytes, patience: Patience) -> Sequence[StoredCell]:
        selections = (*_JUDGED, transactions_collected_above(0, self._times))
        while True:
            try:
                rows = await self._store.read(table_id, [key], selections, patience.attempt_seconds)
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)
            else:
                return rows[0].cells if rows else []
