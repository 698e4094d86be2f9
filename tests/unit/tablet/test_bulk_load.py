"""Bulk load: no reader sees a part of it, nothing commits beneath it, and it is all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import InvalidArgument, NotReady, SchemaChanged, TabletMoved
from percolator.formats.records import RecordKind, WriteRecord
from percolator.tablet import bulk_load, collection
from percolator.tablet.cells import D, F, N, W, cell_prefix, change_key, component, inverted
from percolator.tablet.state import TabletIdentity, loaded_change
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange
from percolator.wire.status import from_detail
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import (
    APPLIED,
    COLUMN,
    DATA,
    LOCK,
    NOT_EXECUTED,
    NOTIFY,
    REFUSED,
    ROLLBACK,
    TARGET,
    WRITE,
    OneRoundRig,
    Rig,
    SlowDisk,
    collected,
    commit,
    counted_turns,
    delete,
    mutation,
    one_round,
    only,
    outcomes,
    prewrite,
    roll_back,
    under_way,
    written,
)

RAISE, CLEAR = pb.FenceRequest.ACTION_RAISE, pb.FenceRequest.ACTION_CLEAR
FINISH, LIFT = pb.FenceRequest.ACTION_FINISH, pb.FenceRequest.ACTION_LIFT
LOOK = pb.FenceRequest.ACTION_LOOK
START, COMMIT, LATER = 50, 51, 60


def fence(action: Any, run: int = START, **fields: Any) -> pb.FenceRequest:
    """A fence over the rows from b up to, but not including, m."""
    given = {"name": "load", "range": RowRange(start=b"b", end=b"m"), **fields}
    return pb.FenceRequest(target=TARGET, action=action, fence=pb.LoadFence(run=run, **given))


def load(rows: list[bytes], run: int = START, value: bytes = b"v", **fields: Any) -> pb.LoadRequest:
    given: dict[str, Any] = {
        "name": "load",
        "start_timestamp": run,
        "commit_timestamp": run + 1,
        "columns": [COLUMN] * len(rows),
        **fields,
    }
    return pb.LoadRequest(target=TARGET, rows=rows, values=[value] * len(rows), **given)


async def begin_load(rig: Rig, rows: list[bytes], run: int = START, **fields: Any) -> None:
    """Raises a fence, and loads rows behind it."""
    await rig.tablet.fence(fence(RAISE, run))
    await rig.tablet.load(load(rows, run, **fields))


async def clear(rig: Rig, run: int = START) -> None:
    while (await rig.tablet.fence(fence(CLEAR, run))).remains:
        pass


async def finish(rig: Rig, run: int = START) -> None:
    await rig.tablet.fence(fence(FINISH, run, commit_timestamp=run + 1))
    assert not (await rig.tablet.fence(fence(LIFT, run))).HasField("fence")


async def test_a_cancelled_caller_leaves_nothing_half_done(rig: Rig) -> None:
    (await under_way(rig.tablet.fence(fence(RAISE)))).cancel()
    # What comes next waits for the write, and finds the fence.
    assert (await rig.tablet.fence(fence(LOOK))).fence.run == START
    (await under_way(rig.tablet.load(load([b"b"])))).cancel()
    await finish(rig)
    assert await rig.value(b"b", COMMIT) == b"v"


async def test_loaded_cells_are_visible_at_their_commit_and_not_below(rig: Rig) -> None:
    assert not (await rig.tablet.fence(fence(RAISE))).HasField("obstacle")
    await rig.tablet.load(load([b"b", b"c"]))
    await rig.tablet.load(load([b"d"], value=b"x" * 2000))
    await finish(rig)
    assert (await rig.value(b"c", COMMIT), await rig.value(b"d", COMMIT)) == (b"v", b"x" * 2000)
    assert await rig.value(b"c", COMMIT - 1) is None
    [page] = await rig.scan(99)
    assert list(page.found.rows) == [b"b", b"c", b"d"]


@pytest.mark.parametrize(
    "in_the_way", [written(b"c", 5, 6), prewrite(b"c", 5), written(b"b", 5, 6)]
)
async def test_a_range_with_a_cell_or_a_lock_is_not_closed(
    rig: Rig, in_the_way: pb.Mutation
) -> None:
    await rig.apply(in_the_way)
    response = await rig.tablet.fence(fence(RAISE))
    assert (response.HasField("fence"), response.obstacle.row) == (False, in_the_way.row)
    await rig.apply(prewrite(b"d", 20))


async def test_cells_around_the_range_and_markers_in_it_are_not_in_the_way(rig: Rig) -> None:
    await rig.apply(written(b"a", 5, 6), written(b"m", 5, 6), roll_back(b"c", 5))
    assert not (await rig.tablet.fence(fence(RAISE))).HasField("obstacle")
    await finish(rig)
    assert len(await rig.cells(ROLLBACK)) == 1


async def test_inside_the_fence_nothing_is_read_or_judged_and_around_it_everything_is(
    rig: Rig,
) -> None:
    await rig.apply(written(b"a", 5, 6, b"1"), written(b"m", 5, 6, b"2"))
    await begin_load(rig, [b"c"])
    for row in (b"b", b"c", b"lzz"):
        for result in (await rig.read(row, 99), await rig.read_row(row, 99)):
            (refused,) = result.refused
            assert isinstance(from_detail(refused.error), NotReady)
            assert not result.found.values
        for change in (prewrite(row, 60), roll_back(row, 60), mutation(row)):
            assert await outcomes(rig.mutate(change)) == [NOT_EXECUTED]
    for fields in ({}, {"range": RowRange(start=b"l")}, {"reverse": True}):
        with pytest.raises(NotReady, match="bulk load 'load'"):
            await rig.scan(99, **fields)
    assert (await rig.value(b"a", 99), await rig.value(b"m", 99)) == (b"1", b"2")
    assert len(await rig.scan(99, range=RowRange(start=b"m"))) == 1
    await rig.apply(prewrite(b"a", 60), prewrite(b"m", 60))


async def test_a_transaction_that_began_before_the_load_cannot_overwrite_it(rig: Rig) -> None:
    await begin_load(rig, [b"c"])
    await finish(rig)
    (answer,) = await rig.mutate(prewrite(b"c", 40))
    assert (answer.outcome, answer.cell.timestamp) == (REFUSED, COMMIT)
    await rig.apply(prewrite(b"c", 60))


async def test_what_the_judge_remembers_of_a_cell_does_not_hide_the_load(rig: Rig) -> None:
    """The cell was written and collected before, and the judge still knows when."""
    await rig.apply(prewrite(b"c", 5), written(b"e", 5, 6))
    await rig.apply(commit(b"c", 5, 6))
    await rig.apply(
        mutation(b"c", delete(WRITE, 6)), mutation(b"e", delete(WRITE, 6)), mutation(b"e")
    )
    assert not (await rig.tablet.fence(fence(RAISE))).HasField("obstacle")
    await rig.tablet.load(load([b"c"]))
    await finish(rig)
    assert await outcomes(rig.mutate(prewrite(b"c", 40))) == [REFUSED]


async def test_a_fence_moves_with_the_tablet_and_so_does_what_the_judge_has_to_know(
    rig: Rig,
) -> None:
    await begin_load(rig, [b"c"])
    moved = await rig.reopened()
    assert len((await moved.read(b"c", 99)).refused) == 1
    await moved.tablet.load(load([b"d"]))
    await finish(moved)
    again = await moved.reopened()
    assert await again.value(b"d", 99) == b"v"
    assert await outcomes(again.mutate(prewrite(b"d", 40))) == [REFUSED]


async def test_both_halves_of_a_split_tablet_have_the_fence(rig: Rig, disk: SlowDisk) -> None:
    await begin_load(rig, [b"c", b"f"])
    await rig.tablet.close()
    lower = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"", end=b"e")
    half = await Rig(disk=disk, identity=lower).open()
    assert len((await half.read(b"c", 99)).refused) == 1
    with pytest.raises(InvalidArgument, match="not behind the fence"):
        await half.tablet.load(load([b"f"]))
    await finish(half)
    assert await half.value(b"c", 99) == b"v"
    await half.tablet.close()
    beyond = TabletIdentity(table_id=7, tablet_id=1, epoch=2, start=b"m", end=b"")
    await (await Rig(disk=disk, identity=beyond).open()).apply(prewrite(b"p", 60))


async def test_a_part_of_a_load_is_never_opened(rig: Rig) -> None:
    await begin_load(rig, [b"c", b"d"], value=b"x" * 2000, observed=_OBSERVED)
    response = await rig.tablet.fence(fence(LIFT))
    assert (response.HasField("fence"), response.obstacle.row) == (True, b"c")
    await clear(rig)
    assert not (await rig.tablet.fence(fence(LIFT))).HasField("fence")
    for space in (WRITE, DATA, NOTIFY, LOCK):
        assert await rig.cells(space) == []
    statistics = rig.tablet.statistics()
    assert (statistics.cells, statistics.bytes, statistics.notifications) == (0, 0, 0)
    await rig.apply(prewrite(b"c", 40))


_OBSERVED = [pb.ObservedColumn(column=COLUMN, observers=[b"f", b"g"])]


async def test_another_run_takes_over_and_the_former_one_is_locked_out(rig: Rig) -> None:
    await begin_load(rig, [b"c"])
    response = await rig.tablet.fence(fence(RAISE, LATER))
    assert (response.fence.run, response.obstacle.row) == (LATER, b"c")
    for attempt in (
        rig.tablet.load(load([b"d"], START)),
        rig.tablet.fence(fence(FINISH, START, commit_timestamp=COMMIT)),
        rig.tablet.fence(fence(CLEAR, START)),
        rig.tablet.fence(fence(LIFT, START)),
    ):
        with pytest.raises(InvalidArgument, match="another run has taken the load over"):
            await attempt
    await clear(rig, LATER)
    await rig.tablet.load(load([b"d"], LATER))
    await finish(rig, LATER)
    assert (await rig.value(b"c", 99), await rig.value(b"d", 99)) == (None, b"v")


async def test_a_complete_load_can_only_be_opened(rig: Rig) -> None:
    await begin_load(rig, [b"c"])
    await rig.tablet.fence(fence(FINISH, commit_timestamp=COMMIT))
    for attempt in (rig.tablet.load(load([b"d"])), rig.tablet.fence(fence(CLEAR))):
        with pytest.raises(InvalidArgument, match="is complete"):
            await attempt
    response = await rig.tablet.fence(fence(RAISE, LATER))
    assert (response.fence.run, response.fence.commit_timestamp) == (START, COMMIT)
    with pytest.raises(InvalidArgument, match="no fence of run"):
        await rig.tablet.fence(fence(LIFT, LATER))
    await rig.tablet.fence(fence(LIFT, START))
    assert await rig.value(b"c", 99) == b"v"


async def test_late_requests_neither_delete_rows_nor_close_them(rig: Rig) -> None:
    await rig.tablet.fence(fence(RAISE, START - 1))
    await begin_load(rig, [b"c"])
    for late in (fence(CLEAR, START - 1), fence(RAISE, START - 1), fence(LIFT, START - 1)):
        with pytest.raises(InvalidArgument, match="another run has taken the load over"):
            await rig.tablet.fence(late)
    assert len(await rig.cells(WRITE)) == 1
    await clear(rig)
    await rig.tablet.fence(fence(LIFT))
    moved = await rig.reopened()
    assert await moved.tablet.fence(fence(RAISE)) == pb.FenceResponse()
    assert (await moved.tablet.fence(fence(RAISE, START + 1))).HasField("fence")


async def test_a_run_older_than_a_load_of_other_rows_takes_over_but_does_not_begin(
    rig: Rig,
) -> None:
    await begin_load(rig, [b"c"])
    other = {"name": "other", "range": RowRange(start=b"m", end=b"n")}
    await rig.tablet.fence(fence(RAISE, LATER, **other))
    await rig.tablet.fence(fence(LIFT, LATER, **other))
    # The run that undoes a failed load.
    taken_over = await rig.tablet.fence(fence(RAISE, COMMIT))
    assert (taken_over.fence.run, taken_over.obstacle.row) == (COMMIT, b"c")
    await clear(rig, COMMIT)
    await rig.tablet.fence(fence(LIFT, COMMIT))
    assert await rig.tablet.fence(fence(RAISE, LATER - 1)) == pb.FenceResponse()
    assert (await rig.tablet.fence(fence(RAISE, LATER + 1))).HasField("fence")


async def test_loading_again_and_repeating_every_step_changes_nothing(rig: Rig) -> None:
    for _ in range(2):
        await begin_load(rig, [b"c", b"d"])
    await rig.tablet.fence(fence(FINISH, commit_timestamp=COMMIT))
    await finish(rig)
    await rig.tablet.fence(fence(LIFT))
    assert [cell.row for cell in await rig.cells(WRITE)] == [b"c", b"d"]


async def test_notifications_of_a_load_are_found_once_it_is_open(rig: Rig) -> None:
    await begin_load(rig, [b"c"], observed=_OBSERVED)
    scan = pb.NotificationScan(target=TARGET)
    assert not (await rig.tablet.scan_notifications(scan)).notifications
    await finish(rig)
    found = (await rig.tablet.scan_notifications(scan)).notifications
    assert [(one.row, one.observer, list(one.timestamps)) for one in found] == [
        (b"c", b"f", [COMMIT]),
        (b"c", b"g", [COMMIT]),
    ]


async def test_a_load_with_notifications_is_judged_under_the_schema_that_it_was_built_for(
    rig: Rig,
) -> None:
    await rig.tablet.fence(fence(RAISE))
    await rig.tablet.set_schema_version(4)
    with pytest.raises(SchemaChanged):
        await rig.tablet.load(load([b"c"]))
    anyhow = load([b"c"])
    anyhow.target.schema_version = 0
    await rig.tablet.load(anyhow)


async def test_a_load_of_many_rows_is_cleared_in_several_steps() -> None:
    rig = await Rig(disk=DurableMemory()).open()
    await rig.tablet.fence(fence(RAISE))
    for first in range(0, 10_000, 1_000):
        rows = [b"c%07d" % number for number in range(first, first + 1_000)]
        await rig.tablet.load(load(rows, value=b"x" * 1_100))
    assert rig.tablet.statistics().cells == 20_000
    assert not (await rig.tablet.fence(fence(CLEAR))).remains
    assert rig.tablet.statistics().cells == 0
    assert await rig.cells(WRITE) == await rig.cells(DATA) == []


TTL = 100


def ms(milliseconds: int) -> int:
    return milliseconds << SEQUENCE_BITS


@pytest.mark.parametrize("during_the_pass", [False, True])
async def test_what_took_longer_to_load_than_history_is_kept_is_collected_all_the_same(
    during_the_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit is then below what was collected last, and nothing may be committed above it."""
    disk = DurableMemory()
    rig = await Rig(disk=disk, change_feed=True, ttls=((COLUMN, TTL),)).open()
    run = ms(10)
    await rig.tablet.fence(fence(RAISE, run))
    correct = collection._changes

    async def rest_of_the_load() -> None:
        await rig.tablet.load(load([b"c"], run))
        await finish(rig, run)

    async def changes_are_collected(*arguments: Any) -> None:
        await correct(*arguments)
        if during_the_pass:
            await rest_of_the_load()

    with monkeypatch.context() as patch:
        patch.setattr(collection, "_changes", changes_are_collected)
        await collected(rig, ms(50))
    if not during_the_pass:
        await rest_of_the_load()
    assert await collected(rig, ms(60)) == 0
    assert not [key for key in disk.durable if key.startswith(F)]
    assert rig.tablet.collected.more_at == ms(10 + TTL)
    assert await collected(rig, ms(200)) == 1
    assert await rig.cells(WRITE) == []


