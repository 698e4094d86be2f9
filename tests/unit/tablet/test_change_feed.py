"""The change feed of a tablet: what is in it, in which order, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument, SnapshotTooOld, StoreUnusable, TabletMoved
from percolator.formats.records import RecordKind, acknowledgement_column
from percolator.tablet import opening
from percolator.tablet.cells import FEED_KEY, FORMAT_KEY, TIMESTAMP_MAX, F, LockMirror, split_change
from percolator.tablet.state import SafePoints, TabletIdentity, TimestampGuard
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from tests.simulation.virtual_time import VirtualClock
from tests.unit.tablet.change_feeds import Change, before, changes, look
from tests.unit.tablet.collecting import collected, in_data, record
from tests.unit.tablet.counting import CountingStorage, counted
from tests.unit.tablet.tablets import (
    COLUMN,
    TARGET,
    WRITE,
    Rig,
    batch,
    commit,
    delete,
    mutation,
    prewrite,
    put,
    roll_back,
    started,
    write_record,
    written,
)
from tests.unit.tablet.watched_storages import LingeringStorage


async def fed(**fields: object) -> Rig:
    """A tablet with a change feed."""
    rig = Rig(change_feed=True, **fields)  # type: ignore[arg-type]
    return await rig.open()


def put_of(at: int, row: bytes, value: bytes | None) -> Change:
    return Change(at, row, COLUMN, value)


def feed_keys(disk: DurableMemory) -> list[bytes]:
    return sorted(key for key in disk.durable if key.startswith(F))


# ---------------------------------------------------------------------------- what is in it


async def test_changes_come_in_the_order_of_their_commits_and_then_of_their_cells() -> None:
    rig = await fed()
    await rig.apply(
        written(b"z", 5, 9, b"last"), written(b"b", 5, 6, b"two"), written(b"a", 5, 6, b"one")
    )
    await rig.apply(record(b"a", 7, 8, RecordKind.DELETE))
    answer = await changes(rig, 0, 20)
    assert answer.changes == [
        put_of(6, b"a", b"one"),
        put_of(6, b"b", b"two"),
        put_of(8, b"a", None),
        put_of(9, b"z", b"last"),
    ]
    assert answer.reached == 20
    assert (await changes(rig, 6, 8)).changes == [put_of(8, b"a", None)]


async def test_long_and_empty_values_are_found() -> None:
    rig = await fed()
    await rig.apply(in_data(b"a", 5, 6, b"long" * 1000), written(b"b", 5, 7, b""))
    found = (await changes(rig, 0, 20)).changes
    assert found == [put_of(6, b"a", b"long" * 1000), put_of(7, b"b", b"")]


async def test_what_changes_nothing_is_not_in_it() -> None:
    """Lock-only commits, rollbacks, and what observers note beside cells."""
    rig = await fed()
    hidden = acknowledgement_column(b"observer", COLUMN)
    await rig.apply(
        record(b"a", 5, 6, RecordKind.LOCK_ONLY),
        roll_back(b"b", 7),
        mutation(b"c", put(WRITE, write_record(5, b"v"), 8), column=hidden),
    )
    assert (await changes(rig, 0, 20)).changes == []


async def test_what_was_before_is_returned_if_wanted() -> None:
    rig = await fed()
    await rig.apply(
        written(b"a", 1, 2, b"old"),
        record(b"a", 3, 4, RecordKind.LOCK_ONLY),
        written(b"a", 5, 6, b"new"),
    )
    await rig.apply(record(b"a", 7, 8, RecordKind.DELETE))
    await rig.apply(in_data(b"a", 9, 10, b"again"), written(b"b", 9, 10, b""))
    await rig.apply(written(b"b", 11, 12, b"b"), written(b"a", 11, 12, b"last"))
    answer = await changes(rig, 0, 20, before=True)
    [page] = answer.pages
    assert [(change.commit, change.row) for change in answer.changes] == [
        (2, b"a"), (6, b"a"), (8, b"a"), (10, b"a"), (10, b"b"), (12, b"a"), (12, b"b"),
    ]  # fmt: skip
    assert before(page) == [None, b"old", b"new", None, None, b"again", b""]


async def test_only_rows_of_the_range_are_returned() -> None:
    rig = await fed()
    await rig.apply(*(written(row, 5, 6, row) for row in (b"a", b"m", b"z")))
    await rig.apply(prewrite(b"z", 8))
    answer = await changes(rig, 0, 20, range=RowRange(start=b"b", end=b"n"))
    assert [change.row for change in answer.changes] == [b"m"]
    assert answer.reached == 20


async def test_a_deleted_write_record_leaves_the_feed() -> None:
    rig = await fed()
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"b", 5, 6, b"v"))
    await rig.apply(mutation(b"a", delete(WRITE, 6)))
    assert [change.row for change in (await changes(rig, 0, 20)).changes] == [b"b"]


async def test_the_entry_is_in_the_same_write_as_the_commit() -> None:
    disk = DurableMemory()
    rig = await fed(disk=disk)
    before_it = disk.durable.copy()
    await rig.apply(written(b"a", 5, 6, b"v"))
    added = {key[:1] for key in disk.durable.keys() - before_it.keys()}
    assert {b"W", b"F"} <= added
    assert len(disk.durable.keys() - before_it.keys()) == 3  # and Mnewest


# ---------------------------------------------------------------------------- limits


async def test_no_commit_is_cut_off_by_a_limit() -> None:
    rig = await fed()
    for at in range(1, 6):
        await rig.apply(*(written(b"row %d" % n, 2 * at - 1, 2 * at, b"v") for n in range(at)))
    found: list[Change] = []
    after, streams = 0, 0
    while after < 30:
        answer = await changes(rig, after, 30, changes_max=4, page_bytes_max=1)
        found += answer.changes
        assert {change.commit for change in found} == {
            at for at in range(2, 11, 2) if at <= answer.reached
        }
        after, streams = answer.reached, streams + 1
    assert len(found) == 15
    assert [change.commit for change in found] == sorted(change.commit for change in found)
    assert streams > 2


async def test_a_page_may_end_inside_a_commit_and_says_how_far_it_is_whole() -> None:
    rig = await fed(slice_entries=2)
    await rig.apply(written(b"a", 1, 2, b"v"))
    await rig.apply(*(written(b"row %d" % n, 3, 4, b"v") for n in range(4)))
    answer = await changes(rig, 0, 30, page_bytes_max=1)
    assert [len(page.found.rows) for page in answer.pages] == [1, 1, 1, 1, 1]
    assert [page.reached for page in answer.pages] == [3, 3, 3, 3, 30]


# ---------------------------------------------------------------------------- locks


async def test_it_ends_below_what_may_still_be_committed() -> None:
    rig = await fed()
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"a", 11, 12, b"w"))
    await rig.apply(prewrite(b"b", 10))
    answer = await changes(rig, 0, 20)
    assert (answer.reached, answer.locks) == (10, [b"b"])
    assert [change.commit for change in answer.changes] == [6]
    await rig.apply(commit(b"b", 10, 13, b"x"))
    answer = await changes(rig, 10, 20)
    assert (answer.reached, [change.commit for change in answer.changes]) == (20, [12, 13])


@pytest.mark.parametrize(
    "lock",
    [
        {"start": 21},
        {"start": 10, "min_commit_timestamp": 21},
        {"start": 10, "kind": RecordKind.LOCK_ONLY},
        {"start": 15},
    ],
    ids=["began later", "was pushed", "changes nothing", "is passed"],
)
async def test_a_lock_that_cannot_change_the_answer_is_not_in_the_way(
    lock: dict[str, int],
) -> None:
    rig = await fed()
    await rig.apply(prewrite(b"b", **lock))  # type: ignore[arg-type]
    answer = await changes(rig, 0, 20, passing=[15])
    assert (answer.reached, answer.locks) == (20, [])


async def test_a_pushed_lock_is_passed_as_far_as_it_was_pushed() -> None:
    rig = await fed()
    await rig.apply(prewrite(b"b", 10, min_commit_timestamp=16))
    assert (await changes(rig, 0, 20)).reached == 15


async def test_all_locks_are_looked_at_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("percolator.tablet.change_scan.LOCKS_PER_SLICE", 3)
    monkeypatch.setattr("percolator.tablet.change_scan.LOCKS_REPORTED_MAX", 2)
    rig = await fed()
    await rig.apply(*(prewrite(b"row %d" % n, 19 - n) for n in range(9)))
    answer = await changes(rig, 0, 20)
    assert (answer.reached, answer.locks) == (11, [b"row 0", b"row 1"])


async def test_of_the_locks_of_a_large_job_only_those_that_are_reported_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("percolator.tablet.change_scan.LOCKS_PER_SLICE", 5)
    monkeypatch.setattr("percolator.tablet.change_scan.LOCKS_REPORTED_MAX", 3)
    storage = CountingStorage(DurableMemory())
    rig = await fed(storage=storage)
    await rig.apply(prewrite(b"a", 12), *(prewrite(b"b%d" % n, 11) for n in range(100)))
    storage.counts.clear()
    answer = await changes(rig, 0, 20)
    assert (answer.reached, answer.locks) == (11, [b"a", b"b0", b"b1"])
    assert storage.counts["get L"] == 3
    # A follower that has come so far does not even walk over the others.
    walked = counted(monkeypatch, LockMirror, "between")
    answer = await changes(rig, 11, 20)
    assert (answer.reached, answer.locks) == (11, [b"a", b"b0", b"b1"])
    assert len(walked) == 1


async def test_a_commit_that_the_storage_shows_before_memory_knows_is_found() -> None:
    """Its lock is still in memory, and gone from the storage."""
    storage = LingeringStorage()
    rig = await fed(storage=storage)
    await rig.apply(prewrite(b"a", 10))
    storage.lingering = True
    committing = started(rig, commit(b"a", 10, 12, b"v"))
    await asyncio.sleep(0.5)
    answer = await changes(rig, 0, 20)
    assert (answer.reached, answer.changes) == (20, [put_of(12, b"a", b"v")])
    await committing


# ---------------------------------------------------------------------------- the newest change


async def test_the_newest_change_is_told_without_reading_any() -> None:
    rig = await fed()
    assert await look(rig, 0, 20) == (20, 0)
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"b", 7, 8, b"v"))
    assert await look(rig, 0, 20) == (20, 8)
    assert await look(rig, 0, 7) == (7, 6)
    assert await look(rig, 8, 20) == (20, 0)
    await rig.apply(prewrite(b"c", 7))
    assert await look(rig, 0, 20) == (7, 6)


async def test_the_highest_number_is_no_time_until_which_changes_can_be_scanned() -> None:
    """Nothing lies above it, where a scan could end."""
    guard = TimestampGuard.by_own_clock(VirtualClock(asyncio.get_running_loop()))
    guard.heard(TIMESTAMP_MAX)
    rig = await fed(guard=guard)
    with pytest.raises(InvalidArgument, match="until: expected less than"):
        await changes(rig, 0, TIMESTAMP_MAX)
    with pytest.raises(InvalidArgument, match="until: expected less than"):
        await look(rig, 0, TIMESTAMP_MAX)
    assert (await changes(rig, 0, TIMESTAMP_MAX - 1)).changes == []


# ---------------------------------------------------------------------------- on and off


async def test_a_table_without_a_feed_has_format_1_and_refuses() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6, b"v"))
    assert feed_keys(disk) == []
    assert disk.durable[FORMAT_KEY] == b"1"
    with pytest.raises(InvalidArgument, match="no change feed"):
        await changes(rig, 0, 20)
    with pytest.raises(InvalidArgument, match="no change feed"):
        await look(rig, 0, 20)


async def test_a_former_owner_does_not_say_that_a_table_has_no_feed() -> None:
    """It may have been switched on since: readers would end with an error."""
    for ask in (changes, look):
        rig = await Rig().open()
        rig.owner = False
        with pytest.raises(TabletMoved):
            await ask(rig, 0, 20)


async def test_a_former_owner_that_hears_of_a_switch_refuses_no_reader_for_it() -> None:
    rig = await fed()
    await rig.apply(*(written(b"%d" % n, n, n + 1, b"v") for n in range(1, 9)))
    pages = rig.tablet.scan_changes(
        pb.ScanChangesRequest(target=TARGET, after=0, until=20, page_bytes_max=1)
    )
    await anext(pages)
    await rig.tablet.set_schema_version(4, change_feed=False)
    rig.owner = False
    with pytest.raises(TabletMoved):
        await anext(pages)


async def test_a_feed_that_is_switched_on_is_complete_from_the_newest_commit_on() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6, b"v"))
    await rig.apply(prewrite(b"b", 7))
    await rig.tablet.set_schema_version(4, change_feed=True)
    assert disk.durable[FORMAT_KEY] == b"2"
    late = commit(b"b", 7, 9, b"w")
    await rig.tablet.mutate(batch([late], 4), deadline_seconds=rig.clock.monotonic_seconds() + 60)
    for lower in (0, 5):
        with pytest.raises(SnapshotTooOld, match="complete only from 6"):
            await changes(rig, lower, 20)
    assert [change.commit for change in (await changes(rig, 6, 20)).changes] == [9]
    await rig.tablet.close()
    again = await Rig(disk=disk, schema_version=4, change_feed=True).open()
    assert [change.commit for change in (await changes(again, 6, 20)).changes] == [9]


async def test_a_tablet_that_is_opened_under_a_schema_with_a_feed_begins_one() -> None:
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6, b"v"))
    await rig.tablet.close()
    rig = await Rig(disk=disk, schema_version=4, change_feed=True).open()
    with pytest.raises(SnapshotTooOld):
        await changes(rig, 5, 20)
    assert (await changes(rig, 6, 20)).changes == []


async def test_a_feed_that_was_off_for_a_while_lacks_what_came_before_it_was_on_again() -> None:
    rig = await fed()
    await rig.apply(written(b"a", 5, 6, b"v"))
    await rig.tablet.set_schema_version(4, change_feed=False)
    with pytest.raises(InvalidArgument, match="no change feed"):
        await changes(rig, 0, 20)
    await rig.tablet.mutate(
        batch([written(b"b", 7, 8, b"v")], 4),
        deadline_seconds=rig.clock.monotonic_seconds() + 60,
    )
    await rig.tablet.set_schema_version(5, change_feed=True)
    with pytest.raises(SnapshotTooOld):
        await changes(rig, 6, 20)
    assert (await changes(rig, 8, 20)).changes == []


async def test_an_order_of_an_older_schema_does_not_switch_the_feed_off() -> None:
    """It was sent before the feed was switched on, and comes late, to a new owner."""
    disk = DurableMemory()
    rig = await Rig(disk=disk).open()
    await rig.tablet.set_schema_version(4, change_feed=True)
    await rig.tablet.close()
    late = await Rig(disk=disk, schema_version=3, change_feed=False).open()
    await late.apply(written(b"a", 5, 6, b"v"))
    assert [change.commit for change in (await changes(late, 0, 20)).changes] == [6]


async def test_a_format_of_a_later_release_is_refused() -> None:
    disk = DurableMemory()
    rig = await fed(disk=disk)
    await rig.tablet.close()
    disk.durable[FORMAT_KEY] = b"4"
    with pytest.raises(StoreUnusable, match="format b'4'"):
        await Rig(disk=disk).open()
    disk.durable[FORMAT_KEY] = b"2"
    disk.durable[FEED_KEY] = b"short"
    with pytest.raises(StoreUnusable, match="change feed has 5 bytes"):
        await Rig(disk=disk).open()
    assert opening.FORMAT == b"1"


# ---------------------------------------------------------------------------- history


async def test_what_is_below_the_safe_point_is_collected_and_refused() -> None:
    disk = DurableMemory()
    rig = await fed(disk=disk)
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"b", 5, 7, b"v"))
    await rig.apply(written(b"a", 8, 9, b"w"))
    await collected(rig, 7)
    assert [split_change(key)[0] for key in feed_keys(disk)] == [9]
    with pytest.raises(SnapshotTooOld):
        await changes(rig, 6, 20)
    with pytest.raises(SnapshotTooOld):
        await look(rig, 6, 20)
    assert [change.commit for change in (await changes(rig, 7, 20)).changes] == [9]
    await collected(rig, 9)
    assert feed_keys(disk) == []
    assert await look(rig, 9, 20) == (20, 0)


async def test_a_scan_that_collection_overtakes_is_refused() -> None:
    rig = await fed()
    await rig.apply(*(written(b"%d" % n, n, n + 1, b"v") for n in range(1, 9)))
    request_pages = rig.tablet.scan_changes(
        pb.ScanChangesRequest(target=TARGET, after=0, until=20, page_bytes_max=1)
    )
    await anext(request_pages)
    await rig.tablet.raise_safe_points(SafePoints(5, 5))
    with pytest.raises(SnapshotTooOld):
        await anext(request_pages)


async def test_a_scan_of_a_tablet_that_is_closed_between_two_pages_is_sent_elsewhere() -> None:
    """As when it is split or moved while the reader is busy with a page."""
    rig = await fed()
    await rig.apply(*(written(b"%d" % n, n, n + 1, b"v") for n in range(1, 9)))
    pages = rig.tablet.scan_changes(
        pb.ScanChangesRequest(target=TARGET, after=0, until=20, page_bytes_max=1)
    )
    await anext(pages)
    await rig.tablet.close()
    with pytest.raises(TabletMoved):
        await anext(pages)


async def test_a_half_of_a_split_has_the_changes_of_its_rows_before_and_after_trimming() -> None:
    disk = DurableMemory()
    rig = await fed(disk=disk)
    await rig.apply(*(written(row, 5, 6, row) for row in (b"a", b"m", b"z")))
    await rig.tablet.close()
    upper = TabletIdentity(7, 1, 2, b"m", b"")
    half = await fed(disk=disk, identity=upper)
    for _ in range(2):
        assert [change.row for change in (await changes(half, 0, 20)).changes] == [b"m", b"z"]
        assert (await look(half, 0, 20))[1] == 6
        await half.tablet.trim()
    assert len(feed_keys(disk)) == 2
