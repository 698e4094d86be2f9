"""Collection: no request that is still allowed can tell that anything is gone."""

from __future__ import annotations

import asyncio
import random

import pytest

from percolator.errors import InvariantViolation, NotReady, StoreUnusable, TabletMoved
from percolator.formats.records import RecordKind, acknowledgement_column
from percolator.observers.watched_cell import Acknowledgement
from percolator.tablet.collection import Sweep
from percolator.tablet.state import SafePoints, TabletIdentity
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.collecting import (
    DELETE,
    IN_DATA,
    LOCK_ONLY,
    collected,
    in_data,
    noted,
    notified,
    record,
    stored,
)
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    LOCK,
    NOTIFY,
    REFUSED,
    ROLLBACK,
    WRITE,
    Rig,
    SlowDisk,
    commit,
    delete,
    lock_record,
    mutation,
    prewrite,
    put,
    roll_back,
    write_record,
    written,
)


async def test_each_cell_keeps_what_a_read_at_the_safe_point_sees_and_all_that_is_newer() -> None:
    rig = await Rig().open()
    await rig.apply(*(written(b"a", end - 1, end, b"%d" % end) for end in (11, 13, 15, 17)))
    await rig.apply(written(b"b", 10, 11, b"only"))
    assert await collected(rig, 14) == 1
    assert await stored(rig, WRITE) == [(b"a", 17), (b"a", 15), (b"a", 13), (b"b", 11)]
    assert await rig.value(b"a", 14) == b"13"
    assert await rig.value(b"b", 14) == b"only"


async def test_the_version_committed_at_the_safe_point_itself_is_the_one_that_is_seen() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"old"), written(b"a", 12, 14, b"new"))
    assert await collected(rig, 14) == 1
    assert await rig.value(b"a", 14) == b"new"


async def test_a_deletion_is_collected_with_everything_below_it() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"old"), record(b"a", 12, 13, DELETE))
    assert await collected(rig, 20) == 2
    assert await stored(rig, WRITE) == []
    assert await rig.value(b"a", 20) is None


