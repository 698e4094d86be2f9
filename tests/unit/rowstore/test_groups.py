"""Groups of steps in a row store: the two kinds that shared transactions have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percolator.bigtable.admin import create_table
from percolator.codecs.values import after_prefix
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    PercolatorError,
    Retry,
    SnapshotTooOld,
    UsageError,
)
from percolator.formats.records import KIND_LOCK_ONLY, WRITE_HEADER, LockRecord, RecordKind
from percolator.observers.context import Waiting, WorkRequest
from percolator.observers.intent_notifications import _NO_TRACE_SECONDS, IntentNotifications
from percolator.protocol import steps
from percolator.routing.cells import APPLIED, Answer, CellMutation, Refused
from percolator.rowstore import mapping, mutations
from percolator.rowstore.adapter import stored_cells
from percolator.rowstore.collection import Bounds, collectable, no_older_lock, planned
from percolator.rowstore.intents import (
    BUCKETS,
    INTENTS_TABLE,
    Intent,
    Intents,
    exactly,
    key_from,
)
from percolator.rowstore.layout import LOCKS, Times
from percolator.rowstore.mapping import Step
from percolator.rowstore.mutations import RowGroups
from percolator.rowstore.port import TIME_UNIT, Change, Check, DeleteCell, RowChange, Selection
from percolator.v1.cells_pb2 import SPACE_LOCK
from percolator.v1.tabletserver_pb2 import Condition, Mutation
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE, TIMES, ModelStore, at
from tests.unit.rowstore.test_calls import prewrites

ROW = b"job"
CLOSED = b"closed"
BEGAN, COMMIT = at(1), at(2_000)
START = 10
"""The number of the first part's start timestamp."""


class Group:
    """The groups of one shared transaction, in the model."""

    def __init__(self, rows: ModelStore) -> None:
        self.rows = rows
        self.groups = RowGroups(rows.store, TIMES, rows.world, rows.limits)

    async def made(self, *mutations: Mutation) -> list[Answer]:
        return await self.groups.mutate_together(TABLE, mutations, self.rows.deadline)

    async def begin(self, *numbers: int, min_commit: int = 0) -> list[Answer]:
        answers: list[Answer] = []
        for number in numbers:
            lock = _lock(number, min_commit)
            step = steps.prewrite(ROW, _column(number), at(number), lock, None)
            answers += await self.made(steps.require_open(ROW, CLOSED, BEGAN), step)
        return answers

    async def commit(self, numbers: Sequence[int], commit: int = COMMIT) -> list[Answer]:
        record = WRITE_HEADER.pack(BEGAN, KIND_LOCK_ONLY)
        group = [steps.close_committed(ROW, CLOSED, BEGAN, commit, record)]
        for number in numbers:
            record = WRITE_HEADER.pack(at(number), KIND_LOCK_ONLY)
            group.append(steps.commit_part(ROW, _column(number), at(number), commit, record))
        return await self.made(*group)

    async def roll_back(self, column: bytes, start: int) -> None:
        step = steps.roll_back(ROW, column, start)
        answers = await self.rows.cells.mutate([CellMutation(TABLE, step)], self.rows.deadline)
        assert answers == [APPLIED]

    async def collect(self, below: int) -> int:
        """Collects the row. Returns how many cells were deleted."""
        bounds, store = Bounds(below, below), self.rows.store
        rows = await store.read(TABLE, [ROW], collectable(bounds, TIMES), SECONDS)
        plan = planned(rows[0].cells if rows else [], bounds, TIMES)
        assert plan is not None
        if not plan.cells:
            return 0
        for changes in plan.changes(bounds, TIMES):
            check = no_older_lock(bounds, TIMES)
            assert await store.check_and_mutate(TABLE, ROW, check, changes, SECONDS)
        return plan.cells

    def stored(self) -> list[tuple[str, bytes]]:
        """Family and column of each cell of the row."""
        (table,) = self.rows.model.tables.values()
        return sorted((family, column) for family, column, _ in table.rows.get(ROW, {}))


