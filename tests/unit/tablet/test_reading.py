"""Reads and scans: while a write is being published, below the safe point, and at their limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Table, codecs
from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    SchemaError,
    SnapshotTooOld,
    StoreUnusable,
)
from percolator.formats.records import RecordKind
from percolator.routing.range_scan import joined_page
from percolator.tablet import visible_cells
from percolator.tablet.cells import W, component, inverted
from percolator.tablet.scans import CROWDED, join_cells
from percolator.tablet.state import SafePoints
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.timestamps import NEWEST
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import (
    ABSENT,
    COLUMN,
    DATA,
    LOCK,
    NOT_EXECUTED,
    NOTIFY,
    REFUSED,
    TARGET,
    WRITE,
    LingeringStorage,
    Rig,
    SlowDisk,
    ValueCountingStorage,
    commit,
    condition,
    counted_turns,
    delete,
    lock_record,
    mutation,
    prewrite,
    put,
    under_way,
    write_record,
    written,
)

APART = put(WRITE, write_record(5, b"", RecordKind.PUT_IN_DATA), 6)
"""A record whose value is apart from it."""


async def lingering_rig(*mutations: pb.Mutation) -> tuple[Rig, asyncio.Task[Any]]:
    """Durable and visible in the storage, not yet known to the mirror."""
    storage = LingeringStorage(DurableMemory())
    rig = await Rig(storage=storage).open()
    await rig.apply(written(b"a", 5, 6, b"old"), prewrite(b"b", 10, b"new"))
    storage.lingering = True
    return rig, await under_way(rig.mutate(*mutations))


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


async def test_below_the_safe_point_nothing_is_read_or_judged(rig: Rig, disk: SlowDisk) -> None:
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
        assert (late.outcome, late.error.snapshot_too_old.safe_point) == (NOT_EXECUTED, 20)
        assert fine.outcome == timeless.outcome == pb.OUTCOME_APPLIED


async def test_transactions_may_be_refused_above_what_snapshots_may_read(rig: Rig) -> None:
    """One table keeps its history longer than another; transactions write to both."""
    await rig.tablet.raise_safe_points(SafePoints(reads=20, transactions=50))
    assert len(await rig.scan(20)) == 1
    [late, fine] = await rig.mutate(mutation(b"c", not_below=49), mutation(b"c", not_below=50))
    assert late.error.snapshot_too_old.safe_point == 50
    assert fine.outcome == pb.OUTCOME_APPLIED


async def test_one_read_below_the_safe_point_does_not_fail_its_batch(rig: Rig) -> None:
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
    assert (list(result.found.reads), list(result.found.values)) == ([1, 2], [b"", b"of a"])
    assert list(result.found.deletes) == [0]


async def test_a_safe_point_raised_while_a_page_is_read_stops_the_page() -> None:
    """The page may lack versions that were collected while it was read."""
    rig = await Rig(slice_entries=2).open()
    await rig.apply(*(written(b"%d" % number, 5, 6) for number in range(10)))
    pages = rig.tablet.scan(pb.ScanRequest(target=TARGET, all_columns=True, timestamp=10))
    reading = await under_way(anext(pages), seconds=0)
    raising = asyncio.ensure_future(rig.tablet.raise_safe_points(SafePoints(20, 20)))
    with pytest.raises(SnapshotTooOld):
        await reading
    await raising


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("answer_bytes_max", "change"),
    [
        (250, put(WRITE, write_record(5, b"v" * 100), 6)),
        (250, APART),
        (2500, put(LOCK, lock_record(10, b"v" * 1000))),
    ],
    ids=["values", "values apart from their records", "locks in the way"],
)
async def test_reads_that_do_not_fit_into_an_answer_are_refused_as_safe_to_repeat(
    answer_bytes_max: int, change: pb.Change
) -> None:
    rig = await Rig(answer_bytes_max=answer_bytes_max).open()
    rows = [b"%d" % number for number in range(6)]
    await rig.apply(*(mutation(row, change, put(DATA, b"v" * 100, 5)) for row in rows))
    reads = [pb.RowRead(row=row, columns=[COLUMN], timestamp=30) for row in rows]
    whole = pb.RowRead(row=b"0", all_columns=True, timestamp=30)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[*reads, whole]))
    assert [*result.found.reads, *(lock.read for lock in result.locks)] == [0, 1, 2]
    found = [(refused.read, refused.error.retry) for refused in result.refused]
    assert found == [(3, 1), (4, 1), (5, 1), (6, 1)]  # SAFE


async def wide_rig(columns: int) -> Rig:
    """A row of one column, another whose value is apart from its record, and one of many."""
    rig = await Rig(answer_bytes_max=250, read_bytes_max=500, slice_entries=3).open()
    value = put(WRITE, write_record(5, b"v" * 100), 6)
    wide = (mutation(b"wide", value, column=b"%02d" % number) for number in range(columns))
    apart = mutation(b"apart", APART, put(DATA, b"v" * 100, 5))
    await rig.apply(mutation(b"row", value), apart, *wide)
    return rig


async def test_one_read_cannot_ask_for_more_than_an_answer_may_hold() -> None:
    """A large value, named ten thousand times, is a short request."""
    rig = await wide_rig(12)
    greedy = [pb.RowRead(row=row, columns=[COLUMN] * 50) for row in (b"row", b"apart")]
    for read in (*greedy, pb.RowRead(row=b"wide", all_columns=True)):
        read.timestamp = 30
        result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))
        (refused,) = result.refused
        assert (*result.found.values, refused.error.invalid_argument.field) == ("reads[0]",)
    fair = await rig.read(b"wide", 30, *(b"%02d" % number for number in range(4)))
    assert len(fair.found.values) == 4


@pytest.mark.parametrize(
    "wide",
    [{"columns": [b"%02d" % number for number in range(4)]}, {"all_columns": True}],
    ids=["columns", "whole row"],
)
async def test_a_read_that_only_fits_alone_is_asked_for_again(wide: dict[str, Any]) -> None:
    """As the row of a scan's page, it may be nearly as large as a message."""
    rig = await wide_rig(4)
    small = pb.RowRead(row=b"row", columns=[COLUMN], timestamp=30)
    large = pb.RowRead(row=b"wide", timestamp=30, **wide)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[small, large]))
    assert list(result.found.reads) == [0]
    assert [(refused.read, refused.error.retry) for refused in result.refused] == [(1, 1)]  # SAFE
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[large]))
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
        value = put(DATA, b"v" * 100, 5)
        await rig.apply(mutation(b"wide", APART, value, column=b"%02d" % number))
    storage.values_read = 0
    result = await rig.read_row(b"wide", 30)
    assert [refused.read for refused in result.refused] == [0]
    assert storage.values_read < 10


