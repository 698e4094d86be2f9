"""Collection: no request that is still allowed can tell that anything is gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    NotReady,
    SchemaChanged,
    SnapshotTooOld,
    StoreUnusable,
    TabletMoved,
)
from percolator.formats.records import RecordKind, acknowledgement_column, observed_column
from percolator.observers.watched_cell import Acknowledgement
from percolator.tablet import collection
from percolator.tablet.collection import Sweep
from percolator.tablet.state import SafePoints, TabletIdentity
from percolator.testing.memory_storage import DurableMemory
from percolator.timestamps import NEWEST, SEQUENCE_BITS, expires_at, is_expired
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import from_detail
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    DELETE,
    IN_DATA,
    LOCK,
    LOCK_ONLY,
    NOTIFY,
    REFUSED,
    ROLLBACK,
    TARGET,
    WRITE,
    BreakingDisk,
    Rig,
    SlowDisk,
    before,
    changes,
    collected,
    commit,
    delete,
    in_data,
    lock_record,
    mutation,
    noted,
    notified,
    prewrite,
    put,
    record,
    roll_back,
    stored,
    under_way,
    write_record,
    written,
)

HIDDEN = acknowledgement_column(b"observer", COLUMN)
PUT_ASIDE = Acknowledgement(0, has_dead_letter=True).encode()


def acknowledged(row: bytes, end: int, start: int, observer: bytes = b"observer") -> pb.Mutation:
    """The run that began at `start` has committed at `end`."""
    hidden = acknowledgement_column(observer, COLUMN)
    record = write_record(start, Acknowledgement(start).encode())
    return mutation(row, put(WRITE, record, end), column=hidden)


def ms(milliseconds: int, sequence: int = 0) -> int:
    return milliseconds << SEQUENCE_BITS | sequence


@pytest.mark.parametrize(
    ("mutations", "below", "gone", "left", "seen"),
    [
        pytest.param(
            [
                *(written(b"a", end - 1, end, b"%d" % end) for end in (11, 13, 15, 17)),
                written(b"b", 10, 11, b"only"),
            ],
            14,
            1,
            {WRITE: [(b"a", 17), (b"a", 15), (b"a", 13), (b"b", 11)]},
            {b"a": b"13", b"b": b"only"},
            id="each cell keeps what a read at the safe point sees, and all that is newer",
        ),
        pytest.param(
            [written(b"a", 10, 11, b"old"), written(b"a", 12, 14, b"new")],
            14,
            1,
            {WRITE: [(b"a", 14)]},
            {b"a": b"new"},
            id="the version committed at the safe point itself is the one that is seen",
        ),
        pytest.param(
            [written(b"a", 10, 11, b"old"), record(b"a", 12, 13, DELETE)],
            20,
            2,
            {WRITE: []},
            {b"a": None},
            id="a deletion goes with everything below it",
        ),
        pytest.param(
            [
                written(b"a", 10, 11, b"value"),
                record(b"a", 12, 13, LOCK_ONLY),
                record(b"a", 30, 31, LOCK_ONLY),
                roll_back(b"b", 15),
                roll_back(b"b", 25),
            ],
            20,
            2,
            {WRITE: [(b"a", 31), (b"a", 11)], ROLLBACK: [(b"b", 25)]},
            {b"a": b"value"},
            id="only lock-only records and markers below the safe point go",
        ),
        pytest.param(
            [in_data(b"a", 10, 11, b"old"), in_data(b"a", 12, 13, b"new")],
            20,
            2,
            {DATA: [(b"a", 12)]},
            {b"a": b"new"},
            id="long values go with their records",
        ),
    ],
)
async def test_what_no_read_from_the_safe_point_on_sees_is_collected(
    rig: Rig,
    mutations: list[pb.Mutation],
    below: int,
    gone: int,
    left: dict[cells_pb2.Space, list[tuple[bytes, int]]],
    seen: dict[bytes, bytes | None],
) -> None:
    await rig.apply(*mutations)
    assert await collected(rig, below) == gone
    assert {space: await stored(rig, space) for space in left} == left
    assert {row: await rig.value(row, below) for row in seen} == seen


async def test_a_crash_between_two_writes_never_brings_back_what_was_deleted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each write, the storage is checked as if the machine had stopped there."""
    monkeypatch.setattr("percolator.tablet.collection.DELETIONS_PER_WRITE", 1)
    monkeypatch.setattr("percolator.tablet.collection.SLICE_ENTRIES", 1)
    for row in (b"a", b"b"):
        await rig.apply(*(written(row, end - 1, end) for end in (5, 7, 9)))
        await rig.apply(record(row, 10, 11, DELETE))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    collecting = asyncio.ensure_future(rig.tablet.collect(20))
    seen = set()
    while not collecting.done():
        await asyncio.sleep(0.5)
        seen.add(tuple(await stored(rig, WRITE)))
        assert (await rig.value(b"a", 20), await rig.value(b"b", 20)) == (None, None)
    assert len(seen) >= 6


