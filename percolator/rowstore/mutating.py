"""Conditional mutations: mapped, joined, sent, and judged if they were refused.

What the store has definitely not executed is sent again until the deadline. What it may have
executed is not: only the protocol knows what repeating it would mean.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Sequence

from percolator.errors import InvalidArgument, NotExecuted, PercolatorError
from percolator.limits import Limits
from percolator.routing.cells import APPLIED, Answer, CellMutation, CommonStep
from percolator.rowstore.common_steps import mapped_step
from percolator.rowstore.intents import Intent, Intents
from percolator.rowstore.joining import Joined, joined
from percolator.rowstore.judging import looked_at, refusal
from percolator.rowstore.layout import row_key
from percolator.rowstore.mapping import Step, check_of
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import RowStore, Selection, StoredCell, in_calls
from percolator.rowstore.times import Times
from percolator.v1.cells_pb2 import SPACE_NOTIFY
from percolator.v1.tabletserver_pb2 import Change, Mutation
from percolator.world import World

_NO_ANSWER = NotExecuted("the mutation was not sent")


class RowMutations:
    """Makes the steps of the protocol in a row store."""

    def __init__(
        self, store: RowStore, intents: Intents, times: Times, world: World, limits: Limits
    ) -> None:
        self._store = store
        self._intents = intents
        self._times = times
        self._world = world
        self._limits = limits

    async def mutate(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        """Answers in the order of the mutations. One that fails raises nothing."""
        answers: list[Answer] = [_NO_ANSWER] * len(mutations)
        steps: list[tuple[int, int, Step]] = []
        notified: dict[int, list[Intent]] = {}
        for place, asked in enumerate(mutations):
            table_id, mutation = asked.table_id, asked.mutation
            try:
                if isinstance(mutation, CommonStep) or mutation.conditions:
                    steps.append((place, table_id, mapped_step(mutation, self._times)))
                else:
                    notified[place] = _certain(table_id, mutation)
            except PercolatorError as error:
                answers[place] = error
        in_order: defaultdict[tuple[int, bytes, int], list[Joined]] = defaultdict(list)
        for group in joined(steps, self._store.check_bytes_max):
            in_order[group.table_id, group.row, group.start].append(group)
        works = [self._in_row(groups, answers, deadline) for groups in in_order.values()]
        if notified:
            works.append(self._notify(notified, answers, deadline))
        if works:
            await _all_of(works)
        return answers

    async def _notify(
        self, notified: dict[int, list[Intent]], answers: list[Answer], deadline: float
    ) -> None:
        answer: Answer = APPLIED
        try:
            intents = [one for several in notified.values() for one in several]
            await self._intents.write(intents, deadline)
        except PercolatorError as error:
            answer = error
        for place in notified:
            answers[place] = answer

    async def _in_row(
        self, groups: Sequence[Joined], answers: list[Answer], deadline: float
    ) -> None:
        """A transaction's calls on one row, one after the other."""
        for group in groups:
            try:
                await self._make(group, answers, Patience(self._world, self._limits, deadline))
            except PercolatorError as error:
                for place in group.steps:
                    if answers[place] is _NO_ANSWER:
                        answers[place] = error

    async def _make(self, group: Joined, answers: list[Answer], patience: Patience) -> None:
        """Answers every step of the group. Raises what prevents the steps that are left."""
        left = dict(group.steps)
        questions = {place: one for place, one in left.items() if not one.changes}
        if questions:
            await self._judge(group, questions, answers, patience)
            for place in questions:
                del left[place]
                answers[place] = APPLIED if answers[place] is _NO_ANSWER else answers[place]
        while left:
            try:
                applied = await self._send(group, list(left.values()), patience)
            except PercolatorError as error:
                await patience.outlast(error, is_read=False)
                continue
            if applied:
                for place in left:
                    answers[place] = APPLIED
                return
            patience.refused()
            await self._judge(group, left, answers, patience)
            possible = {place: one for place, one in left.items() if answers[place] is _NO_ANSWER}
            if len(possible) == len(left):
                await patience.again()  # what was in the way is gone already
            left = possible

    async def _send(self, group: Joined, steps: Sequence[Step], patience: Patience) -> bool:
        changes = [change for step in steps for change in step.changes]
        return await self._store.check_and_mutate(
            group.table_id, row_key(group.row), check_of(steps), changes, patience.attempt_seconds
        )

    async def _judge(
        self, group: Joined, steps: dict[int, Step], answers: list[Answer], patience: Patience
    ) -> None:
        """Answers those steps that are not possible in the row as it is now.

        What steps look at takes more room than their checks, which joined them. So it may take
        several readings; each step is judged on one.
        """
        needs = [
            (place, tuple(looked_at(one.mutation, self._times))) for place, one in steps.items()
        ]
        for places, selections in in_calls(needs, self._store.check_bytes_max):
            cells = await self._look(group, selections, patience)
            for place in places:
                refused = refusal(steps[place].mutation, cells, self._times)
                if refused is not None:
                    answers[place] = refused

    async def _look(
        self, group: Joined, selections: Sequence[Selection], patience: Patience
    ) -> list[StoredCell]:
        key = row_key(group.row)
        while True:
            try:
                rows = await self._store.read(
                    group.table_id, [key], selections, patience.attempt_seconds
                )
            except PercolatorError as error:
                await patience.outlast(error, is_read=True)
            else:
                return rows[0].cells if rows else []


async def _all_of(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Does these at the same time. The caller's own task does one of them: most have two."""
    *others, last = works
    tasks = list(map(asyncio.ensure_future, others))
    try:
        await last
        for task in tasks:
            await task
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)


def _certain(table_id: int, mutation: Mutation) -> list[Intent]:
    """What a mutation without conditions says: it notifies, and does nothing else."""
    notifies = [
        change.space == SPACE_NOTIFY and change.kind == Change.KIND_PUT
        for change in mutation.changes
    ]
    if not notifies or not all(notifies):
        raise InvalidArgument("changes", "a row store changes a cell only under a condition")
    return [
        Intent(
            table_id,
            mutation.row,
            mutation.column,
            change.qualifier,
            change.timestamp,
            is_certain=True,
        )
        for change in mutation.changes
    ]