async def test_a_large_batch_of_reads_lets_others_run() -> None:
    rig = await Rig(slice_rows=10).open()
    await rig.apply(written(b"a", 5, 6, b"value"))
    read = pb.RowRead(row=b"a", columns=[COLUMN], timestamp=30)
    async with counted_turns() as turns:
        result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read] * 95))
    assert list(result.found.values) == [b"value"] * 95
    assert turns.count >= 9


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
    for asking in (rig.read(b"a", 30), rig.scan(30)):
        with pytest.raises(StoreUnusable):
            await asking
    storage.damaged = False
    assert await rig.value(b"a", 30) == b"value"
    assert rig.closed == []


async def test_an_unreadable_cache_closes_the_tablet_which_is_made_again() -> None:
    storage = UnreadableStorage(DurableMemory())
    storage.is_cache = True
    rig = await Rig(storage=storage).open()
    await rig.apply(written(b"a", 5, 6, b"value"))
    storage.damaged = True
    with pytest.raises(StoreUnusable):
        await rig.read(b"a", 30)
    assert [type(error) for error in rig.closed] == [StoreUnusable]


async def test_a_write_record_without_its_value_is_reported(rig: Rig) -> None:
    await rig.apply(mutation(b"a", APART))
    with pytest.raises(InvariantViolation):
        await rig.read(b"a", 30)


# ---------------------------------------------------------------- scans


@pytest.mark.parametrize("timestamps", [(0,), (30, 0), (0, 30)])
async def test_a_read_without_a_timestamp_is_refused(rig: Rig, timestamps: tuple[int, ...]) -> None:
    reads = [pb.RowRead(row=b"a", columns=[COLUMN], timestamp=each) for each in timestamps]
    with refused(f"reads[{timestamps.index(0)}].timestamp"):
        await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))