async def test_a_deletion_stays_until_its_observers_have_seen_it(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11), record(b"a", 12, 13, DELETE), notified(b"a", 13))
    assert await collected(rig, 20) == 1
    assert await stored(rig, WRITE) == [(b"a", 13)]
    await rig.apply(mutation(b"a", delete(NOTIFY, 13, b"observer")))
    assert await collected(rig, 20) == 1, "although nothing was committed since"
    assert await stored(rig, WRITE) == []


async def test_a_deletion_stays_while_a_dead_letter_of_it_exists(rig: Rig) -> None:
    await rig.apply(
        written(b"a", 10, 11),
        record(b"a", 12, 13, DELETE),
        noted(b"a", COLUMN, 12, Acknowledgement(11).encode()),
        noted(b"a", COLUMN, 15, PUT_ASIDE),
        record(b"b", 12, 13, DELETE),
        noted(b"b", b"another column", 15, PUT_ASIDE),
    )
    await collected(rig, 20)
    assert (b"a", 13) in await stored(rig, WRITE)
    assert (b"b", 13) not in await stored(rig, WRITE)
    # The run that answers it clears it away.
    await rig.apply(noted(b"a", COLUMN, 25, Acknowledgement(24).encode()))
    await collected(rig, 30)
    assert (b"a", 13) not in await stored(rig, WRITE)


@pytest.mark.parametrize(
    ("reason", "indexed"),
    [
        (mutation(b"a", put(LOCK, lock_record(25)), column=HIDDEN), 100),
        (notified(b"a", 13), 1),
    ],
    ids=["it may be about to become a dead letter", "its observer does not fit into the index"],
)
async def test_a_deletion_stays_while(reason: pb.Mutation, indexed: int) -> None:
    rig = await Rig(notifications_indexed_max=indexed).open()
    await rig.apply(notified(b"0", 5), record(b"a", 12, 13, DELETE), reason)
    await collected(rig, 20)
    assert (b"a", 13) in await stored(rig, WRITE)


async def test_records_of_ended_transactions_are_collected_before_the_history_around_them(
    rig: Rig,
) -> None:
    """This holds however long a table keeps snapshots, which see neither kind of record."""
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
    assert (await rig.tablet.collect(5, ended_below=61)).cells == 1 + 5 + 3
    assert (await stored(rig, WRITE))[-3:] == [(b"a", 61), (b"a", 31), (b"a", 11)]
    assert await stored(rig, ROLLBACK) == []
    assert [await rig.value(b"a", at) for at in (14, 31, 300)] == [b"old", b"new", b"new"]


async def test_no_late_rollback_marks_a_transaction_whose_lock_only_commit_was_collected(
    rig: Rig, disk: SlowDisk
) -> None:
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


async def test_nothing_is_collected_while_an_older_lock_is_left(rig: Rig) -> None:
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8), prewrite(b"b", 10))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    with pytest.raises(NotReady, match="lock below the safe point 20"):
        await rig.tablet.collect(20)
    assert len(await stored(rig, WRITE)) == 2
    await rig.apply(mutation(b"b", delete(cells_pb2.SPACE_LOCK)))
    assert (await rig.tablet.collect(20)).cells == 1


async def test_nothing_is_collected_above_the_safe_point(rig: Rig) -> None:
    await rig.tablet.raise_safe_points(SafePoints(reads=20, transactions=30))
    for collecting, said in (
        (rig.tablet.collect(21), "would collect below 21, "),
        (rig.tablet.collect(20, 31), "ended transactions below 31"),
    ):
        with pytest.raises(InvariantViolation, match=said):
            await collecting


