"""Read locks of a cell and its writers exclude each other, and read locks do not."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument
from percolator.formats.records import KIND_READ_LOCK, RecordKind
from percolator.tablet import judge
from percolator.tablet.cells import FORMAT_KEY
from percolator.tablet.state import SafePoints
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from tests.unit.tablet.read_lock_steps import (
    LOCKED,
    NEWER,
    commit_read_lock,
    hidden,
    read_lock,
    roll_back_read_lock,
    whole_read_lock,
)
from tests.unit.tablet.tablets import (
    APPLIED,
    COLUMN,
    NOT_EXECUTED,
    REFUSED,
    TARGET,
    WRITE,
    Rig,
    commit,
    outcomes,
    prewrite,
    started,
    written,
)
from tests.unit.tablet.whole_transactions import OneRoundRig, only, whole

ROW = b"hub"


async def _refusal(rig: Rig, step: pb.Mutation) -> tuple[int, bytes, int]:
    """Which condition failed, and the column and timestamp of the cell that is in the way."""
    (result,) = await rig.mutate(step)
    assert result.outcome == REFUSED
    assert (result.cell.row, result.cell.column) == (ROW, step.column)
    return result.failed_condition, _column(result), result.cell.timestamp


def _column(refusal: pb.MutationResult) -> bytes:
    """The column in which the lock or record is stored because of which it was refused."""
    return refusal.cell.qualifier or refusal.cell.column


# ------------------------------------------------------------------ who excludes whom


async def test_any_number_of_read_locks_are_live_and_committed_at_the_same_time() -> None:
    rig = await Rig().open()
    await rig.apply(read_lock(ROW, 10), read_lock(ROW, 11), read_lock(ROW, 5))
    await rig.apply(commit_read_lock(ROW, 11, 20), commit_read_lock(ROW, 5, 21))
    await rig.apply(read_lock(ROW, 6), commit_read_lock(ROW, 10, 22), commit_read_lock(ROW, 6, 23))


async def test_a_writer_meets_a_live_read_lock_and_then_its_commit() -> None:
    rig = await Rig().open()
    await rig.apply(read_lock(ROW, 10))
    (result,) = await rig.mutate(prewrite(ROW, 12))
    assert (result.failed_condition, _column(result)) == (LOCKED, hidden(10))
    assert result.cell.value.startswith((10).to_bytes(8, "big"))
    await rig.apply(commit_read_lock(ROW, 10, 20))
    assert await _refusal(rig, prewrite(ROW, 12)) == (NEWER, hidden(10), 20)
    assert await _refusal(rig, prewrite(ROW, 20)) == (NEWER, hidden(10), 20)
    await rig.apply(prewrite(ROW, 21))


async def test_a_writer_that_is_younger_than_what_was_rolled_back_goes_on() -> None:
    rig = await Rig().open()
    await rig.apply(read_lock(ROW, 10))
    await rig.apply(roll_back_read_lock(ROW, 10))
    await rig.apply(prewrite(ROW, 9))


@pytest.mark.parametrize("kind", [RecordKind.PUT, RecordKind.DELETE, RecordKind.LOCK_ONLY])
async def test_a_read_lock_meets_a_live_writer_and_then_its_commit(kind: RecordKind) -> None:
    rig = await Rig().open()
    await rig.apply(prewrite(ROW, 10, kind=kind))
    assert await _refusal(rig, read_lock(ROW, 12)) == (LOCKED, COLUMN, 0)
    await rig.apply(commit(ROW, 10, 20, kind=kind))
    assert await _refusal(rig, read_lock(ROW, 12)) == (NEWER, COLUMN, 20)
    await rig.apply(read_lock(ROW, 21))


async def test_only_the_locked_cell_is_locked() -> None:
    """Not the others of its row, not one whose name begins the same, nor one in another row."""
    rig = await Rig().open()
    await rig.apply(read_lock(ROW, 10))
    await rig.apply(commit_read_lock(ROW, 10, 20))
    await rig.apply(read_lock(ROW, 11))
    for row, column in (
        (ROW, b"other"),
        (ROW, COLUMN + b"s"),
        (ROW, COLUMN[:-1]),
        (b"hut", COLUMN),
    ):
        step = prewrite(row, 12)
        step.column = column
        await rig.apply(step)


async def test_a_writer_that_knows_nothing_of_read_locks_is_kept_away_too() -> None:
    """Its prewrite is the one of the protocol, without a word about them."""
    rig = await Rig().open()
    await rig.apply(read_lock(ROW, 10))
    (result,) = await rig.mutate(prewrite(ROW, 12))
    assert (result.failed_condition, result.cell.column) == (LOCKED, COLUMN), "it waits for that"


async def test_both_ways_to_commit_exclude_each_other() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.apply(read_lock(ROW, 10))
    assert only(await rig.commit(whole(12, {ROW: b"v"}))).failed_condition == LOCKED
    await rig.apply(roll_back_read_lock(ROW, 10))
    assert list((await rig.commit(whole_read_lock(13, ROW))).commit_timestamps) == [100]
    found = only(await rig.commit(whole(14, {ROW: b"v"})))
    assert (found.failed_condition, _column(found)) == (NEWER, hidden(13))
    assert await _refusal(rig, prewrite(ROW, 15)) == (NEWER, hidden(13), 100)
    assert list((await rig.commit(whole(150, {ROW: b"v"}))).commit_timestamps) == [200]
    assert only(await rig.commit(whole_read_lock(160, ROW))).failed_condition == NEWER
    assert await _refusal(rig, read_lock(ROW, 161)) == (NEWER, COLUMN, 200)


async def test_a_read_does_not_wait_for_a_read_lock() -> None:
    rig = await Rig().open()
    await rig.apply(written(ROW, 2, 3, b"v"), read_lock(ROW, 10))
    assert await rig.value(ROW, 50) == b"v"
    (page,) = await rig.scan(50)
    assert (list(page.found.values), list(page.locks)) == ([b"v"], [])


# ------------------------------------------------------------------ at the same time


async def test_of_two_in_one_request_only_one_is_there() -> None:
    """Each would be judged before the other is durable."""
    for steps in ((read_lock(ROW, 10), prewrite(ROW, 12)), (prewrite(ROW, 12), read_lock(ROW, 10))):
        rig = await Rig().open()
        assert [one.outcome for one in await rig.mutate(*steps)] == [APPLIED, REFUSED]


async def test_read_locks_of_one_cell_share_a_batch() -> None:
    rig = await Rig().open()
    await rig.apply(*(read_lock(ROW, start) for start in range(10, 60)))
    assert rig.tablet._state.counters.batches_synced == 1


async def test_a_writer_waits_for_read_locks_that_are_held_and_the_other_way_round() -> None:
    rig = OneRoundRig()
    await rig.open()
    readers = [rig.committing(whole_read_lock(start, ROW)) for start in (10, 11)]
    await asyncio.sleep(0.5)
    writing = started(rig, prewrite(ROW, 12))
    await asyncio.sleep(0.1)
    late = rig.committing(whole_read_lock(13, ROW))
    for reader in readers:
        assert (await reader).commit_timestamps[0] >= 100
    assert await outcomes(writing) == [REFUSED], "it began before they had committed"
    assert (await late).commit_timestamps[0] > 100, "it waited behind the writer"


async def test_a_read_lock_waits_for_a_writer_that_holds_the_cell() -> None:
    rig = OneRoundRig()
    await rig.open()
    writing = rig.committing(whole(10, {ROW: b"v"}))
    await asyncio.sleep(0.5)
    reading = started(rig, read_lock(ROW, 12))
    late = rig.committing(whole_read_lock(13, ROW))
    await asyncio.sleep(0.1)
    assert not reading.done()
    assert list((await writing).commit_timestamps) == [100]
    assert await outcomes(reading) == [REFUSED]
    assert only(await late).failed_condition == NEWER


# ------------------------------------------------------------------ what is stored


async def test_the_format_is_marked_once_there_is_a_read_lock() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(prewrite(ROW, 5))
    await rig.apply(commit(ROW, 5, 6))
    assert disk.durable[FORMAT_KEY] == b"1"
    await rig.apply(read_lock(ROW, 10))
    assert disk.durable[FORMAT_KEY] == b"3"


async def test_a_change_feed_does_not_lower_the_format() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(read_lock(ROW, 10))
    await rig.tablet.set_schema_version(4, change_feed=True)
    assert disk.durable[FORMAT_KEY] == b"3"
    await rig.tablet.close()
    again = await Rig(disk=disk, schema_version=4, change_feed=True).open()
    assert again.tablet._state.feed.on


async def test_nor_does_the_end_of_a_load_that_began_before_the_feed() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(read_lock(ROW, 10))
    load = pb.LoadFence(name="load", run=20, range=RowRange(start=b"x"))
    await _fence(rig, pb.FenceRequest.ACTION_RAISE, load)
    await rig.tablet.set_schema_version(4, change_feed=True)
    load.commit_timestamp = 21
    await _fence(rig, pb.FenceRequest.ACTION_FINISH, load)
    await _fence(rig, pb.FenceRequest.ACTION_LIFT, load)
    assert rig.tablet._state.feed.complete_from == 21
    await rig.tablet.close()
    again = await Rig(disk=disk, change_feed=True).open()
    assert await _refusal(again, prewrite(ROW, 25)) == (LOCKED, hidden(10), 0)


async def _fence(rig: Rig, action: pb.FenceRequest.Action, load: pb.LoadFence) -> None:
    await rig.tablet.fence(pb.FenceRequest(target=TARGET, action=action, fence=load))


async def test_a_new_owner_knows_the_read_locks_and_their_commits() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(read_lock(ROW, 10), read_lock(ROW, 11), written(b"other", 18, 30))
    await rig.apply(commit_read_lock(ROW, 11, 20))
    await rig.tablet.close()
    again = await Rig(disk=disk).open()
    assert await _refusal(again, prewrite(ROW, 25)) == (LOCKED, hidden(10), 0)
    await again.apply(roll_back_read_lock(ROW, 10))
    assert await _refusal(again, prewrite(ROW, 12)) == (NEWER, hidden(11), 20)
    await again.apply(prewrite(ROW, 25))


async def test_an_old_transaction_comes_back_when_there_are_too_many_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judge, "LOOKED_AT_MAX", 3)
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    for start in range(10, 18, 2):
        await rig.apply(read_lock(ROW, start))
        await rig.apply(commit_read_lock(ROW, start, start + 1))
    await rig.apply(written(b"other", 30, 40))
    await rig.tablet.close()
    again = await Rig(disk=disk).open()
    assert await _refusal(again, prewrite(ROW, 17)) == (NEWER, hidden(16), 17)
    (result,) = await again.mutate(prewrite(ROW, 25))
    assert result.outcome == NOT_EXECUTED
    assert "more than 3 read locks" in result.error.message
    await again.apply(prewrite(ROW, 41))


async def test_their_records_are_collected_before_the_history_around_them() -> None:
    """However long the table keeps snapshots: they carry nothing that a snapshot shows."""
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(ROW, 6, 7, b"old"), written(b"hut", 6, 7, b"old"))
    await rig.apply(*(read_lock(ROW, start) for start in (10, 20, 30)))
    await rig.apply(*(commit_read_lock(ROW, start, start + 1) for start in (10, 20, 30)))
    await rig.apply(roll_back_read_lock(ROW, 12))
    await rig.tablet.raise_safe_points(SafePoints(reads=5, transactions=25))
    assert (await rig.tablet.collect(5, ended_below=25)).cells == 3
    left = [(cell.column, cell.timestamp) for cell in await rig.cells(WRITE)]
    assert left == [(hidden(30), 31), (COLUMN, 7), (COLUMN, 7)]
    for opened in (rig, await Rig(disk=disk).open()):
        assert await _refusal(opened, prewrite(ROW, 26)) == (NEWER, hidden(30), 31)


async def test_a_repeated_prewrite_finds_its_own_lock_commit_and_marker() -> None:
    rig = await Rig().open()
    await rig.apply(read_lock(ROW, 10))
    assert await _refusal(rig, read_lock(ROW, 10)) == (LOCKED, hidden(10), 0)
    await rig.apply(commit_read_lock(ROW, 10, 20), roll_back_read_lock(ROW, 11))
    assert await _refusal(rig, read_lock(ROW, 10)) == (0, hidden(10), 20)
    assert await _refusal(rig, read_lock(ROW, 11)) == (1, hidden(11), 11)


# ------------------------------------------------------------------ bad requests


async def test_a_kind_that_is_only_for_write_sets_is_refused() -> None:
    rig = OneRoundRig()
    await rig.open()
    with pytest.raises(InvalidArgument, match=r"kinds\[0\]: 5 is not a kind"):
        await rig.commit(whole(10, {ROW: b""}, KIND_READ_LOCK, hidden(10)))


async def test_a_transaction_does_not_write_a_cell_and_read_lock_it() -> None:
    rig = OneRoundRig()
    await rig.open()
    both = whole(10, {ROW: b"v"})
    both.MergeFrom(whole_read_lock(10, ROW))
    del both.start_timestamps[1:], both.cells[:]
    both.cells.append(2)
    with pytest.raises(InvalidArgument, match=r"cells\[0\]: a write of a cell, and a read lock"):
        await rig.commit(both)
    assert not await rig.cells(WRITE)
