"""Transactions that commit in one round, and are not executed, or of which that is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from percolator.errors import InvalidArgument, Overloaded, SchemaChanged, TabletMoved, Unavailable
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import (
    APPLIED,
    IDENTITY,
    NOT_EXECUTED,
    REFUSED,
    ROLLBACK,
    UNKNOWN,
    WRITE,
    Rig,
    roll_back,
    started,
)
from tests.unit.tablet.whole_transactions import (
    DELETE,
    OneRoundRig,
    only,
    together,
    whole,
)

# ---------------------------------------------------------------- not executed


async def test_without_a_timestamp_it_is_not_executed_and_lets_go() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.oracle.failure = Unavailable("cut off")
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    reading = asyncio.ensure_future(rig.value(b"a", 150))
    marking = started(rig, roll_back(b"a", 10))
    result = only(await committing)
    assert result.outcome == NOT_EXECUTED
    assert "cut off" in result.error.message
    assert await reading is None
    assert [result.outcome for result in await marking] == [APPLIED]


async def test_a_start_from_the_future_stops_only_its_own_transaction() -> None:
    rig = OneRoundRig()
    await rig.open()
    result = await rig.commit(whole(100, {b"a": b"1"}), whole(50, {b"b": b"2"}))
    assert list(result.commit_timestamps) == [0, 101]
    assert result.uncommitted[0].result.outcome == NOT_EXECUTED
    assert not await rig.value(b"a", 150)


async def test_a_server_without_an_oracle_does_not_execute_it() -> None:
    rig = await Rig().open()
    result = await rig.tablet.commit(together([whole(10, {b"a": b"1"})]), deadline_seconds=1e9)
    assert only(result).outcome == NOT_EXECUTED


async def test_an_oracle_that_takes_no_more_requests_leaves_no_cell_held() -> None:
    def full(count: int) -> Awaitable[int]:
        raise Overloaded("too many wait", retry_after_seconds=1.0)

    rig = await Rig(timestamps=full).open()
    for start in (10, 11):
        request = together([whole(start, {b"a": b"1"})])
        result = only(await rig.tablet.commit(request, deadline_seconds=1e9))
        assert result.outcome == NOT_EXECUTED
        assert "too many wait" in result.error.message
    assert await rig.value(b"a", 150) is None


async def test_a_batch_that_fails_leaves_it_unknown_and_what_waits_not_executed() -> None:
    rig = OneRoundRig()
    await rig.open()
    rig.slow_disk.failure = OSError("on fire")
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(1.5)
    behind = rig.committing(whole(11, {b"b": b"1"}))
    waiting = rig.committing(whole(12, {b"a": b"2"}))
    assert only(await committing).outcome == UNKNOWN
    assert only(await behind).outcome == NOT_EXECUTED
    assert only(await waiting).outcome == NOT_EXECUTED


async def test_a_lost_tablet_leaves_it_unknown() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    rig.owner = False
    assert only(await committing).outcome == UNKNOWN
    assert [type(error) for error in rig.closed] == [TabletMoved]


async def test_below_the_safe_point_it_is_not_executed() -> None:
    rig = OneRoundRig()
    await rig.open()
    await rig.tablet.raise_safe_points(rig.tablet.safe_points._replace(transactions=11))
    result = only(await rig.commit(whole(10, {b"a": b"1"})))
    assert result.outcome == NOT_EXECUTED
    assert result.error.HasField("snapshot_too_old")


async def test_a_commit_is_found_by_a_later_copy_of_its_message_even_below_the_safe_point() -> None:
    rig = OneRoundRig()
    await rig.open()
    message = whole(10, {b"a": b"1", b"b": b"2"})
    assert list((await rig.commit(message)).commit_timestamps) == [100]
    await rig.tablet.raise_safe_points(rig.tablet.safe_points._replace(transactions=101))
    result = only(await rig.commit(message))
    assert (result.outcome, result.failed_condition, result.cell.timestamp) == (REFUSED, 0, 100)
    other = only(await rig.commit(whole(11, {b"a": b"1"})))
    assert other.error.HasField("snapshot_too_old"), "a conflict proves nothing down there"


async def test_a_deadline_that_passes_while_it_waits_for_its_cell() -> None:
    rig = OneRoundRig()
    await rig.open()
    first = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    second = rig.committing(whole(11, {b"a": b"1"}), within_seconds=0.5)
    await first
    result = only(await second)
    assert result.outcome == NOT_EXECUTED
    assert "deadline" in result.error.message


async def test_a_full_queue_refuses_the_request() -> None:
    rig = OneRoundRig(queue_bytes_max=2_000)
    await rig.open()
    first = rig.committing(whole(10, {b"a": b"x" * 1_800}))
    await asyncio.sleep(0.5)
    with pytest.raises(Exception, match="bytes of mutations wait"):
        await rig.commit(whole(11, {b"b": b"x" * 1_800}))
    await first
    await rig.commit(whole(101, {b"b": b"x" * 1_800}))


# ---------------------------------------------------------------- what changes between batches


async def test_a_new_schema_is_acknowledged_only_after_what_was_judged_under_the_old_one() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    changing = asyncio.ensure_future(rig.tablet.set_schema_version(4))
    await asyncio.sleep(0.1)
    waiting = rig.committing(whole(11, {b"b": b"1"}))
    with pytest.raises(SchemaChanged, match="at version 3"):
        await rig.commit(whole(12, {b"c": b"1"}), schema_version=4)
    assert not changing.done()
    await changing
    assert committing.done()
    later = rig.committing(whole(12, {b"c": b"1"}), schema_version=4)
    assert list((await committing).commit_timestamps) == [100]
    result = only(await waiting)
    assert result.outcome == NOT_EXECUTED
    assert result.error.schema_changed.schema_version == 4
    assert list((await later).commit_timestamps) == [200]


async def test_a_fence_waits_for_the_cells_and_then_finds_them() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    target = pb.TabletTarget(tablet_id=1, epoch=2)
    request = pb.FenceRequest(
        target=target,
        action=pb.FenceRequest.ACTION_RAISE,
        fence=pb.LoadFence(name="load", run=50),
    )
    response = await rig.tablet.fence(request)
    assert committing.done()
    assert response.obstacle.row == b"a"


async def test_behind_a_fence_it_is_not_executed() -> None:
    rig = OneRoundRig()
    await rig.open()
    request = pb.FenceRequest(
        target=pb.TabletTarget(tablet_id=1, epoch=2),
        action=pb.FenceRequest.ACTION_RAISE,
        fence=pb.LoadFence(name="load", run=50),
    )
    raising = asyncio.ensure_future(rig.tablet.fence(request))
    await asyncio.sleep(0.5)  # the fence is on its way to the disk
    result = only(await rig.commit(whole(60, {b"a": b"1"})))
    await raising
    assert result.outcome == NOT_EXECUTED
    assert result.error.HasField("not_ready")


async def test_closing_lets_what_is_held_land_and_refuses_the_rest() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    waiting = rig.committing(whole(11, {b"a": b"2"}))
    closing = asyncio.ensure_future(rig.tablet.close())
    assert list((await committing).commit_timestamps) == [100]
    await closing
    result = only(await waiting)
    assert result.outcome == NOT_EXECUTED
    reopened = OneRoundRig(disk=rig.disk)
    await reopened.open()
    assert await reopened.value(b"a", 150) == b"1"


async def test_a_caller_that_leaves_does_not_stop_what_is_held() -> None:
    rig = OneRoundRig()
    await rig.open()
    committing = rig.committing(whole(10, {b"a": b"1"}))
    await asyncio.sleep(0.5)
    waiting = rig.committing(whole(11, {b"a": b"2"}))
    await asyncio.sleep(0.1)
    committing.cancel()
    waiting.cancel()
    assert await rig.value(b"a", 150) == b"1"
    assert not await rig.cells(ROLLBACK)
    await rig.commit(whole(120, {b"a": b"3"}))
    assert [cell.timestamp for cell in await rig.cells(WRITE)] == [200, 100]


# ---------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("start_timestamps", lambda b: b.ClearField("start_timestamps")),
        ("start_timestamps[0]", lambda b: b.start_timestamps.__setitem__(0, 0)),
        ("start_timestamps[0]", lambda b: b.start_timestamps.__setitem__(0, 2**63)),
        ("cells", lambda b: b.cells.append(1)),
        ("cells[0]", lambda b: b.cells.__setitem__(0, 0)),
        ("cells[0]", lambda b: b.cells.__setitem__(0, 3)),
        ("cells", lambda b: b.cells.__setitem__(0, 1)),
        ("cells[0]", lambda b: b.rows.__setitem__(1, b"a")),
        ("rows", lambda b: b.rows.append(b"x")),
        ("rows[0]", lambda b: b.rows.__setitem__(0, b"x" * 5_000)),
        ("columns[0]", lambda b: b.columns.__setitem__(0, b"x" * 5_000)),
        ("kinds[0]", lambda b: b.kinds.__setitem__(0, 9)),
        ("values[0]", lambda b: b.kinds.__setitem__(0, DELETE)),
        ("values[0]", lambda b: b.values.__setitem__(0, b"x" * (5 << 20))),
        ("observed", lambda b: b.observed.add(column=b"c", observers=[b""])),
        ("observed", lambda b: b.observed.add(column=b"c", observers=[b"f", b"f"])),
        ("notifications[0]", lambda b: b.notifications.add(transaction=1)),
        ("followed[0]", lambda b: b.followed.append(1)),
    ],
)
async def test_a_malformed_request_is_refused_and_changes_nothing(
    field: str, spoil: Callable[[pb.TransactionBatch], None]
) -> None:
    rig = OneRoundRig()
    await rig.open()
    request = together([whole(10, {b"a": b"1", b"b": b"2"})])
    spoil(request)
    with pytest.raises(InvalidArgument) as caught:
        await rig.tablet.commit(request, deadline_seconds=1e9)
    assert caught.value.field == field
    assert not await rig.cells(WRITE)


async def test_a_row_of_another_tablet_is_refused() -> None:
    rig = OneRoundRig(identity=replace(IDENTITY, start=b"m"))
    await rig.open()
    with pytest.raises(InvalidArgument, match="not in this tablet"):
        await rig.commit(whole(10, {b"a": b"1"}))