async def test_a_late_rollback_cannot_mark_what_was_committed_and_collected(
    rig: Rig, disk: SlowDisk
) -> None:
    """It was sent while the lock existed; now it finds neither the lock nor a commit."""
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
        disk = BreakingDisk()
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


async def test_what_another_owner_took_over_is_not_collected_here(rig: Rig) -> None:
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    rig.owner = False
    with pytest.raises(TabletMoved):
        await rig.tablet.collect(20)


async def test_a_cell_with_many_versions_above_the_safe_point_is_stepped_over(rig: Rig) -> None:
    for end in range(11, 211, 2):
        await rig.apply(written(b"a", end - 1, end))
    await rig.apply(written(b"b", 10, 11), written(b"b", 12, 13))
    assert (await rig.tablet.collect(0)).cells == 0
    assert await collected(rig, 20) == 5
    assert len(await stored(rig, WRITE)) == 95 + 1 + 1
    assert rig.tablet.statistics().cells == 97


async def test_without_new_commits_a_second_pass_does_not_walk(rig: Rig, disk: SlowDisk) -> None:
    await rig.apply(written(b"a", 5, 6), written(b"a", 7, 8))
    assert await collected(rig, 20) == 1
    writes = disk.writes
    assert (await rig.tablet.collect(20)) == (await rig.tablet.collect(20))
    assert disk.writes == writes
    await rig.apply(written(b"a", 25, 26))
    assert await collected(rig, 30) == 1


async def test_commits_continue_during_a_pass(rig: Rig) -> None:
    for end in range(11, 31, 2):
        await rig.apply(written(b"a", end - 1, end))
    await rig.tablet.raise_safe_points(SafePoints(40, 40))
    collecting = asyncio.ensure_future(rig.tablet.collect(40))
    await rig.apply(prewrite(b"a", 50, b"new"), prewrite(b"b", 50))
    await rig.apply(commit(b"a", 50, 51, b"new"))
    assert (await collecting).cells == 9
    assert (await rig.value(b"a", 60), await rig.value(b"a", 49)) == (b"new", b"")


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
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("percolator.tablet.collection.HEAVY_DELETIONS", 20)
    compacted: list[tuple[bytes, bytes]] = []
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


async def test_a_pass_yields_after_each_256_entries_whatever_the_clock_says(rig: Rig) -> None:
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


# An acknowledgement is collected once nothing is left that it acknowledges.


async def acknowledgements(rig: Rig) -> list[tuple[bytes, int]]:
    return [
        (cell.row, cell.timestamp)
        for cell in await rig.cells(WRITE)
        if observed_column(cell.column) is not None
    ]


async def test_an_acknowledgement_is_collected_with_the_deletion_that_it_is_about(rig: Rig) -> None:
    seen = Acknowledgement(13).encode()
    await rig.apply(
        written(b"a", 10, 11),
        record(b"a", 12, 13, DELETE),
        noted(b"a", COLUMN, 12, Acknowledgement(11).encode()),
        noted(b"a", COLUMN, 15, seen),
        written(b"b", 10, 11),
        noted(b"b", COLUMN, 12, seen),
        noted(b"b", b"gone before", 12, seen),
        noted(b"c", COLUMN, 12, seen),
        noted(b"c", COLUMN, 30, seen),
    )
    await collected(rig, 20)
    # Those of what still exists, or was acknowledged recently; "c" is left for the next pass.
    assert await acknowledgements(rig) == [(b"b", 12), (b"c", 30), (b"c", 12)]
    assert await stored(rig, WRITE) == [(b"b", 12), (b"b", 11), (b"c", 30), (b"c", 12)]
    await collected(rig, 40)
    assert await acknowledgements(rig) == [(b"b", 12)]


async def test_an_acknowledgement_stays_while_a_notification_keeps_what_it_acknowledges(
    rig: Rig,
) -> None:
    await rig.apply(
        record(b"a", 12, 13, DELETE),
        notified(b"a", 13),
        noted(b"a", COLUMN, 15, Acknowledgement(14).encode()),
    )
    await collected(rig, 20)
    assert await stored(rig, WRITE) == [(b"a", 15), (b"a", 13)]
    await rig.apply(mutation(b"a", delete(NOTIFY, 13, b"observer")))
    await collected(rig, 20)
    assert await stored(rig, WRITE) == []