async def test_a_read_of_now_shows_the_newest_commit_and_meets_every_lock(rig: Rig) -> None:
    """A lock that was pushed far above may still be committed before the next look."""
    await rig.apply(written(b"a", 5, 6, b"old"), written(b"a", 7, 8, b"new"))
    pushed = lock_record(10, min_commit_timestamp=1_000_000)
    await rig.apply(mutation(b"b", put(LOCK, pushed)))
    assert (await rig.value(b"a", NEWEST), await rig.value(b"c", NEWEST)) == (b"new", None)
    assert [found.lock.value for found in (await rig.read(b"b", NEWEST)).locks] == [pushed]


async def test_only_reads_of_rows_are_of_now(rig: Rig) -> None:
    """The pages of a scan would show different moments."""
    with pytest.raises(InvalidArgument, match=r"^timestamp: "):
        await rig.scan(NEWEST)


# Scans of rows and of stored cells: bad input, pages and where they end.


async def drained(pages: AsyncIterator[Any]) -> list[Any]:
    return [page async for page in pages]


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("range", pb.ScanRequest(range=cells_pb2.RowRange(start=b"c", end=b"b"))),
        ("range", pb.ScanRequest(range=cells_pb2.RowRange(start=b"c", end=b"c"))),
        ("timestamp", pb.ScanRequest(timestamp=0)),
        ("columns", pb.ScanRequest()),
        ("column_prefixes", pb.ScanRequest(column_prefixes=[b"c", b""])),
        ("column_prefixes", pb.ScanRequest(column_prefixes=[b"\0c"])),
        ("column_prefixes", pb.ScanRequest(column_prefixes=[b"%d" % n for n in range(101)])),
        ("all_columns", pb.ScanRequest(all_columns=True, columns=[b"c"])),
        ("all_columns", pb.ScanRequest(all_columns=True, column_prefixes=[b"c"])),
    ],
)
async def test_a_bad_scan_is_refused_by_the_name_of_its_field(
    rig: Rig, field: str, request_: pb.ScanRequest
) -> None:
    request = pb.ScanRequest(target=TARGET, timestamp=30)
    request.MergeFrom(request_)
    if field in ("range", "timestamp"):
        request.all_columns = True
    if field == "timestamp":
        request.timestamp = 0
    with refused(field):
        await drained(rig.tablet.scan(request))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("space", pb.ScanCellsRequest(target=TARGET)),
        (
            "until_timestamp",
            pb.ScanCellsRequest(target=TARGET, space=WRITE, from_timestamp=5, until_timestamp=5),
        ),
        (
            "range",
            pb.ScanCellsRequest(
                target=TARGET, space=WRITE, range=cells_pb2.RowRange(start=b"b", end=b"a")
            ),
        ),
    ],
)
async def test_a_bad_scan_of_cells_is_refused_by_the_name_of_its_field(
    rig: Rig, field: str, request_: pb.ScanCellsRequest
) -> None:
    with refused(field):
        await drained(rig.tablet.scan_cells(request_))


@pytest.mark.parametrize("reverse", [False, True])
async def test_the_rest_of_a_page_continues_the_scan_exactly(rig: Rig, reverse: bool) -> None:
    """After a broken stream, a client continues with `rest`, and misses and repeats nothing."""
    rows = [b"", b"\0", b"a", b"a\0", b"b\xff", b"c"]
    await rig.apply(*(written(row, 5, 6, row) for row in rows), prewrite(b"ab", 7))
    seen: list[bytes] = []
    range_ = cells_pb2.RowRange()
    while True:
        request = pb.ScanRequest(
            target=TARGET,
            timestamp=30,
            all_columns=True,
            range=range_,
            page_rows_max=2,
            reverse=reverse,
        )
        pages = rig.tablet.scan(request)
        page = await anext(pages)
        await pages.aclose()
        seen += [*page.found.rows, *(found.lock.row for found in page.locks)]
        if not page.HasField("rest"):
            break
        range_ = page.rest
    assert sorted(seen) == sorted([*rows, b"ab"])