async def test_a_crash_between_two_writes_never_brings_back_what_was_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each write, the storage is checked as if the machine had stopped there."""
    monkeypatch.setattr("percolator.tablet.collection.DELETIONS_PER_WRITE", 1)
    monkeypatch.setattr("percolator.tablet.collection.SLICE_ENTRIES", 1)
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    for row in (b"a", b"b"):
        await rig.apply(*(written(row, end - 1, end) for end in (5, 7, 9)))
        await rig.apply(record(row, 10, 11, DELETE))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    collecting = asyncio.ensure_future(rig.tablet.collect(20))
    seen = set()
    while not collecting.done():
        await asyncio.sleep(0.5)
        left = await stored(rig, WRITE)
        seen.add(tuple(left))
        assert await rig.value(b"a", 20) is None
        assert await rig.value(b"b", 20) is None
    assert len(seen) >= 6


async def test_a_deletion_stays_until_its_observers_have_seen_it() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11), record(b"a", 12, 13, DELETE), notified(b"a", 13))
    assert await collected(rig, 20) == 1
    assert await stored(rig, WRITE) == [(b"a", 13)]
    await rig.apply(mutation(b"a", delete(NOTIFY, 13, b"observer")))
    assert await collected(rig, 20) == 1, "although nothing was committed since"
    assert await stored(rig, WRITE) == []


async def test_a_deletion_stays_while_a_dead_letter_of_it_exists() -> None:
    rig = await Rig().open()
    put_aside = Acknowledgement(0, has_dead_letter=True).encode()
    await rig.apply(
        written(b"a", 10, 11),
        record(b"a", 12, 13, DELETE),
        noted(b"a", COLUMN, 12, Acknowledgement(11).encode()),
        noted(b"a", COLUMN, 15, put_aside),
        record(b"b", 12, 13, DELETE),
        noted(b"b", b"another column", 15, put_aside),
    )
    await collected(rig, 20)
    assert (b"a", 13) in await stored(rig, WRITE)
    assert (b"b", 13) not in await stored(rig, WRITE)
    # The run that answers it clears it away.
    await rig.apply(noted(b"a", COLUMN, 25, Acknowledgement(24).encode()))
    await collected(rig, 30)
    assert (b"a", 13) not in await stored(rig, WRITE)


async def test_a_deletion_stays_while_it_may_be_about_to_become_a_dead_letter() -> None:
    rig = await Rig().open()
    await rig.apply(record(b"a", 12, 13, DELETE))
    hidden = acknowledgement_column(b"observer", COLUMN)
    await rig.apply(mutation(b"a", put(LOCK, lock_record(25)), column=hidden))
    await collected(rig, 20)
    assert (b"a", 13) in await stored(rig, WRITE)


async def test_a_deletion_stays_for_an_observer_that_does_not_fit_into_the_index() -> None:
    rig = await Rig(notifications_indexed_max=1).open()
    await rig.apply(notified(b"0", 5), record(b"a", 12, 13, DELETE), notified(b"a", 13))
    await collected(rig, 20)
    assert (b"a", 13) in await stored(rig, WRITE)


async def test_only_lock_only_records_and_markers_below_the_safe_point_are_collected() -> None:
    rig = await Rig().open()
    await rig.apply(
        written(b"a", 10, 11, b"value"),
        record(b"a", 12, 13, LOCK_ONLY),
        record(b"a", 30, 31, LOCK_ONLY),
        roll_back(b"b", 15),
        roll_back(b"b", 25),
    )
    assert await collected(rig, 20) == 2
    assert await stored(rig, WRITE) == [(b"a", 31), (b"a", 11)]
    assert await stored(rig, ROLLBACK) == [(b"b", 25)]
    assert await rig.value(b"a", 20) == b"value"


async def test_records_of_ended_transactions_are_collected_before_the_history_around_them() -> None:
    """This holds however long a table keeps snapshots, which see neither kind of record."""
    rig = await Rig().open()
    locked = [record(b"a", at, at + 1, LOCK_ONLY) for at in range(40, 240, 4)]
    await rig.apply(
        written(b"a", 10, 11, b"old"),
        record(b"a", 12, 13, LOCK_ONLY),
        written(b"a", 30, 31, b"new"),
        *locked,
        roll_back(b"b", 15),
        roll_back(b"b", 59),
        roll_back(b"b", 60),
    )
    await rig.tablet.raise_safe_points(SafePoints(reads=5, transactions=61))
    done = await rig.tablet.collect(5, ended_below=61)
    assert done.cells == 1 + 5 + 3
    assert (await stored(rig, WRITE))[-3:] == [(b"a", 61), (b"a", 31), (b"a", 11)]
    assert await stored(rig, ROLLBACK) == []
    assert [await rig.value(b"a", at) for at in (14, 31, 300)] == [b"old", b"new", b"new"]


async def test_no_late_rollback_marks_a_transaction_whose_lock_only_commit_was_collected() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    late = roll_back(b"a", 50)
    late.not_below = 0
    await rig.apply(record(b"a", 50, 51, LOCK_ONLY), record(b"a", 70, 71, LOCK_ONLY))
    await rig.tablet.raise_safe_points(SafePoints(reads=5, transactions=60))
    await rig.tablet.collect(5, ended_below=60)
    assert await stored(rig, WRITE) == [(b"a", 71)]
    for opened in (rig, await Rig(disk=disk).open()):
        [refused] = await opened.mutate(late)
        assert refused.error.snapshot_too_old.safe_point == 60
        assert not await stored(opened, ROLLBACK)


async def test_long_values_are_collected_with_their_records() -> None:
    rig = await Rig().open()
    await rig.apply(in_data(b"a", 10, 11, b"old"), in_data(b"a", 12, 13, b"new"))
    assert await collected(rig, 20) == 2
    assert await stored(rig, DATA) == [(b"a", 12)]
    assert await rig.value(b"a", 20) == b"new"


async def test_nothing_is_collected_while_an_older_lock_is_left() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8), prewrite(b"b", 10))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    with pytest.raises(NotReady, match="lock below the safe point 20"):
        await rig.tablet.collect(20)
    assert len(await stored(rig, WRITE)) == 2
    await rig.apply(mutation(b"b", delete(cells_pb2.SPACE_LOCK)))
    assert (await rig.tablet.collect(20)).cells == 1


async def test_nothing_is_collected_above_the_safe_point() -> None:
    rig = await Rig().open()
    await rig.tablet.raise_safe_points(SafePoints(reads=20, transactions=30))
    with pytest.raises(InvariantViolation, match="would collect below 21, "):
        await rig.tablet.collect(21)
    with pytest.raises(InvariantViolation, match="ended transactions below 31"):
        await rig.tablet.collect(20, 31)


async def test_a_late_rollback_cannot_mark_what_was_committed_and_collected() -> None:
    """It was sent while the lock existed; now it finds neither the lock nor a commit."""
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    late = roll_back(b"a", 5)
    late.not_below = 0  # sent by others, which resolve locks below the safe point before collection
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8), written(b"b", 11, 12))
    await rig.tablet.raise_safe_points(SafePoints(10, 20))
    [refused] = await rig.mutate(late)
    assert (refused.outcome, refused.cell.timestamp) == (pb.OUTCOME_REFUSED, 6)
    assert await collected(rig, 10) == 1
    recent = roll_back(b"c", 10)
    recent.not_below = 0
    for opened in (rig, await Rig(disk=disk).open()):
        [refused, applied] = await opened.mutate(late, recent)
        assert refused.error.snapshot_too_old.safe_point == 10
        assert applied.outcome == pb.OUTCOME_APPLIED
        assert await stored(opened, ROLLBACK) == [(b"c", 10)]


@pytest.mark.parametrize("kept", [True, False])
async def test_wherever_collection_stops_no_later_owner_lets_a_late_rollback_mark_a_commit(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails at each write in turn, which may be durable or not; a half is opened there."""
    monkeypatch.setattr("percolator.tablet.collection.DELETIONS_PER_WRITE", 1)
    monkeypatch.setattr("percolator.tablet.collection.SLICE_ENTRIES", 1)
    late = [roll_back(row, start) for row in (b"a", b"b") for start in (5, 7)]
    for step in late:
        step.not_below = 0
    half = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"", end=b"c")
    left = set()
    for failing in range(1, 20):
        disk = _BreakingDisk()
        rig = await Rig(disk=disk).open()
        for row in (b"a", b"b"):
            await rig.apply(*(written(row, end - 1, end) for end in (6, 8, 10)))
        await rig.tablet.raise_safe_points(SafePoints(20, 20))
        disk.writes_left = failing
        try:
            await rig.tablet.collect(20)
        except StoreUnusable:
            disk.settle(kept=kept)
            disk.writes_left = 1_000
        else:
            break
        later = await Rig(disk=disk, identity=half).open()
        results = await later.mutate(*late)
        left.add(len(await stored(later, WRITE)))
        assert {one.outcome for one in results} <= {REFUSED, pb.OUTCOME_NOT_EXECUTED}
        assert not await stored(later, ROLLBACK)
    assert len(left) >= 4


