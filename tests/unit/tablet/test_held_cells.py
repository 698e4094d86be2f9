"""What waits for the cells that a transaction holds while it commits in one round, and how long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from percolator.errors import NotReady
from percolator.tablet.cells import HeldCells, Holder, cell_prefix
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.change_feeds import Change, changes, look
from tests.unit.tablet.read_lock_steps import whole_read_lock
from tests.unit.tablet.tablets import (
    APPLIED,
    COLUMN,
    REFUSED,
    SlowDisk,
    roll_back,
    started,
    written,
)
from tests.unit.tablet.whole_transactions import OneRoundRig, only, together, whole


@dataclass(eq=False)
class Committing:
    """Holds a cell, and counts how often it is looked at."""

    cells: Sequence[bytes]
    start: int = 10
    looks: int = 0

    @property
    def commit(self) -> int:
        self.looks += 1
        return 0


def _committing(rows: int) -> tuple[HeldCells, list[Committing]]:
    held = HeldCells()
    holders = [Committing([cell_prefix(b"%03d" % row, COLUMN)]) for row in range(rows)]
    for holder in holders:
        held.hold(holder)
    return held, holders


async def test_reads_at_or_above_the_start_wait_and_see_the_commit() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    scanning = asyncio.ensure_future(rig.scan(150))
    await asyncio.sleep(0.1)
    assert not reading.done()
    assert not scanning.done()
    assert await rig.value(b"a", 9) is None  # below the start
    assert await rig.value(b"b", 150) is None  # another cell
    assert list((await committing).commit_timestamps) == [100]
    assert await reading == b"1"
    assert list((await scanning)[0].found.values) == [b"1"]


@pytest.mark.parametrize("row", [b"a", b"named like \0read\0\0\1"])
async def test_a_read_of_all_columns_waits_too(row: bytes) -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {row: b"1"}))
    await asyncio.sleep(0.5)
    read = pb.RowRead(row=row, all_columns=True, timestamp=150)
    request = pb.ReadBatch(target=together([]).target, reads=[read])
    reading = asyncio.ensure_future(rig.tablet.read(request))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await committing
    assert list((await reading).found.values) == [b"1"]


async def test_a_read_goes_on_once_the_commit_is_known_to_be_above_it() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(rig.value(b"a", 50))
    await asyncio.sleep(0.4)
    assert not reading.done()
    await asyncio.sleep(0.2)  # the oracle has answered: 100
    assert reading.done()
    assert not committing.done()
    assert await reading is None
    await committing


async def test_reads_wait_until_memory_knows_of_the_batch() -> None:
    """The storage shows a batch before its writer hears that the write has ended."""

    class Heard(SlowDisk):
        async def heard(self) -> None:
            await asyncio.sleep(1)

    rig = OneRoundRig(disk=Heard())
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(2.5)  # durable, and not yet heard
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    await asyncio.sleep(0.1)
    assert not reading.done()
    await committing
    assert await reading == b"1"


async def test_a_read_does_not_wait_for_ever() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.seconds = 60.0
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    with pytest.raises(NotReady, match="oracle or the disk is slow"):
        await rig.value(b"a", 150)
    await committing


async def test_the_time_that_a_read_waits_does_not_start_again_when_other_cells_change_hands() -> (
    None
):
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.seconds = 60.0
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    rig.oracle.seconds = 0.5
    for row in (b"b", b"c", b"d", b"e"):
        await rig.commit(whole(20, {row: b"2"}))
    assert reading.done()
    with pytest.raises(NotReady, match="oracle or the disk is slow"):
        await reading
    await committing


async def test_what_waits_is_woken_only_by_those_in_its_way() -> None:
    held, (first, *others) = _committing(100)
    looks = 0

    def look() -> list[Holder]:
        nonlocal looks
        looks += 1
        return held.in_the_way_in_rows(b"000", b"000\0", 50)

    waiting = asyncio.ensure_future(held.let_pass(look))
    for holder in others:
        await asyncio.sleep(0)
        held.changed([holder])
        held.let_go([holder])
    assert (looks, waiting.done()) == (1, False)
    held.let_go([first])
    await waiting
    assert looks == 1  # no cell is held by then


async def test_a_read_of_one_row_does_not_look_at_what_is_held_in_others() -> None:
    held, holders = _committing(200)
    assert held.in_the_way_in_rows(b"007", b"007\0", 50) == [holders[7]]
    assert held.in_the_way_in_rows(b"198", b"", 50) == holders[198:]
    assert held.in_the_way_in_rows(b"199", b"", 5) == []
    assert sum(holder.looks for holder in holders) == 3


async def test_a_marker_waits_and_finds_the_commit() -> None:
    """`resolve` asks the primary of a transaction that is on its way."""
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    marking = started(rig, roll_back(b"a", 10))
    other = started(rig, written(b"b", 10, 20))
    assert [result.outcome for result in await other] == [APPLIED]
    assert not marking.done()
    assert list((await committing).commit_timestamps) == [100]
    (refused,) = await marking
    assert (refused.outcome, refused.failed_condition) == (REFUSED, 0)
    assert refused.cell.timestamp == 100


async def test_a_transaction_waits_for_a_cell_that_a_batch_is_changing() -> None:
    """Judged against what is not durable, it would miss the marker that is on its way."""
    rig = OneRoundRig()
    await rig.open()
    marking = started(rig, roll_back(b"a", 10))
    await asyncio.sleep(0.5)
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.1)
    assert rig.oracle.asked == []
    await marking
    assert only(await committing).failed_condition == 1


async def test_the_next_transactions_get_their_timestamps_while_the_disk_is_busy() -> None:
    rig = OneRoundRig()
    await rig.open()
    began = rig.clock.monotonic_seconds()
    first = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(1.2)  # at the disk, until 2.0
    second = rig.committing(whole(11, {b"b": b"2"}))
    await first
    await second
    # One after the other: asked at 2.0, written at 4.0.
    assert rig.clock.monotonic_seconds() - began == pytest.approx(3.2)


async def test_mutations_do_not_wait_for_the_oracle() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.seconds = 60.0
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    await rig.apply(written(b"b", 10, 20))
    assert not committing.done()
    await committing


async def test_a_mutation_that_waits_is_judged_before_the_next_transaction() -> None:
    """A crowd of transactions would otherwise keep a roll-back waiting forever."""
    rig = OneRoundRig()
    await rig.open()
    first = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    marking = started(rig, roll_back(b"a", 20))
    await asyncio.sleep(0.1)
    second = rig.committing(whole(20, {b"a": b"2"}))
    await first
    assert [result.outcome for result in await marking] == [APPLIED]
    assert only(await second).failed_condition == 1


# ---------------------------------------------------------------- changes


async def test_a_scan_of_changes_waits_for_a_commit_at_or_below_its_end() -> None:
    """There is no lock that would tell it to end earlier, and it never comes back."""
    rig = OneRoundRig(change_feed=True)
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(changes(rig, 0, 150))
    looking = asyncio.ensure_future(look(rig, 0, 150))
    await asyncio.sleep(0.1)
    assert not reading.done()
    assert not looking.done()
    assert (await changes(rig, 0, 9)).reached == 9  # below the start
    await committing
    answer = await reading
    assert answer.changes == [Change(100, b"a", COLUMN, b"1")]
    assert answer.reached == 150
    assert await looking == (150, 100)


async def test_a_scan_of_changes_goes_on_once_the_commit_is_known_to_be_above_its_end() -> None:
    rig = OneRoundRig(change_feed=True)
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(changes(rig, 0, 50))
    await asyncio.sleep(0.6)  # the oracle has answered: 100
    assert not committing.done()
    assert (await reading).reached == 50
    await committing
    assert (await changes(rig, 50, 150)).changes == [Change(100, b"a", COLUMN, b"1")]


async def test_reads_of_whole_rows_do_not_wait_for_a_read_lock() -> None:
    """It changes nothing that they could see."""
    rig = OneRoundRig()
    await rig.open()
    await rig.apply(written(b"a", 2, 3, b"v"))
    committing = rig.committing(whole_read_lock(10, b"a"))
    await asyncio.sleep(0.5)
    read = pb.RowRead(row=b"a", all_columns=True, timestamp=150)
    request = pb.ReadBatch(target=together([]).target, reads=[read])
    reading = asyncio.ensure_future(rig.tablet.read(request))
    scanning = asyncio.ensure_future(rig.scan(150))
    await asyncio.sleep(0.1)
    assert reading.done()
    assert scanning.done()
    assert not committing.done()
    assert list((await reading).found.values) == [b"v"]
    assert list((await scanning)[0].found.values) == [b"v"]
    await committing
