"""Steps and reads in parallel lists are checked as strictly as those that come one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from percolator.errors import InvalidArgument
from percolator.formats.records import KIND_PUT, WRITE_HEADER, LockRecord
from percolator.protocol.steps import raise_lock, replace_lock
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    COLUMN,
    LOCK,
    REFUSED,
    TARGET,
    WRITE,
    Rig,
    lock_record,
    written,
)

HOUR = 3_600_000 << 18
NOW = 1_800_000_000_000 << 18  # the virtual clock's
START, COMMIT = NOW + 5, NOW + 6
RECORD = WRITE_HEADER.pack(START, KIND_PUT) + b"value"


def _prewrites(*rows: bytes, **changed: Any) -> pb.StepList:
    fields: dict[str, Any] = {
        "kinds": [pb.StepList.KIND_PREWRITE] * len(rows),
        "rows": rows,
        "columns": [COLUMN] * len(rows),
        "values": [lock_record(START)] * len(rows),
        "start_timestamps": [START] * len(rows),
        "commit_timestamps": [0] * len(rows),
        "min_commit_timestamps": [0] * len(rows),
    }
    return pb.StepList(**fields | changed)


def _commit(**changed: Any) -> pb.StepList:
    fields: dict[str, Any] = {
        "kinds": [pb.StepList.KIND_COMMIT_PRIMARY],
        "values": [RECORD],
        "commit_timestamps": [COMMIT],
        "min_commit_timestamps": [START + 1],
    }
    return _prewrites(b"a", **fields | changed)


def _write(commit: int, start: int = 0, **changed: Any) -> pb.StepList:
    return _commit(
        kinds=[pb.StepList.KIND_WRITE],
        values=[WRITE_HEADER.pack(commit - 1, KIND_PUT)],
        start_timestamps=[start],
        commit_timestamps=[commit],
        **changed,
    )


async def _apply(rig: Rig, steps: pb.StepList) -> pb.MutationBatchResult:
    batch = pb.MutationBatch(target=TARGET, steps=steps)
    return await rig.tablet.mutate(batch, deadline_seconds=1e9)


async def test_only_the_steps_that_were_not_applied_are_in_the_answer() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"b", START, COMMIT))
    answer = await _apply(rig, _prewrites(b"a", b"b", b"c"))
    assert answer.mutations == 3
    [refused] = answer.unapplied
    assert (refused.mutation, refused.result.outcome) == (1, REFUSED)
    assert refused.result.cell.row == b"b"


async def test_a_lock_and_a_commit_in_lists_are_read_like_others() -> None:
    rig = await Rig().open()
    for steps in (_prewrites(b"a"), _commit()):
        answer = await _apply(rig, steps)
        assert (answer.mutations, len(answer.unapplied)) == (1, 0)
    assert await rig.value(b"a", COMMIT) == b"value"


async def test_a_write_outside_of_transactions_is_refused_by_one_that_is_as_new() -> None:
    rig = await Rig().open()
    assert not (await _apply(rig, _write(COMMIT))).unapplied
    assert [one.mutation for one in (await _apply(rig, _write(COMMIT))).unapplied] == [0]
    assert not (await _apply(rig, _write(COMMIT + 1))).unapplied


BAD: list[tuple[str, pb.StepList]] = [
    ("steps", _prewrites(b"a", rows=[])),
    ("steps", _prewrites(b"a", min_commit_timestamps=[])),
    ("steps.kinds[0]", _prewrites(b"a", kinds=[0])),
    ("steps.kinds[0]", _prewrites(b"a", kinds=[5])),
    ("steps.rows[1]", _prewrites(b"a", b"r" * 5000)),
    ("steps.columns[0]", _prewrites(b"a", columns=[b"c" * 1100])),
    ("steps.values[0]", _prewrites(b"a", values=[b"x"])),
    ("steps.values[0]", _prewrites(b"a", values=[bytes(5 << 20)])),
    ("steps.values[0]", _prewrites(b"a", values=[lock_record(START + 1)])),
    ("steps.values[0]", _commit(values=[b"x"])),
    ("steps.values[0]", _commit(values=[WRITE_HEADER.pack(START - 1, KIND_PUT)])),
    ("steps.start_timestamps[0]", _prewrites(b"a", start_timestamps=[0])),
    ("steps.start_timestamps[0]", _write(COMMIT, START)),
    ("steps.commit_timestamps[0]", _prewrites(b"a", commit_timestamps=[COMMIT])),
    ("steps.commit_timestamps[0]", _commit(commit_timestamps=[0])),
    ("steps.commit_timestamps[0]", _commit(commit_timestamps=[START])),
    ("steps.commit_timestamps[0]", _commit(commit_timestamps=[NOW + 2 * HOUR])),
    ("steps.observed", _commit(observed=[pb.ObservedColumn(column=COLUMN, observers=[b""])])),
]


@pytest.mark.parametrize(("field", "steps"), BAD)
async def test_bad_steps_are_refused_by_the_name_of_their_list(
    field: str, steps: pb.StepList
) -> None:
    rig = await Rig().open()
    with pytest.raises(InvalidArgument) as refused:
        await _apply(rig, steps)
    assert refused.value.field == field
    assert await rig.cells(LOCK) == await rig.cells(WRITE) == []


async def test_a_long_row_can_be_committed_once_it_is_locked() -> None:
    """The limit may have been lowered since, and other cells may wait for the outcome."""
    rig = await Rig(row_bytes_max=5000).open()
    await _apply(rig, _prewrites(b"r" * 5000))
    rig = await Rig(disk=rig.disk).open()
    assert not (await _apply(rig, _commit(rows=[b"r" * 5000]))).unapplied
    with pytest.raises(InvalidArgument, match=r"steps.rows\[0\]: 65537 bytes"):
        await _apply(rig, _commit(rows=[b"r" * 65_537]))
    with pytest.raises(InvalidArgument, match=r"steps.rows\[0\]: 5000 bytes"):
        await _apply(rig, _write(COMMIT, rows=[b"r" * 5000]))


async def test_the_lock_of_a_long_row_can_be_replaced_and_raised() -> None:
    """Or a commit that takes long would be taken for dead once its tablet has a server that allows
    less, and readers could not push it."""
    row, seen = b"r" * 5000, lock_record(START)
    rig = await Rig(row_bytes_max=5000).open()
    await _apply(rig, _prewrites(row))
    rig = await Rig(disk=rig.disk).open()
    longer, higher = (
        replace(LockRecord.decode(seen), min_commit_timestamp=START + least, ttl_milliseconds=9_999)
        for least in (1, 20)
    )
    await rig.apply(replace_lock(row, COLUMN, LockRecord.decode(seen).prefix, longer.encode()))
    await rig.apply(raise_lock(row, COLUMN, START, START + 19, higher.encode()))
    assert [cell.value for cell in await rig.cells(LOCK)] == [higher.encode()]


async def test_a_group_has_no_steps() -> None:
    rig = await Rig().open()
    batch = pb.MutationBatch(target=TARGET, steps=_prewrites(b"a"))
    with pytest.raises(InvalidArgument, match="a group has mutations"):
        await rig.tablet.mutate_together(batch, deadline_seconds=1e9)
    assert await rig.cells(LOCK) == []


async def test_steps_are_numbered_after_the_mutations_of_their_batch() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"c", START, COMMIT))
    batch = pb.MutationBatch(
        target=TARGET,
        mutations=[written(b"a", START, COMMIT), written(b"b", START, COMMIT)],
        steps=_prewrites(b"d", b"c"),
    )
    answer = await rig.tablet.mutate(batch, deadline_seconds=1e9)
    assert (answer.mutations, [one.mutation for one in answer.unapplied]) == (4, [3])
    assert [cell.row for cell in await rig.cells(WRITE)] == [b"a", b"b", b"c"]
    assert [cell.row for cell in await rig.cells(LOCK)] == [b"d"]


async def test_a_batch_with_an_invalid_step_changes_nothing() -> None:
    rig = await Rig().open()
    batch = pb.MutationBatch(
        target=TARGET, mutations=[written(b"a", START, COMMIT)], steps=_prewrites(b"b", kinds=[9])
    )
    with pytest.raises(InvalidArgument, match=r"steps\.kinds\[0\]"):
        await rig.tablet.mutate(batch, deadline_seconds=1e9)
    assert await rig.cells(WRITE) == []


async def test_cells_in_lists_are_read_as_one_by_one() -> None:
    rig = await Rig().open()
    await rig.apply(written(b"a", START, COMMIT, b"of a"), written(b"c", START, COMMIT, b"of c"))
    await _apply(rig, _prewrites(b"d", values=[lock_record(START)]))
    rows, at = [b"a", b"b", b"c", b"d", b"a"], [COMMIT, COMMIT, COMMIT + 1, COMMIT, START]
    reads = [
        pb.RowRead(row=row, columns=[COLUMN], timestamp=timestamp)
        for row, timestamp in zip(rows, at, strict=True)
    ]
    cells = pb.CellReads(rows=rows, columns=[COLUMN] * 5, timestamps=at)
    alone = await rig.tablet.read(pb.ReadBatch(target=TARGET, reads=reads))
    listed = await rig.tablet.read(pb.ReadBatch(target=TARGET, cells=cells))
    assert list(alone.found.reads) == [0, 2]
    assert [lock.read for lock in alone.locks] == [3]
    assert listed.reads == 5
    assert listed == alone
    both = pb.ReadBatch(target=TARGET, reads=reads[:2], cells=cells)
    answer = await rig.tablet.read(both)
    assert (answer.reads, list(answer.found.reads)) == (7, [0, 2, 4])
    assert [lock.read for lock in answer.locks] == [5]


async def test_lists_of_cells_that_differ_in_number_are_refused() -> None:
    rig = await Rig().open()
    cells = pb.CellReads(rows=[b"a"], columns=[COLUMN], timestamps=[])
    with pytest.raises(InvalidArgument, match="differ in number"):
        await rig.tablet.read(pb.ReadBatch(target=TARGET, cells=cells))
