"""Conditional mutations: mapped, joined, sent, and judged if they were refused.

What the store has definitely not executed is sent again until the deadline. What it may have
executed is not: only the protocol knows what repeating it would mean.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from percolator.errors import (
    InvalidArgument,
    NotExecuted,
    PercolatorError,
    SnapshotTooOld,
    UsageError,
)
from percolator.formats.records import too_old
from percolator.limits import Limits
from percolator.routing.cells import APPLIED, Answer, CellMutation, ListedStep, Refused
from percolator.rowstore.intents import Intent, Intents
from percolator.rowstore.layout import (
    COLLECTED,
    LOCK_ONLY,
    LOCKS,
    ROLLBACKS,
    WRITES,
    Times,
    column_bounds,
    column_of,
    newest_note,
    no_proof,
    proof,
    proof_selected,
    row_key,
    stored_column,
    transactions_collected_above,
)
from percolator.rowstore.mapping import (
    Joined,
    Step,
    check_of,
    commits_selected,
    joined,
    mapped,
    mapped_step,
    oldest_admitted,
    other_sides,
)
from percolator.rowstore.patience import Patience
from percolator.rowstore.port import Change, Check, RowStore, Selection, StoredCell, in_calls
from percolator.v1.cells_pb2 import (
    SPACE_LOCK,
    SPACE_NOTIFY,
    SPACE_ROLLBACK,
    SPACE_WRITE,
    Cell,
    Space,
)
from percolator.v1.tabletserver_pb2 import Change as WireChange
from percolator.v1.tabletserver_pb2 import Condition, Mutation
from percolator.world import World

# Why a step was refused: its conditions, judged in their order on what the row holds.
#
# A store says only that a check did not pass. Then the row is read once, and the first condition
# that fails there is the answer, with the cell that failed it, as a tablet answers. The step has
# changed nothing, so it is as if it had been judged at the time of that reading. If no condition
# fails any more, the step is sent again.

_FAMILIES: dict[Space, tuple[str, ...]] = {
    SPACE_LOCK: (LOCKS,),
    SPACE_WRITE: (WRITES, LOCK_ONLY),
    SPACE_ROLLBACK: (ROLLBACKS,),
}


class _Version(NamedTuple):
    timestamp: int
    """As the protocol knows it: 0 for a lock."""
    column: bytes
    """As it is stored."""
    value: bytes


def looked_at(step: Mutation, times: Times) -> Iterator[Selection]:
    """All that the conditions of a step are about."""
    bounds = column_bounds(step.column)
    for condition in step.conditions:
        if condition.space == SPACE_WRITE:
            since, until = condition.from_timestamp, condition.until_timestamp
            yield from commits_selected(*bounds, since, until, times)
        elif condition.space == SPACE_ROLLBACK:
            from_time = times.at_or_above(condition.from_timestamp)
            until_time = times.at_or_above(condition.until_timestamp)
            yield Selection(ROLLBACKS, *bounds, from_time, until_time)
    yield Selection(LOCKS, *bounds)
    oldest = oldest_admitted(step)
    if oldest:
        yield transactions_collected_above(oldest, times)
    for side in other_sides(step):
        if side.space == SPACE_LOCK:
            yield Selection(LOCKS, side.first_column, side.end_column)
        else:
            yield from commits_selected(
                side.first_column, side.end_column, side.from_timestamp, 0, times
            )


def refusal(
    step: Mutation, cells: Iterable[StoredCell], times: Times
) -> Refused | SnapshotTooOld | None:
    """Why the step is not possible in a row with these cells; None if it is. The cells are those
    that `looked_at` selects, among others.

    A record of the transaction itself says what became of it, whatever else was collected. Without
    one, a note of collection counts before all else: what is not there proves nothing.
    """
    found = list(dict.fromkeys(cells))  # what several selections name is reported several times
    refused = _failed_condition(step, found, times)
    if refused is not None and _is_about_the_transaction(step.conditions[refused.condition]):
        return refused
    oldest = oldest_admitted(step)
    note = newest_note(found, times)
    return too_old(oldest, note) if oldest and note > oldest else refused


def _is_about_the_transaction(condition: Condition) -> bool:
    """True if the condition fails on the transaction's own commit or marker."""
    names_one = bool(condition.prefix) or condition.space == SPACE_ROLLBACK
    return condition.expectation == Condition.EXPECTATION_ABSENT and names_one


def _failed_condition(step: Mutation, found: Sequence[StoredCell], times: Times) -> Refused | None:
    own = column_bounds(step.column)
    for index, condition in enumerate(step.conditions):
        versions = _versions(found, condition.space, *own, times)
        until = condition.until_timestamp
        selected = [
            one
            for one in versions
            if condition.from_timestamp <= one.timestamp and (not until or one.timestamp < until)
        ]
        holds, offender = _judged(condition, selected)
        if not holds:
            return Refused(index, _cell(step, condition.space, offender))
    for side in other_sides(step):
        bounds = side.first_column, side.end_column
        for version in _versions(found, side.space, *bounds, times):
            if version.timestamp >= side.from_timestamp:
                return Refused(side.condition, _cell(step, side.space, version))
    return None


