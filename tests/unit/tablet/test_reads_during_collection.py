"""A read below a safe point that is raised meanwhile is told so, whatever is deleted under it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from percolator.errors import InvariantViolation, SnapshotTooOld
from percolator.formats.records import RecordKind
from percolator.testing.memory_storage import DurableMemory
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import from_detail
from tests.unit.tablet.collecting import collected, in_data, record
from tests.unit.tablet.tablets import COLUMN, DATA, TARGET, Rig, delete, mutation

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
    reading = asyncio.ensure_future(rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads)))
    await _collected_meanwhile(rig, reading)
    await _only_the_second_is_refused(reading)


async def test_of_rows_only_those_that_are_too_old_are_refused() -> None:
    rig = await Rig(disk=DurableMemory(), slice_entries=1).open()
    for start in (10, 20):
        steps = [in_data(b"r", start, start + 1, b"long") for _ in ROWS]
        for step, row in zip(steps, ROWS, strict=True):
            step.column = row
        await rig.apply(*steps)
    asked = [(b"none", BELOW), (b"r", AT), (b"r", BELOW)]
    reads = [pb.RowRead(row=row, all_columns=True, timestamp=at) for row, at in asked]
    reading = asyncio.ensure_future(rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads)))
    await _collected_meanwhile(rig, reading)
    await _only_the_second_is_refused(reading, len(ROWS))


async def _only_the_second_is_refused(
    reading: asyncio.Future[pb.ReadBatchResult], found: int = 1
) -> None:
    result = await reading
    (refused,) = result.refused
    assert refused.read == 1
    assert isinstance(from_detail(refused.error), SnapshotTooOld)
    assert list(result.found.reads) == [2] * found


async def test_a_value_that_is_missing_without_that_is_damage() -> None:
    rig = await _stored_apart()
    await rig.apply(mutation(ROWS[0], delete(DATA, 10)))
    with pytest.raises(InvariantViolation, match="value of a write record"):
        await rig.scan(AT)
    with pytest.raises(InvariantViolation, match="value of a write record"):
        await rig.value(ROWS[0], AT)