class _LargeValues(MemoryStorage):
    """Counts the large values that whoever iterates has and keeps."""

    kept = most = 0

    def iterate(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        outer = self

        class Value(bytes):
            def __del__(self) -> None:
                outer.kept -= 1

        for key, value in super().iterate(start, stop):
            self.kept += 1
            self.most = max(self.most, self.kept)
            yield key, Value(value)


async def test_clearing_keeps_no_large_values_in_memory_and_lets_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    megabyte = 1 << 20
    monkeypatch.setattr(bulk_load, "CLEARED_BYTES_PER_WRITE", 2 * megabyte)
    storage = _LargeValues()
    rig = await Rig(storage=storage).open()
    await rig.tablet.fence(fence(RAISE))
    for number in range(40):
        await rig.tablet.load(load([b"c%d" % number], value=b"x" * megabyte))
    storage.most = storage.kept = 0
    async with counted_turns() as turns:
        assert (await rig.tablet.fence(fence(CLEAR))).remains
        assert not (await rig.tablet.fence(fence(CLEAR))).remains
    assert storage.most <= 3
    assert turns.count >= 20
    assert rig.tablet.statistics().cells == 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (fence(RAISE, name=""), "fence.name"),
        (fence(RAISE, run=0), "fence.run"),
        (fence(RAISE, range=RowRange(start=b"z", end=b"a")), "fence.range"),
        (fence(RAISE, name="other", range=RowRange(start=b"l")), "fence.range"),
        (fence(RAISE, range=RowRange(start=b"b", end=b"n")), "fence.range"),
        (fence(FINISH), "fence.commit_timestamp"),
        (fence(FINISH, commit_timestamp=2**63), "fence.commit_timestamp"),
        (fence(0), "action"),
        (load([b"n"]), "rows[0]"),
        (load([b"c", b"a"]), "rows[1]"),
        (load([b"c" * 5000]), "rows[0]"),
        (load([b"c"], name="unknown"), "run"),
        (load([b"c"], columns=[]), "rows"),
        (load([b"c"], commit_timestamp=50), "commit_timestamp"),
        (load([b"c"], commit_timestamp=2**63), "commit_timestamp"),
    ],
)
async def test_bad_input_is_refused_by_name_and_nothing_is_stored(
    rig: Rig, request_: Any, field: str
) -> None:
    await rig.tablet.fence(fence(RAISE))
    call: Any = rig.tablet.fence if isinstance(request_, pb.FenceRequest) else rig.tablet.load
    with refused(field):
        await call(request_)
    assert await rig.cells(WRITE) == []


