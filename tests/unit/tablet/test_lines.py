"""Who has a cell next, and that nothing else is looked at."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import Unavailable
from percolator.tablet.group_commit import HeldTransactions, MutationWork
from tests.unit.tablet.counting import counted
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    NOT_EXECUTED,
    REFUSED,
    WRITE,
    condition,
    mutation,
    outcomes,
    roll_back,
    started,
    written,
)
from tests.unit.tablet.whole_transactions import OneRoundRig, only, whole

# ---------------------------------------------------------------- order


async def test_what_waits_for_several_cells_is_not_overtaken_on_any_of_them() -> None:
    """It would wait forever where the others never leave all of them free at once."""
    rig = OneRoundRig()
    await rig.open()
    first = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    both = rig.committing(whole(150, {b"a": b"2", b"b": b"2"}))
    await asyncio.sleep(0.1)
    later = rig.committing(whole(160, {b"b": b"3"}))
    assert list((await first).commit_timestamps) == [100]
    assert list((await both).commit_timestamps) == [200]
    assert only(await later).cell.timestamp == 200


async def test_a_crowd_of_mutations_does_not_keep_a_transaction_waiting() -> None:
    rig = OneRoundRig()
    await rig.open()
    crowd = [started(rig, written(b"a", 1, 2)) for _ in range(3)]
    await asyncio.sleep(0.5)
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.1)
    crowd += [started(rig, written(b"a", 1, 2)) for _ in range(20)]
    await committing
    assert sum(task.done() for task in crowd) == 3
    await asyncio.gather(*crowd)


async def test_a_mutation_never_overtakes_an_earlier_one_of_its_cell() -> None:
    """Not even if the cell becomes free between the looks at the two."""
    rig = OneRoundRig(slice_rows=1)
    await rig.open()
    rig.oracle.failure, rig.oracle.gate = Unavailable("silent"), asyncio.Event()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.1)
    others = [written(b"%d" % number, 1, 2) for number in range(200)]
    question = mutation(b"a", conditions=[condition(WRITE, ABSENT)])
    asked = started(rig, written(b"a", 1, 2), *others, question)
    for _ in range(50):
        await asyncio.sleep(0)  # a mutation is looked at in each turn
    rig.oracle.gate.set()
    assert only(await committing).outcome == NOT_EXECUTED
    assert not asked.done()
    first, *_, last = await outcomes(asked)
    assert (first, last) == (APPLIED, REFUSED)


async def test_while_the_oracle_is_silent_those_that_wait_do_not_wait_one_after_the_other() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.failure = Unavailable("silent")
    crowd = []
    for start in range(10, 20):
        crowd.append(rig.committing(whole(start, {b"a": b"1"})))
        await asyncio.sleep(0.01)
    marking = started(rig, roll_back(b"a", 5))
    began = rig.clock.monotonic_seconds()
    assert await outcomes(marking) == [APPLIED]
    assert rig.clock.monotonic_seconds() - began == pytest.approx(1.9, abs=0.1)  # and the disk
    for task in crowd:
        assert only(await task).outcome == NOT_EXECUTED
    assert len(rig.oracle.asked) == 1


async def test_a_request_that_ends_in_line_is_not_judged_any_further_in_the_queue() -> None:
    rig = OneRoundRig(commit_mutations_max=2)
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1", b"c": b"1", b"d": b"1"}))
    await asyncio.sleep(0.1)
    others = started(rig, roll_back(b"c", 5), roll_back(b"d", 5))
    asked = [roll_back(b"a", 5), *(written(b"%d" % row, 1, 2) for row in range(9))]
    late = asyncio.ensure_future(rig.mutate(*asked, within_seconds=1.5))
    await committing
    found = [result.outcome for result in await late]
    assert found[0] == found[-1] == NOT_EXECUTED
    assert await outcomes(others) == [APPLIED, APPLIED]
    await rig.apply(written(b"z", 1, 2))


# ---------------------------------------------------------------- cost


async def test_mutations_behind_a_held_cell_leave_room_for_others() -> None:
    rig = OneRoundRig(commit_mutations_max=4)
    await rig.open()
    rig.oracle.seconds = 60.0
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    behind = [started(rig, roll_back(b"a", start)) for start in range(20, 40)]
    await asyncio.sleep(0.1)
    await rig.apply(*(written(b"b%d" % number, 1, 2) for number in range(8)))
    assert not committing.done()
    assert not any(task.done() for task in behind)
    await committing
    assert all([await outcomes(task) == [APPLIED] for task in behind])


async def test_a_transaction_that_waits_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = OneRoundRig()
    await rig.open()
    looks = counted(monkeypatch, HeldTransactions, "_obstacle")
    crowd = []
    for start in range(10, 110):
        crowd.append(rig.committing(whole(start, {b"a": b"1"})))
        await asyncio.sleep(0.001)
    for row in range(10):
        await rig.commit(whole(10, {b"%d" % row: b"1"}))
    results = await asyncio.gather(*crowd)
    assert [list(result.commit_timestamps) for result in results].count([100]) == 1
    assert len(looks) == 110


async def test_a_mutation_that_waits_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it arrives, and when it is the first in line and the cell is free."""
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.seconds = 60.0
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    looks = counted(monkeypatch, MutationWork, "refusal")
    behind = [started(rig, roll_back(b"a", 10)) for _ in range(50)]
    for row in range(20):
        await rig.apply(written(b"b%d" % row, 1, 2))
    await committing
    assert all([await outcomes(task) == [REFUSED] for task in behind])
    assert len(looks) == 2 * 50 + 20
