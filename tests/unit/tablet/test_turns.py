"""Queues of cells: who may begin, where, and how a turn ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.errors import Overloaded, TabletMoved
from percolator.tablet.state import TabletIdentity
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import COLUMN, TARGET, OneRoundRig, one_round, prewrite, roll_back

HOLD_SECONDS = 0.5
LONG_SECONDS = 60.0


@pytest.fixture
@asynccontextmanager
async def rig() -> AsyncIterator[OneRoundRig]:
    rig = OneRoundRig()
    rig.oracle.seconds = 0.0
    await rig.tablet.open()
    yield rig
    await rig.tablet.close()


async def turn(
    rig: OneRoundRig, place: int, *, within_seconds: float = LONG_SECONDS, **fields: Any
) -> pb.AwaitTurnResponse:
    request = pb.AwaitTurnRequest(target=TARGET, row=b"bob", column=COLUMN, place=place)
    request.hold_milliseconds = int(1000 * HOLD_SECONDS)
    request.MergeFrom(pb.AwaitTurnRequest(**fields))
    deadline = rig.clock.monotonic_seconds() + within_seconds
    return await rig.tablet.await_turn(request, deadline_seconds=deadline)


async def waiting(rig: OneRoundRig, place: int, **options: Any) -> asyncio.Task[Any]:
    """A turn that is waited for: the call has reached the tablet."""
    task = asyncio.ensure_future(turn(rig, place, **options))
    await asyncio.sleep(0.001)
    return task


def end(rig: OneRoundRig, place: int) -> None:
    rig.tablet.end_turn(pb.EndTurnRequest(target=TARGET, row=b"bob", column=COLUMN, place=place))


async def test_the_first_to_come_begins_at_once_and_learns_the_cell(rig: OneRoundRig) -> None:
    await rig.commit(one_round(1, {b"bob": b"5"}))
    answer = await turn(rig, 1)
    assert answer.in_turn
    assert not answer.contended
    assert (answer.start_timestamp, list(answer.found.found.values)) == (200, [b"5"])


async def test_the_next_begins_directly_above_the_commit_before_it(rig: OneRoundRig) -> None:
    first = await turn(rig, 1, hold_milliseconds=10_000)
    second, third = await waiting(rig, 2), await waiting(rig, 3)
    committed = await rig.commit(one_round(first.start_timestamp, {b"bob": b"6"}))
    answer = await second
    assert answer.start_timestamp == committed.commit_timestamps[0] + 1
    assert list(answer.found.found.values) == [b"6"]
    assert answer.contended
    assert rig.oracle.asked == [1, 2]
    assert not third.done()
    third.cancel()


async def test_one_that_came_after_the_timestamps_were_asked_for_begins_later(
    rig: OneRoundRig,
) -> None:
    first = await turn(rig, 1, hold_milliseconds=10_000)
    leaving = await waiting(rig, 2)
    rig.oracle.seconds = 1.0
    committing = rig.committing(one_round(first.start_timestamp, {b"bob": b"6"}))
    await asyncio.sleep(0.5)
    late = await waiting(rig, 3)
    leaving.cancel()
    (commit_ts,) = (await committing).commit_timestamps
    assert (await late).start_timestamp > commit_ts + 1


async def test_the_next_attempt_keeps_the_turn_and_begins_anew(rig: OneRoundRig) -> None:
    first = await turn(rig, 1)
    second = await waiting(rig, 2)
    again = await turn(rig, 1)
    assert again.in_turn
    assert again.start_timestamp > first.start_timestamp
    assert not second.done()
    second.cancel()


async def test_a_set_aside_timestamp_is_given_once(rig: OneRoundRig) -> None:
    first = await turn(rig, 1, hold_milliseconds=10_000)
    second = await waiting(rig, 2)
    await rig.commit(one_round(first.start_timestamp, {b"bob": b"6"}))
    assert (await turn(rig, 2)).start_timestamp != (await second).start_timestamp


async def test_a_turn_ends_with_the_rollback_of_its_transaction(rig: OneRoundRig) -> None:
    await turn(rig, 1, start_timestamp=10, hold_milliseconds=10_000)
    second = await waiting(rig, 2)
    await rig.mutate(prewrite(b"bob", 10))
    assert not second.done()
    await rig.mutate(roll_back(b"bob", 10))
    assert (await second).in_turn


async def test_the_commit_of_another_transaction_ends_no_turn(rig: OneRoundRig) -> None:
    await turn(rig, 1, start_timestamp=10, hold_milliseconds=10_000)
    second = await waiting(rig, 2)
    await rig.commit(one_round(11, {b"bob": b"6"}))
    assert not second.done()
    second.cancel()


async def test_one_that_has_begun_learns_the_cell_as_it_is_now(rig: OneRoundRig) -> None:
    await rig.commit(one_round(11, {b"bob": b"6"}))
    answer = await turn(rig, 1, start_timestamp=10)
    assert (answer.start_timestamp, list(answer.found.found.commit_timestamps)) == (0, [100])


async def test_a_turn_that_is_not_ended_lasts_as_long_as_was_asked(rig: OneRoundRig) -> None:
    began = rig.clock.monotonic_seconds()
    await turn(rig, 1)
    assert (await turn(rig, 2)).in_turn
    assert rig.clock.monotonic_seconds() - began == pytest.approx(HOLD_SECONDS)


@pytest.mark.parametrize("place", [3, 2], ids=["the next caller", "a copy of the call"])
async def test_where_a_caller_goes_another_has_its_turn(rig: OneRoundRig, place: int) -> None:
    await turn(rig, 1, hold_milliseconds=10_000)
    second, other = await waiting(rig, 2), await waiting(rig, place)
    second.cancel()
    await asyncio.sleep(0)
    end(rig, 1)
    assert (await other).in_turn


async def test_one_whose_time_is_over_leaves_the_queue(rig: OneRoundRig) -> None:
    await turn(rig, 1, hold_milliseconds=10_000)
    assert not (await turn(rig, 2, within_seconds=1.0)).in_turn
    assert (await waiting(rig, 3)).cancel()


async def test_a_turn_that_comes_at_once_needs_no_time(rig: OneRoundRig) -> None:
    assert (await turn(rig, 1, within_seconds=0.0)).in_turn


async def test_a_copy_that_ends_late_does_not_give_up_a_new_place(rig: OneRoundRig) -> None:
    rig.oracle.seconds = 2 * HOLD_SECONDS
    first = await waiting(rig, 1)  # its turn is over before the oracle has answered
    second = await waiting(rig, 2)
    await asyncio.sleep(1.2 * HOLD_SECONDS)
    anew = await waiting(rig, 1)
    first.cancel()
    await asyncio.sleep(0)
    end(rig, 2)
    assert (await anew).in_turn
    await second


async def test_a_place_that_is_given_up_is_answered(rig: OneRoundRig) -> None:
    await turn(rig, 1, hold_milliseconds=10_000)
    second = await waiting(rig, 2)
    end(rig, 2)
    assert not (await second).in_turn


async def test_a_queue_that_is_full_refuses_more() -> None:
    rig = OneRoundRig(turns_waiting_max=2)
    rig.oracle.seconds = 0.0
    await rig.tablet.open()
    await turn(rig, 1)
    tasks = [await waiting(rig, 2), await waiting(rig, 3)]
    with pytest.raises(Overloaded, match="2 transactions wait for their turn"):
        await turn(rig, 4)
    assert (await turn(rig, 1)).in_turn
    for task in tasks:
        task.cancel()
    await rig.tablet.close()


async def test_turns_at_too_many_cells_are_refused() -> None:
    rig = OneRoundRig(turns_waiting_max=2)
    rig.oracle.seconds = 0.0
    await rig.tablet.open()
    for place, row in enumerate((b"ann", b"bob"), 1):
        assert (await turn(rig, place, row=row, hold_milliseconds=10_000)).in_turn
    with pytest.raises(Overloaded, match="2 transactions have their turn"):
        await turn(rig, 3, row=b"joe")
    assert (await turn(rig, 2, row=b"bob")).in_turn
    await rig.tablet.close()


async def test_a_tablet_that_closes_tells_all_who_wait(rig: OneRoundRig) -> None:
    await turn(rig, 1)
    second = await waiting(rig, 2)
    await rig.tablet.close()
    with pytest.raises(TabletMoved):
        await second


async def test_nothing_is_left_of_a_queue(rig: OneRoundRig) -> None:
    await rig.commit(one_round((await turn(rig, 1)).start_timestamp, {b"bob": b"6"}))
    assert rig.tablet._state.turns.queues == {}


# Transactions that wait for each other. The cells of "ann", "bob" and "joe" are in this order.


def end_at(rig: OneRoundRig, row: bytes, place: int) -> None:
    rig.tablet.end_turn(pb.EndTurnRequest(target=TARGET, row=row, column=COLUMN, place=place))


@pytest.mark.parametrize("last", [1, 2])
async def test_of_two_that_wait_for_each_other_the_one_out_of_order_is_told_at_once(
    rig: OneRoundRig, last: int
) -> None:
    long = {"hold_milliseconds": 10_000}
    await turn(rig, 1, row=b"ann", start_timestamp=10, **long)
    await turn(rig, 2, row=b"bob", start_timestamp=11, **long)
    asked = {1: {"row": b"bob", "start_timestamp": 10}, 2: {"row": b"ann", "start_timestamp": 11}}
    began = rig.clock.monotonic_seconds()
    tasks = {place: await waiting(rig, place, **asked[place]) for place in (3 - last, last)}
    assert not (await tasks[2]).in_turn
    assert rig.clock.monotonic_seconds() - began < 0.01
    assert not tasks[1].done()
    end_at(rig, b"bob", 2)
    assert (await tasks[1]).in_turn


async def test_of_three_that_wait_in_a_circle_one_is_told(rig: OneRoundRig) -> None:
    rows = (b"ann", b"bob", b"joe")
    for place, row in enumerate(rows):
        await turn(rig, place + 1, row=row, start_timestamp=10 + place, hold_milliseconds=10_000)
    tasks = [
        await waiting(rig, place + 1, row=rows[(place + 1) % 3], start_timestamp=10 + place)
        for place in (2, 0, 1)
    ]
    assert not (await tasks[0]).in_turn  # has "joe", and waits for "ann"
    assert [task.done() for task in tasks[1:]] == [False, False]
    end_at(rig, b"joe", 3)
    assert (await tasks[2]).in_turn
    end_at(rig, b"bob", 2)
    assert (await tasks[1]).in_turn


async def test_one_that_has_yet_to_begin_is_about_to_end_its_turns_and_waits(
    rig: OneRoundRig,
) -> None:
    await turn(rig, 1, row=b"ann", hold_milliseconds=10_000)
    await turn(rig, 2, row=b"bob", hold_milliseconds=10_000)
    tasks = [await waiting(rig, 1, row=b"bob"), await waiting(rig, 2, row=b"ann")]
    assert [task.done() for task in tasks] == [False, False]
    end_at(rig, b"bob", 2)
    assert (await tasks[0]).in_turn
    end_at(rig, b"ann", 1)
    assert (await tasks[1]).in_turn


async def test_one_that_waits_for_others_who_wait_for_nobody_is_not_told(rig: OneRoundRig) -> None:
    await turn(rig, 1, row=b"ann", start_timestamp=10, hold_milliseconds=10_000)
    await turn(rig, 2, row=b"bob", start_timestamp=11, hold_milliseconds=10_000)
    waits = await waiting(rig, 2, row=b"ann", start_timestamp=11)
    assert not waits.done()
    left = await waiting(rig, 1, row=b"joe", start_timestamp=10)
    assert (await left).in_turn
    assert not waits.done()
    end_at(rig, b"ann", 1)
    assert (await waits).in_turn


async def test_queues_are_counted(rig: OneRoundRig) -> None:
    await turn(rig, 1)
    leaving = await waiting(rig, 2)
    await waiting(rig, 3)
    await turn(rig, 4, row=b"ann")
    now = rig.tablet.statistics()
    assert (now.turn_cells, now.turns_waiting, now.turns_granted) == (2, 2, 2)
    leaving.cancel()
    await asyncio.sleep(2.1 * HOLD_SECONDS)
    then = rig.tablet.statistics()
    assert (then.turn_cells, then.turns_waiting, then.turns_granted) == (0, 0, 3)
    assert (then.turns_given_up, then.turns_timed_out) == (1, 3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"place": 0}, "place"),
        ({"row": b"zoe"}, "row"),
        ({"row": b"b" * 5_000}, "row"),
        ({"column": b"c" * 5_000}, "column"),
    ],
)
async def test_bad_input_is_refused(fields: dict[str, Any], field: str) -> None:
    identity = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"", end=b"m")
    rig = OneRoundRig(identity=identity)
    await rig.tablet.open()
    request = pb.AwaitTurnRequest(target=TARGET, row=b"bob", column=COLUMN, place=1)
    for name, value in fields.items():
        setattr(request, name, value)
    with refused(field):
        await rig.tablet.await_turn(request, deadline_seconds=LONG_SECONDS)
    assert rig.tablet._state.turns.queues == {}
    await rig.tablet.close()