async def test_mutations_that_wait_when_the_fence_is_raised_are_obstacles_or_refused(
    rig: Rig,
) -> None:
    """All that the group commit judged before is stored when the range is looked at."""
    early = asyncio.create_task(rig.mutate(prewrite(b"c", 40)))
    await asyncio.sleep(0.5)  # its write is in progress
    response = await rig.tablet.fence(fence(RAISE))
    assert [answer.outcome for answer in await early] == [APPLIED]
    assert response.obstacle.space == LOCK


async def test_looking_changes_nothing_and_only_the_run_that_holds_the_fence_gets_an_answer(
    rig: Rig,
) -> None:
    with pytest.raises(InvalidArgument, match="no fence of run 50"):
        await rig.tablet.fence(fence(LOOK))
    await begin_load(rig, [b"b"])
    seen = await rig.tablet.fence(fence(LOOK))
    assert (seen.fence.run, seen.fence.commit_timestamp) == (START, 0)
    with pytest.raises(InvalidArgument, match="no fence of run 60"):
        await rig.tablet.fence(fence(LOOK, LATER))
    await rig.tablet.fence(fence(FINISH, commit_timestamp=COMMIT))
    assert (await rig.tablet.fence(fence(LOOK))).fence.commit_timestamp == COMMIT
    await rig.tablet.fence(fence(LIFT))
    with pytest.raises(InvalidArgument, match="no fence of run 50"):
        await rig.tablet.fence(fence(LOOK))


