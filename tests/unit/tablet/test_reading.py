"""Reads and scans: while a write is being published, below the safe point, and at their limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import InvalidArgument, InvariantViolation, SnapshotTooOld, StoreUnusable
from percolator.formats.records import RecordKind
from percolator.tablet import visible_cells
from percolator.tablet.state import SafePoints
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.timestamps import NEWEST
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    ABSENT,
    COLUMN,
    DATA,
    LOCK,
    NOT_EXECUTED,
    REFUSED,
    TARGET,
    WRITE,
    Rig,
    SlowDisk,
    commit,
    condition,
    lock_record,
    mutation,
    prewrite,
    put,
    write_record,
    written,
)
from tests.unit.tablet.watched_storages import LingeringStorage, ValueCountingStorage


async def lingering_rig(*mutations: pb.Mutation) -> tuple[Rig, asyncio.Task[Any]]:
    """Durable and visible in the storage, not yet known to the mirror."""
    storage = LingeringStorage(DurableMemory())
    rig = await Rig(storage=storage).open()
    await rig.apply(written(b"a", 5, 6, b"old"), prewrite(b"b", 10, b"new"))
    storage.lingering = True
    writing = asyncio.ensure_future(rig.mutate(*mutations))
    await asyncio.sleep(0.5)
    return rig, writing


async def scanned(rig: Rig, timestamp: int) -> tuple[list[bytes], list[bytes]]:
    """The values found, and the rows with locks."""
    [page] = await rig.scan(timestamp)
    return list(page.found.values), [found.lock.row for found in page.locks]


async def test_a_lock_that_the_storage_no_longer_has_is_not_in_the_way_and_its_commit_is_seen() -> (
    None
):
    """The mirror is asked first, then the cursor is created; otherwise, neither would be found."""
    rig, writing = await lingering_rig(commit(b"b", 10, 20, b"new"))
    assert await rig.value(b"b", 30) == b"new"
    assert await scanned(rig, 30) == ([b"old", b"new"], [])
    assert await rig.cells(LOCK) == []
    await writing


async def test_a_lock_is_judged_as_it_is_in_the_storage() -> None:
    pushed = mutation(b"b", put(LOCK, lock_record(10, b"new", min_commit_timestamp=31)))
    rig, writing = await lingering_rig(pushed)
    assert await rig.value(b"b", 30) is None
    assert await scanned(rig, 30) == ([b"old"], [])
    result = await rig.read(b"b", 31)
    assert [found.lock.value for found in result.locks] == [
        lock_record(10, b"new", min_commit_timestamp=31)
    ]
    await writing


async def test_a_lock_that_was_never_acknowledged_is_not_in_the_way() -> None:
    """Its transaction gets its commit timestamp later, and so above every reader's timestamp."""
    rig, writing = await lingering_rig(prewrite(b"a", 25, b"newer"))
    assert await rig.value(b"a", 30) == b"old"
    await writing
    assert [found.lock.row for found in (await rig.read(b"a", 30)).locks] == [b"a"]


# ---------------------------------------------------------------- below the safe point


async def test_below_the_safe_point_nothing_is_read_or_judged() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6, b"old"), written(b"b", 15, 16, b"new"))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    await rig.tablet.raise_safe_points(SafePoints(10, 10))
    for opened in (rig, await Rig(disk=disk).open()):
        assert opened.tablet.safe_points == SafePoints(20, 20)
        with pytest.raises(SnapshotTooOld) as caught:
            await opened.scan(19)
        assert (caught.value.timestamp, caught.value.safe_point) == (19, 20)
        assert len(await opened.scan(20)) == 1
        [late, fine, timeless] = await opened.mutate(
            mutation(b"c", not_below=19), mutation(b"c", not_below=20), mutation(b"c")
        )
        assert late.outcome == NOT_EXECUTED
        assert late.error.snapshot_too_old.safe_point == 20
        assert fine.outcome == timeless.outcome == pb.OUTCOME_APPLIED