async def test_columns_that_a_walk_does_not_remember_are_read_as_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible_cells, "COLUMNS_MET_MAX", 2)
    columns = [b"a", b"b", b"c\0", b"d"]
    for row in (b"1", b"2\0"):
        changes = [put(WRITE, write_record(5, row + column), 6) for column in columns]
        await rig.apply(
            *(mutation(row, one, column=c) for one, c in zip(changes, columns, strict=True))
        )
    for wanted in (columns, [b"b", b"d"], [b"c\0"]):
        (page,) = await rig.scan(30, columns=[] if wanted == columns else wanted)
        addresses = list(zip(page.found.rows, page.found.columns, strict=True))
        assert addresses == [(row, column) for row in (b"1", b"2\0") for column in wanted]
        assert list(page.found.values) == [row + column for row, column in addresses]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("page_entries_max", [1, 2, 3])
async def test_a_page_that_ends_at_the_empty_row_is_not_followed_by_all_rows(
    page_entries_max: int, reverse: bool
) -> None:
    """The range before it is empty, and its end looks like that of the table."""
    rows = [b"", b"a", b"b"]
    rig = await Rig(page_entries_max=page_entries_max).open()
    await rig.apply(*(written(row, 5, 6, b"v") for row in rows))
    found: list[bytes] = []
    request = pb.ScanRequest(target=TARGET, timestamp=30, all_columns=True, reverse=reverse)
    async with aclosing(rig.tablet.scan(request)) as pages:
        async for page in pages:
            found += page.found.rows
            assert len(found) <= len(rows)
    assert found == sorted(rows, reverse=reverse)


@pytest.mark.parametrize("page_entries_max", [10, 12])
async def test_a_range_of_only_deleted_rows_is_split_into_pages(page_entries_max: int) -> None:
    """One cursor over millions would hold back compaction, and its caller would hear nothing."""
    rig = await Rig(slice_entries=5, page_entries_max=page_entries_max).open()
    gone = write_record(5, b"", RecordKind.DELETE)
    await rig.apply(*(mutation(b"%03d" % number, put(WRITE, gone, 6)) for number in range(60)))
    await rig.apply(written(b"zzz", 5, 6, b"last"))
    for reverse in (False, True):
        pages = await rig.scan(30, reverse=reverse)
        assert len(pages) >= 4
        assert [value for page in pages for value in page.found.values] == [b"last"]


