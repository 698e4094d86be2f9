"""The change feed of a tablet: what is in it, in which order, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    SnapshotTooOld,
    StoreUnusable,
    TabletMoved,
)
from percolator.formats.records import RecordKind, acknowledgement_column
from percolator.tablet import opening
from percolator.tablet.cells import FEED_KEY, FORMAT_KEY, TIMESTAMP_MAX, F, LockMirror, split_change
from percolator.tablet.state import SafePoints, TabletIdentity, TimestampGuard
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.world import Random
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.tablet.tablets import (
    COLUMN,
    TARGET,
    WRITE,
    Answer,
    Change,
    CountingStorage,
    LingeringStorage,
    Rig,
    SlowDisk,
    batch,
    before,
    changes,
    collected,
    commit,
    counted,
    delete,
    in_data,
    look,
    mutation,
    prewrite,
    put,
    record,
    roll_back,
    started,
    under_way,
    write_record,
    written,
)
from tests.unit.tablet.test_bulk_load import (
    CLEAR,
    FINISH,
    LIFT,
    RAISE,
    begin_load,
    fence,
    finish,
    load,
)


async def fed(**fields: object) -> Rig:
    """A tablet with a change feed."""
    rig = Rig(change_feed=True, **fields)  # type: ignore[arg-type]
    return await rig.open()


@pytest.fixture
@asynccontextmanager
async def rig(disk: SlowDisk) -> AsyncIterator[Rig]:
    """A tablet with a change feed."""
    yield await fed(disk=disk)


def put_of(at: int, row: bytes, value: bytes | None) -> Change:
    return Change(at, row, COLUMN, value)


def feed_keys(disk: DurableMemory) -> list[bytes]:
    return sorted(key for key in disk.durable if key.startswith(F))


@asynccontextmanager
async def between_two_pages(rig: Rig, error: type[PercolatorError]) -> AsyncIterator[None]:
    """The time after the first page of a scan: what is done in it makes the second one fail."""
    await rig.apply(*(written(b"%d" % n, n, n + 1, b"v") for n in range(1, 9)))
    request = pb.ScanChangesRequest(target=TARGET, after=0, until=20, page_bytes_max=1)
    pages = rig.tablet.scan_changes(request)
    await anext(pages)
    yield
    with pytest.raises(error):
        await anext(pages)


# ---------------------------------------------------------------------------- what is in it


async def test_changes_come_in_the_order_of_their_commits_and_then_of_their_cells(rig: Rig) -> None:
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


async def test_long_and_empty_values_are_found(rig: Rig) -> None:
    await rig.apply(in_data(b"a", 5, 6, b"long" * 1000), written(b"b", 5, 7, b""))
    found = (await changes(rig, 0, 20)).changes
    assert found == [put_of(6, b"a", b"long" * 1000), put_of(7, b"b", b"")]


async def test_what_changes_nothing_is_not_in_it(rig: Rig) -> None:
    """Lock-only commits, rollbacks, and what observers note beside cells."""
    hidden = acknowledgement_column(b"observer", COLUMN)
    await rig.apply(
        record(b"a", 5, 6, RecordKind.LOCK_ONLY),
        roll_back(b"b", 7),
        mutation(b"c", put(WRITE, write_record(5, b"v"), 8), column=hidden),
    )
    assert (await changes(rig, 0, 20)).changes == []


async def test_what_was_before_is_returned_if_wanted(rig: Rig) -> None:
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


async def test_only_rows_of_the_range_are_returned(rig: Rig) -> None:
    await rig.apply(*(written(row, 5, 6, row) for row in (b"a", b"m", b"z")))
    await rig.apply(prewrite(b"z", 8))
    answer = await changes(rig, 0, 20, range=RowRange(start=b"b", end=b"n"))
    assert ([change.row for change in answer.changes], answer.reached) == ([b"m"], 20)


async def test_a_deleted_write_record_leaves_the_feed(rig: Rig) -> None:
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"b", 5, 6, b"v"))
    await rig.apply(mutation(b"a", delete(WRITE, 6)))
    assert [change.row for change in (await changes(rig, 0, 20)).changes] == [b"b"]


async def test_the_entry_is_in_the_same_write_as_the_commit(rig: Rig, disk: SlowDisk) -> None:
    before_it = disk.durable.copy()
    await rig.apply(written(b"a", 5, 6, b"v"))
    assert {b"W", b"F"} <= {key[:1] for key in disk.durable.keys() - before_it.keys()}
    assert len(disk.durable.keys() - before_it.keys()) == 3  # and Mnewest


# ---------------------------------------------------------------------------- limits


async def test_no_commit_is_cut_off_by_a_limit(rig: Rig) -> None:
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


async def test_it_ends_below_what_may_still_be_committed(rig: Rig) -> None:
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
    rig: Rig,
    lock: dict[str, int],
) -> None:
    await rig.apply(prewrite(b"b", **lock))  # type: ignore[arg-type]
    answer = await changes(rig, 0, 20, passing=[15])
    assert (answer.reached, answer.locks) == (20, [])


async def test_a_pushed_lock_is_passed_as_far_as_it_was_pushed(rig: Rig) -> None:
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
    assert ((answer.reached, answer.locks), len(walked)) == ((11, [b"a", b"b0", b"b1"]), 1)


async def test_a_commit_that_the_storage_shows_before_memory_knows_is_found() -> None:
    """Its lock is still in memory, and gone from the storage."""
    storage = LingeringStorage()
    rig = await fed(storage=storage)
    await rig.apply(prewrite(b"a", 10))
    storage.lingering = True
    committing = await under_way(rig.mutate(commit(b"a", 10, 12, b"v")))
    answer = await changes(rig, 0, 20)
    assert (answer.reached, answer.changes) == (20, [put_of(12, b"a", b"v")])
    await committing


# ---------------------------------------------------------------------------- the newest change


async def test_the_newest_change_is_told_without_reading_any(rig: Rig) -> None:
    assert await look(rig, 0, 20) == (20, 0)
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"b", 7, 8, b"v"))
    assert (await look(rig, 0, 20), await look(rig, 0, 7)) == ((20, 8), (7, 6))
    assert await look(rig, 8, 20) == (20, 0)
    await rig.apply(prewrite(b"c", 7))
    assert await look(rig, 0, 20) == (7, 6)


async def test_the_highest_number_is_no_time_until_which_changes_can_be_scanned() -> None:
    """Nothing lies above it, where a scan could end."""
    guard = TimestampGuard.by_own_clock(VirtualClock(asyncio.get_running_loop()))
    guard.heard(TIMESTAMP_MAX)
    rig = await fed(guard=guard)
    for ask in (changes, look):
        with pytest.raises(InvalidArgument, match="until: expected less than"):
            await ask(rig, 0, TIMESTAMP_MAX)
    assert (await changes(rig, 0, TIMESTAMP_MAX - 1)).changes == []


# ---------------------------------------------------------------------------- on and off


async def test_a_table_without_a_feed_has_format_1_and_refuses(disk: SlowDisk) -> None:
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6, b"v"))
    assert (feed_keys(disk), disk.durable[FORMAT_KEY]) == ([], b"1")
    for ask in (changes, look):
        with pytest.raises(InvalidArgument, match="no change feed"):
            await ask(rig, 0, 20)


async def test_a_former_owner_does_not_say_that_a_table_has_no_feed() -> None:
    """It may have been switched on since: readers would end with an error."""
    for ask in (changes, look):
        rig = await Rig().open()
        rig.owner = False
        with pytest.raises(TabletMoved):
            await ask(rig, 0, 20)


async def test_a_former_owner_that_hears_of_a_switch_refuses_no_reader_for_it(rig: Rig) -> None:
    async with between_two_pages(rig, TabletMoved):
        await rig.tablet.set_schema_version(4, change_feed=False)
        rig.owner = False


async def test_a_feed_that_is_switched_on_is_complete_from_the_newest_commit_on(
    disk: SlowDisk,
) -> None:
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
    again = await rig.reopened(schema_version=4, change_feed=True)
    assert [change.commit for change in (await changes(again, 6, 20)).changes] == [9]


async def test_a_tablet_that_is_opened_under_a_schema_with_a_feed_begins_one(
    disk: SlowDisk,
) -> None:
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"a", 5, 6, b"v"))
    rig = await rig.reopened(schema_version=4, change_feed=True)
    with pytest.raises(SnapshotTooOld):
        await changes(rig, 5, 20)
    assert (await changes(rig, 6, 20)).changes == []


async def test_a_feed_that_was_off_for_a_while_lacks_what_came_before_it_was_on_again(
    rig: Rig,
) -> None:
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


async def test_an_order_of_an_older_schema_does_not_switch_the_feed_off(
    disk: SlowDisk,
) -> None:
    """It was sent before the feed was switched on, and comes late, to a new owner."""
    rig = await Rig(disk=disk).open()
    await rig.tablet.set_schema_version(4, change_feed=True)
    late = await rig.reopened(schema_version=3, change_feed=False)
    await late.apply(written(b"a", 5, 6, b"v"))
    assert [change.commit for change in (await changes(late, 0, 20)).changes] == [6]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [(FORMAT_KEY, b"4", "format b'4'"), (FEED_KEY, b"short", "change feed has 5 bytes")],
    ids=["format", "feed"],
)
async def test_a_format_of_a_later_release_is_refused(
    rig: Rig, disk: SlowDisk, key: bytes, value: bytes, reason: str
) -> None:
    await rig.tablet.close()
    disk.durable[key] = value
    with pytest.raises(StoreUnusable, match=reason):
        await Rig(disk=disk).open()
    assert opening.FORMAT == b"1"


# ---------------------------------------------------------------------------- history


async def test_what_is_below_the_safe_point_is_collected_and_refused(
    rig: Rig, disk: SlowDisk
) -> None:
    await rig.apply(written(b"a", 5, 6, b"v"), written(b"b", 5, 7, b"v"))
    await rig.apply(written(b"a", 8, 9, b"w"))
    await collected(rig, 7)
    assert [split_change(key)[0] for key in feed_keys(disk)] == [9]
    for ask in (changes, look):
        with pytest.raises(SnapshotTooOld):
            await ask(rig, 6, 20)
    assert [change.commit for change in (await changes(rig, 7, 20)).changes] == [9]
    await collected(rig, 9)
    assert feed_keys(disk) == []
    assert await look(rig, 9, 20) == (20, 0)


async def test_a_scan_that_collection_overtakes_is_refused(rig: Rig) -> None:
    async with between_two_pages(rig, SnapshotTooOld):
        await rig.tablet.raise_safe_points(SafePoints(5, 5))


async def test_a_scan_of_a_tablet_that_is_closed_between_two_pages_is_sent_elsewhere(
    rig: Rig,
) -> None:
    """As when it is split or moved while the reader is busy with a page."""
    async with between_two_pages(rig, TabletMoved):
        await rig.tablet.close()


async def test_a_half_of_a_split_has_the_changes_of_its_rows_before_and_after_trimming(
    rig: Rig, disk: SlowDisk
) -> None:
    await rig.apply(*(written(row, 5, 6, row) for row in (b"a", b"m", b"z")))
    await rig.tablet.close()
    upper = TabletIdentity(7, 1, 2, b"m", b"")
    half = await fed(disk=disk, identity=upper)
    for _ in range(2):
        assert [change.row for change in (await changes(half, 0, 20)).changes] == [b"m", b"z"]
        assert (await look(half, 0, 20))[1] == 6
        await half.tablet.trim()
    assert len(feed_keys(disk)) == 2


# Whatever happens, an answer holds every change up to where it says it is complete, forever.
#
# Transactions come and go in any order, commits show before they are heard of, tablets are closed,
# split, trimmed and collected. Each answer of the feed is kept, and compared at the end with all
# commits that there have been: also those that reached the tablet after the answer.

ROWS = [b"", b"\0", b"a", b"a\0", b"b", b"n", b"\xff"]
SPLIT = b"a\0"
TINY_LIMITS: dict[str, Any] = {"slice_entries": 2, "recent_writes_max": 2}


@dataclass
class Locked:
    """A transaction with locks that are still there."""

    start: int
    rows: list[bytes]
    kind: RecordKind
    commit: int = 0


@dataclass
class World:
    """A tablet, its transactions, and the answers that it has given."""

    random: Random
    disk: DurableMemory = field(default_factory=DurableMemory)
    time: int = 0
    open: list[Locked] = field(default_factory=list)
    committed: dict[tuple[int, bytes], bytes | None] = field(default_factory=dict)
    answers: list[tuple[int, Answer, bytes]] = field(default_factory=list)
    safe_point: int = 0
    start_row: bytes = b""

    async def run(self, steps: int) -> None:
        rig = await self._opened()
        choices = [self._begin] * 4 + [self._end] * 5 + [self._ask] * 5 + [self._collect]
        for _ in range(steps):
            if self.random.random() < 0.05:
                await rig.tablet.close()
                if self.random.random() < 0.3 and not self.start_row and not self.open:
                    self.start_row = SPLIT
                rig = await self._opened()
                if self.random.random() < 0.5:
                    await rig.tablet.trim()
            await self.random.choice(choices)(rig)
        for answer in self.answers:
            self._compare(*answer)

    async def _opened(self) -> Rig:
        storage = LingeringStorage(self.disk)
        storage.lingering = True
        identity = TabletIdentity(7, 1, 2, self.start_row, b"")
        return await Rig(storage=storage, identity=identity, change_feed=True, **TINY_LIMITS).open()

    def _now(self) -> int:
        self.time += 1
        return self.time

    async def _begin(self, rig: Rig) -> None:
        start = self._now()
        taken = {row for locked in self.open for row in locked.rows}
        free = [row for row in ROWS if row not in taken and row >= self.start_row]
        rows = self.random.sample(free, min(len(free), self.random.randint(1, 2)))
        kind = self.random.choice([RecordKind.PUT, RecordKind.DELETE, RecordKind.LOCK_ONLY])
        if rows:
            await rig.apply(*(prewrite(row, start, kind=kind) for row in rows))
            self.open.append(Locked(start, rows, kind))

    async def _end(self, rig: Rig) -> None:
        """Commits or rolls back one cell; the others of its transaction may wait for long."""
        if not self.open:
            return
        locked = self.random.choice(self.open)
        row = locked.rows.pop()
        if not locked.rows:
            self.open.remove(locked)
        if not locked.commit and self.random.random() < 0.2:
            await rig.apply(roll_back(row, locked.start), *self._rest(locked))
            return
        locked.commit = locked.commit or self._now()
        value = b"of %d" % locked.start if locked.kind is RecordKind.PUT else b""
        task = started(rig, commit(row, locked.start, locked.commit, value, locked.kind))
        if locked.kind is not RecordKind.LOCK_ONLY:
            deleted = locked.kind is RecordKind.DELETE
            self.committed[locked.commit, row] = None if deleted else value
        # The write takes a second, and shows a second before its writer hears of it.
        for _ in range(self.random.randint(0, 2)):
            await asyncio.sleep(0.9)
            await self._ask(rig)
        await task

    def _rest(self, locked: Locked) -> list[pb.Mutation]:
        rows, locked.rows = locked.rows, []
        if locked in self.open:
            self.open.remove(locked)
        return [roll_back(row, locked.start) for row in rows]

    async def _ask(self, rig: Rig) -> None:
        until = self._now()
        after = self.random.randint(self.safe_point, until - 1)
        answer = await changes(
            rig, after, until, changes_max=self.random.choice([0, 1, 3]), page_bytes_max=40
        )
        self.answers.append((after, answer, self.start_row))
        reached, newest = await look(rig, after, until)
        assert reached >= answer.reached
        assert newest >= max([change.commit for change in answer.changes], default=0)
        if not self.open:
            assert reached == until

    async def _collect(self, rig: Rig) -> None:
        below = min([self.time, *(locked.start for locked in self.open)])
        if below <= self.safe_point:
            return
        self.safe_point = self.random.randint(self.safe_point + 1, below)
        await rig.tablet.raise_safe_points(SafePoints(self.safe_point, self.safe_point))
        await rig.tablet.collect(self.safe_point)
        if self.safe_point > 1:
            try:
                await changes(rig, self.safe_point - 1, self._now())
            except SnapshotTooOld:
                return
            raise AssertionError("history that is gone was read")

    def _compare(self, after: int, answer: Answer, start_row: bytes) -> None:
        expected = [
            Change(at, row, COLUMN, value)
            for (at, row), value in sorted(self.committed.items())
            if after < at <= answer.reached and row >= start_row
        ]
        assert answer.changes == expected


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(5, 60))
def test_an_answer_is_complete_as_far_as_it_says(seed: int, steps: int) -> None:
    run_virtually(World(Random(seed)).run(steps))


# A bulk load in the change feed: all of its rows, at its commit timestamp, once it is visible.


def under_schema_4(rows: list[bytes]) -> pb.LoadRequest:
    request = load(rows)
    request.target.schema_version = 4
    return request


async def test_its_rows_are_changes_at_its_commit_timestamp(rig: Rig, disk: SlowDisk) -> None:
    await begin_load(rig, [b"c"], value=b"short")
    await rig.tablet.load(load([b"d"], value=b"long" * 999))
    await finish(rig)
    answer = await changes(rig, 0, 60)
    assert [(change.commit, change.row) for change in answer.changes] == [(51, b"c"), (51, b"d")]
    assert [change.value for change in answer.changes] == [b"short", b"long" * 999]
    # The values are stored only once.
    assert all(len(disk.durable[key]) == 9 for key in disk.durable if key[:1] == b"F" and key[1:])


async def test_reserved_columns_of_a_load_are_not_in_the_feed(rig: Rig) -> None:
    await begin_load(rig, [b"c", b"d"], columns=[COLUMN, b"\0hidden"])
    await finish(rig)
    assert [change.row for change in (await changes(rig, 0, 60)).changes] == [b"c"]


async def test_until_it_is_visible_the_feed_ends_below_it(rig: Rig) -> None:
    await rig.apply(written(b"a", 48, 49, b"v"))
    await begin_load(rig, [b"c"])
    await rig.apply(written(b"z", 52, 53, b"v"))
    for reached in (50, 50):
        answer = await changes(rig, 0, 60)
        assert (answer.reached, [change.row for change in answer.changes]) == (reached, [b"a"])
        assert await look(rig, 0, 60) == (reached, 49)
        await rig.tablet.fence(fence(FINISH, commit_timestamp=51))
    # Now its commit timestamp is known, and what is below that is not held up.
    assert (await changes(rig, 0, 50)).reached == 50
    await rig.tablet.fence(fence(LIFT))
    answer = await changes(rig, 50, 60)
    assert [change.row for change in answer.changes] == [b"c", b"z"]


async def test_what_an_earlier_run_has_loaded_is_not_shown_and_goes_when_it_is_cleared(
    rig: Rig, disk: SlowDisk
) -> None:
    await begin_load(rig, [b"c"])
    await rig.tablet.fence(fence(RAISE, run=60))
    answer = await changes(rig, 0, 70)
    assert (answer.reached, answer.changes) == (60, [])
    await rig.tablet.fence(fence(CLEAR, run=60))
    assert not [key for key in disk.durable if key.startswith(F)]


async def test_rows_that_were_loaded_before_the_feed_was_on_are_not_promised() -> None:
    rig = await Rig().open()
    await begin_load(rig, [b"c"])
    await rig.tablet.set_schema_version(4, change_feed=True)
    await rig.tablet.load(under_schema_4([b"d"]))
    assert (await changes(rig, 0, 60)).reached == 50
    await finish(rig)
    with pytest.raises(SnapshotTooOld, match="complete only from 51"):
        await changes(rig, 0, 60)
    assert (await changes(rig, 51, 60)).changes == []


async def test_a_load_that_began_after_the_feed_is_complete_in_it() -> None:
    rig = await Rig().open()
    await rig.tablet.fence(fence(RAISE, run=30))
    await rig.tablet.fence(fence(LIFT, run=30))
    await rig.tablet.set_schema_version(4, change_feed=True)
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.load(under_schema_4([b"d"]))
    await finish(rig)
    assert [change.row for change in (await changes(rig, 0, 60)).changes] == [b"d"]


async def test_a_load_that_is_cleared_while_the_feed_is_off_does_not_come_back(rig: Rig) -> None:
    await begin_load(rig, [b"c"])
    await rig.tablet.set_schema_version(4, change_feed=False)
    await rig.tablet.fence(fence(CLEAR))
    await rig.tablet.fence(fence(LIFT))
    await rig.tablet.set_schema_version(5, change_feed=True)
    assert (await changes(rig, 0, 60)).changes == []