def _versions(
    cells: Iterable[StoredCell], space: Space, first: bytes, end: bytes, times: Times
) -> list[_Version]:
    """The versions in a space and in columns from `first` to `end`, the oldest first."""
    families = _FAMILIES[space]
    return sorted(
        _Version(0 if space == SPACE_LOCK else times.timestamp(cell.time), cell.column, cell.value)
        for cell in cells
        if cell.family in families and first <= cell.column and (not end or cell.column < end)
    )


def _judged(condition: Condition, versions: list[_Version]) -> tuple[bool, _Version | None]:
    """Judges whether a condition holds for these versions, and the version that fails it, if one
    does."""
    selected = [one for one in versions if one.value.startswith(condition.prefix)]
    match condition.expectation:
        case Condition.EXPECTATION_ABSENT:
            return not selected, selected[0] if selected else None
        case Condition.EXPECTATION_PRESENT:
            return bool(selected), versions[-1] if versions else None
        case Condition.EXPECTATION_AT_MOST if selected:
            end = len(condition.prefix) + len(condition.required)
            is_above = selected[0].value[len(condition.prefix) : end] > condition.required
            return not is_above, selected[0] if is_above else None
        case Condition.EXPECTATION_AT_MOST:
            return False, versions[-1] if versions else None
        case Condition.EXPECTATION_BEGINS_IF_PRESENT:
            others = [one for one in selected if not one.value.startswith(condition.required)]
            return not others, others[-1] if others else None
        case _:
            raise InvalidArgument(
                "mutation", f"a row store cannot judge expectation {condition.expectation}"
            )


def _cell(step: Mutation, space: Space, version: _Version | None) -> Cell | None:
    if version is None:
        return None
    other = b"" if version.column == stored_column(step.column) else column_of(version.column)
    return Cell(
        space=space,
        row=step.row,
        column=step.column,
        timestamp=version.timestamp,
        value=version.value,
        qualifier=other,
    )


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
                if isinstance(mutation, ListedStep) or mutation.conditions:
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

        What steps look at takes more space than their checks, which joined them. So it may take
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
        read = partial(self._store.read, group.table_id, [row_key(group.row)], selections)
        rows = await patience.repeated(read)
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
    """Intents of a mutation without conditions: it only notifies."""
    notifies = [
        change.space == SPACE_NOTIFY and change.kind == WireChange.KIND_PUT
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


# Groups of steps on one row as one check with all of their changes.
#
#     nothing is expected   all is asked for that any step must not find, as for joined steps
#     locks are expected    the locks are counted. A step that expects nothing must have left a
#                           proof (layout.py) in an earlier group; that is counted, too
#
# A step without changes leaves a proof wherever it is part of a group of the first kind. So a
# shared transaction (percolator/protocol/shared/participant.py) has a proof that it is open, from
# the beginning of its first participant until it ends, and can be committed with one check.
#
# A check may describe only so much. The locks are one selection of as many ranges of values as
# there are locks, and no columns: the value of a lock begins with its start, and of all cells of
# the row, the transaction that began then has locked only this one. (A participant has one cell
# there, its primary.)


class Group(NamedTuple):
    """Steps as one call."""

    check: Check
    changes: Sequence[Change]


def grouped(steps: Sequence[Step], ranges_max: int, times: Times) -> Group:
    """The steps of one row as one call. Raises `UsageError` if these are too many locks, and
    `InvalidArgument` if it is not possible."""
    changes = [change for step in steps for change in step.changes]
    locked = [step for step in steps if step.expects_lock]
    cells = [(step.mutation.column, step.start) for step in steps if not step.expects_lock]
    if not locked:
        obstacles = tuple(one for step in steps for one in step.selections)
        looked = [(step.mutation.column, step.start) for step in steps if not step.changes]
        proofs = [proof(*cell, times) for cell in looked]
        return Group(Check(obstacles, found=False), [*changes, *proofs])
    if len({step.start for step in locked}) < len(locked):
        raise InvalidArgument("mutations", "two steps of a group expect locks of one transaction")
    if len(locked) > ranges_max:
        raise UsageError(
            f"in a row store, at most {ranges_max} parts of a shared transaction can be committed "
            f"together, and this one has {len(locked)}: run it as fewer tasks"
        )
    ranges = [(one.first_value, one.end_value) for step in locked for one in step.selections]
    selections = [Selection(LOCKS, any_of=tuple(ranges))]
    selections += [proof_selected(*cell, times) for cell in cells]
    check = Check(tuple(selections), found=True, more_than=len(steps) - 1)
    return Group(check, [*changes, *(no_proof(*cell, times) for cell in cells)])


# `percolator.routing.cells.Groups` on a row store: steps of a row, made together or not at all.

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
        rows = await patience.repeated(partial(self._store.read, table_id, [key], selections))
        return rows[0].cells if rows else []