async def test_entries_that_a_slice_left_unread_do_not_count_towards_the_end_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slice of large values ends by its bytes, long before it has looked at all its entries."""
    monkeypatch.setattr(visible_cells, "SLICE_BYTES", 250)
    rig = await Rig(slice_entries=100, page_entries_max=200).open()
    rows = [b"%02d" % number for number in range(40)]
    await rig.apply(*(written(row, 5, 6, b"v" * 100) for row in rows))
    [page] = await rig.scan(30)
    assert list(page.found.rows) == rows


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("versions", [1, 4])
async def test_by_default_a_page_looks_at_a_hundred_thousand_entries_and_ends(
    disk: SlowDisk, reverse: bool, versions: int
) -> None:
    """100,000 is not a multiple of a slice. And the number of rows, each of which may have many
    versions, says nothing about how long a page takes."""
    await (await Rig(disk=disk).open()).tablet.close()
    gone = write_record(5, b"", RecordKind.DELETE)
    for number in range(130_000 // versions):
        cell = component(b"%06d" % number) + component(COLUMN)
        for version in range(versions):
            disk.durable[W + cell + inverted(6 + version)] = gone
    rig = await Rig(disk=disk).open()
    pages = await rig.scan(30, reverse=reverse)
    assert len(pages) == 2
    assert not any(page.found.rows for page in pages)
    rest = pages[0].rest
    row = rest.end if reverse else rest.start.removesuffix(b"\0")
    rows_of_page = 130_000 // versions - int(row) if reverse else int(row) + 1
    assert 100_000 <= rows_of_page * versions < 100_000 + 2 * 1024


@pytest.mark.parametrize("space", [LOCK, NOTIFY])
@pytest.mark.parametrize("removed", [30, 1500])
async def test_stored_cells_continue_after_cells_that_are_gone_but_still_in_memory(
    space: cells_pb2.Space, removed: int
) -> None:
    """Between a write and its publication, memory knows cells that the storage no longer has. If
    one were taken for the end of the tablet, every lock after it would be hidden."""
    storage = LingeringStorage(DurableMemory())
    rig = await Rig(storage=storage).open()
    rows = [b"%05d" % number for number in range(3000)]
    if space == LOCK:
        await rig.apply(*(prewrite(row, 10) for row in rows))
        gone = [mutation(row, delete(LOCK)) for row in rows[:removed]]
    else:
        await rig.apply(*(mutation(row, put(NOTIFY, b"", 10, b"o")) for row in rows))
        gone = [mutation(row, delete(NOTIFY, 10, b"o")) for row in rows[:removed]]
    storage.lingering = True
    writing = await under_way(rig.mutate(*gone))
    assert not writing.done()
    found = {cell.row for cell in await rig.cells(space)}
    assert found >= set(rows[removed:])
    assert rows[0] not in found
    await writing
    assert {cell.row for cell in await rig.cells(space)} == set(rows[removed:])


async def test_many_locks_end_a_page_too(rig: Rig) -> None:
    await rig.apply(*(prewrite(b"%05d" % number, 10) for number in range(5000)))
    for reverse in (False, True):
        pages = await rig.scan(9, reverse=reverse, page_rows_max=10_000)
        assert len(pages) == 2
        assert not any(page.locks for page in pages)
        pages = await rig.scan(30, reverse=reverse, page_rows_max=500)
        assert [len(page.locks) for page in pages] == [500] * 10


@pytest.mark.parametrize("reverse", [False, True])
async def test_locks_with_large_values_end_a_page_by_their_bytes(rig: Rig, reverse: bool) -> None:
    rows = [b"%d" % number for number in range(6)]
    await rig.apply(*(prewrite(row, 10, b"v" * 1000) for row in rows))
    pages = await rig.scan(30, reverse=reverse, page_bytes_max=1500)
    assert [len(page.locks) for page in pages] == [2, 2, 2]
    found = [lock.lock.row for page in pages for lock in page.locks]
    assert found == (rows[::-1] if reverse else rows)


@pytest.mark.parametrize("space", [LOCK, DATA, NOTIFY])
async def test_a_page_of_large_stored_cells_loads_no_more_than_it_holds(
    space: cells_pb2.Space,
) -> None:
    """Loading a thousand values of 4 MiB to return one of them would exhaust a server's memory."""
    storage = ValueCountingStorage(SlowDisk())
    rig = await Rig(storage=storage, page_bytes_default=1500).open()
    change = {
        LOCK: put(LOCK, lock_record(10, b"v" * 1000)),
        DATA: put(DATA, b"v" * 1000, 10),
        NOTIFY: put(NOTIFY, b"v" * 1000, 10, b"f"),
    }[space]
    await rig.apply(*(mutation(b"%02d" % number, change) for number in range(20)))
    pages = rig.tablet.scan_cells(pb.ScanCellsRequest(target=TARGET, space=space))
    storage.values_read = 0
    assert len((await anext(pages)).cells) == 2
    assert (storage.values_read, sum([len(page.cells) async for page in pages])) == (3, 18)


async def test_locks_can_be_found_by_their_age(rig: Rig) -> None:
    await rig.apply(*(prewrite(b"%d" % start, start) for start in (10, 20, 30)))
    found = await rig.cells(LOCK, until_timestamp=25, from_timestamp=11)
    assert [cell.row for cell in found] == [b"20"]
    assert [cell.row for cell in await rig.cells(LOCK, cell_limit=2)] == [b"10", b"20"]


async def test_a_search_for_old_locks_reads_none_of_those_that_a_large_job_holds() -> None:
    """A master searches once a minute. Reading ten million locks takes minutes."""
    storage = ValueCountingStorage(SlowDisk())
    rig = await Rig(storage=storage).open()
    await rig.apply(*(prewrite(b"%05d" % number, 30) for number in range(3000)))
    storage.values_read = 0
    assert await rig.cells(LOCK, until_timestamp=30) == []
    assert storage.values_read == 0
    await rig.apply(prewrite(b"02999x", 20))
    storage.values_read = 0
    assert [cell.row for cell in await rig.cells(LOCK, until_timestamp=30)] == [b"02999x"]
    assert storage.values_read == 1