# ---------------------------------------------------------------- beside transactions


@pytest.mark.parametrize("loaders", [1, 2, 4])
async def test_commits_of_other_rows_go_on_beside_any_number_of_loaders(
    one_round_rig: OneRoundRig, loaders: int
) -> None:
    """Each write takes a second, and at most one load comes before a batch."""
    one_round_rig.oracle.seconds = 0.01
    await one_round_rig.tablet.fence(fence(RAISE))
    loop = asyncio.get_running_loop()
    ends = loop.time() + 100.0

    async def load_all_the_time(number: int) -> int:
        count = 0
        while loop.time() < ends:
            await one_round_rig.tablet.load(load([b"c%d-%06d" % (number, count)]))
            count += 1
            await asyncio.sleep(0.2)
        return count

    loading = [asyncio.ensure_future(load_all_the_time(number)) for number in range(loaders)]
    await asyncio.sleep(3.3)
    commits = 0
    while loop.time() < ends:
        begun = loop.time()
        await one_round_rig.apply(written(b"z-%d" % commits, 60, 61))
        assert loop.time() - begun < 3.5
        begun = loop.time()
        result = await one_round_rig.commit(one_round(70, {b"y-%d" % commits: b"1"}))
        assert loop.time() - begun < 3.5
        assert not result.uncommitted
        commits += 1
    counts = await asyncio.gather(*loading)
    # Nor do the commits stop the loads, or one loader another.
    assert sum(counts) > 30
    assert min(counts) > 30 // loaders - 2