def _column(number: int) -> bytes:
    return b"0.%d.0.task" % at(number)


def _lock(number: int, min_commit: int = 0) -> bytes:
    primary = CellAddress(TABLE, ROW, _column(number))
    least = min_commit or at(number) + 1
    return LockRecord(at(number), least, 1_000, RecordKind.PUT, b"", primary, b"open").encode()


async def opened() -> Group:
    return Group(await ModelStore().opened())


@pytest.fixture
@asynccontextmanager
async def group() -> AsyncIterator[Group]:
    """Groups of steps in an empty row store."""
    yield await opened()


def _conditions(answers: Sequence[Answer]) -> list[int | None]:
    """The failed condition of each answer; None if the others were refused."""
    assert all(isinstance(one, Refused | NotExecuted) for one in answers)
    return [one.condition if isinstance(one, Refused) else None for one in answers]


async def test_all_parts_are_committed_at_one_moment_and_nothing_is_left_but_records(
    group: Group,
) -> None:
    assert await group.begin(10, 11, 12) == [APPLIED] * 6
    assert await group.commit([10, 12]) == [APPLIED] * 3
    columns = [b"c" + one for one in (_column(10), _column(12), CLOSED)]
    assert group.stored() == [("l", b"c" + _column(11)), *(("o", one) for one in sorted(columns))]


@pytest.mark.parametrize("lost", [10, 11, 12])
async def test_none_is_committed_if_one_was_rolled_back(group: Group, lost: int) -> None:
    await group.begin(10, 11, 12)
    await group.roll_back(_column(lost), at(lost))
    answers = await group.commit([10, 11, 12])
    expected = [steps.OWN_ROLLBACK if number == lost else None for number in (10, 11, 12)]
    assert _conditions(answers) == [None, *expected]
    assert not any(family == "o" for family, _ in group.stored())


async def test_a_lock_of_another_attempt_does_not_stand_for_one_that_is_lost(group: Group) -> None:
    """There are as many locks in the row as parts to commit."""
    await group.begin(10, 11, 13)
    await group.roll_back(_column(11), at(11))
    assert _conditions(await group.commit([10, 11])) == [None, None, steps.OWN_ROLLBACK]


async def test_a_part_that_was_pushed_above_the_commit_is_refused_with_its_lock(
    group: Group,
) -> None:
    await group.begin(10)
    await group.begin(11, min_commit=COMMIT + 1)
    answers = await group.commit([10, 11])
    assert _conditions(answers) == [None, None, steps.OWN_LOCK]
    refused = answers[2]
    assert isinstance(refused, Refused)
    assert refused.cell is not None
    assert (refused.cell.space, refused.cell.value) == (SPACE_LOCK, _lock(11, COMMIT + 1))
    assert await group.commit([10, 11], COMMIT + 64) == [APPLIED] * 3


async def test_a_part_that_was_pushed_up_to_the_commit_is_committed(group: Group) -> None:
    await group.begin(10, min_commit=COMMIT)
    assert await group.commit([10]) == [APPLIED] * 2


async def test_after_the_end_nothing_begins_and_nothing_is_committed(group: Group) -> None:
    await group.begin(10)
    await group.roll_back(CLOSED, BEGAN)
    assert _conditions(await group.commit([10])) == [steps.OWN_ROLLBACK, None]
    assert _conditions(await group.begin(11)) == [steps.OWN_ROLLBACK, None]
    assert [one for one in group.stored() if one[0] == "l"] == [("l", b"c" + _column(10))]


async def test_a_commit_that_is_repeated_finds_itself(group: Group) -> None:
    await group.begin(10, 11)
    await group.commit([10, 11])
    answers = await group.commit([10, 11])
    assert _conditions(answers) == [steps.OWN_COMMIT] * 3
    assert {one.cell.timestamp for one in answers if isinstance(one, Refused) and one.cell} == {
        COMMIT
    }
    assert _conditions(await group.begin(12)) == [steps.OWN_COMMIT, None]