async def test_pages_of_stored_cells_say_what_remains(rig: Rig) -> None:
    versions = [put(WRITE, write_record(time), time + 1) for time in range(2, 9)]
    await rig.apply(mutation(b"a", *versions), written(b"b", 5, 6), written(b"c", 5, 6))
    request = pb.ScanCellsRequest(target=TARGET, space=WRITE, page_rows_max=1)
    pages = [page async for page in rig.tablet.scan_cells(request)]
    assert [len(page.cells) for page in pages] == [7, 1, 1]
    assert [page.rest.start for page in pages] == [b"b", b"c", b""]
    assert not pages[-1].HasField("rest")


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_stream_ends_early_after_a_page_full_of_locks(rig: Rig, reverse: bool) -> None:
    """Nobody wants what would be read in advance: the locks are resolved before that."""
    rows = [b"%04d" % number for number in range(2 * CROWDED)]
    await rig.apply(*(prewrite(row, 7) for row in rows), written(b"z", 5, 6, b"value"))
    few = await rig.scan(30, reverse=reverse, page_rows_max=CROWDED - 1)
    assert sum(len(page.locks) for page in few) == len(rows), "pages with fewer are followed"
    met: list[bytes] = []
    rest, streams = cells_pb2.RowRange(), 0
    while True:
        pages = await rig.scan(30, range=rest, reverse=reverse, page_rows_max=CROWDED)
        streams += 1
        assert all(len(page.locks) < CROWDED for page in pages[:-1])
        met += [one.lock.row for page in pages for one in page.locks]
        if not pages[-1].HasField("rest"):
            break
        rest = pages[-1].rest
    assert met == sorted(rows, reverse=reverse)
    assert streams > 1


# Columns that begin with 00 hold observers' notes, and are read only when named.

RESERVED = b"\x00ack\x00"
VISIBLE = b"\x01"


async def rig_with(*columns: bytes) -> Rig:
    """One row with a value in each of these columns."""
    rig = await Rig().open()
    await rig.apply(*(mutation(b"r", put(WRITE, write_record(5, c), 6), column=c) for c in columns))
    return rig


async def seen(rig: Rig, *columns: bytes) -> tuple[list[bytes], int]:
    """The values of the row, and how many locks are in the way: the same to reads and scans."""
    read = await (rig.read(b"r", 9, *columns) if columns else rig.read_row(b"r", 9))
    for reverse in (False, True):
        (page,) = await rig.scan(9, columns=columns, reverse=reverse)
        assert not page.HasField("rest")
        assert (page.found.values, len(page.locks)) == (read.found.values, len(read.locks))
    return list(read.found.values), len(read.locks)


async def test_all_columns_means_all_but_the_reserved_ones() -> None:
    rig = await rig_with(b"", RESERVED, b"\0", VISIBLE, b"a\0")
    assert await seen(rig) == ([b"", VISIBLE, b"a\0"], 0)
    assert list((await rig.read_row(b"r", 9)).found.columns) == [b"", VISIBLE, b"a\0"]


async def test_a_row_with_only_reserved_columns_is_not_a_row() -> None:
    rig = await rig_with(RESERVED)
    assert await seen(rig) == ([], 0)
    assert not (await rig.scan(9))[0].found.rows


async def test_a_read_that_names_a_reserved_column_gets_it() -> None:
    assert await seen(await rig_with(RESERVED, VISIBLE), RESERVED) == ([RESERVED], 0)


async def test_a_lock_on_a_reserved_column_blocks_only_reads_that_name_it() -> None:
    """Otherwise, scans over rows with active observers would wait for their acknowledgements."""
    rig = await rig_with(VISIBLE)
    await rig.apply(mutation(b"r", put(LOCK, lock_record(4)), column=RESERVED))
    assert await seen(rig) == ([VISIBLE], 0)
    assert await seen(rig, RESERVED) == ([], 1)


async def test_many_versions_of_reserved_columns_do_not_end_a_page_early() -> None:
    rig = await rig_with(VISIBLE)
    versions = [put(WRITE, write_record(at), at + 1) for at in range(10, 60, 2)]
    await rig.apply(mutation(b"r", *versions, column=RESERVED))
    assert await seen(rig) == ([VISIBLE], 0)


def test_programs_cannot_name_a_reserved_column() -> None:
    for name in ("\0", b"\x00ack\x00f"):
        with pytest.raises(SchemaError, match="reserved"):
            Table("pages").column(name, codecs.text)