async def test_transactions_may_be_refused_above_what_snapshots_may_read() -> None:
    """One table keeps its history longer than another; transactions write to both."""
    rig = await Rig().open()
    await rig.tablet.raise_safe_points(SafePoints(reads=20, transactions=50))
    assert len(await rig.scan(20)) == 1
    [late, fine] = await rig.mutate(mutation(b"c", not_below=49), mutation(b"c", not_below=50))
    assert late.error.snapshot_too_old.safe_point == 50
    assert fine.outcome == pb.OUTCOME_APPLIED


async def test_one_read_below_the_safe_point_does_not_fail_its_batch() -> None:
    rig = await Rig().open()
    await rig.apply(
        written(b"a", 5, 6, b"of a"),
        mutation(b"b", put(WRITE, write_record(5, b"", RecordKind.DELETE), 6)),
    )
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    reads = [
        pb.RowRead(row=row, columns=[COLUMN], timestamp=timestamp, report_deletes=True)
        for row, timestamp in [(b"a", 19), (b"b", 20), (b"a", 20), (b"b", 7)]
    ]
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
    assert [refused.read for refused in result.refused] == [0, 3]
    assert all(refused.error.HasField("snapshot_too_old") for refused in result.refused)
    assert list(result.found.reads) == [1, 2]
    assert list(result.found.values) == [b"", b"of a"]
    assert list(result.found.deletes) == [0]


async def test_a_safe_point_raised_while_a_page_is_read_stops_the_page() -> None:
    """The page may lack versions that were collected while it was read."""
    rig = await Rig(slice_entries=2).open()
    await rig.apply(*(written(b"%d" % number, 5, 6) for number in range(10)))
    pages = rig.tablet.scan(pb.ScanRequest(target=TARGET, all_columns=True, timestamp=10))
    reading = asyncio.ensure_future(anext(pages))
    await asyncio.sleep(0)
    raising = asyncio.ensure_future(rig.tablet.raise_safe_points(SafePoints(20, 20)))
    with pytest.raises(SnapshotTooOld):
        await reading
    await raising


# ---------------------------------------------------------------- limits


async def test_reads_that_do_not_fit_into_an_answer_are_refused_as_safe_to_repeat() -> None:
    rig = await Rig(answer_bytes_max=250).open()
    rows = [b"%d" % number for number in range(6)]
    await rig.apply(*(written(row, 5, 6, b"v" * 100) for row in rows))
    reads = [pb.RowRead(row=row, columns=[COLUMN], timestamp=30) for row in rows]
    whole = pb.RowRead(row=b"0", all_columns=True, timestamp=30)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[*reads, whole]))
    assert list(result.found.reads) == [0, 1, 2]
    assert [refused.read for refused in result.refused] == [3, 4, 5, 6]
    assert all(refused.error.retry == 1 for refused in result.refused)  # SAFE


async def test_values_apart_from_their_records_count_towards_the_size_of_an_answer() -> None:
    rig = await Rig(answer_bytes_max=250, read_bytes_max=500).open()
    record = put(WRITE, write_record(5, b"", RecordKind.PUT_IN_DATA), 6)
    rows = [b"%d" % number for number in range(6)]
    await rig.apply(*(mutation(row, record, put(DATA, b"v" * 100, 5)) for row in rows))
    reads = [pb.RowRead(row=row, columns=[COLUMN], timestamp=30) for row in rows]
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
    assert list(result.found.reads) == [0, 1, 2]
    assert [refused.error.retry for refused in result.refused] == [1, 1, 1]  # SAFE
    greedy = pb.RowRead(row=b"0", columns=[COLUMN] * 50, timestamp=30)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[greedy]))
    assert result.refused[0].error.invalid_argument.field == "reads[0]"


async def test_locks_in_the_way_count_towards_the_size_of_an_answer() -> None:
    rig = await Rig(answer_bytes_max=2500).open()
    rows = [b"%d" % number for number in range(6)]
    await rig.apply(*(prewrite(row, 10, b"v" * 1000) for row in rows))
    reads = [pb.RowRead(row=row, columns=[COLUMN], timestamp=30) for row in rows]
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
    assert [lock.read for lock in result.locks] == [0, 1, 2]
    assert [refused.read for refused in result.refused] == [3, 4, 5]
    assert all(refused.error.retry == 1 for refused in result.refused)  # SAFE