async def test_what_is_committed_is_not_committed_again_with_other_parts(group: Group) -> None:
    await group.begin(10, 11)
    await group.commit([10])
    assert _conditions(await group.commit([11], COMMIT + 64)) == [steps.OWN_COMMIT, None]


async def test_a_beginning_that_is_repeated_finds_its_lock(group: Group) -> None:
    await group.begin(10)
    assert _conditions(await group.begin(10)) == [None, steps.PREWRITE_LOCKED]


async def test_the_proof_of_a_driver_that_died_is_collected_and_then_nothing_is_committed(
    group: Group,
) -> None:
    await group.begin(10)
    await group.roll_back(_column(10), at(10))
    assert ("r", b"p" + CLOSED) in group.stored()
    assert (await group.collect(BEGAN), await group.collect(at(11))) == (0, 2)
    assert {family for family, _ in group.stored()} == {"g"}
    # A marker may have been there, too, and would be gone as well.
    assert [type(one) for one in await group.begin(20)] == [SnapshotTooOld, NotExecuted]
    assert [type(one) for one in await group.commit([20])] == [SnapshotTooOld, Refused]


async def test_a_proof_is_no_cell_of_the_transactions(group: Group) -> None:
    await group.begin(10)
    cells = [one async for one in stored_cells(group.rows.store, TABLE, TIMES, SECONDS)]
    assert [cell.column for cell in cells] == [_column(10)]


async def test_as_many_parts_as_a_check_can_describe_and_no_more(group: Group) -> None:
    most = group.rows.store.ranges_max
    numbers = range(START, START + most)
    await group.begin(*numbers)
    assert await group.commit(numbers) == [APPLIED] * (most + 1)
    with pytest.raises(UsageError, match=f"at most {most} parts .* and this one has {most + 1}"):
        await group.commit(range(START, START + most + 1))