# Pages whose cells are joined have what pages of lists have, or are lists.

CELLS = st.dictionaries(
    st.tuples(st.sampled_from([b"", b"a", b"a\0", b"b"]), st.sampled_from([b"x", b"y", b"z\0"])),
    st.binary(max_size=3),
)


@given(CELLS)
def test_cells_are_joined_if_all_rows_have_the_same_columns(
    cells: dict[tuple[bytes, bytes], bytes],
) -> None:
    ordered = sorted(cells)
    rows, columns = [row for row, _ in ordered], [column for _, column in ordered]
    found = pb.JoinedCells()
    joined = join_cells(rows, columns, [cells[one] for one in ordered], found)
    of_rows = [{column for row, column in ordered if row == one} for one in {*rows}]
    assert joined == (bool(of_rows) and all(one == of_rows[0] for one in of_rows))
    if not joined:
        assert found == pb.JoinedCells()
        return
    page = joined_page(found, b"", b"")
    assert page is not None
    assert (page.rows.ends(), len(page.rows)) == ((rows[0], rows[-1]), len({*rows}))
    seen = {
        (row, column): value
        for column, values in page.columns.items()
        for row, value in zip(page.rows.cut(), values.cut(), strict=True)
    }
    assert seen == cells


async def test_a_scan_joins_what_it_can_if_its_caller_takes_that(rig: Rig) -> None:
    await rig.apply(*(written(row, 5, 6, b"value of " + row) for row in (b"a", b"b", b"c")))
    [listed] = await rig.scan(30)
    assert not listed.HasField("joined")
    [sent] = await rig.scan(30, joined=True)
    assert not sent.HasField("found")
    page = joined_page(sent.joined, b"", b"")
    assert page is not None
    assert page.rows.cut() == list(listed.found.rows)
    assert [values.cut() for values in page.columns.values()] == [list(listed.found.values)]


async def test_locks_deletions_and_rows_of_other_columns_are_never_left_out(rig: Rig) -> None:
    await rig.apply(written(b"a", 5, 6, b"1"), prewrite(b"b", 7))
    [page] = await rig.scan(30, joined=True)
    assert [lock.lock.row for lock in page.locks] == [b"b"]
    assert list(page.found.rows) == [b"a"]
    rig = await Rig().open()
    gone = write_record(5, b"", RecordKind.DELETE)
    await rig.apply(written(b"a", 5, 6, b"1"), mutation(b"b", put(WRITE, gone, 6)))
    [page] = await rig.scan(30, joined=True, report_deletes=True)
    assert (list(page.found.rows), list(page.found.deletes)) == ([b"a", b"b"], [1])
    rig = await Rig().open()
    other = mutation(b"b", put(WRITE, write_record(5, b"2"), 6), column=b"other")
    await rig.apply(written(b"a", 5, 6, b"1"), other)
    [page] = await rig.scan(30, joined=True)
    assert list(page.found.values) == [b"1", b"2"]
    [page] = await rig.scan(2, joined=True)
    assert not page.HasField("joined")


def _column(block: bytes, *offsets: int) -> pb.JoinedBytes:
    return pb.JoinedBytes(
        block=block, offsets=b"".join(one.to_bytes(4, "little") for one in offsets)
    )


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        (_column(b"ab", 0, 1, 2), _column(b"v", 0, 1)),
        (_column(b"ab", 0, 1, 3), _column(b"vv", 0, 1, 2)),
        (_column(b"ab", 0, 1, 2), _column(b"vv", 1, 1, 2)),
        (pb.JoinedBytes(block=b"", offsets=b""), pb.JoinedBytes()),
        (pb.JoinedBytes(block=b"", offsets=bytes(5)), pb.JoinedBytes(offsets=bytes(5))),
        (_column(b"", 0), _column(b"", 0)),
    ],
)
def test_joined_cells_that_do_not_fit_together_are_no_page(
    rows: pb.JoinedBytes, values: pb.JoinedBytes
) -> None:
    columns = [pb.JoinedColumn(name=b"c", values=values)]
    assert joined_page(pb.JoinedCells(rows=rows, columns=columns), b"", b"") is None
    assert joined_page(pb.JoinedCells(rows=rows), b"", b"") is None