async def test_a_stream_of_commits_does_not_keep_a_load_out(one_round_rig: OneRoundRig) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + 60.0
    running: list[asyncio.Task[pb.TransactionBatchResult]] = []

    async def commit_all_the_time() -> None:
        while loop.time() < ends:
            running.append(one_round_rig.committing(one_round(10, {b"z%d" % len(running): b"1"})))
            await asyncio.sleep(0.1)

    committing = await under_way(commit_all_the_time(), seconds=5)
    for action in (RAISE, LOOK, FINISH, LIFT):
        begun = loop.time()
        await one_round_rig.tablet.fence(fence(action, commit_timestamp=COMMIT))
        if action == LOOK:
            await one_round_rig.tablet.load(load([b"c"]))
        assert loop.time() - begun < 10.0
    await committing
    assert not any(result.uncommitted for result in await asyncio.gather(*running))
    assert await one_round_rig.value(b"c", 99) == b"v"


@pytest.mark.parametrize("row", [b"c", b"z"])
async def test_a_range_is_not_closed_while_a_transaction_holds_cells(
    one_round_rig: OneRoundRig, row: bytes
) -> None:
    """Judged before the fence, it would be written after it: behind the fence, if it is there."""
    committing = await under_way(one_round_rig.commit(one_round(10, {row: b"1"})), seconds=0.1)
    closing = asyncio.ensure_future(one_round_rig.tablet.fence(fence(RAISE, run=150)))
    await asyncio.sleep(0.1)
    behind = one_round_rig.committing(one_round(20, {b"d": b"2"}))
    assert list((await committing).commit_timestamps) == [100]
    assert (await closing).HasField("obstacle") == (row == b"c")
    if row == b"c":
        assert list((await behind).commit_timestamps) == [200]
    else:
        # It came while the fence was on its way, and was judged behind it.
        assert isinstance(from_detail(only(await behind).error), NotReady)