class _BreakingDisk(DurableMemory):
    """Fails after a number of writes."""

    writes_left = 1_000

    async def sync(self) -> None:
        self.writes_left -= 1
        await super().sync()
        if self.writes_left < 1:
            raise OSError("the disk failed")


async def test_what_another_owner_took_over_is_not_collected_here() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    rig.owner = False
    with pytest.raises(TabletMoved):
        await rig.tablet.collect(20)


async def test_a_cell_with_many_versions_above_the_safe_point_is_stepped_over() -> None:
    rig = await Rig().open()
    for end in range(11, 211, 2):
        await rig.apply(written(b"a", end - 1, end))
    await rig.apply(written(b"b", 10, 11), written(b"b", 12, 13))
    done = await rig.tablet.collect(0)
    assert done.cells == 0
    assert await collected(rig, 20) == 5
    assert len(await stored(rig, WRITE)) == 95 + 1 + 1
    assert rig.tablet.statistics().cells == 97


async def test_without_new_commits_a_second_pass_does_not_walk() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8))
    assert await collected(rig, 20) == 1
    writes = disk.writes
    assert (await rig.tablet.collect(20)) == (await rig.tablet.collect(20))
    assert disk.writes == writes
    await rig.apply(written(b"a", 25, 26))
    assert await collected(rig, 30) == 1


