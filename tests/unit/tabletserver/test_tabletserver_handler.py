"""Requests: a separate result for each batch, limits, and what is refused before it has effects."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import InvalidArgument, SchemaChanged, TabletMoved
from percolator.errors import StoreUnusable as UnusableStore
from percolator.formats.records import KIND_PUT
from percolator.protocol import steps
from percolator.services.chassis.rpc import Exposed
from percolator.services.tabletserver.settings import RequestLimits
from percolator.tablet.state import TabletLimits
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import RETRY_SAFETY_SAFE, StoreUnusable
from tests.unit.tablet.tablets import results_of
from tests.unit.tabletserver.memory_store import (
    COLUMN,
    COMMIT,
    START,
    Machine,
    disk_full,
    outcomes,
    put,
    target,
)


def wide(number: int, *, cells: int, value: bytes = b"v") -> pb.MutationBatch:
    """Writes many cells of one row, which has the name of its tablet."""
    batch = put(number, *[b"%d" % number] * cells, value=value)
    for column, mutation in enumerate(batch.mutations):
        mutation.column = b"%d" % column
    return batch


def whole_row(number: int) -> pb.RowRead:
    return pb.RowRead(row=b"%d" % number, all_columns=True, timestamp=COMMIT)


async def test_every_batch_has_its_own_answer() -> None:
    machine = Machine()
    await machine.open(1, end=b"m")
    await machine.open(2, start=b"m")
    wrong_epoch = put(2, b"z", epoch=9)
    fine, outside, absent, stale = await machine.mutate(
        put(1, b"a", b"b"), put(1, b"c", b"z"), put(9, b"a"), wrong_epoch
    )
    assert outcomes(fine) == ["APPLIED", "APPLIED"]
    assert outside.error.invalid_argument.field == "batches[1].mutations[1].row"
    assert absent.error.tablet_moved.tablet_id == 9
    assert absent.error.where == "tablet 9"
    assert stale.error.HasField("tablet_moved")
    assert await machine.value(1, b"c") is None
    assert await machine.value(1, b"b") == b"v"


@pytest.mark.parametrize("whole_rows", [False, True])
async def test_an_answer_does_not_grow_with_the_number_of_tablets(whole_rows: bool) -> None:
    machine = Machine(tablet_limits=TabletLimits(answer_bytes_max=25_000))
    tablets = range(1, 6)
    for number in tablets:
        await machine.open(number, start=b"%d" % number, end=b"%d" % (number + 1))
        rows = [b"%d%d" % (number, row) for row in range(4)]
        await machine.mutate(put(number, *rows, value=bytes(10_000)))
    reads = {
        (number, row): pb.RowRead(
            row=b"%d%d" % (number, row),
            columns=[] if whole_rows else [COLUMN],
            all_columns=whole_rows,
            timestamp=COMMIT,
        )
        for number in tablets
        for row in range(4)
    }
    calls = 0
    while reads:
        asked = [[key for key in reads if key[0] == number] for number in tablets]
        batches = [
            pb.ReadBatch(target=target(number), reads=[reads[key] for key in keys])
            for number, keys in zip(tablets, asked, strict=True)
            if keys
        ]
        answer = await machine.handler.read(pb.ReadRequest(batches=batches))
        assert answer.ByteSize() < 40_000
        for keys, result in zip(filter(None, asked), answer.batches, strict=True):
            refused = {one.read for one in result.refused}
            assert all("request the rest" in one.error.message for one in result.refused)
            for at, key in enumerate(keys):
                if at not in refused:
                    del reads[key]
        calls += 1
    assert calls == 7, "three rows each"


async def test_rows_of_many_cells_in_many_tablets_are_not_all_in_one_answer() -> None:
    machine = Machine(tablet_limits=TabletLimits(answer_bytes_max=25_000, slice_entries=4))
    tablets = range(1, 10)
    for number in tablets:
        await machine.open(number)
        await machine.mutate(wide(number, cells=10, value=bytes(1_000)))
    wanted, answered = list(tablets), []
    while wanted:
        batches = [
            pb.ReadBatch(target=target(number), reads=[whole_row(number)]) for number in wanted
        ]
        answer = await machine.handler.read(pb.ReadRequest(batches=batches))
        assert answer.ByteSize() < 40_000
        found = [len(result.found.values) for result in answer.batches]
        assert set(found) <= {0, 10}
        answered.append(found.count(10))
        wanted = [number for number, cells in zip(wanted, found, strict=True) if not cells]
    assert answered == [3, 3, 3]


async def test_a_tablet_that_is_closed_while_its_read_waits_for_others_refuses_it() -> None:
    machine = Machine(tablet_limits=TabletLimits(slice_entries=1))
    batches = []
    for number in (1, 2):
        await machine.open(number)
        await machine.mutate(wide(number, cells=100))
        batches.append(pb.ReadBatch(target=target(number), reads=[whole_row(number)]))
    reading = asyncio.ensure_future(machine.handler.read(pb.ReadRequest(batches=batches)))
    await asyncio.sleep(0)
    await machine.handler.close_tablet(pb.CloseTabletRequest(tablet_id=2, epoch=1))
    assert not reading.done()
    first, second = (await reading).batches
    assert len(first.found.values) == 100
    assert second.error.HasField("tablet_moved")


async def test_reads_answer_batch_by_batch_too() -> None:
    machine = Machine()
    await machine.open(1, end=b"m")
    await machine.mutate(put(1, b"a"))
    read = pb.RowRead(row=b"a", all_columns=True, timestamp=COMMIT)
    outside = pb.RowRead(row=b"z", all_columns=True, timestamp=COMMIT)
    batches = [
        pb.ReadBatch(target=target(1), reads=[read]),
        pb.ReadBatch(target=target(1), reads=[read, outside]),
        pb.ReadBatch(target=target(2), reads=[read]),
    ]
    found, wrong, moved = (await machine.handler.read(pb.ReadRequest(batches=batches))).batches
    assert list(found.found.values) == [b"v"]
    assert wrong.error.invalid_argument.field == "batches[1].reads[1].row"
    assert moved.error.HasField("tablet_moved")


async def test_a_scan_of_a_tablet_that_is_not_here_ends_with_its_error() -> None:
    machine = Machine()
    scan = pb.ScanRequest(target=target(1), all_columns=True, timestamp=COMMIT)
    (page,) = [page async for page in machine.handler.scan(scan)]
    assert page.error.HasField("tablet_moved")
    cells = pb.ScanCellsRequest(target=target(1))
    (cell_page,) = [page async for page in machine.handler.scan_cells(cells)]
    assert cell_page.error.HasField("tablet_moved")


async def test_a_scan_gives_the_rows_of_its_tablet() -> None:
    machine = Machine()
    await machine.open(1)
    await machine.mutate(put(1, b"a", b"b"))
    scan = pb.ScanRequest(target=target(1), all_columns=True, timestamp=COMMIT)
    pages = [page async for page in machine.handler.scan(scan)]
    assert [row for page in pages for row in page.found.rows] == [b"a", b"b"]
    assert machine.handler.counts.pages == len(pages)


async def test_a_full_disk_refuses_changes_and_answers_questions_and_reads() -> None:
    machine = Machine()
    await machine.open(1)
    await machine.mutate(put(1, b"row"))
    machine.free_bytes = 999
    await machine.disk.check()
    question = pb.MutationBatch(target=target(1), mutations=[pb.Mutation(row=b"row", column=b"c")])
    refused, answered = await machine.mutate(put(1, b"row"), question)
    assert refused.error.store_unusable.reason == StoreUnusable.REASON_DISK_FULL
    assert refused.error.retry == RETRY_SAFETY_SAFE
    assert outcomes(answered) == ["APPLIED"]
    assert await machine.value(1, b"row") == b"v"
    machine.free_bytes = 1000
    await machine.disk.check()
    assert outcomes((await machine.mutate(put(1, b"row")))[0]) == ["APPLIED"]


async def test_the_master_is_told_that_writes_are_refused_and_why() -> None:
    machine = Machine()
    await machine.disk.check()
    assert not (await machine.handler.report(pb.ReportRequest())).HasField("writes_refused")
    machine.free_bytes = 999
    await machine.disk.check()
    refused = (await machine.handler.report(pb.ReportRequest())).writes_refused
    assert refused.store_unusable.reason == StoreUnusable.REASON_DISK_FULL
    assert "kept in reserve" in refused.message
    machine.free_bytes = 1000
    await machine.disk.check()
    assert not (await machine.handler.report(pb.ReportRequest())).HasField("writes_refused")
    machine.store_trouble = "the store hangs"
    refused = (await machine.handler.report(pb.ReportRequest())).writes_refused
    assert refused.message == "the store hangs"


async def test_half_of_the_reserve_is_for_roll_backs() -> None:
    machine = Machine()
    await machine.open(1)
    rolled_back = pb.MutationBatch(target=target(1), mutations=[steps.roll_back(b"x", b"c", START)])
    stuffed = pb.MutationBatch()
    stuffed.CopyFrom(rolled_back)
    stuffed.mutations[0].changes[-1].value = b"much"
    mixed = put(1, b"row")
    mixed.mutations.extend(rolled_back.mutations)
    mixed.mutations.extend(put(1, b"other").mutations)
    machine.free_bytes = 500
    await machine.disk.check()
    both, lone, too_much = await machine.mutate(mixed, rolled_back, stuffed)
    assert outcomes(both) == ["NOT_EXECUTED", "APPLIED", "NOT_EXECUTED"]
    assert results_of(both)[0].error.store_unusable.reason == StoreUnusable.REASON_DISK_FULL
    assert outcomes(lone) == ["APPLIED"]
    assert too_much.error.store_unusable.reason == StoreUnusable.REASON_DISK_FULL
    machine.free_bytes = 499
    await machine.disk.check()
    (refused,) = await machine.mutate(rolled_back)
    assert refused.error.store_unusable.reason == StoreUnusable.REASON_DISK_FULL


async def test_above_the_limit_of_the_process_a_mutation_is_told_when_to_come_back() -> None:
    machine = Machine(limits=RequestLimits(queue_bytes_max=5_000))
    await machine.open(1)
    await machine.open(2)
    gate = machine.store.disks[1].gate = asyncio.Event()
    waiting = asyncio.create_task(machine.mutate(put(1, b"row", value=b"x" * 4_000)))
    await asyncio.sleep(0.01)
    (refused,) = await machine.mutate(put(2, b"row", value=b"x" * 2_000))
    assert refused.error.overloaded.retry_after_milliseconds > 0
    assert outcomes((await machine.mutate(put(2, b"row")))[0]) == ["APPLIED"]
    gate.set()
    assert outcomes((await waiting)[0]) == ["APPLIED"]
    assert machine.handler.counts.queue_bytes == 0
    assert machine.handler.counts.refused == {"Overloaded": 1}


async def test_more_rows_than_a_request_may_hold_are_refused_as_a_whole() -> None:
    machine = Machine(limits=RequestLimits(rows_max=3))
    await machine.open(1)
    with pytest.raises(InvalidArgument, match="at most 3 rows"):
        await machine.mutate(put(1, b"a", b"b"), put(1, b"c", b"d"))
    assert await machine.value(1, b"a") is None


async def test_more_weak_notifications_than_a_request_may_hold_are_refused_as_a_whole() -> None:
    machine = Machine(limits=RequestLimits(rows_max=3))
    await machine.open(1)
    batch = pb.TransactionBatch(
        target=target(1),
        start_timestamps=[START],
        cells=[1],
        rows=[b"a"],
        columns=[COLUMN],
        kinds=[KIND_PUT],
        values=[b"v"],
    )
    for number in range(4):
        batch.notifications.add(row=b"%d" % number, column=b"w", observers=[b"f"])
    with pytest.raises(InvalidArgument, match="at most 3 in total, found 4") as refused:
        await machine.handler.commit_transactions(pb.CommitTransactionsRequest(batches=[batch]))
    assert refused.value.field == "batches.notifications"
    assert await machine.value(1, b"a") is None


async def test_batches_of_nothing_are_counted_too() -> None:
    machine = Machine(limits=RequestLimits(rows_max=3))
    with pytest.raises(InvalidArgument, match="batches: expected at most 3, found 4"):
        await machine.mutate(*[pb.MutationBatch()] * 4)
    with pytest.raises(InvalidArgument, match="batches: expected at most 3, found 4"):
        await machine.handler.read(pb.ReadRequest(batches=[pb.ReadBatch()] * 4))


async def test_work_whose_deadline_passed_in_the_queue_is_definitely_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    await machine.open(1)
    gate = machine.store.disks[1].gate = asyncio.Event()
    first = asyncio.create_task(machine.mutate(put(1, b"first")))
    await asyncio.sleep(0.01)
    monkeypatch.setattr("percolator.services.tabletserver.tablets.remaining_seconds", lambda: 2.0)
    late = asyncio.create_task(machine.mutate(put(1, b"late")))
    await machine.clock.sleep(5)
    gate.set()
    assert outcomes((await first)[0]) == ["APPLIED"]
    (result,) = await late
    assert outcomes(result) == ["NOT_EXECUTED"]
    assert await machine.value(1, b"late") is None


@pytest.mark.parametrize(
    ("remaining", "milliseconds", "seconds"),
    [(5.0, 0, 4.5), (2.0, 0, 1.8), (5.0, 800, 0.8), (2.0, 10_000, 1.8), (None, 700, 0.7)],
)
async def test_a_transaction_that_waits_is_answered_while_its_caller_still_waits(
    remaining: float | None,
    milliseconds: int,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    await machine.open(1)
    gate = machine.store.disks[1].gate = asyncio.Event()
    writing = asyncio.create_task(machine.mutate(put(1, b"row")))
    await asyncio.sleep(0.01)
    monkeypatch.setattr(
        "percolator.services.tabletserver.tablets.remaining_seconds", lambda: remaining
    )
    batch = pb.TransactionBatch(
        target=target(1),
        start_timestamps=[START],
        cells=[1],
        rows=[b"row"],
        columns=[COLUMN],
        kinds=[KIND_PUT],
        values=[b"v"],
    )
    request = pb.CommitTransactionsRequest(batches=[batch], wait_milliseconds=milliseconds)
    begun = machine.clock.monotonic_seconds()
    response = await machine.handler.commit_transactions(request)
    assert machine.clock.monotonic_seconds() - begun == pytest.approx(seconds)
    (uncommitted,) = response.batches[0].uncommitted
    assert uncommitted.result.outcome == pb.OUTCOME_NOT_EXECUTED
    assert uncommitted.result.error.retry == RETRY_SAFETY_SAFE
    assert "the deadline passed" in uncommitted.result.error.message
    gate.set()
    await writing


async def test_a_caller_that_gives_up_neither_undoes_its_write_nor_stops_the_tablet() -> None:
    machine = Machine()
    await machine.open(1)
    gate = machine.store.disks[1].gate = asyncio.Event()
    abandoned = asyncio.create_task(machine.mutate(put(1, b"row"), put(1, b"other")))
    await asyncio.sleep(0.01)
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    gate.set()
    assert outcomes((await machine.mutate(put(1, b"next")))[0]) == ["APPLIED"]
    assert await machine.value(1, b"row") == b"v"
    assert machine.handler.counts.queue_bytes == 0


async def test_a_slow_request_is_counted() -> None:
    machine = Machine(limits=RequestLimits(slow_request_seconds=1.0))
    await machine.open(1)
    gate = machine.store.disks[1].gate = asyncio.Event()
    slow = asyncio.create_task(machine.mutate(put(1, b"row")))
    await machine.clock.sleep(2)
    gate.set()
    await slow
    assert machine.handler.counts.slow == 1


async def test_a_split_is_proposed_between_two_rows_and_not_within_one() -> None:
    machine = Machine()
    await machine.open(1)
    request = pb.ProposeSplitRequest(target=target(1))
    assert not (await machine.handler.propose_split(request)).HasField("row")
    await machine.mutate(put(1, *(b"%03d" % n for n in range(100)), value=b"x" * 100))
    proposed = await machine.handler.propose_split(request)
    assert b"000" < proposed.row <= b"099"


async def test_a_split_of_another_epoch_or_schema_is_not_proposed() -> None:
    machine = Machine()
    await machine.open(1)
    with pytest.raises(TabletMoved):
        await machine.handler.propose_split(pb.ProposeSplitRequest(target=target(1, epoch=2)))
    with pytest.raises(SchemaChanged):
        await machine.handler.propose_split(pb.ProposeSplitRequest(target=target(1, schema=2)))


async def test_a_report_names_this_process_and_what_fails_here() -> None:
    machine = Machine()
    await machine.open(1, epoch=4, schema=2)
    machine.store.open_fails = disk_full()
    with pytest.raises(UnusableStore):
        await machine.open(2)
    report = await machine.handler.report(pb.ReportRequest())
    assert report.server_id == "server"
    served, failed = report.tablets
    assert (served.tablet_id, served.epoch, served.schema_version) == (1, 4, 2)
    assert not served.HasField("error")
    assert failed.error.HasField("store_unusable")


async def test_a_report_tells_the_tablets_what_time_it_is() -> None:
    machine = Machine()
    await machine.open(1)
    ahead = COMMIT + (1 << 60)
    read = pb.RowRead(row=b"row", columns=[COLUMN], timestamp=ahead)
    request = pb.ReadRequest(batches=[pb.ReadBatch(target=target(1), reads=[read])])
    [refused] = (await machine.handler.read(request)).batches
    assert refused.error.invalid_argument.field == "batches[0].reads[0].timestamp"
    await machine.handler.report(pb.ReportRequest(newest_timestamp=ahead))
    [answered] = (await machine.handler.read(request)).batches
    assert not answered.HasField("error")


async def test_every_method_of_the_service_is_there() -> None:
    Exposed(pb.DESCRIPTOR.services_by_name["TabletServerService"], Machine().handler)
