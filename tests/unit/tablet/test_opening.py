"""Storage that a tablet finds when it is opened, and storage that it refuses."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from percolator.errors import StoreFault, StoreUnusable
from percolator.tablet import opening
from percolator.tablet.cells import FORMAT_KEY, SAFE_POINT_KEY
from percolator.tablet.state import SafePoints, TabletIdentity
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from tests.unit.tablet.tablets import (
    LOCK,
    NOTIFY,
    REFUSED,
    WRITE,
    Rig,
    SlowDisk,
    commit,
    mutation,
    prewrite,
    put,
    read_lock,
    roll_back,
    written,
)


def of_rows(start: bytes, end: bytes) -> TabletIdentity:
    return TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=start, end=end)


async def test_locks_and_notifications_are_found_again(rig: Rig) -> None:
    await rig.apply(prewrite(b"a", 10), mutation(b"b", put(NOTIFY, b"", 5, b"f")))
    reopened = await rig.reopened()
    assert len((await reopened.read(b"a", 30)).locks) == 1
    assert [(c.row, c.timestamp, c.qualifier) for c in await reopened.cells(NOTIFY)] == [
        (b"b", 5, b"f")
    ]
    statistics = reopened.tablet.statistics()
    assert (statistics.locks, statistics.notifications) == (1, 1)


async def test_a_child_of_a_split_sees_nothing_outside_of_its_range(rig: Rig) -> None:
    """Its directory is a clone of its parent's and still holds the other half, whose data, locks
    and notifications now belong to another tablet."""
    rows = [b"a", b"m", b"z"]
    await rig.apply(
        *(written(row, 5, 6, row) for row in rows),
        *(mutation(row, put(NOTIFY, b"", 5, b"f")) for row in rows),
    )
    await rig.apply(*(prewrite(row, 10) for row in rows))
    child = await rig.reopened(identity=of_rows(b"m", b"z"))
    [page] = await child.scan(9)
    assert list(page.found.rows) == [b"m"]
    for space in (LOCK, WRITE, NOTIFY):
        assert [cell.row for cell in await child.cells(space)] == [b"m"]
    [page] = await child.scan(30)
    assert [found.lock.row for found in page.locks] == [b"m"]
    [page] = await child.scan(9, reverse=True)
    assert list(page.found.rows) == [b"m"]
    statistics = child.tablet.statistics()
    assert (statistics.locks, statistics.notifications) == (1, 1)


async def test_a_transaction_from_before_the_reopening_is_judged_by_the_storage(
    rig: Rig, disk: SlowDisk
) -> None:
    """Memory has lost the recent commits and markers; the stored bounds make up for it."""
    await rig.apply(prewrite(b"a", 10), roll_back(b"b", 11))
    await rig.apply(commit(b"a", 10, 20))
    reopened = await Rig(disk=disk).open()
    [late, rolled_back, own] = await reopened.mutate(
        prewrite(b"a", 15), prewrite(b"b", 11), prewrite(b"c", 10)
    )
    assert late.outcome == REFUSED
    assert (late.failed_condition, late.cell.timestamp) == (3, 20)
    assert (rolled_back.outcome, rolled_back.cell.timestamp) == (REFUSED, 11)
    assert own.outcome != REFUSED


async def test_safe_points_of_another_length_are_refused_and_never_mistaken_for_lower_ones(
    rig: Rig, disk: SlowDisk
) -> None:
    """A lower one would let a read through whose history is gone."""
    await rig.tablet.raise_safe_points(SafePoints(20, 30))
    disk.durable[SAFE_POINT_KEY] = disk.durable[SAFE_POINT_KEY][:16]
    with pytest.raises(StoreUnusable, match="have 16 bytes, not 24") as refused:
        await Rig(disk=disk).open()
    assert refused.value.fault is StoreFault.DAMAGED


async def test_a_storage_of_another_format_is_refused_by_name_and_left_as_it_is(
    rig: Rig, disk: SlowDisk
) -> None:
    """The release that knows the format goes on with it, and with its counts."""
    await rig.apply(written(b"a", 5, 6, b"v"))
    await rig.tablet.close()
    disk.durable[FORMAT_KEY] = b"4"
    before = dict(disk.durable)
    refused = Rig(disk=disk)
    with pytest.raises(StoreUnusable, match="format b'4'"):
        await refused.open()
    await refused.tablet.close()
    assert disk.durable == before


async def test_a_storage_that_holds_something_else_is_refused(disk: DurableMemory) -> None:
    disk.durable[b"what"] = b"ever"
    refused = Rig(disk=disk)
    with pytest.raises(StoreUnusable, match="no tablet"):
        await refused.open()
    await refused.tablet.close()
    assert disk.durable == {b"what": b"ever"}


async def test_other_tablets_are_served_while_one_takes_in_its_locks(
    rig: Rig, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job may have left ten million of them, and read locks are found among all others."""
    starts = range(100, 120)
    await rig.apply(*(prewrite(b"%d" % start, start) for start in starts))
    await rig.apply(*(read_lock(b"other", start) for start in starts))
    monkeypatch.setattr(opening, "_SLICE", 3)
    again = Rig(disk=disk)
    state = again.tablet._state
    taken: list[tuple[int, int]] = []

    async def serve_others() -> None:
        while True:
            read_locks = sum(map(len, state.read_locks.live.values()))
            taken.append((len(state.mirror), read_locks))
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve_others())
    await again.open()
    serving.cancel()
    assert taken[-1] == (40, 20)
    assert max(map(max, [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(taken)])) == 3


class UnreadableStorage(MemoryStorage):
    def get(self, key: bytes) -> bytes | None:
        raise OSError("damaged")


async def test_a_storage_that_cannot_be_read_is_unusable() -> None:
    with pytest.raises(StoreUnusable, match="damaged"):
        await Rig(storage=UnreadableStorage()).open()


async def test_counts_outlive_a_clean_close_and_are_shared_out_after_a_split(
    rig: Rig, disk: SlowDisk
) -> None:
    await rig.apply(*(written(b"%03d" % number, 5, 6, b"v" * 50) for number in range(100)))
    await rig.tablet.close()
    counted = rig.tablet.statistics()
    assert counted.cells == 100
    assert 100 * 60 < counted.bytes < 100 * 120
    reopened = (await Rig(disk=disk).open()).tablet.statistics()
    assert (reopened.cells, reopened.bytes) == (counted.cells, counted.bytes)
    child = (await Rig(disk=disk, identity=of_rows(b"", b"025")).open()).tablet.statistics()
    assert child.cells == 25
