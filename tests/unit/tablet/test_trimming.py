"""After a split, the cells of the other half are removed, and the counts become true."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator.errors import StoreUnusable, TabletMoved
from percolator.tablet.cells import SPACE_OF_PREFIX, decode
from percolator.tablet.collection import Sweep
from percolator.tablet.state import TabletIdentity
from percolator.testing.memory_storage import DurableMemory
from tests.unit.tablet.tablets import (
    COLUMN,
    DATA,
    LOCK,
    NOTIFY,
    ROLLBACK,
    WRITE,
    BreakingDisk,
    Rig,
    SlowDisk,
    commit,
    mutation,
    prewrite,
    put,
    roll_back,
    written,
)

WHOLE = TabletIdentity(7, 1, 2, b"", b"")
LOWER = TabletIdentity(7, 1, 2, b"", b"m")
UPPER = TabletIdentity(7, 1, 2, b"m", b"")
MIDDLE = TabletIdentity(7, 1, 2, b"h", b"p")
ROWS = [bytes([letter]) for letter in range(ord("a"), ord("z") + 1)]
COUNTED = (b"W", b"D", b"R")


async def parent(disk: DurableMemory) -> None:
    """Every row has a committed value, a long value, a lock, a marker and a notification."""
    rig = await Rig(disk=disk, identity=WHOLE).open()
    for row in ROWS:
        await rig.apply(written(row, 5, 6, b"v" * 50), roll_back(row + b"1", 7))
        await rig.apply(prewrite(row + b"2", 8))
        await rig.apply(mutation(row + b"3", put(DATA, b"long" * 99, 9), put(NOTIFY, b"", 9, b"o")))
        await rig.apply(prewrite(row + b"4", 10, b"w"))
        await rig.apply(commit(row + b"4", 10, 11))
    await rig.tablet.close()


@pytest.fixture
@asynccontextmanager
async def child(disk: SlowDisk) -> AsyncIterator[Rig]:
    """The lower half of a tablet that was split, before it is trimmed."""
    await parent(disk)
    yield await Rig(disk=disk, identity=LOWER).open()


def is_due(rig: Rig) -> bool:
    return rig.tablet.needs_trimming


def copy(disk: DurableMemory) -> DurableMemory:
    other = DurableMemory()
    other.durable = dict(disk.durable)
    return other


def stored(disk: DurableMemory) -> dict[bytes, bytes]:
    """All cells, without fences and notes."""
    return {
        key: value
        for key, value in disk.durable.items()
        if key[:1] in SPACE_OF_PREFIX and len(key) > 1
    }


def is_inside(key: bytes, identity: TabletIdentity) -> bool:
    row = decode(key).row
    return identity.start <= row and (not identity.end or row < identity.end)


def counts(disk: DurableMemory) -> tuple[int, int]:
    found = {key: value for key, value in stored(disk).items() if key[:1] in COUNTED}
    return len(found), sum(len(key) + len(value) for key, value in found.items())


@pytest.mark.parametrize("identity", [LOWER, UPPER, MIDDLE], ids=["lower", "upper", "middle"])
async def test_exactly_the_cells_outside_are_removed_and_the_counts_become_true(
    disk: SlowDisk, identity: TabletIdentity
) -> None:
    await parent(disk)
    kept = {key: value for key, value in stored(disk).items() if is_inside(key, identity)}
    assert {decode(key).space for key in kept} == {LOCK, WRITE, DATA, ROLLBACK, NOTIFY}
    child = await Rig(disk=disk, identity=identity).open()
    assert is_due(child)
    before = [await child.cells(space) for space in (LOCK, WRITE, DATA, ROLLBACK, NOTIFY)]
    assert await child.tablet.trim() > 0
    assert not is_due(child)
    assert stored(disk) == kept
    after = [await child.cells(space) for space in (LOCK, WRITE, DATA, ROLLBACK, NOTIFY)]
    assert after == before
    statistics = child.tablet.statistics()
    assert (statistics.cells, statistics.bytes) == counts(disk)
    again = await child.reopened(identity=identity)
    assert not again.tablet.needs_trimming
    assert (again.tablet.statistics().cells, again.tablet.statistics().bytes) == counts(disk)


async def test_a_tablet_that_was_never_split_needs_no_trimming() -> None:
    rig = await Rig(identity=LOWER).open()
    assert not rig.tablet.needs_trimming
    assert not (await rig.reopened(identity=LOWER)).tablet.needs_trimming


async def test_while_it_is_trimmed_a_child_does_not_pretend_to_be_as_large_as_the_whole(
    child: Rig, disk: SlowDisk
) -> None:
    """The master would split it again at once."""
    whole, _ = counts(disk)
    assert child.tablet.statistics().cells < 0.7 * whole


async def test_wherever_trimming_stops_the_next_owner_completes_it_with_true_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("percolator.tablet.collection.DELETIONS_PER_WRITE", 1)
    monkeypatch.setattr("percolator.tablet.collection.SLICE_ENTRIES", 5)
    whole = DurableMemory()
    await parent(whole)
    for writes in range(40):
        disk = BreakingDisk()
        disk.durable = dict(whole.durable)
        child = await Rig(disk=disk, identity=MIDDLE).open()
        disk.writes_left = writes + 1
        try:
            await child.tablet.trim()
        except StoreUnusable:
            pass
        else:
            break
        after = copy(disk)
        successor = await Rig(disk=after, identity=MIDDLE).open()
        await successor.tablet.trim()
        assert all(is_inside(key, MIDDLE) for key in stored(after))
        statistics = successor.tablet.statistics()
        assert (statistics.cells, statistics.bytes) == counts(after), writes
    assert writes > 10, "otherwise, nothing was interrupted"


async def test_a_half_trimmed_tablet_that_is_split_again_is_trimmed_to_its_own_rows(
    child: Rig, disk: SlowDisk
) -> None:
    grandchild = await child.reopened(identity=TabletIdentity(7, 1, 2, b"c", b"f"))
    await grandchild.tablet.trim()
    assert {decode(key).row[:1] for key in stored(disk)} == {b"c", b"d", b"e"}
    assert grandchild.tablet.statistics().cells == counts(disk)[0]


async def test_what_is_written_meanwhile_is_counted_and_stays(child: Rig, disk: SlowDisk) -> None:
    await child.apply(written(b"a9", 20, 21, b"new"))
    await child.tablet.trim()
    assert await child.value(b"a9", 30) == b"new"
    assert child.tablet.statistics().cells == counts(disk)[0]


async def test_an_owner_that_was_deposed_trims_no_further(child: Rig) -> None:
    child.owner = False
    with pytest.raises(TabletMoved):
        await child.tablet.trim()


async def test_a_time_to_live_that_changes_meanwhile_does_not_stop_it(
    child: Rig,
    disk: SlowDisk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads what is outside, and it would stay until the tablet is opened again."""
    write = Sweep.write

    async def late(self: Sweep) -> None:
        await child.tablet.set_schema_version(4, ttls=((COLUMN, 100),))
        await write(self)

    monkeypatch.setattr(Sweep, "write", late)
    await child.tablet.trim()
    assert not is_due(child)
    assert all(is_inside(key, LOWER) for key in stored(disk))