async def test_commits_continue_during_a_pass() -> None:
    rig = await Rig().open()
    for end in range(11, 31, 2):
        await rig.apply(written(b"a", end - 1, end))
    await rig.tablet.raise_safe_points(SafePoints(40, 40))
    collecting = asyncio.ensure_future(rig.tablet.collect(40))
    await rig.apply(prewrite(b"a", 50, b"new"), prewrite(b"b", 50))
    await rig.apply(commit(b"a", 50, 51, b"new"))
    assert (await collecting).cells == 9
    assert await rig.value(b"a", 60) == b"new"
    assert await rig.value(b"a", 49) == b""


@pytest.mark.parametrize("seed", range(40))
async def test_every_read_at_or_above_the_safe_point_is_answered_as_before(seed: int) -> None:
    """Random histories; every row is read at every timestamp that is still allowed."""
    chance = random.Random(seed)
    rig = await Rig(sweep_share=0.5).open()
    rows = [b"", b"a", b"a\0", b"b", b"\xff"]
    kinds = [RecordKind.PUT, RecordKind.PUT, IN_DATA, DELETE, LOCK_ONLY]
    newest = 10
    for row in rows:
        at = 10
        for _ in range(chance.randrange(12)):
            start = at + chance.randrange(1, 4)
            at = start + chance.randrange(1, 4)
            kind = chance.choice(kinds)
            if kind is IN_DATA:
                await rig.apply(in_data(row, start, at, b"long %d" % at))
            else:
                value = b"%d" % at if kind is RecordKind.PUT else b""
                await rig.apply(mutation(row, put(WRITE, write_record(start, value, kind), at)))
            newest = max(newest, at)
    below = chance.randrange(10, newest + 3)

    async def answers() -> list[bytes | None]:
        return [await rig.value(row, at) for row in rows for at in range(below, newest + 3)]

    before = await answers()
    await collected(rig, below)
    assert await answers() == before
    for row in rows:
        reachable = [at for found, at in await stored(rig, WRITE) if found == row and at <= below]
        assert len(reachable) <= 1, "below the safe point, at most one version is left"


async def test_what_was_deleted_is_compacted_once_it_is_as_much_as_is_stored_over_many_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("percolator.tablet.collection.HEAVY_DELETIONS", 20)
    compacted: list[tuple[bytes, bytes]] = []
    rig = await Rig().open()
    storage = rig.tablet._state.storage

    async def compact(first: bytes, stop: bytes) -> None:
        compacted.append((first, stop))

    monkeypatch.setattr(storage, "compact", compact)
    end = 10
    for passes in range(1, 4):
        for _ in range(8):
            end += 2
            await rig.apply(written(b"hot", end - 1, end, b"value"))
        await collected(rig, end + 1)
        # 7, 15 and 23 versions have been deleted.
        assert bool(compacted) == (passes == 3)
    ((first, stop),) = compacted
    assert first < stop
    # A large live range is not rewritten for so little.
    compacted.clear()
    monkeypatch.setattr(storage, "approximate_bytes", lambda first, stop: 1 << 30)
    for _ in range(30):
        end += 2
        await rig.apply(written(b"hot", end - 1, end, b"value"))
    await collected(rig, end + 1)
    assert not compacted


async def test_a_pass_yields_after_each_256_entries_whatever_the_clock_says() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    await rig.apply(*(written(b"%04d" % number, 10, 11) for number in range(1_000)))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    breaths = 0

    async def breathe(self: Sweep) -> None:
        nonlocal breaths
        breaths += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweep, "breathe", breathe)
        await rig.tablet.collect(20)
    assert breaths >= 1_000 // 256
