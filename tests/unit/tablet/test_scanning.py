"""Scans of rows and of stored cells: bad input, pages and where they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from percolator.errors import InvalidArgument
from percolator.formats.records import RecordKind
from percolator.tablet import visible_cells
from percolator.tablet.cells import W, component, inverted
from percolator.tablet.scans import CROWDED
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    LOCK,
    NOTIFY,
    TARGET,
    WRITE,
    Rig,
    SlowDisk,
    delete,
    lock_record,
    mutation,
    prewrite,
    put,
    write_record,
    written,
)
from tests.unit.tablet.watched_storages import LingeringStorage, ValueCountingStorage


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
    field: str, request_: pb.ScanRequest
) -> None:
    rig = await Rig().open()
    request = pb.ScanRequest(target=TARGET, timestamp=30)
    request.MergeFrom(request_)
    if field in ("range", "timestamp"):
        request.all_columns = True
    if field == "timestamp":
        request.timestamp = 0
    with pytest.raises(InvalidArgument) as caught:
        await drained(rig.tablet.scan(request))
    assert caught.value.field == field


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
    field: str, request_: pb.ScanCellsRequest
) -> None:
    rig = await Rig().open()
    with pytest.raises(InvalidArgument) as caught:
        await drained(rig.tablet.scan_cells(request_))
    assert caught.value.field == field


@pytest.mark.parametrize("reverse", [False, True])
async def test_the_rest_of_a_page_continues_the_scan_exactly(reverse: bool) -> None:
    """After a broken stream, a client continues with `rest`, and misses and repeats nothing."""
    rig = await Rig().open()
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visible_cells, "COLUMNS_MET_MAX", 2)
    rig = await Rig().open()
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
    """What remains before it is an empty range, whose end looks like that of the table."""
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
    reverse: bool, versions: int
) -> None:
    """100,000 is not a multiple of a slice. And the number of rows, each of which may have many
    versions, says nothing about how long a page takes."""
    disk = DurableMemory()
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
    writing = asyncio.ensure_future(rig.mutate(*gone))
    await asyncio.sleep(0.5)
    assert not writing.done()
    found = {cell.row for cell in await rig.cells(space)}
    assert found >= set(rows[removed:])
    assert rows[0] not in found
    await writing
    assert {cell.row for cell in await rig.cells(space)} == set(rows[removed:])


async def test_many_locks_end_a_page_too() -> None:
    rig = await Rig().open()
    await rig.apply(*(prewrite(b"%05d" % number, 10) for number in range(5000)))
    for reverse in (False, True):
        pages = await rig.scan(9, reverse=reverse, page_rows_max=10_000)
        assert len(pages) == 2
        assert not any(page.locks for page in pages)
        pages = await rig.scan(30, reverse=reverse, page_rows_max=500)
        assert [len(page.locks) for page in pages] == [500] * 10


@pytest.mark.parametrize("reverse", [False, True])
async def test_locks_with_large_values_end_a_page_by_their_bytes(reverse: bool) -> None:
    rig = await Rig().open()
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
    assert storage.values_read == 3
    assert sum([len(page.cells) async for page in pages]) == 18


async def test_locks_can_be_found_by_their_age() -> None:
    rig = await Rig().open()
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


async def test_pages_of_stored_cells_say_what_remains() -> None:
    rig = await Rig().open()
    versions = [put(WRITE, write_record(time), time + 1) for time in range(2, 9)]
    await rig.apply(mutation(b"a", *versions), written(b"b", 5, 6), written(b"c", 5, 6))
    request = pb.ScanCellsRequest(target=TARGET, space=WRITE, page_rows_max=1)
    pages = [page async for page in rig.tablet.scan_cells(request)]
    assert [len(page.cells) for page in pages] == [7, 1, 1]
    assert [page.rest.start for page in pages] == [b"b", b"c", b""]
    assert not pages[-1].HasField("rest")


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_stream_ends_early_after_a_page_full_of_locks(reverse: bool) -> None:
    """Nobody wants what would be read in advance: the locks are resolved before that."""
    rows = [b"%04d" % number for number in range(2 * CROWDED)]
    rig = await Rig().open()
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