async def test_a_transaction_on_other_rows_is_held_and_written_while_rows_are_loaded(
    one_round_rig: OneRoundRig,
) -> None:
    one_round_rig.oracle.gate = asyncio.Event()
    await one_round_rig.tablet.fence(fence(RAISE))
    committing = await under_way(one_round_rig.commit(one_round(10, {b"a": b"1"})), seconds=0.1)
    await one_round_rig.tablet.load(load([b"c"]))
    await finish(one_round_rig)
    one_round_rig.oracle.gate.set()
    assert list((await committing).commit_timestamps) == [100]
    assert [await one_round_rig.value(row, 100) for row in (b"a", b"c")] == [b"1", b"v"]
    # What began before either commit must not overwrite it.
    for start, row in ((40, b"c"), (60, b"a")):
        refused = only(await one_round_rig.commit(one_round(start, {row: b"2"})))
        assert (refused.outcome, refused.failed_condition) == (REFUSED, 3)


async def test_batches_come_between_the_writes_that_clear_a_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_load, "CLEARED_PER_WRITE", 1)
    rig = await OneRoundRig().open()
    await begin_load(rig, [b"c%02d" % number for number in range(12)])
    loop = asyncio.get_running_loop()
    begun = loop.time()
    clearing = asyncio.ensure_future(rig.tablet.fence(fence(CLEAR)))
    again = await under_way(rig.tablet.fence(fence(CLEAR)), seconds=0.1)
    await rig.apply(written(b"z", 60, 61))
    assert list((await rig.commit(one_round(70, {b"y": b"1"}))).commit_timestamps) == [100]
    assert loop.time() - begun < 8.0
    assert not clearing.done()
    assert not (await clearing).remains
    assert not (await again).remains
    # What two requests met was counted once.
    assert rig.tablet.statistics().cells == 2