async def test_a_cell_rewritten_while_its_acknowledgement_waits_is_not_harmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The walk yields after every entry, and just then the cell is written."""
    monkeypatch.setattr("percolator.tablet.collection.SLICE_ENTRIES", 1)
    rig = await Rig(sweep_share=0.001).open()
    await rig.apply(noted(b"a", COLUMN, 12, Acknowledgement(11).encode()), written(b"b", 10, 11))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    collecting = await under_way(rig.tablet.collect(20), seconds=0)
    await rig.apply(written(b"a", 24, 25, b"new"))
    await collecting
    assert (await rig.value(b"a", 30), await rig.value(b"a", 24)) == (b"new", None)


@pytest.mark.parametrize(
    "dead_letter",
    [
        noted(b"a", COLUMN, 15, PUT_ASIDE),
        mutation(
            b"a",
            put(WRITE, write_record(14, b"", IN_DATA), 15),
            put(DATA, PUT_ASIDE, 14),
            column=HIDDEN,
        ),
    ],
    ids=["in its record", "apart"],
)
async def test_the_acknowledgement_of_a_dead_letter_stays_wherever_it_is_stored(
    rig: Rig, dead_letter: pb.Mutation
) -> None:
    await rig.apply(dead_letter)
    await collected(rig, 20)
    assert await acknowledgements(rig) == [(b"a", 15)]


# What a cell held when an observer last ran stays under a newer version, and can be read by the
# acknowledgement that says so.


async def last_seen(rig: Rig, row: bytes, at: int, **fields: Any) -> list[bytes]:
    """Values that the run which began then has seen. Raises the refusal."""
    asked = {"acknowledgement": acknowledgement_column(b"observer", COLUMN), **fields}
    read = pb.RowRead(row=row, columns=[COLUMN], timestamp=at, **asked)
    result = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))
    for refused in result.refused:
        raise from_detail(refused.error)
    return [*result.found.values]


async def versions(rig: Rig, row: bytes = b"a") -> list[int]:
    return [
        cell.timestamp
        for cell in await rig.cells(WRITE)
        if cell.row == row and observed_column(cell.column) is None
    ]


@pytest.mark.parametrize("apart", [False, True])
async def test_what_an_observer_has_last_seen_stays_until_it_has_run_again(
    rig: Rig, apart: bool
) -> None:
    write = in_data if apart else written
    for end in (11, 13, 15, 17, 19):
        await rig.apply(write(b"a", end - 1, end, b"%d" % end))
    await rig.apply(acknowledged(b"a", 14, 12), acknowledged(b"a", 16, 15))
    assert await collected(rig, 20) == (7 if apart else 4)
    assert await versions(rig) == [19, 15], "neither the one before, nor the one in between"
    assert await last_seen(rig, b"a", 15) == [b"15"]
    with pytest.raises(SnapshotTooOld):
        await last_seen(rig, b"a", 15, acknowledgement=b"")
    await rig.apply(acknowledged(b"a", 22, 21))
    with pytest.raises(SnapshotTooOld):
        await last_seen(rig, b"a", 15)
    await collected(rig, 30)
    assert await versions(rig) == [19]


@pytest.mark.parametrize(
    ("runs", "below", "kept"),
    [
        pytest.param(
            [
                acknowledged(b"a", 16, 14),
                acknowledged(b"a", 12, 11, b"other"),
                acknowledged(b"a", 20, 18, b"third"),
            ],
            20,
            [19, 17, 13, 11],
            id="each observer keeps what it has seen itself",
        ),
        pytest.param(
            [acknowledged(b"a", 18, 16)],
            16,
            [19, 17, 15],
            id="what was seen before anything newer holds nothing else",
        ),
    ],
)
async def test_what_observers_have_seen_is_kept(
    rig: Rig, runs: list[pb.Mutation], below: int, kept: list[int]
) -> None:
    await rig.apply(*(written(b"a", end - 1, end, b"%d" % end) for end in (11, 13, 15, 17, 19)))
    await rig.apply(*runs)
    await collected(rig, below)
    assert await versions(rig) == kept


async def test_a_run_that_saw_nothing_is_not_told_of_what_was_there_before(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"old"), record(b"a", 12, 13, DELETE))
    await rig.apply(acknowledged(b"a", 15, 14), written(b"a", 16, 17, b"new"))
    await collected(rig, 20)
    assert await last_seen(rig, b"a", 14) == []
    assert await versions(rig) == [17, 13], "the deletion: what it hides goes in another write"


async def test_what_was_seen_under_a_deletion_stays_as_long_as_that(rig: Rig) -> None:
    await rig.apply(written(b"a", 10, 11, b"old"), acknowledged(b"a", 13, 12))
    await rig.apply(record(b"a", 14, 15, DELETE), notified(b"a", 15))
    await collected(rig, 20)
    assert await versions(rig) == [15, 11]
    assert await last_seen(rig, b"a", 12) == [b"old"]
    await rig.apply(mutation(b"a", delete(NOTIFY, 15, b"observer")))
    await collected(rig, 30)
    assert await stored(rig, WRITE) == [], "nothing comes back from under the deletion"


async def test_what_was_seen_stays_while_a_later_change_is_a_dead_letter(rig: Rig) -> None:
    put_aside = Acknowledgement(12, has_dead_letter=True).encode()
    await rig.apply(written(b"a", 10, 11, b"old"), acknowledged(b"a", 13, 12))
    await rig.apply(written(b"a", 14, 15, b"bad"))
    await rig.apply(mutation(b"a", put(WRITE, write_record(17, put_aside), 18), column=HIDDEN))
    await collected(rig, 20)
    assert await last_seen(rig, b"a", 12) == [b"old"]


async def test_what_has_expired_is_not_kept_for_an_observer(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2), b"old"), acknowledged(b"a", ms(4), ms(3)))
    await aging.apply(written(b"a", ms(5), ms(6), b"new"))
    await collected(aging, ms(1_000_000))
    assert await stored(aging, WRITE) == []


async def test_only_the_column_of_an_acknowledgement_is_read_by_it(rig: Rig) -> None:
    for wrong in (b"other", acknowledgement_column(b"observer", b"other")):
        with pytest.raises(InvalidArgument, match=r"reads\[0\].acknowledgement: expected"):
            await last_seen(rig, b"a", 15, acknowledgement=wrong)


# A read below a safe point that is raised meanwhile is told so, whatever is deleted under it.

ROWS = [b"r%04d" % number for number in range(400)]
AT, BELOW = 15, 30


async def _stored_apart(**limits: Any) -> Rig:
    """Each row has a long value that a read at AT sees, and a younger one."""
    rig = await Rig(disk=DurableMemory(), **limits).open()
    for start in (10, 20):
        await rig.apply(*(in_data(row, start, start + 1, b"long") for row in ROWS))
    return rig


async def _collected_meanwhile(rig: Rig, reading: asyncio.Task[object]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert await collected(rig, BELOW) == 2 * len(ROWS)
    assert not reading.done()


async def test_a_scan_whose_values_are_collected_meanwhile_is_told_that_it_is_too_old() -> None:
    rig = await _stored_apart(slice_entries=1)
    reading = asyncio.ensure_future(rig.scan(AT))
    await _collected_meanwhile(rig, reading)
    with pytest.raises(SnapshotTooOld, match="goes back to 30"):
        await reading


async def test_of_a_batch_only_the_reads_that_are_too_old_are_refused() -> None:
    rig = await _stored_apart(slice_entries=1)
    # Lock-only records of one mutation do not say what is below them, and are stepped over.
    locked = [record(b"locked", at, at + 1, RecordKind.LOCK_ONLY) for at in range(40, 940, 2)]
    for first in range(0, len(locked), 50):
        steps = [change for one in locked[first : first + 50] for change in one.changes]
        await rig.apply(mutation(b"locked", *steps))
    asked = [(b"locked", 2_000), (ROWS[0], AT), (ROWS[0], BELOW)]
    reads = [pb.RowRead(row=row, columns=[COLUMN], timestamp=at) for row, at in asked]
    await _only_the_second_is_refused(rig, reads)


async def test_of_rows_only_those_that_are_too_old_are_refused() -> None:
    rig = await Rig(disk=DurableMemory(), slice_entries=1).open()
    for start in (10, 20):
        steps = [in_data(b"r", start, start + 1, b"long") for _ in ROWS]
        for step, row in zip(steps, ROWS, strict=True):
            step.column = row
        await rig.apply(*steps)
    asked = [(b"none", BELOW), (b"r", AT), (b"r", BELOW)]
    reads = [pb.RowRead(row=row, all_columns=True, timestamp=at) for row, at in asked]
    await _only_the_second_is_refused(rig, reads, len(ROWS))


async def _only_the_second_is_refused(
    rig: Rig, reads: Sequence[pb.RowRead], found: int = 1
) -> None:
    reading = asyncio.ensure_future(rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads)))
    await _collected_meanwhile(rig, reading)
    result = await reading
    (refused,) = result.refused
    assert isinstance(from_detail(refused.error), SnapshotTooOld)
    assert (refused.read, list(result.found.reads)) == (1, [2] * found)


async def test_a_value_that_is_missing_without_that_is_damage() -> None:
    rig = await _stored_apart()
    await rig.apply(mutation(ROWS[0], delete(DATA, 10)))
    for reading in (rig.scan(AT), rig.value(ROWS[0], AT)):
        with pytest.raises(InvariantViolation, match="value of a write record"):
            await reading


# Values that expire: whether they are visible depends on three numbers, and on nothing else.

TTL = 100
TTLS = ((COLUMN, TTL),)


async def _rig(**fields: object) -> Rig:
    return await Rig(ttls=TTLS, **fields).open()  # type: ignore[arg-type]


@pytest.fixture
@asynccontextmanager
async def aging() -> AsyncIterator[Rig]:
    """A tablet with columns whose values expire."""
    yield await _rig()


@pytest.mark.parametrize("sequence", [0, 7, (1 << SEQUENCE_BITS) - 1])
def test_only_the_milliseconds_of_both_timestamps_count(sequence: int) -> None:
    commit = ms(1_000, sequence)
    assert not is_expired(commit, ms(1_099, (1 << SEQUENCE_BITS) - 1), TTL)
    assert is_expired(commit, ms(1_100), TTL)
    assert expires_at(commit, TTL) == ms(1_100)


async def _seen(rig: Rig, row: bytes, timestamp: int) -> list[bytes | None]:
    """Values of the cell, by each way of reading."""
    ways = [list((await rig.read_row(row, timestamp)).found.values)]
    for fields in ({}, {"columns": [COLUMN]}, {"reverse": True}):
        pages = await rig.scan(timestamp, **fields)
        ways.append([value for page in pages for value in page.found.values])
    return [await rig.value(row, timestamp), *(one[0] if one else None for one in ways)]


@pytest.mark.parametrize(
    ("mutations", "seen"),
    [
        pytest.param(
            [
                written(b"a", ms(1_000), ms(1_001), b"old"),
                written(b"a", ms(1_049), ms(1_050), b"new"),
            ],
            # Whatever was asked before: the last one is read later.
            [(1_040, b"old"), (1_149, b"new"), (1_150, None), (9_999, None), (1_040, b"old")],
            id="until its time is over, and the one before stays hidden",
        ),
        pytest.param(
            [written(b"a", ms(1), ms(2), b"v"), record(b"a", ms(90), ms(95), LOCK_ONLY)],
            [(101, b"v"), (102, None)],
            id="locks above an expired value do not bring it back",
        ),
        pytest.param(
            [in_data(b"a", ms(1), ms(2), b"long")],
            [(101, b"long"), (102, None)],
            id="a long value",
        ),
    ],
)
async def test_a_value_is_visible_for_its_time_to_live(
    aging: Rig, mutations: list[pb.Mutation], seen: list[tuple[int, bytes | None]]
) -> None:
    await aging.apply(*mutations)
    for milliseconds, value in seen:
        # The last sequence numbers of a millisecond belong to it.
        assert await _seen(aging, b"a", ms(milliseconds, 9 if value else 0)) == [value] * 5


async def test_other_columns_do_not_expire(aging: Rig) -> None:
    change = put(WRITE, write_record(ms(1), b"stays"), ms(2))
    await aging.apply(mutation(b"a", change, column=b"other"), written(b"a", ms(1), ms(2), b"goes"))
    pages = await aging.scan(ms(5_000))
    assert [value for page in pages for value in page.found.values] == [b"stays"]


async def test_an_expired_value_is_reported_as_a_deletion_at_its_commit(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2), b"v"))
    for fields in ({"columns": [COLUMN]}, {"all_columns": True}):
        read = pb.RowRead(row=b"a", timestamp=ms(500), report_deletes=True, **fields)
        found = (await aging.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))).found
        assert (list(found.commit_timestamps), list(found.deletes)) == ([ms(2)], [0])
        assert list(found.values) == [b""]


async def test_what_is_newest_cannot_be_read_without_a_timestamp(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2), b"v"))
    for columns in ([COLUMN], [b"other", COLUMN]):
        answer = await aging.read(b"a", NEWEST, *columns)
        assert not answer.found.values
        assert answer.refused[0].error.invalid_argument.field == "reads[0].timestamp"
    assert not (await aging.read(b"a", NEWEST, b"other")).refused


async def test_a_change_shows_its_value_and_nothing_before_it_that_had_expired() -> None:
    rig = await _rig(change_feed=True)
    for at in (1_000, 1_100, 1_201):
        await rig.apply(written(b"a", ms(at) - 1, ms(at), b"%d" % at))
    answer = await changes(rig, 0, ms(5_000), before=True)
    assert [change.value for change in answer.changes] == [b"1000", b"1100", b"1201"]
    assert [one for page in answer.pages for one in before(page)] == [None, b"1000", None]


# ---------------------------------------------------------------------------- collection


@pytest.mark.parametrize(
    ("write", "cells"), [(written, 1), (in_data, 2)], ids=["in its record", "apart"]
)
async def test_an_expired_value_is_collected_like_a_deletion(
    aging: Rig, write: Callable[..., pb.Mutation], cells: int
) -> None:
    await aging.apply(write(b"a", ms(1), ms(2), b"old"), write(b"a", ms(3), ms(4), b"new"))
    assert await collected(aging, ms(103)) == cells, "the superseded one"
    assert await aging.value(b"a", ms(103)) == b"new"
    assert await collected(aging, ms(104)) == cells, "although nothing was committed since"
    assert await stored(aging, WRITE) == await stored(aging, DATA) == []


async def test_values_that_expire_later_are_not_looked_at_before(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2)), written(b"b", ms(5), ms(6)))
    await collected(aging, ms(50))
    assert aging.tablet.collected.more_at == ms(102)
    assert await collected(aging, ms(103)) == 1
    assert aging.tablet.collected.more_at == ms(106)


async def test_a_value_that_is_hidden_by_a_younger_one_above_the_safe_point_goes_too(
    aging: Rig,
) -> None:
    await aging.apply(written(b"a", ms(1), ms(2), b"old"), written(b"a", ms(200), ms(201), b"new"))
    assert await collected(aging, ms(150)) == 1
    assert (await aging.value(b"a", ms(150)), await aging.value(b"a", ms(250))) == (None, b"new")


async def test_an_expired_value_stays_until_its_observers_have_seen_it(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2)), notified(b"a", ms(2)))
    assert await collected(aging, ms(200)) == 0
    await aging.apply(mutation(b"a", delete(NOTIFY, ms(2), b"observer")))
    assert await collected(aging, ms(200)) == 1


async def test_a_deletion_in_such_a_column_is_collected_without_waiting(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2)), record(b"a", ms(3), ms(4), DELETE))
    assert await collected(aging, ms(5)) == 2


# ---------------------------------------------------------------------------- changes of it


def _under_schema_4(milliseconds: int) -> pb.ReadBatch:
    target = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=4)
    read = pb.RowRead(row=b"a", columns=[COLUMN], timestamp=ms(milliseconds))
    return pb.ReadBatch(target=target, reads=[read])


async def test_a_changed_time_to_live_applies_to_what_is_there(aging: Rig) -> None:
    await aging.apply(written(b"a", ms(1), ms(2), b"v"))
    assert await aging.value(b"a", ms(150)) is None
    await aging.tablet.set_schema_version(4, ttls=((COLUMN, 200),))
    assert (await aging.tablet.read(_under_schema_4(150))).found.values == [b"v"]
    await aging.tablet.set_schema_version(3, ttls=())
    late = (await aging.tablet.read(_under_schema_4(202))).found
    assert not late.values, "an older schema came late"


async def test_a_shorter_time_to_live_is_collected_although_nothing_was_committed(
    aging: Rig,
) -> None:
    await aging.apply(written(b"a", ms(1), ms(2), b"v"))
    assert await collected(aging, ms(90)) == 0
    await aging.tablet.set_schema_version(4, ttls=((COLUMN, 10),))
    assert await collected(aging, ms(91)) == 1


async def test_a_time_to_live_that_changes_during_collection_ends_it(
    aging: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader may have begun with the new one, and be about to fetch a value apart from it."""
    await aging.apply(in_data(b"a", ms(1), ms(2), b"long"))
    await aging.tablet.raise_safe_points(SafePoints(ms(150), ms(150)))
    reached, go_on = asyncio.Event(), asyncio.Event()
    write = Sweep.write

    async def late(self: Sweep) -> None:
        reached.set()
        await go_on.wait()
        await write(self)

    monkeypatch.setattr(Sweep, "write", late)
    collecting = asyncio.ensure_future(aging.tablet.collect(ms(150)))
    await reached.wait()
    await aging.tablet.set_schema_version(4, ttls=())
    go_on.set()
    with pytest.raises(NotReady, match="were changed during its collection"):
        await collecting
    monkeypatch.undo()
    assert (await aging.tablet.collect(ms(150))).cells == 0
    await aging.tablet.set_schema_version(5, ttls=TTLS)
    assert (await aging.tablet.collect(ms(150))).cells == 2, "they were still there"


