"""Lock-only records cost readers nothing: each names the change below it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from percolator.errors import TabletMoved
from percolator.formats.records import RecordKind, WriteRecord
from percolator.tablet.cells import STEPS_MAX
from percolator.tablet.state import SafePoints
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.counting import CountingStorage
from tests.unit.tablet.tablets import (
    COLUMN,
    NOT_EXECUTED,
    TARGET,
    WRITE,
    Rig,
    commit,
    delete,
    mutation,
    prewrite,
    put,
    write_record,
    written,
)
from tests.unit.tablet.watched_storages import LingeringStorage

LOCKS = 500


def locked(row: bytes, end: int, kind: RecordKind = RecordKind.LOCK_ONLY) -> pb.Mutation:
    return mutation(row, put(WRITE, write_record(end - 1, b"", kind), end))


async def lock_many(rig: Rig, first: int, count: int = LOCKS) -> int:
    """Commits a cell lock-only this many times; returns a timestamp above them."""
    end = first + 2 * count
    for at in range(first, end, 2):
        await rig.apply(locked(b"a", at))
    return end


async def named(rig: Rig) -> list[int | None]:
    """What the lock-only records name, newest first."""
    records = [WriteRecord.decode(cell.value) for cell in await rig.cells(WRITE)]
    return [one.last_change for one in records if one.kind is RecordKind.LOCK_ONLY]


async def without_names(disk: DurableMemory) -> None:
    """Makes all lock-only records name nothing."""
    for key, value in disk.durable.items():
        if key.startswith(b"W") and value[8] == RecordKind.LOCK_ONLY:
            disk.durable[key] = value[:9]


async def reopened(rig: Rig) -> tuple[Rig, Counter[str]]:
    """Makes memory forget everything."""
    await rig.tablet.close()
    storage = CountingStorage(rig.disk)
    opened = await Rig(disk=rig.disk, storage=storage).open()
    storage.counts.clear()
    return opened, storage.counts


async def read_row(rig: Rig, timestamp: int) -> list[bytes]:
    read = pb.RowRead(row=b"a", all_columns=True, timestamp=timestamp)
    return list((await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=[read]))).found.values)


@pytest.mark.parametrize("below", [1, LOCKS])
async def test_a_read_above_many_locks_costs_two_seeks_and_the_next_one_costs_one(
    below: int,
) -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"value"))
    end = await lock_many(rig, 100)
    rig, counts = await reopened(rig)
    at = 100 + 2 * below
    assert await rig.value(b"a", at) == b"value"
    assert counts == Counter({"seek W": 2})
    counts.clear()
    assert await rig.value(b"a", end) == b"value"
    assert await rig.value(b"a", end) == b"value"
    assert counts["seek W"] == (3 if below == 1 else 2)
    assert not counts["step"]


async def test_a_cell_that_was_only_ever_locked_is_absent_at_the_same_cost() -> None:
    rig = await Rig().open()
    end = await lock_many(rig, 100)
    await rig.apply(written(b"a\0", 10, 11, b"another"))
    rig, counts = await reopened(rig)
    assert await rig.value(b"a", end) is None
    assert await rig.value(b"a", end) is None
    assert counts == Counter({"seek W": 3})
    assert set(await named(rig)) == {0}


@pytest.mark.parametrize("reverse", [False, True])
async def test_a_scan_passes_many_locks_at_the_cost_of_a_few(reverse: bool) -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"value"), written(b"b", 10, 11, b"next"))
    end = await lock_many(rig, 100)
    rig, counts = await reopened(rig)
    pages = await rig.scan(end, reverse=reverse)
    values = [value for page in pages for value in page.found.values]
    assert sorted(values) == [b"next", b"value"]
    assert sum(counts.values()) < 25
    counts.clear()
    assert await read_row(rig, end) == [b"value"]
    assert sum(counts.values()) < 15


async def test_a_hot_lock_is_committed_and_read_without_stepping_over_its_records() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"value"))
    rig, counts = await reopened(rig)
    await rig.apply(locked(b"a", 13))
    counts.clear()
    for end in range(15, 55, 2):
        await rig.apply(locked(b"a", end))
        assert await rig.value(b"a", end) == b"value"
    assert counts == Counter({"seek W": 20})
    assert set(await named(rig)) == {11}


async def test_a_lock_names_the_newest_put_or_deletion_below_it() -> None:
    rig = await Rig().open()
    await rig.apply(locked(b"a", 5), written(b"a", 6, 7), locked(b"a", 9), locked(b"a", 11))
    await rig.apply(locked(b"a", 13, RecordKind.DELETE), locked(b"a", 15), locked(b"a", 17))
    await rig.apply(written(b"a", 18, 19), locked(b"a", 21))
    assert await named(rig) == [19, 13, 13, 7, 7, 0]


async def test_the_remembered_change_of_a_cell_is_forgotten_when_it_changes() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"old"), locked(b"a", 13))
    assert await rig.value(b"a", 14) == b"old"
    await rig.apply(written(b"a", 15, 16, b"new"))
    assert [await rig.value(b"a", at) for at in (14, 15, 16, 20)] == [
        b"old",
        b"old",
        b"new",
        b"new",
    ]
    await rig.apply(locked(b"a", 18), locked(b"a", 22, RecordKind.DELETE), locked(b"a", 24))
    assert [await rig.value(b"a", at) for at in (19, 21, 22, 30)] == [b"new", b"new", None, None]


async def test_a_read_of_the_past_teaches_nothing_about_the_present() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"old"), locked(b"a", 13), written(b"a", 15, 16, b"new"))
    rig, _ = await reopened(rig)
    assert await rig.value(b"a", 14) == b"old"
    assert await rig.value(b"a", 20) == b"new"


async def test_what_a_lock_names_may_be_collected() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"old"), locked(b"a", 13, RecordKind.DELETE))
    await rig.apply(locked(b"a", 31), locked(b"b", 15), written(b"b", 16, 17), locked(b"b", 33))
    await rig.tablet.raise_safe_points(SafePoints(20, 20))
    await rig.tablet.collect(20)
    rig, _ = await reopened(rig)
    assert [await rig.value(row, 40) for row in (b"a", b"b")] == [None, b""]
    assert await named(rig) == [13, 17]


async def test_the_clients_own_last_change_is_ignored() -> None:
    rig = await Rig().open()
    lie = WriteRecord(19, RecordKind.LOCK_ONLY, last_change=5).encode()
    await rig.apply(written(b"a", 10, 11, b"value"), mutation(b"a", put(WRITE, lie, 20)))
    assert await named(rig) == [11]
    assert await rig.value(b"a", 30) == b"value"


@pytest.mark.parametrize("kind", [RecordKind.PUT, RecordKind.DELETE])
async def test_a_change_cannot_be_committed_under_a_lock_that_names_an_older_one(
    kind: RecordKind,
) -> None:
    """Locks rule it out; a client that writes without them must not make others read the past."""
    rig = await Rig().open()
    await rig.apply(written(b"a", 4, 5, b"value"), locked(b"a", 20), locked(b"a", 30))
    results = await rig.mutate(*(locked(b"a", at, kind) for at in (10, 20, 25)))
    assert [one.outcome for one in results] == [NOT_EXECUTED] * 3
    assert "below a lock-only commit" in results[0].error.message
    await rig.apply(locked(b"a", 8), locked(b"a", 40, kind), locked(b"a", 35, kind))


async def test_a_bulk_load_of_a_cell_that_was_locked_once_is_read() -> None:
    rig = await Rig().open()
    await rig.apply(locked(b"a", 11))
    assert await rig.value(b"a", 15) is None
    await rig.apply(mutation(b"a", delete(WRITE, 11)))
    fence = pb.LoadFence(name="load", run=20)
    raise_ = pb.FenceRequest(target=TARGET, action=pb.FenceRequest.ACTION_RAISE, fence=fence)
    await rig.tablet.fence(raise_)
    await rig.tablet.load(
        pb.LoadRequest(
            target=TARGET,
            name="load",
            start_timestamp=20,
            commit_timestamp=21,
            rows=[b"a"],
            columns=[COLUMN],
            values=[b"loaded"],
        )
    )
    fence.commit_timestamp = 21
    for action in (pb.FenceRequest.ACTION_FINISH, pb.FenceRequest.ACTION_LIFT):
        await rig.tablet.fence(pb.FenceRequest(target=TARGET, action=action, fence=fence))
    assert await rig.value(b"a", 30) == b"loaded"


# ------------------------------------------------------------------- records that name nothing


async def test_records_that_name_nothing_are_stepped_over_in_slices() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"value"))
    end = await lock_many(rig, 100)
    await rig.tablet.close()
    await without_names(rig.disk)
    rig = await Rig(storage=MemoryStorage(rig.disk), slice_entries=50).open()
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.ensure_future(count_turns())
    assert await rig.value(b"a", end) == b"value"
    counting.cancel()
    assert turns >= LOCKS // 50 - 2
    assert rig.tablet.statistics().versions_skipped == LOCKS


async def test_a_tablet_that_is_closed_while_a_read_steps_over_records_answers_nothing() -> None:
    rig = await Rig().open()
    end = await lock_many(rig, 100)
    await rig.tablet.close()
    await without_names(rig.disk)
    rig = await Rig(storage=MemoryStorage(rig.disk), slice_entries=50).open()
    reading = asyncio.ensure_future(rig.value(b"a", end))
    await asyncio.sleep(0)
    await rig.tablet.close()
    with pytest.raises(TabletMoved):
        await reading


async def test_a_commit_during_such_a_read_does_not_leave_a_stale_memory_of_the_cell() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"old"))
    end = await lock_many(rig, 100)
    await rig.tablet.close()
    await without_names(rig.disk)
    rig = await Rig(storage=MemoryStorage(rig.disk), slice_entries=10).open()
    reading = asyncio.ensure_future(rig.value(b"a", end))
    await asyncio.sleep(0)
    await rig.apply(prewrite(b"a", end + 1, b"new"))
    await rig.apply(commit(b"a", end + 1, end + 2, b"new"))
    assert await reading == b"old"
    assert await rig.value(b"a", end + 3) == b"new"


@pytest.mark.parametrize(("older", "expected"), [(STEPS_MAX - 1, 11), (STEPS_MAX, None)])
async def test_a_new_lock_finds_the_change_below_a_few_records_that_name_nothing(
    older: int, expected: int | None
) -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 10, 11, b"value"))
    end = await lock_many(rig, 100, older)
    await rig.tablet.close()
    await without_names(rig.disk)
    rig = await Rig(storage=MemoryStorage(rig.disk)).open()
    await rig.apply(locked(b"a", end))
    assert (await named(rig))[0] == expected
    assert await rig.value(b"a", end) == b"value"
    await rig.apply(locked(b"a", end + 2))
    assert (await named(rig))[0] == 11, "a read has found it in the meantime"


async def test_two_commits_of_a_cell_in_one_mutation_name_no_change() -> None:
    """The change that the second one would name is not in the storage yet."""
    rig = await Rig().open()
    changes = [put(WRITE, write_record(9, b"value"), 10)]
    changes.append(put(WRITE, write_record(11, b"", RecordKind.LOCK_ONLY), 12))
    await rig.apply(mutation(b"a", *changes))
    assert await named(rig) == [None]
    assert await rig.value(b"a", 20) == b"value"


async def lingering_commit() -> tuple[Rig, LingeringStorage, asyncio.Task[object]]:
    """A cell whose change below a lock is remembered, and a commit that the storage shows but
    memory has not heard of."""
    storage = LingeringStorage(DurableMemory())
    rig = await Rig(storage=storage).open()
    await rig.apply(written(b"a", 10, 11, b"old"), written(b"b", 10, 11, b"other"))
    await rig.apply(locked(b"a", 20))
    assert await rig.value(b"a", 25) == b"old"
    await rig.apply(prewrite(b"a", 30, b"new"))
    storage.lingering = True
    committing = asyncio.ensure_future(rig.mutate(commit(b"a", 30, 40, b"new")))
    await asyncio.sleep(0.5)
    return rig, storage, committing


async def test_a_commit_is_read_as_soon_as_its_lock_is_gone_whatever_memory_remembers() -> None:
    rig, _, committing = await lingering_commit()
    assert await rig.value(b"a", 50) == b"new"
    await committing
    assert await rig.value(b"a", 50) == b"new"


async def test_a_read_below_a_commit_on_its_way_teaches_memory_nothing_about_its_cell() -> None:
    rig, _, committing = await lingering_commit()
    assert await rig.value(b"a", 25) == b"old"
    assert await rig.value(b"a", 50) == b"new"
    await committing
    assert await rig.value(b"a", 25) == b"old"
    assert await rig.value(b"a", 50) == b"new"