async def test_a_run_that_takes_over_between_two_writes_that_clear_a_range_loses_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_load, "CLEARED_PER_WRITE", 1)
    await begin_load(rig, [b"c%02d" % number for number in range(4)])
    clearing = await under_way(rig.tablet.fence(fence(CLEAR)), seconds=0.1)
    taken_over = await rig.tablet.fence(fence(RAISE, LATER))
    with pytest.raises(InvalidArgument, match="another run has taken the load over"):
        await clearing
    assert taken_over.obstacle.row.startswith(b"c")
    await rig.tablet.load(load([b"c03"], LATER))
    assert {cell.timestamp for cell in await rig.cells(WRITE)} == {COMMIT, LATER + 1}


async def test_a_tablet_is_closed_between_two_writes_that_clear_a_range(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_load, "CLEARED_PER_WRITE", 1)
    await begin_load(rig, [b"c%02d" % number for number in range(12)])
    clearing = await under_way(rig.tablet.fence(fence(CLEAR)), seconds=0.1)
    begun = asyncio.get_running_loop().time()
    await rig.tablet.close()
    assert asyncio.get_running_loop().time() - begun < 4.0
    with pytest.raises(TabletMoved):
        await clearing


# ---------------------------------------------------------------- in many writes


def _many(count: int) -> list[bytes]:
    return [b"c%05d" % number for number in range(count)]


async def _closed_beside_batches() -> OneRoundRig:
    """A tablet with a closed range that has just written a batch of other rows."""
    rig = await OneRoundRig().open()
    await rig.tablet.fence(fence(RAISE))
    await rig.apply(written(b"z", 60, 61))
    return rig


async def test_a_load_that_has_the_tablet_to_itself_is_one_write_per_request(
    one_round_rig: OneRoundRig,
) -> None:
    await one_round_rig.tablet.fence(fence(RAISE))
    before = one_round_rig.slow_disk.writes
    await one_round_rig.tablet.load(load(_many(3_000)))
    assert one_round_rig.slow_disk.writes == before + 1


@pytest.mark.parametrize(
    ("count", "size", "writes"), [(3_000, 1, 3), (1_024, 1, 1), (10, 100_000, 5), (0, 0, 1)]
)
async def test_beside_batches_a_load_is_many_short_writes(
    count: int, size: int, writes: int
) -> None:
    rig = await _closed_beside_batches()
    before = rig.slow_disk.writes
    loading = await under_way(rig.tablet.load(load(_many(count), value=b"x" * size)))
    # So a batch comes between, and what follows knows that there are batches.
    batches = 0
    while not loading.done():
        await rig.apply(written(b"y%d" % batches, 60, 61))
        batches += 1
    await loading
    assert rig.slow_disk.writes - before - batches == writes
    assert batches >= writes - 1
    assert rig.tablet.statistics().cells == 1 + batches + count * (2 if size > 1_024 else 1)
    await finish(rig)
    assert len(await rig.cells(WRITE, range=RowRange(start=b"c", end=b"d"))) == count


async def test_a_bad_cell_at_the_end_of_a_request_leaves_nothing_of_it() -> None:
    rig = await _closed_beside_batches()
    with pytest.raises(InvalidArgument, match=r"rows\[2999\]: not behind the fence"):
        await rig.tablet.load(load([*_many(2_999), b"z"]))
    assert not await rig.cells(WRITE, range=RowRange(start=b"c", end=b"d"))


