"""Group commit when the disk fails, the tablet is taken away, or the tablet is closed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from percolator.errors import (
    PercolatorError,
    StoreUnusable,
    TabletMoved,
)
from percolator.tablet.judge import JudgedBatch
from percolator.testing.memory_storage import MemoryBatch, MemoryStorage
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    ABSENT,
    APPLIED,
    COLUMN,
    NOT_EXECUTED,
    REFUSED,
    UNKNOWN,
    WRITE,
    Rig,
    SlowDisk,
    batch,
    commit,
    condition,
    mutation,
    outcomes,
    prewrite,
    started,
    written,
)

# ---------------------------------------------------------------- failing disks


@pytest.mark.parametrize("kept", [False, True])
async def test_after_a_failed_write_everything_in_its_batch_is_unknown(kept: bool) -> None:
    """A failed fsync does not mean that nothing was written: if a transfer were reported as failed
    and the user repeated it, it would happen twice. And a refusal may reveal what is in doubt."""
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"taken", 5, 6))
    disk.failure = OSError("the disk is on fire")
    writing = started(
        rig, written(b"a", 10, 20), mutation(b"taken", conditions=[condition(WRITE, ABSENT)])
    )
    await asyncio.sleep(0.5)
    waiting = started(rig, written(b"b", 10, 20))
    for result in await writing:
        assert result.outcome == UNKNOWN
        assert result.error.HasField("outcome_unknown")
    [result] = await waiting
    assert result.outcome == NOT_EXECUTED
    assert result.error.HasField("store_unusable")

    assert [type(error) for error in rig.closed] == [StoreUnusable]
    with pytest.raises(StoreUnusable):
        await rig.mutate(written(b"c", 10, 20))
    with pytest.raises(StoreUnusable):
        await rig.read(b"taken", 30)
    with pytest.raises(StoreUnusable):
        await rig.scan(30)
    await rig.tablet.close()

    disk.failure = None
    disk.settle(kept=kept)
    reopened = await Rig(disk=disk).open()
    assert await reopened.value(b"a", 30) == (b"" if kept else None)
    assert await reopened.value(b"b", 30) is None


class ForgetfulStorage(MemoryStorage):
    """Raises an error that no disk raises, as a bug would."""

    broken = False

    async def write(self, batch: MemoryBatch, then: Callable[[], bool] | None = None) -> bool:
        if self.broken:
            raise RuntimeError("a bug")
        return await super().write(batch, then)


async def test_a_bug_leaves_no_caller_waiting_for_an_answer() -> None:
    storage = ForgetfulStorage(SlowDisk())
    rig = await Rig(storage=storage).open()
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    storage.broken = True
    [result] = await rig.mutate(written(b"a", 10, 20))
    assert result.outcome == UNKNOWN
    assert rig.closed
    with pytest.raises(PercolatorError):
        await rig.read(b"a", 30)


async def test_a_bug_after_the_write_stops_the_tablet_and_leaves_its_batch_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is durable but only half known to memory must be neither judged nor read: a lock that
    the mirror does not know would block no one."""
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: None)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(JudgedBatch, "publish", broken)
    async with asyncio.timeout(10):
        [result] = await rig.mutate(prewrite(b"a", 10))
    assert result.outcome == UNKNOWN
    assert rig.closed
    with pytest.raises(PercolatorError):
        await rig.read(b"a", 30)
    await rig.tablet.close()
    reopened = await Rig(disk=disk).open()
    assert len((await reopened.read(b"a", 30)).locks) == 1


# ---------------------------------------------------------------- lost ownership


async def test_an_owner_deposed_during_the_write_answers_unknown() -> None:
    """The new owner may have cloned the directory before the write, or after it."""
    rig = await Rig().open()
    await rig.apply(written(b"taken", 5, 6))
    writing = started(
        rig, written(b"a", 10, 20), mutation(b"taken", conditions=[condition(WRITE, ABSENT)])
    )
    await asyncio.sleep(0.5)
    waiting = started(rig, written(b"b", 10, 20))
    rig.owner = False
    assert await outcomes(writing) == [UNKNOWN, UNKNOWN]
    [result] = await waiting
    assert result.outcome == NOT_EXECUTED
    assert result.error.HasField("tablet_moved")
    assert [type(error) for error in rig.closed] == [TabletMoved]
    with pytest.raises(TabletMoved):
        await rig.mutate(written(b"c", 10, 20))