async def test_one_read_cannot_ask_for_more_than_an_answer_may_hold() -> None:
    """The same large value, named ten thousand times, is a short request."""
    rig = await Rig(answer_bytes_max=250, read_bytes_max=500, slice_entries=3).open()
    columns = [b"%02d" % number for number in range(12)]
    value = put(WRITE, write_record(5, b"v" * 100), 6)
    await rig.apply(*(mutation(b"wide", value, column=column) for column in columns))
    await rig.apply(written(b"row", 5, 6, b"v" * 100))
    greedy = pb.RowRead(row=b"row", columns=[COLUMN] * 50, timestamp=30)
    whole = pb.RowRead(row=b"wide", all_columns=True, timestamp=30)
    for read in (greedy, whole):
        result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))
        assert not result.found.values
        (refused,) = result.refused
        assert refused.error.invalid_argument.field == "reads[0]"
    fair = pb.RowRead(row=b"wide", columns=columns[:4], timestamp=30)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[fair]))
    assert len(result.found.values) == 4


@pytest.mark.parametrize("whole_row", [False, True])
async def test_a_read_that_only_fits_alone_is_asked_for_again(whole_row: bool) -> None:
    """As the row of a scan's page, it may be nearly as large as a message."""
    rig = await Rig(answer_bytes_max=250, read_bytes_max=500, slice_entries=3).open()
    columns = [b"%02d" % number for number in range(4)]
    value = put(WRITE, write_record(5, b"v" * 100), 6)
    await rig.apply(*(mutation(b"wide", value, column=column) for column in columns))
    await rig.apply(written(b"row", 5, 6, b"v" * 100))
    small = pb.RowRead(row=b"row", columns=[COLUMN], timestamp=30)
    wide = pb.RowRead(row=b"wide", columns=columns, timestamp=30)
    if whole_row:
        wide = pb.RowRead(row=b"wide", all_columns=True, timestamp=30)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[small, wide]))
    assert list(result.found.reads) == [0]
    (refused,) = result.refused
    assert (refused.read, refused.error.retry) == (1, 1)  # SAFE
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[wide]))
    assert len(result.found.values) == 4


async def test_a_read_of_too_many_columns_is_refused_by_the_name_of_its_field() -> None:
    rig = await Rig(columns_max=3).open()
    with pytest.raises(InvalidArgument, match=r"^reads\[0\]\.columns: 4 entries"):
        await rig.read(b"row", 30, *[COLUMN] * 4)


async def test_refusals_with_large_cells_fill_an_answer_and_the_rest_is_not_executed() -> None:
    rig = await Rig(answer_bytes_max=2500).open()
    await rig.apply(mutation(b"row", put(DATA, b"v" * 1000, 10)))
    question = mutation(b"row", conditions=[condition(DATA, ABSENT)])
    results = await rig.mutate(*[question] * 5, mutation(b"other", put(DATA, b"", 10)))
    assert [result.outcome for result in results] == [REFUSED] * 3 + [NOT_EXECUTED] * 3
    assert results[3].error.retry == 1  # SAFE
    assert [cell.row for cell in await rig.cells(DATA)] == [b"row"]