async def test_a_time_to_live_that_changes_while_what_was_collected_is_compacted_is_not_forgotten(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else would have the tablet look again: nothing is committed any more."""
    await rig.apply(written(b"a", ms(1), ms(2), b"old"), written(b"a", ms(3), ms(4), b"new"))

    async def compacted(_: object) -> None:
        await rig.tablet.set_schema_version(4, ttls=TTLS)

    with monkeypatch.context() as patch:
        patch.setattr(collection, "compact_heavy", compacted)
        assert await collected(rig, ms(90)) == 1
    assert await collected(rig, ms(150)) == 1, "the expired one"


async def test_a_longer_time_to_live_waits_for_the_deletion_that_is_being_written(
    aging: Rig,
) -> None:
    """Readers would go by it at once, and find the record of a value that is gone with it."""
    await aging.apply(in_data(b"a", ms(1), ms(2), b"long"))
    await aging.tablet.raise_safe_points(SafePoints(ms(150), ms(150)))
    writes = aging.disk.writes  # type: ignore[attr-defined]
    collecting = await under_way(aging.tablet.collect(ms(150)), seconds=1.5)
    assert aging.disk.writes == writes + 2  # type: ignore[attr-defined]
    # The safe point was first; the deletion is on its way.
    altering = await under_way(aging.tablet.set_schema_version(4, ttls=()), seconds=0.1)
    assert not altering.done()
    assert aging.tablet.schema_version == 3
    assert await aging.value(b"a", ms(200)) is None
    with pytest.raises(SchemaChanged, match="at version 3"):
        await aging.tablet.read(_under_schema_4(200))
    await altering
    assert (await collecting).cells == 2
    assert not (await aging.tablet.read(_under_schema_4(200))).found.values


Reading = Callable[[Rig], Coroutine[Any, Any, object]]


def _scan(**fields: Any) -> Reading:
    return lambda rig: rig.scan(ms(155), **fields)


async def _whole_row(rig: Rig) -> object:
    return await rig.read_row(b"row", ms(155))


def _changes(rig: Rig) -> Coroutine[Any, Any, object]:
    return changes(rig, ms(155), ms(200), before=True)


@pytest.mark.parametrize("reading", [_scan(), _scan(reverse=True), _whole_row, _changes])
async def test_a_reader_whose_values_are_collected_under_a_shorter_time_to_live_asks_again(
    reading: Reading,
) -> None:
    """It began under the longer one, and values apart from their records are read as they are."""
    rig = await Rig(slice_entries=4, change_feed=True).open()
    columns = [b"c%02d" % number for number in range(20)]
    for start, end in ((ms(1), ms(2)), (ms(160), ms(161))):
        pointer = put(WRITE, write_record(start, b"", IN_DATA), end)
        value = put(DATA, b"long", start)
        await rig.apply(*(mutation(b"row", pointer, value, column=column) for column in columns))
    begun = reading(rig)
    begun.send(None)  # it has read some, and lets others go on
    await rig.tablet.set_schema_version(4, ttls=tuple((column, TTL) for column in columns))
    assert await collected(rig, ms(150)) == 2 * len(columns)
    with pytest.raises(SchemaChanged, match="at version 4"):
        await asyncio.ensure_future(begun)


async def test_a_bad_column_of_a_read_is_still_named() -> None:
    rig = await _rig(columns_max=1)
    with pytest.raises(InvalidArgument, match=r"reads\[0\].columns"):
        await rig.read(b"a", NEWEST, COLUMN, b"other")
