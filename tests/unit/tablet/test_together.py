"""Groups of mutations that take effect at one moment or not at all, and how a lock is compared."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import ExecutionUnknown, InvalidArgument, NotExecuted, SchemaChanged
from percolator.formats.records import KIND_LOCK_ONLY, WRITE_HEADER
from percolator.protocol import steps
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.read_lock_steps import read_lock
from tests.unit.tablet.tablets import (
    APPLIED,
    LOCK,
    NOT_EXECUTED,
    REFUSED,
    ROLLBACK,
    TARGET,
    WRITE,
    Rig,
    prewrite,
    roll_back,
    started,
)

COMMIT = 50


def _commit(row: bytes, start: int = 10, commit: int = COMMIT) -> pb.Mutation:
    record = WRITE_HEADER.pack(start, KIND_LOCK_ONLY)
    return steps.commit_part(row, b"balance", start, commit, record)


async def _together(rig: Rig, *mutations: pb.Mutation, seconds: float = 3600.0) -> list[int]:
    response = await rig.tablet.mutate_together(
        pb.MutationBatch(target=TARGET, mutations=mutations),
        deadline_seconds=rig.clock.monotonic_seconds() + seconds,
    )
    return [result.outcome for result in response.results]


async def _locked(*rows: bytes) -> Rig:
    rig = Rig()
    await rig.open()
    await rig.apply(*(prewrite(row, 10) for row in rows))
    return rig


async def test_all_are_applied_with_one_write() -> None:
    rig = await _locked(b"a", b"b", b"c")
    before = rig.disk.writes  # type: ignore[attr-defined]
    assert await _together(rig, _commit(b"a"), _commit(b"b"), _commit(b"c")) == [APPLIED] * 3
    assert rig.disk.writes == before + 1  # type: ignore[attr-defined]
    assert [cell.timestamp for cell in await rig.cells(WRITE)] == [COMMIT] * 3
    assert not await rig.cells(LOCK)


async def test_if_one_is_refused_none_is_applied() -> None:
    rig = await _locked(b"a", b"b", b"c")
    await rig.apply(roll_back(b"b", 10))
    outcomes = await _together(rig, _commit(b"a"), _commit(b"b"), _commit(b"c"))
    assert outcomes == [NOT_EXECUTED, REFUSED, NOT_EXECUTED]
    assert not await rig.cells(WRITE)
    assert len(await rig.cells(LOCK)) == 2
    assert len(await rig.cells(ROLLBACK)) == 1


async def test_a_repeated_group_is_refused_by_its_own_commits() -> None:
    rig = await _locked(b"a", b"b")
    await _together(rig, _commit(b"a"), _commit(b"b"))
    assert await _together(rig, _commit(b"a"), _commit(b"b")) == [REFUSED] * 2


@pytest.mark.parametrize(("pushed_to", "outcome"), [(COMMIT, APPLIED), (COMMIT + 1, REFUSED)])
async def test_a_lock_may_be_pushed_up_to_the_commit_and_not_above(
    pushed_to: int, outcome: int
) -> None:
    rig = Rig()
    await rig.open()
    await rig.apply(prewrite(b"a", 10, min_commit_timestamp=pushed_to))
    assert await _together(rig, _commit(b"a")) == [outcome]


async def test_the_lock_of_another_transaction_is_not_enough() -> None:
    rig = Rig()
    await rig.open()
    await rig.apply(prewrite(b"a", 11))
    assert await _together(rig, _commit(b"a")) == [REFUSED]


async def test_a_group_waits_for_the_batch_in_progress() -> None:
    rig = await _locked(b"a")
    rolling = started(rig, roll_back(b"a", 10))
    await asyncio.sleep(0.5)  # its batch is on its way to the disk
    assert await _together(rig, _commit(b"a")) == [REFUSED]
    await rolling


async def test_the_outcome_is_unknown_when_the_tablet_was_lost() -> None:
    rig = await _locked(b"a")
    rig.owner = False
    with pytest.raises(ExecutionUnknown):
        await _together(rig, _commit(b"a"))
    assert rig.closed


async def test_the_outcome_is_unknown_when_the_disk_fails() -> None:
    rig = await _locked(b"a")
    rig.disk.failure = OSError("broken")  # type: ignore[attr-defined]
    with pytest.raises(ExecutionUnknown, match="broken"):
        await _together(rig, _commit(b"a"))
    assert rig.closed


async def test_what_cannot_be_judged_is_not_executed() -> None:
    rig = await _locked(b"a")
    with pytest.raises(InvalidArgument, match="two mutations of one cell"):
        await _together(rig, _commit(b"a"), _commit(b"a"))
    with pytest.raises(InvalidArgument, match="none"):
        await _together(rig)
    with pytest.raises(NotExecuted, match="deadline"):
        await _together(rig, _commit(b"a"), seconds=0.0)
    writing = started(rig, prewrite(b"b", 10))
    await asyncio.sleep(0.1)
    begun = asyncio.get_running_loop().time()
    with pytest.raises(NotExecuted, match="deadline"):
        await _together(rig, _commit(b"a"), seconds=0.5)
    assert asyncio.get_running_loop().time() - begun == pytest.approx(0.5)
    await writing
    assert not await rig.cells(WRITE)
    await rig.tablet.set_schema_version(4)
    with pytest.raises(SchemaChanged):
        await _together(rig, _commit(b"a"))


async def test_a_cancelled_caller_does_not_tear_the_group() -> None:
    rig = await _locked(b"a", b"b")
    calling = asyncio.ensure_future(_together(rig, _commit(b"a"), _commit(b"b")))
    await asyncio.sleep(0.5)
    calling.cancel()
    await asyncio.sleep(2.0)
    assert len(await rig.cells(WRITE)) == 2
    assert not await rig.cells(LOCK)


@pytest.mark.parametrize("reader_first", [False, True])
async def test_a_cell_is_not_written_and_read_locked_in_one_group(reader_first: bool) -> None:
    """Each would be judged before the other is durable, and both would pass."""
    rig = Rig()
    await rig.open()
    steps_ = [prewrite(b"a", 10), read_lock(b"a", 12)]
    with pytest.raises(InvalidArgument, match="a cell is written and read-locked"):
        await _together(rig, *(reversed(steps_) if reader_first else steps_))
    assert not await rig.cells(LOCK)
    readers = [read_lock(b"a", 12), read_lock(b"a", 14), prewrite(b"b", 10)]
    assert await _together(rig, *readers) == [APPLIED] * 3