async def test_what_may_have_been_made_is_not_repeated(group: Group) -> None:
    await group.begin(10)
    correct = group.rows.store.check_and_mutate

    async def unanswered(
        table: int, key: bytes, check: Check, changes: Sequence[Change], timeout: float
    ) -> bool:
        await correct(table, key, check, changes, timeout)
        raise ExecutionUnknown("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.rows.store, "check_and_mutate", unanswered)
        with pytest.raises(PercolatorError, match="no answer"):
            await group.commit([10])
    assert _conditions(await group.commit([10])) == [steps.OWN_COMMIT] * 2


async def test_a_group_that_is_refused_and_cannot_be_looked_at_may_have_been_made(
    group: Group,
) -> None:
    """Its call reached the store twice, and the second copy found what the first had made."""
    await group.begin(10)
    correct = group.rows.store.check_and_mutate

    async def twice(*arguments: Any) -> bool:
        await correct(*arguments)
        return await correct(*arguments)

    async def silent(*_: Any) -> None:
        raise ExecutionUnknown("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group.rows.store, "check_and_mutate", twice)
        patch.setattr(group.rows.store, "read", silent)
        with pytest.raises(PercolatorError, match="no answer") as raised:
            await group.commit([10])
        assert raised.value.retry is Retry.UNKNOWN
    assert _conditions(await group.commit([10])) == [steps.OWN_COMMIT] * 2


async def test_what_is_not_of_one_row_is_refused(group: Group) -> None:
    other = steps.require_open(b"other", CLOSED, BEGAN)
    with pytest.raises(InvalidArgument, match="a group is of one row"):
        await group.made(steps.require_open(ROW, CLOSED, BEGAN), other)


# ---------------------------------------------------------------- planted mistakes

Patch = pytest.MonkeyPatch


def pushes_are_passed(patch: Patch) -> None:
    """A reader above the commit has read past the part."""
    correct = mapping._expected_lock

    def wrong(column: bytes, condition: Condition, times: Times) -> Selection:
        own = correct(column, condition, times)
        return own._replace(end_value=after_prefix(condition.prefix))

    patch.setattr(mapping, "_expected_lock", wrong)


def the_end_is_not_asked_for(patch: Patch) -> None:
    """Plants a bug: a group that was given up is committed by a late message."""
    correct = mutations.grouped

    def wrong(steps_: Sequence[Step], ranges_max: int, times: Times) -> mutations.Group:
        group = correct(steps_, ranges_max, times)
        if not group.check.found:
            return group
        locks = tuple(one for one in group.check.selections if one.family == LOCKS)
        more_than = group.check.more_than - 1
        return group._replace(check=Check(locks, found=True, more_than=more_than))

    patch.setattr(mutations, "grouped", wrong)


def markers_leave_the_proof(patch: Patch) -> None:
    """It says that the transaction is open, and it is not."""
    correct = mapping._changed

    def wrong(*arguments: Any) -> tuple[Change, ...]:
        return tuple(one for one in correct(*arguments) if not one.column.startswith(b"p"))

    patch.setattr(mapping, "_changed", wrong)


def commits_leave_the_proof(patch: Patch) -> None:
    """Other parts are committed at a second timestamp."""
    nothing = DeleteCell(LOCKS, b"nothing", TIME_UNIT)
    patch.setattr(mutations, "no_proof", lambda *_: nothing)


def beginnings_leave_no_proof(patch: Patch) -> None:
    """Nothing can be committed."""
    nothing = DeleteCell(LOCKS, b"nothing", TIME_UNIT)
    patch.setattr(mutations, "proof", lambda *_: nothing)


def no_note_is_looked_at(patch: Patch) -> None:
    """Where evidence was collected, what is not there proves nothing."""
    patch.setattr(mapping, "transactions_collected_above", lambda *_: Selection(LOCKS, b"\xff"))


MISTAKES: dict[Callable[[Patch], None], Callable[[Group], Awaitable[None]]] = {
    pushes_are_passed: (test_a_part_that_was_pushed_above_the_commit_is_refused_with_its_lock),
    the_end_is_not_asked_for: test_after_the_end_nothing_begins_and_nothing_is_committed,
    markers_leave_the_proof: test_after_the_end_nothing_begins_and_nothing_is_committed,
    commits_leave_the_proof: test_what_is_committed_is_not_committed_again_with_other_parts,
    beginnings_leave_no_proof: (
        test_all_parts_are_committed_at_one_moment_and_nothing_is_left_but_records
    ),
    no_note_is_looked_at: (
        test_the_proof_of_a_driver_that_died_is_collected_and_then_nothing_is_committed
    ),
}


@pytest.mark.parametrize("plant", MISTAKES)
async def test_a_mistake_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, DeadlineExceeded)):
        await MISTAKES[plant](await opened())


# The table of intents, and what is deleted from it when.

INTENTS = [
    Intent(TABLE, row, b"column", b"observer", at(number), is_certain=False)
    for number, row in enumerate((b"a", b"a", b"b"))
]


class WatchedIntents(Intents):
    """Notes what the mark is when intents are deleted."""

    def __init__(self, rows: ModelStore) -> None:
        super().__init__(rows.store, TIMES, rows.world, rows.limits)
        self.marks: list[Hashable] = []

    async def delete(self, intents: Sequence[Intent], deadline: float) -> None:
        self.marks.append(await self.mark(deadline))
        await super().delete(intents, deadline)


class LostMarks(WatchedIntents):
    async def touch(self, deadline: float) -> None:
        raise ExecutionUnknown("no answer")


async def with_intents(rows: ModelStore) -> ModelStore:
    await create_table(rows.network, PLACE, INTENTS_TABLE, SECONDS)
    await rows.intents.write(INTENTS, rows.deadline)
    return rows


@pytest.fixture
@asynccontextmanager
async def rows() -> AsyncIterator[ModelStore]:
    """A row store with intents."""
    yield await with_intents(await ModelStore().opened())


def notifications_of(
    rows: ModelStore, intents: Intents, cells: object = None
) -> IntentNotifications:
    now = rows.clock.monotonic_seconds
    env: Any = SimpleNamespace(
        limits=rows.limits, cells=cells, now=now, deadline=lambda: now() + 5.0
    )
    return IntentNotifications(rows.world, env, cast("Any", None), intents)