async def test_a_batch_of_refusals_writes_nothing_but_still_checks_the_ownership() -> None:
    """Otherwise, a deposed owner would answer "not committed" about its successor's commits."""
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    await rig.apply(written(b"taken", 5, 6))
    writes, checks = disk.writes, rig.owner_checks
    question = mutation(b"taken", conditions=[condition(WRITE, ABSENT)])
    assert [result.outcome for result in await rig.mutate(question)] == [REFUSED]
    assert (disk.writes, rig.owner_checks) == (writes, checks + 1)
    rig.owner = False
    assert [result.outcome for result in await rig.mutate(question)] == [UNKNOWN]


async def test_a_deposed_owner_answers_neither_reads_nor_pages() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", 5, 6), written(b"b", 5, 6))
    pages = rig.tablet.scan(
        pb.ScanRequest(target=batch([]).target, all_columns=True, timestamp=30, page_rows_max=1)
    )
    assert list((await anext(pages)).found.rows) == [b"a"]
    rig.owner = False
    with pytest.raises(TabletMoved):
        await anext(pages)
    assert len(rig.closed) == 1

    other = await Rig().open()
    other.owner = False
    with pytest.raises(TabletMoved):
        await other.read(b"a", 30)
    assert len(other.closed) == 1


# ---------------------------------------------------------------- closing


async def test_closing_lets_the_current_batch_finish_and_refuses_the_rest() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    first = started(rig, written(b"a", 10, 20))
    await asyncio.sleep(0.1)
    waiting = started(rig, written(b"b", 10, 20))
    closing = asyncio.ensure_future(rig.tablet.close())
    assert await outcomes(first) == [APPLIED]
    [result] = await waiting
    assert result.outcome == NOT_EXECUTED
    await closing
    await rig.tablet.close()
    assert rig.closed == []  # the close was requested
    with pytest.raises(TabletMoved):
        await rig.mutate(written(b"c", 10, 20))
    reopened = await Rig(disk=disk).open()
    assert await reopened.value(b"a", 30) == b""
    assert await reopened.value(b"b", 30) is None


async def test_a_disk_failure_while_closing_is_reported_and_the_storage_is_closed() -> None:
    disk = SlowDisk()
    rig = await Rig(disk=disk).open()
    disk.failure = OSError("the disk is on fire")
    with pytest.raises(StoreUnusable):
        await rig.tablet.close()
    assert rig.closed == []  # the error tells the caller that closed it
    disk.settle(kept=False)
    disk.failure = None
    reopened = await Rig(disk=disk).open()
    assert (await reopened.read(b"a", 30, COLUMN)).found.values == []


async def test_what_was_not_synced_at_a_crash_was_never_acknowledged() -> None:
    disk = SlowDisk()
    storage = MemoryStorage(disk)
    rig = await Rig(disk=disk, storage=storage).open()
    await rig.apply(prewrite(b"a", 10, b"value"))
    committing = started(rig, commit(b"a", 10, 20, b"value"))
    await asyncio.sleep(0.5)
    storage.crash()
    disk.settle(kept=False)
    assert await outcomes(committing) == [UNKNOWN]
    reopened = await Rig(disk=disk).open()
    assert len((await reopened.read(b"a", 30)).locks) == 1


class ClosableStorage(MemoryStorage):
    """Counts calls after it was closed, for which LevelDB raises an error."""

    is_closed = False
    touched_after_close = 0

    async def close(self) -> None:
        await super().close()
        self.is_closed = True

    def batch(self) -> MemoryBatch:
        self.touched_after_close += self.is_closed
        return super().batch()


async def test_what_waited_when_the_tablet_was_closed_leaves_its_storage_alone() -> None:
    storage = ClosableStorage(SlowDisk())
    rig = await Rig(storage=storage).open()
    running = asyncio.ensure_future(rig.mutate(prewrite(b"a", 10)))
    await asyncio.sleep(0.5)
    closing = asyncio.ensure_future(rig.tablet.close())
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(rig.mutate(prewrite(b"b", 10)))
    await closing
    assert [(await work)[0].outcome for work in (running, waiting)] == [APPLIED, NOT_EXECUTED]
    await asyncio.sleep(1)
    assert storage.touched_after_close == 0