async def test_a_slice_of_a_walk_ends_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, one slice of a wide row would load a thousand large values unchecked."""
    monkeypatch.setattr(visible_cells, "SLICE_BYTES", 250)
    storage = ValueCountingStorage(SlowDisk())
    rig = await Rig(storage=storage, answer_bytes_max=250, read_bytes_max=500).open()
    for number in range(40):
        column = b"%02d" % number
        await rig.apply(
            mutation(
                b"wide",
                put(WRITE, write_record(5, b"", RecordKind.PUT_IN_DATA), 6),
                put(DATA, b"v" * 100, 5),
                column=column,
            )
        )
    read = pb.RowRead(row=b"wide", all_columns=True, timestamp=30)
    storage.values_read = 0
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))
    assert [refused.read for refused in result.refused] == [0]
    assert storage.values_read < 10


async def test_a_large_batch_of_reads_lets_others_run() -> None:
    rig = await Rig(slice_rows=10).open()
    await rig.apply(written(b"a", 5, 6, b"value"))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.ensure_future(others())
    read = pb.RowRead(row=b"a", columns=[COLUMN], timestamp=30)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read] * 95))
    assert list(result.found.values) == [b"value"] * 95
    assert turns >= 9
    running.cancel()


async def test_a_tablet_that_stops_during_a_read_says_so() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk, slice_entries=2, slice_rows=2).open()
    await rig.apply(*(written(b"%d" % number, 5, 6) for number in range(20)))
    disk.failure = OSError("the disk is on fire")
    failing = asyncio.ensure_future(rig.mutate(written(b"x", 5, 6)))
    pages = rig.tablet.scan(
        pb.ScanRequest(target=TARGET, all_columns=True, timestamp=10, page_rows_max=5)
    )
    await anext(pages)
    await failing
    with pytest.raises(StoreUnusable):
        await anext(pages)


class UnreadableStorage(MemoryStorage):
    damaged = False

    def cursor(self) -> Any:
        if self.damaged:
            raise OSError("a damaged block")
        return super().cursor()


async def test_an_unreadable_record_fails_the_request_and_not_the_tablet() -> None:
    storage = UnreadableStorage(DurableMemory())
    rig = await Rig(storage=storage).open()
    await rig.apply(written(b"a", 5, 6, b"value"))
    storage.damaged = True
    with pytest.raises(StoreUnusable):
        await rig.read(b"a", 30)
    with pytest.raises(StoreUnusable):
        await rig.scan(30)
    storage.damaged = False
    assert await rig.value(b"a", 30) == b"value"
    assert rig.closed == []


async def test_a_write_record_without_its_value_is_reported() -> None:
    rig = await Rig().open()
    await rig.apply(mutation(b"a", put(WRITE, write_record(5, b"", RecordKind.PUT_IN_DATA), 6)))
    with pytest.raises(InvariantViolation):
        await rig.read(b"a", 30)


# ---------------------------------------------------------------- scans


async def test_a_condition_that_fails_names_itself_and_its_cell() -> None:
    rig = await Rig().open()
    await rig.apply(prewrite(b"a", 10))
    [result] = await rig.mutate(
        mutation(
            b"a",
            conditions=[
                condition(WRITE, pb.Condition.EXPECTATION_ABSENT),
                condition(LOCK, pb.Condition.EXPECTATION_ABSENT),
            ],
        )
    )
    assert result.failed_condition == 1
    assert result.cell == cells_pb2.Cell(space=LOCK, row=b"a", column=COLUMN, value=lock_record(10))


@pytest.mark.parametrize("timestamps", [(0,), (30, 0), (0, 30)])
async def test_a_read_without_a_timestamp_is_refused(timestamps: tuple[int, ...]) -> None:
    rig = await Rig().open()
    reads = [pb.RowRead(row=b"a", columns=[COLUMN], timestamp=each) for each in timestamps]
    with pytest.raises(InvalidArgument) as caught:
        await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
    assert caught.value.field == f"reads[{timestamps.index(0)}].timestamp"


async def test_a_read_of_now_shows_the_newest_commit_and_meets_every_lock() -> None:
    """A lock that was pushed far above may still be committed before the next look."""
    rig = await Rig().open()
    await rig.apply(written(b"a", 5, 6, b"old"), written(b"a", 7, 8, b"new"))
    pushed = lock_record(10, min_commit_timestamp=1_000_000)
    await rig.apply(mutation(b"b", put(LOCK, pushed)))
    assert await rig.value(b"a", NEWEST) == b"new"
    assert await rig.value(b"c", NEWEST) is None
    assert [found.lock.value for found in (await rig.read(b"b", NEWEST)).locks] == [pushed]


async def test_only_reads_of_rows_are_of_now() -> None:
    """The pages of a scan would show different moments."""
    rig = await Rig().open()
    with pytest.raises(InvalidArgument, match=r"^timestamp: "):
        await rig.scan(NEWEST)