async def test_a_run_that_takes_over_between_two_writes_of_a_load_keeps_the_rest_out() -> None:
    rig = await _closed_beside_batches()
    loading = await under_way(rig.tablet.load(load(_many(5_000))))
    assert (await rig.tablet.fence(fence(RAISE, LATER))).HasField("obstacle")
    with pytest.raises(InvalidArgument, match="another run has taken the load over"):
        await loading
    await clear(rig, LATER)
    assert rig.tablet.statistics().cells == 1


async def test_a_schema_that_changes_between_two_writes_of_a_load_refuses_the_rest() -> None:
    """Otherwise an observer that was registered with it would miss some of the cells."""
    rig = await _closed_beside_batches()
    loading = await under_way(rig.tablet.load(load(_many(5_000))))
    await rig.tablet.set_schema_version(4)
    with pytest.raises(SchemaChanged):
        await loading


async def test_a_tablet_that_is_closed_between_two_writes_of_a_load_ends_it() -> None:
    rig = await _closed_beside_batches()
    loading = await under_way(rig.tablet.load(load(_many(9_000))))
    begun = asyncio.get_running_loop().time()
    await rig.tablet.close()
    assert asyncio.get_running_loop().time() - begun < 4.0
    with pytest.raises(TabletMoved):
        await loading


# The cells of a bulk load are stored as each of them would be if it came alone.

CELLS = st.dictionaries(
    st.tuples(
        st.sampled_from([b"b", b"b\0", b"b\0\x01", b"c", b"l\xff"]),
        st.sampled_from([b"a", b"a\0", b"\0hidden", b"\xff"]),
    ),
    st.sampled_from([b"", b"v", b"\0\x01", b"i" * 1024, b"d" * 1025]),
    min_size=1,
)


def expected(row: bytes, column: bytes, value: bytes, observed: bytes) -> dict[bytes, bytes]:
    cell, commit = cell_prefix(row, column), inverted(COMMIT)
    is_inline = len(value) <= 1024
    kind = RecordKind.PUT if is_inline else RecordKind.PUT_IN_DATA
    record = WriteRecord(START, kind, value if is_inline else b"")
    stored = {W + cell + commit: record.encode()}
    if not is_inline:
        stored[D + cell + inverted(START)] = value
    if not column.startswith(b"\0"):
        stored[change_key(cell, COMMIT)] = loaded_change(START)
    if column == observed:
        stored[N + cell + component(b"observer") + commit] = b""
    return stored


@settings(deadline=None)
@given(CELLS, st.integers(1, 5), st.sampled_from([b"a", b"\xff"]))
def test_every_cell_is_stored_and_counted_once(
    cells: dict[tuple[bytes, bytes], bytes], slice_rows: int, observed: bytes
) -> None:
    async def run() -> None:
        rig = await Rig(disk=DurableMemory(), slice_rows=slice_rows, change_feed=True).open()
        await rig.tablet.fence(fence(RAISE))
        storage = rig.tablet._state.storage
        before = dict(storage.iterate(b"", b"\xff"))
        request = pb.LoadRequest(
            target=TARGET,
            name="load",
            start_timestamp=START,
            commit_timestamp=COMMIT,
            rows=[row for row, _ in cells],
            columns=[column for _, column in cells],
            values=cells.values(),
            observed=[pb.ObservedColumn(column=observed, observers=[b"observer"])],
        )
        await rig.tablet.load(request)
        stored = dict(storage.iterate(b"", b"\xff"))
        added = {key: value for key, value in stored.items() if key not in before}
        wanted: dict[bytes, bytes] = {}
        for (row, column), value in cells.items():
            wanted |= expected(row, column, value, observed)
        assert added == wanted
        counted = {key: value for key, value in wanted.items() if key[:1] in (W, D)}
        statistics = rig.tablet.statistics()
        assert statistics.cells == len(counted)
        assert statistics.bytes == sum(len(key) + len(value) for key, value in counted.items())

    asyncio.run(run())
