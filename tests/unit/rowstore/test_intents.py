"""The table of intents, and what is deleted from it when."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percolator.bigtable.admin import create_table
from percolator.errors import CellAddress, ExecutionUnknown
from percolator.formats.records import LockRecord, RecordKind
from percolator.observers.context import Waiting, WorkRequest
from percolator.observers.intent_notifications import _NO_TRACE_SECONDS, IntentNotifications
from percolator.protocol import steps
from percolator.routing.cells import APPLIED, Answer, CellMutation, Refused
from percolator.rowstore.intents import (
    BUCKETS,
    INTENTS_TABLE,
    Intent,
    Intents,
    exactly,
    key_from,
)
from percolator.rowstore.port import RowChange
from tests.unit.rowstore.model_store import PLACE, SECONDS, TABLE, TIMES, ModelStore, at
from tests.unit.rowstore.test_calls import prewrites

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


async def opened(rows: ModelStore) -> ModelStore:
    await create_table(rows.network, PLACE, INTENTS_TABLE, SECONDS)
    await rows.intents.write(INTENTS, rows.deadline)
    return rows


def notifications_of(rows: ModelStore, intents: Intents) -> IntentNotifications:
    env = cast("Any", SimpleNamespace(limits=rows.limits))
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two surveys would take it for unchanged, although intents were deleted between them."""
    rows = await opened(ModelStore())
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


async def test_the_mark_is_changed_before_handled_intents_are_deleted() -> None:
    """Otherwise, two surveys might find nothing while work moves behind them."""
    rows = await opened(ModelStore())
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


async def test_nothing_is_deleted_if_the_mark_could_not_be_changed() -> None:
    rows = await opened(ModelStore())
    notifications = notifications_of(rows, LostMarks(rows))
    found = await surveyed(notifications)
    assert isinstance(await notifications.forget(found, rows.deadline), ExecutionUnknown)
    assert await surveyed(notifications) == found


async def test_only_what_was_handled_is_deleted() -> None:
    """A later change of the same cell still waits for its observer."""
    rows = await opened(ModelStore())
    notifications = notifications_of(rows, rows.intents)
    first, second = await surveyed(notifications)
    assert await notifications.forget([first._replace(timestamps=(at(0),))], rows.deadline) is None
    assert await surveyed(notifications) == [first._replace(timestamps=(at(1),)), second]


async def test_intents_of_locked_cells_are_sent_in_the_same_order_in_every_process() -> None:
    """Whoever knows the observers has them in a set, whose order is another in each process."""
    rows = await opened(await ModelStore().opened())
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


async def test_where_nothing_is_locked_nothing_is_announced() -> None:
    """An observer may be new of a column that a shared transaction does not write."""
    rows = await opened(await ModelStore().opened())
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


async def test_a_cell_that_was_locked_since_the_worker_looked_keeps_its_lock() -> None:
    """Its transaction may have committed since: without the lock, half of it would be lost."""
    rows = await (await opened(ModelStore())).opened()
    intent = INTENTS[2]
    prewrite = steps.prewrite(intent.row, intent.column, intent.timestamp, lock_of(intent), None)
    cells = PrewrittenMeanwhile(rows, CellMutation(TABLE, prewrite))
    env = SimpleNamespace(limits=rows.limits, cells=cells, now=rows.clock.monotonic_seconds)
    notifications = IntentNotifications(
        rows.world, cast("Any", env), cast("Any", None), rows.intents
    )
    await notifications._mark_dead(await notifications._fates.judge([intent]))
    await rows.clock.sleep(_NO_TRACE_SECONDS)
    judged = await notifications._fates.judge([intent])
    await notifications._mark_dead(judged)
    question = steps.status(intent.row, intent.column, intent.timestamp)
    (found,) = await rows.cells.mutate([CellMutation(TABLE, question)], rows.deadline)
    assert isinstance(found, Refused)
    assert found.cell is not None
    assert found.cell.value == lock_of(intent)
    assert not judged.rolled_back
    assert not judged.committed


class Silent:
    """Cells that do not answer."""

    async def mutate(self, asked: Sequence[CellMutation], deadline: float) -> list[Answer]:
        return [ExecutionUnknown("no answer") for _ in asked]


async def test_a_survey_that_cannot_look_into_a_cell_fails() -> None:
    """Otherwise, `wait_for_observers` would return while the cell's change waits."""
    rows = await opened(ModelStore())
    env = SimpleNamespace(limits=rows.limits, cells=Silent(), now=rows.clock.monotonic_seconds)
    notifications = IntentNotifications(
        rows.world, cast("Any", env), cast("Any", None), rows.intents
    )
    with pytest.raises(ExecutionUnknown, match="no answer"):
        await surveyed(notifications, locks_before=at(9))


async def test_a_page_for_more_observers_than_a_filter_may_name_has_only_theirs() -> None:
    rows = await opened(ModelStore())
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


async def test_locks_in_more_columns_than_a_filter_may_name_are_announced() -> None:
    rows = await opened(await ModelStore().opened())
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