def lock_of(intent: Intent) -> bytes:
    return LockRecord(
        intent.timestamp,
        intent.timestamp + 1,
        ttl_milliseconds=3_000,
        kind=RecordKind.PUT,
        session=b"",
        primary=CellAddress(TABLE, b"a", b"primary"),
        value=b"new",
    ).encode()


async def surveyed(notifications: IntentNotifications, *, locks_before: int = 0) -> list[Waiting]:
    answers = notifications.survey(WorkRequest(TABLE, locks_before=locks_before))
    return sorted([one async for answer in answers for one in answer.waiting])


async def test_a_late_copy_of_a_change_of_the_mark_brings_no_earlier_mark_back(
    rows: ModelStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two surveys would take it for unchanged, although intents were deleted between them."""
    write, sent = rows.store.write, []

    async def unanswered(table: int, changes: Sequence[RowChange], seconds: float) -> None:
        sent.append(changes)
        await write(table, changes, seconds)
        if len(sent) == 1:
            raise ExecutionUnknown("no answer")

    monkeypatch.setattr(rows.store, "write", unanswered)
    # All in one row, as the one in sixteen that are.
    monkeypatch.setattr(rows.world.random, "randrange", lambda _: 0)
    await rows.intents.touch(rows.deadline)
    seen = await rows.intents.mark(rows.deadline)
    await rows.intents.touch(rows.deadline)
    await write(INTENTS_TABLE, sent[0], SECONDS)
    assert len(sent) == 3
    assert await rows.intents.mark(rows.deadline) != seen


async def test_the_mark_is_changed_before_handled_intents_are_deleted(rows: ModelStore) -> None:
    """Otherwise, two surveys might find nothing while work moves behind them."""
    intents = WatchedIntents(rows)
    notifications = notifications_of(rows, intents)
    found = await surveyed(notifications)
    assert [(one.row, one.timestamps) for one in found] == [
        (b"a", (at(1), at(0))),
        (b"b", (at(2),)),
    ]
    marks = [await intents.mark(rows.deadline)]
    for one in found:
        assert await notifications.forget([one], rows.deadline) is None
        marks.append(await intents.mark(rows.deadline))
    assert intents.marks == marks[1:], "it was changed before, and not again after"
    assert len(set(marks)) == 3
    assert await surveyed(notifications) == []


async def test_nothing_is_deleted_if_the_mark_could_not_be_changed(rows: ModelStore) -> None:
    notifications = notifications_of(rows, LostMarks(rows))
    found = await surveyed(notifications)
    assert isinstance(await notifications.forget(found, rows.deadline), ExecutionUnknown)
    assert await surveyed(notifications) == found


async def test_only_what_was_handled_is_deleted(rows: ModelStore) -> None:
    """A later change of the same cell still waits for its observer."""
    notifications = notifications_of(rows, rows.intents)
    first, second = await surveyed(notifications)
    assert await notifications.forget([first._replace(timestamps=(at(0),))], rows.deadline) is None
    assert await surveyed(notifications) == [first._replace(timestamps=(at(1),)), second]


async def test_intents_of_locked_cells_are_sent_in_the_same_order_in_every_process(
    rows: ModelStore,
) -> None:
    """Whoever knows the observers has them in a set, whose order is another in each process."""
    await rows.cells.mutate(prewrites(at(5), b"a", [b"0"]), rows.deadline)
    sent: list[list[bytes]] = []

    class Noted(Intents):
        async def write(self, intents: Sequence[Intent], deadline: float) -> None:
            sent.append([one.observer for one in intents])

    intents = Noted(rows.store, TIMES, rows.world, rows.limits)
    for observers in ([b"x", b"y"], [b"y", b"x"]):
        observed = [(b"0", observer) for observer in observers]
        await intents.announce_locked(TABLE, observed, [at(5)], rows.deadline)
    assert sent == [[b"x", b"y"], [b"x", b"y"]]


async def test_where_nothing_is_locked_nothing_is_announced(rows: ModelStore) -> None:
    """An observer may be new of a column that a shared transaction does not write."""
    await rows.cells.mutate(prewrites(at(5), b"a", [b"0"]), rows.deadline)
    await rows.intents.announce_locked(TABLE, [(b"1", b"late")], [at(5)], rows.deadline)
    assert await rows.intents.page(b"", b"", [exactly(TABLE, b"late")], rows.deadline) == ([], b"")


class PrewrittenMeanwhile:
    """The cells of a store, in which a transaction locks its cell after a worker has looked there,
    and before the worker's next step arrives."""

    def __init__(self, rows: ModelStore, late: CellMutation) -> None:
        self._rows = rows
        self._late: CellMutation | None = late
        self._looks = 0

    async def mutate(self, asked: Sequence[CellMutation], deadline: float) -> list[Answer]:
        if asked and self._looks == 2 and self._late is not None:
            late, self._late = self._late, None
            assert await self._rows.cells.mutate([late], deadline) == [APPLIED]
        self._looks += 1
        return await self._rows.cells.mutate(asked, deadline)


async def test_a_cell_that_was_locked_since_the_worker_looked_keeps_its_lock(
    rows: ModelStore,
) -> None:
    """Its transaction may have committed since: without the lock, half of it would be lost."""
    intent = INTENTS[2]
    prewrite = steps.prewrite(intent.row, intent.column, intent.timestamp, lock_of(intent), None)
    cells = PrewrittenMeanwhile(rows, CellMutation(TABLE, prewrite))
    notifications = notifications_of(rows, rows.intents, cells)
    await notifications._mark_dead(await notifications._fates.judge([intent]))
    await rows.clock.sleep(_NO_TRACE_SECONDS)
    judged = await notifications._fates.judge([intent])
    await notifications._mark_dead(judged)
    question = steps.status(intent.row, intent.column, intent.timestamp)
    (found,) = await rows.cells.mutate([CellMutation(TABLE, question)], rows.deadline)
    assert isinstance(found, Refused)
    assert found.cell is not None
    assert found.cell.value == lock_of(intent)
    assert not [*judged.rolled_back, *judged.committed]


class Silent:
    """Cells that do not answer."""

    async def mutate(self, asked: Sequence[CellMutation], deadline: float) -> list[Answer]:
        return [ExecutionUnknown("no answer") for _ in asked]


async def test_a_survey_that_cannot_look_into_a_cell_fails(rows: ModelStore) -> None:
    """Otherwise, `wait_for_observers` would return while the cell's change waits."""
    notifications = notifications_of(rows, rows.intents, Silent())
    with pytest.raises(ExecutionUnknown, match="no answer"):
        await surveyed(notifications, locks_before=at(9))


async def test_a_page_for_more_observers_than_a_filter_may_name_has_only_theirs(
    rows: ModelStore,
) -> None:
    names = [b"observer %0100d" % number for number in range(300)]
    theirs = [
        Intent(TABLE, b"c", b"column", one, at(number + 9), is_certain=False)
        for number, one in enumerate(names)
    ]
    await rows.intents.write(theirs, rows.deadline)
    columns = [exactly(TABLE, one) for one in names]
    found, first = [], key_from(BUCKETS[0])
    while first:
        page, first = await rows.intents.page(first, b"", columns, rows.deadline)
        found += page
    assert sorted(found) == sorted(theirs)


async def test_locks_in_more_columns_than_a_filter_may_name_are_announced(rows: ModelStore) -> None:
    names = [b"column %0100d" % number for number in range(300)]
    await rows.cells.mutate(prewrites(at(9), b"d", [names[7], b"other"]), rows.deadline)
    observed = [(one, b"observer") for one in names]
    await rows.intents.announce_locked(TABLE, observed, [at(9)], rows.deadline)
    found, _ = await rows.intents.page(
        key_from(BUCKETS[0]), b"", [exactly(TABLE, b"observer")], rows.deadline
    )
    assert [one for one in found if one.timestamp == at(9)] == [
        Intent(TABLE, b"d", names[7], b"observer", at(9), is_certain=False)
    ]
