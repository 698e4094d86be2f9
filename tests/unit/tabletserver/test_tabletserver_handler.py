"""Requests: a separate result for each batch, limits, and what is refused before it has effects."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
from prometheus_client import CollectorRegistry

from percolator.errors import (
    InvalidArgument,
    Retry,
    SchemaChanged,
    StoreFault,
    StoreUnusable,
    TabletMoved,
)
from percolator.formats.records import KIND_PUT, RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.services.chassis.rpc import Exposed
from percolator.services.tabletserver.dump import _entry, as_line
from percolator.services.tabletserver.metrics import TabletServerMetrics
from percolator.services.tabletserver.settings import RequestLimits
from percolator.services.tabletserver.storage import CHECK_SECONDS, DiskSpace
from percolator.tablet.cells import NOTIFY, cell_prefix, change_key, encode
from percolator.tablet.state import TabletLimits
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import RETRY_SAFETY_SAFE
from percolator.v1.errors_pb2 import StoreUnusable as StoreUnusableDetail
from tests.simulation.virtual_time import VirtualClock
from tests.unit.refusals import refused
from tests.unit.tablet.tablets import results_of, under_way
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


async def test_every_batch_has_its_own_answer(machine: Machine) -> None:
    await machine.open(1, end=b"m")
    await machine.open(2, start=b"m")
    wrong_epoch = put(2, b"z", epoch=9)
    fine, outside, absent, stale = await machine.mutate(
        put(1, b"a", b"b"), put(1, b"c", b"z"), put(9, b"a"), wrong_epoch
    )
    assert outcomes(fine) == ["APPLIED", "APPLIED"]
    assert outside.error.invalid_argument.field == "batches[1].mutations[1].row"
    assert (absent.error.tablet_moved.tablet_id, absent.error.where) == (9, "tablet 9")
    assert stale.error.HasField("tablet_moved")
    assert (await machine.value(1, b"c"), await machine.value(1, b"b")) == (None, b"v")


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
        for answered, result in zip(filter(None, asked), answer.batches, strict=True):
            refused = {one.read for one in result.refused}
            assert all("request the rest" in one.error.message for one in result.refused)
            for at, key in enumerate(answered):
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
    reading = await under_way(machine.handler.read(pb.ReadRequest(batches=batches)), seconds=0)
    await machine.handler.close_tablet(pb.CloseTabletRequest(tablet_id=2, epoch=1))
    assert not reading.done()
    first, second = (await reading).batches
    assert len(first.found.values) == 100
    assert second.error.HasField("tablet_moved")


async def test_reads_answer_batch_by_batch_too(machine: Machine) -> None:
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


async def test_a_scan_of_a_tablet_that_is_not_here_ends_with_its_error(machine: Machine) -> None:
    scan = pb.ScanRequest(target=target(1), all_columns=True, timestamp=COMMIT)
    (page,) = [page async for page in machine.handler.scan(scan)]
    assert page.error.HasField("tablet_moved")
    cells = pb.ScanCellsRequest(target=target(1))
    (cell_page,) = [page async for page in machine.handler.scan_cells(cells)]
    assert cell_page.error.HasField("tablet_moved")


async def test_a_scan_gives_the_rows_of_its_tablet(serving: Machine) -> None:
    await serving.mutate(put(1, b"a", b"b"))
    scan = pb.ScanRequest(target=target(1), all_columns=True, timestamp=COMMIT)
    pages = [page async for page in serving.handler.scan(scan)]
    assert [row for page in pages for row in page.found.rows] == [b"a", b"b"]
    assert serving.handler.counts.pages == len(pages)


async def test_a_full_disk_refuses_changes_and_answers_questions_and_reads(
    serving: Machine,
) -> None:
    await serving.mutate(put(1, b"row"))
    await serving.disk_has(999)
    question = pb.MutationBatch(target=target(1), mutations=[pb.Mutation(row=b"row", column=b"c")])
    refused, answered = await serving.mutate(put(1, b"row"), question)
    assert refused.error.store_unusable.reason == StoreUnusableDetail.REASON_DISK_FULL
    assert (refused.error.retry, outcomes(answered)) == (RETRY_SAFETY_SAFE, ["APPLIED"])
    assert await serving.value(1, b"row") == b"v"
    await serving.disk_has(1000)
    assert outcomes((await serving.mutate(put(1, b"row")))[0]) == ["APPLIED"]


async def test_the_master_is_told_that_writes_are_refused_and_why(machine: Machine) -> None:
    await machine.disk.check()
    assert not (await machine.handler.report(pb.ReportRequest())).HasField("writes_refused")
    await machine.disk_has(999)
    refused = (await machine.handler.report(pb.ReportRequest())).writes_refused
    assert refused.store_unusable.reason == StoreUnusableDetail.REASON_DISK_FULL
    assert "kept in reserve" in refused.message
    await machine.disk_has(1000)
    assert not (await machine.handler.report(pb.ReportRequest())).HasField("writes_refused")
    machine.store_trouble = "the store hangs"
    refused = (await machine.handler.report(pb.ReportRequest())).writes_refused
    assert refused.message == "the store hangs"


async def test_half_of_the_reserve_is_for_roll_backs(serving: Machine) -> None:
    rolled_back = pb.MutationBatch(target=target(1), mutations=[steps.roll_back(b"x", b"c", START)])
    stuffed = pb.MutationBatch()
    stuffed.CopyFrom(rolled_back)
    stuffed.mutations[0].changes[-1].value = b"much"
    mixed = put(1, b"row")
    mixed.mutations.extend(rolled_back.mutations)
    mixed.mutations.extend(put(1, b"other").mutations)
    await serving.disk_has(500)
    both, lone, too_much = await serving.mutate(mixed, rolled_back, stuffed)
    assert outcomes(both) == ["NOT_EXECUTED", "APPLIED", "NOT_EXECUTED"]
    assert results_of(both)[0].error.store_unusable.reason == StoreUnusableDetail.REASON_DISK_FULL
    assert outcomes(lone) == ["APPLIED"]
    assert too_much.error.store_unusable.reason == StoreUnusableDetail.REASON_DISK_FULL
    await serving.disk_has(499)
    assert (
        await serving.refusal(rolled_back)
    ).store_unusable.reason == StoreUnusableDetail.REASON_DISK_FULL


async def test_above_the_limit_of_the_process_a_mutation_is_told_when_to_come_back() -> None:
    machine = Machine(limits=RequestLimits(queue_bytes_max=5_000))
    await machine.open(1)
    await machine.open(2)
    gate = machine.store.disks[1].gate = asyncio.Event()
    waiting = await under_way(machine.mutate(put(1, b"row", value=b"x" * 4_000)), seconds=0.01)
    assert (
        await machine.refusal(put(2, b"row", value=b"x" * 2_000))
    ).overloaded.retry_after_milliseconds > 0
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
    with refused("batches.notifications", "at most 3 in total, found 4"):
        await machine.handler.commit_transactions(pb.CommitTransactionsRequest(batches=[batch]))
    assert await machine.value(1, b"a") is None


async def test_batches_of_nothing_are_counted_too() -> None:
    machine = Machine(limits=RequestLimits(rows_max=3))
    read = pb.ReadRequest(batches=[pb.ReadBatch()] * 4)
    for asking in (machine.mutate(*[pb.MutationBatch()] * 4), machine.handler.read(read)):
        with pytest.raises(InvalidArgument, match="batches: expected at most 3, found 4"):
            await asking


async def test_work_whose_deadline_passed_in_the_queue_is_definitely_not_done(
    serving: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = serving.store.disks[1].gate = asyncio.Event()
    first = await under_way(serving.mutate(put(1, b"first")), seconds=0.01)
    monkeypatch.setattr("percolator.services.tabletserver.tablets.remaining_seconds", lambda: 2.0)
    late = asyncio.create_task(serving.mutate(put(1, b"late")))
    await serving.clock.sleep(5)
    gate.set()
    assert outcomes((await first)[0]) == ["APPLIED"]
    (result,) = await late
    assert outcomes(result) == ["NOT_EXECUTED"]
    assert await serving.value(1, b"late") is None


@pytest.mark.parametrize(
    ("remaining", "milliseconds", "seconds"),
    [(5.0, 0, 4.5), (2.0, 0, 1.8), (5.0, 800, 0.8), (2.0, 10_000, 1.8), (None, 700, 0.7)],
)
async def test_a_transaction_that_waits_is_answered_while_its_caller_still_waits(
    serving: Machine,
    remaining: float | None,
    milliseconds: int,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = serving.store.disks[1].gate = asyncio.Event()
    writing = await under_way(serving.mutate(put(1, b"row")), seconds=0.01)
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
    begun = serving.clock.monotonic_seconds()
    response = await serving.handler.commit_transactions(request)
    assert serving.clock.monotonic_seconds() - begun == pytest.approx(seconds)
    (uncommitted,) = response.batches[0].uncommitted
    assert uncommitted.result.outcome == pb.OUTCOME_NOT_EXECUTED
    assert uncommitted.result.error.retry == RETRY_SAFETY_SAFE
    assert "the deadline passed" in uncommitted.result.error.message
    gate.set()
    await writing


async def test_a_caller_that_gives_up_neither_undoes_its_write_nor_stops_the_tablet(
    serving: Machine,
) -> None:
    gate = serving.store.disks[1].gate = asyncio.Event()
    abandoned = await under_way(serving.mutate(put(1, b"row"), put(1, b"other")), seconds=0.01)
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    gate.set()
    assert outcomes((await serving.mutate(put(1, b"next")))[0]) == ["APPLIED"]
    assert await serving.value(1, b"row") == b"v"
    assert serving.handler.counts.queue_bytes == 0


async def test_a_slow_request_is_counted() -> None:
    machine = Machine(limits=RequestLimits(slow_request_seconds=1.0))
    await machine.open(1)
    gate = machine.store.disks[1].gate = asyncio.Event()
    slow = asyncio.create_task(machine.mutate(put(1, b"row")))
    await machine.clock.sleep(2)
    gate.set()
    await slow
    assert machine.handler.counts.slow == 1


async def test_a_split_is_proposed_between_two_rows_and_not_within_one(serving: Machine) -> None:
    request = pb.ProposeSplitRequest(target=target(1))
    assert not (await serving.handler.propose_split(request)).HasField("row")
    await serving.mutate(put(1, *(b"%03d" % n for n in range(100)), value=b"x" * 100))
    proposed = await serving.handler.propose_split(request)
    assert b"000" < proposed.row <= b"099"


async def test_a_split_of_another_epoch_or_schema_is_not_proposed(serving: Machine) -> None:
    with pytest.raises(TabletMoved):
        await serving.handler.propose_split(pb.ProposeSplitRequest(target=target(1, epoch=2)))
    with pytest.raises(SchemaChanged):
        await serving.handler.propose_split(pb.ProposeSplitRequest(target=target(1, schema=2)))


async def test_a_report_names_this_process_and_what_fails_here(machine: Machine) -> None:
    await machine.open(1, epoch=4, schema=2)
    machine.store.open_fails = disk_full()
    with pytest.raises(StoreUnusable):
        await machine.open(2)
    report = await machine.handler.report(pb.ReportRequest())
    assert report.server_id == "server"
    served, failed = report.tablets
    assert (served.tablet_id, served.epoch, served.schema_version) == (1, 4, 2)
    assert not served.HasField("error")
    assert failed.error.HasField("store_unusable")


async def test_a_report_tells_the_tablets_what_time_it_is(serving: Machine) -> None:
    ahead = COMMIT + (1 << 60)
    read = pb.RowRead(row=b"row", columns=[COLUMN], timestamp=ahead)
    request = pb.ReadRequest(batches=[pb.ReadBatch(target=target(1), reads=[read])])
    [refused] = (await serving.handler.read(request)).batches
    assert refused.error.invalid_argument.field == "batches[0].reads[0].timestamp"
    await serving.handler.report(pb.ReportRequest(newest_timestamp=ahead))
    [answered] = (await serving.handler.read(request)).batches
    assert not answered.HasField("error")


async def test_every_method_of_the_service_is_there() -> None:
    Exposed(pb.DESCRIPTOR.services_by_name["TabletServerService"], Machine().handler)


# An order to collect names two bounds: one for history, one for what only transactions need.


def locked(commit: int) -> pb.MutationBatch:
    record = WriteRecord(commit - 1, RecordKind.LOCK_ONLY).encode()
    change = pb.Change(
        kind=pb.Change.KIND_PUT, space=cells_pb2.SPACE_WRITE, timestamp=commit, value=record
    )
    mutation = pb.Mutation(row=b"a", column=COLUMN, changes=[change])
    return pb.MutationBatch(target=target(1), mutations=[mutation])


async def test_lock_only_records_of_ended_transactions_go_although_history_is_kept(
    serving: Machine,
) -> None:
    for batch in (put(1, b"a"), locked(COMMIT + 10), locked(COMMIT + 20), locked(COMMIT + 30)):
        await serving.mutate(batch)
    order = pb.SafePoint(
        tablet_id=1, epoch=1, reads=START - 5, transactions=COMMIT + 25, collect_below=START - 5
    )
    request = pb.RaiseSafePointsRequest(safe_points=[order])
    (raised,) = (await serving.handler.raise_safe_points(request)).safe_points
    assert not raised.HasField("error"), raised.error
    await asyncio.gather(*serving.tasks)
    assert serving.collector.cells == 2
    assert await serving.value(1, b"a") == b"v"


async def test_an_order_that_names_a_tablet_twice_is_refused_and_raises_nothing(
    serving: Machine,
) -> None:
    """Each naming is a durable write, so that thousands of them would hold the server up."""
    twice = [pb.SafePoint(tablet_id=1, epoch=1, reads=at) for at in (START, START + 1)]
    with refused("safe_points[1].tablet_id"):
        await serving.handler.raise_safe_points(pb.RaiseSafePointsRequest(safe_points=twice))
    once = pb.RaiseSafePointsRequest(safe_points=[pb.SafePoint(tablet_id=1, epoch=1)])
    (still,) = (await serving.handler.raise_safe_points(once)).safe_points
    assert still.reads == 0


# Change feeds on a tablet server: switched by the master's orders, and asked tablet by tablet.

LATER = COMMIT + 10


async def scanned(machine: Machine, tablet: int, epoch: int = 1) -> pb.ScanChangesResponse:
    request = pb.ScanChangesRequest(target=target(tablet, epoch), until=LATER)
    *_, last = [page async for page in machine.handler.scan_changes(request)]
    return last


def with_schema(batch: pb.MutationBatch, schema: int) -> pb.MutationBatch:
    batch.target.schema_version = schema
    return batch


async def test_an_order_switches_the_feed_of_an_open_tablet(serving: Machine) -> None:
    assert (await scanned(serving, 1)).error.invalid_argument.field == "target"
    await serving.open(1, schema=2, change_feed=True)
    await serving.mutate(with_schema(put(1, b"a"), 2))
    assert list((await scanned(serving, 1)).found.rows) == [b"a"]
    # An order that was sent earlier and comes late.
    await serving.open(1, schema=1, change_feed=False)
    assert list((await scanned(serving, 1)).found.rows) == [b"a"]
    await serving.open(1, schema=3, change_feed=False)
    assert (await scanned(serving, 1)).error.invalid_argument.field == "target"


async def test_a_tablet_that_has_failed_is_opened_again_with_its_feed(machine: Machine) -> None:
    await machine.open(1, schema=2, change_feed=True)
    await machine.mutate(with_schema(put(1, b"a"), 2))
    machine.store.disks[1].failures = 1
    await machine.mutate(with_schema(put(1, b"b"), 2))
    while (await scanned(machine, 1)).HasField("error"):
        await machine.clock.sleep(0.1)
    await machine.mutate(with_schema(put(1, b"c"), 2))
    found = set((await scanned(machine, 1)).found.rows)
    assert {b"a", b"c"} <= found <= {b"a", b"b", b"c"}


async def test_looks_are_answered_tablet_by_tablet(machine: Machine) -> None:
    await machine.open(1, end=b"m", change_feed=True)
    await machine.open(2, start=b"m", change_feed=True)
    await machine.open(3)
    await machine.mutate(put(1, b"a"))
    looks = [pb.ChangesLook(target=target(number), until=LATER) for number in (1, 2, 3, 4)]
    looks.append(pb.ChangesLook(target=target(1, epoch=9), until=LATER))
    looks.append(pb.ChangesLook(target=target(1)))
    request = pb.LookForChangesRequest(looks=looks)
    found = (await machine.handler.look_for_changes(request)).looks
    assert [(one.reached, one.newest) for one in found[:2]] == [(LATER, COMMIT), (LATER, 0)]
    assert found[2].error.invalid_argument.field == "looks[2].target"
    assert found[3].error.HasField("tablet_moved")
    assert found[4].error.HasField("tablet_moved")
    assert found[5].error.invalid_argument.field == "looks[5].until"


def test_a_dump_shows_what_is_in_a_feed() -> None:
    record = WriteRecord(START, RecordKind.PUT, b"v").encode()
    key = change_key(cell_prefix(b"a", COLUMN), COMMIT)
    assert as_line(_entry(key, record)) == (
        f'F row="a" column="c" timestamp={COMMIT} start={START} kind="PUT" value="v"'
    )


# Scans of notifications, and streams of them, over many tablets of one server.


def notified(tablet: int, *rows: bytes) -> pb.MutationBatch:
    change = pb.Change(
        kind=pb.Change.KIND_PUT,
        space=cells_pb2.SPACE_NOTIFY,
        timestamp=COMMIT,
        qualifier=b"f",
    )
    return pb.MutationBatch(
        target=target(tablet),
        mutations=[pb.Mutation(row=row, column=COLUMN, changes=[change]) for row in rows],
    )


async def scan(machine: Machine, *scans: pb.NotificationScan) -> list[pb.NotificationScanResult]:
    request = pb.ScanNotificationsRequest(scans=scans)
    return list((await machine.handler.scan_notifications(request)).scans)


def of(tablet: int, start: bytes = b"", end: bytes = b"") -> pb.NotificationScan:
    return pb.NotificationScan(target=target(tablet), range={"start": start, "end": end})


def rows(result: pb.NotificationScanResult) -> list[bytes]:
    return [one.row for one in result.notifications]


async def test_every_scan_has_its_own_answer(machine: Machine) -> None:
    await machine.open(1, end=b"m")
    await machine.open(2, start=b"m")
    await machine.mutate(notified(1, b"a", b"b"), notified(2, b"z"))
    one, moved, outside, two = await scan(machine, of(1), of(9), of(2, end=b"b"), of(2))
    assert (rows(one), one.notifications_written) == ([b"a", b"b"], 2)
    assert moved.error.tablet_moved.tablet_id == 9
    assert outside.error.invalid_argument.field == "scans[2].range"
    assert (rows(two), two.notifications_written) == ([b"z"], 1)


async def test_what_does_not_fit_into_an_answer_is_to_be_asked_again() -> None:
    machine = Machine(limits=RequestLimits(answer_bytes_max=1))
    await machine.open(1)
    await machine.mutate(notified(1, b"a"))
    told, full = await scan(machine, of(1), of(1))
    assert (rows(told), full.error.retry) == ([b"a"], RETRY_SAFETY_SAFE)


async def test_a_watcher_hears_of_every_tablet_of_its_tables_also_of_those_that_come_later(
    machine: Machine,
) -> None:
    await machine.open(1, end=b"m")
    watched = [{"table_id": 3, "observers": [b"f"]}]
    request = pb.WatchNotificationsRequest(watched=watched)
    stream = machine.handler.watch_notifications(request)
    assert not (await anext(stream)).notifications
    await machine.open(2, start=b"m")
    await machine.mutate(notified(1, b"a"))
    await machine.mutate(notified(2, b"z"))
    machine.tablets.watch.close()
    heard = [one.row async for answer in stream for one in answer.notifications]
    assert heard == [b"a", b"z"]


async def test_the_count_of_notifications_never_shrinks_within_an_epoch(serving: Machine) -> None:
    """`percolator wait` compares two counts: one that was reset could hide what came between."""
    await serving.mutate(notified(1, b"a", b"b"))
    serving.store.disks[1].failures = 1
    (failed,) = await serving.mutate(notified(1, b"c"))
    assert outcomes(failed) == ["UNKNOWN"]
    await asyncio.sleep(1)
    (result,) = await scan(serving, of(1))
    assert result.notifications_written > 2


# Writes are refused while the disk is full, and accepted again without help.


def refusal(disk: DiskSpace) -> StoreUnusable | None:
    return disk.full


async def test_it_refuses_below_the_reserve_and_recovers_by_itself() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    free = [1000]
    log = structlog.stdlib.get_logger("test")

    async def free_bytes() -> int:
        return free[0]

    disk = DiskSpace(free_bytes, clock, log, reserve_bytes=500)
    watching = asyncio.create_task(disk.watch())
    await disk.check()
    assert refusal(disk) is None
    free[0] = 499
    await clock.sleep(2 * CHECK_SECONDS)
    full = refusal(disk)
    assert full is not None
    assert full.fault is StoreFault.DISK_FULL
    assert full.retry is Retry.SAFE
    free[0] = 500
    await clock.sleep(2 * CHECK_SECONDS)
    assert refusal(disk) is None
    watching.cancel()


# Requests leave nothing for the garbage collector, which rarely runs (process.py).

OF_A_TABLET_SERVER = (
    "percolator.tablet",
    "percolator.v1.tabletserver",
    "percolator.services.tabletserver",
)
"""Only these are counted: in another thread, a client of another test may still be running."""


@contextmanager
def garbage() -> Iterator[list[str]]:
    """The types of a tablet server's objects that only the collector could free, at its end."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += [
            type(each).__name__
            for each in gc.garbage
            if type(each).__module__.startswith(OF_A_TABLET_SERVER)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def test_mutations_reads_and_scans_are_freed_at_once(serving: Machine) -> None:
    """Each page that waited for the collector held a MiB, a hundred pages held a hundred."""
    rows = [b"%04d" % number for number in range(50)]
    with garbage() as left:
        await serving.mutate(put(1, *rows), put(2, b"refused"))
        await serving.value(1, rows[0])
        for reverse in (False, True):
            scan = pb.ScanRequest(
                target=target(1), all_columns=True, timestamp=COMMIT, reverse=reverse
            )
            pages = [page async for page in serving.handler.scan(scan)]
            assert sum(len(page.found.rows) for page in pages) == len(rows)
    assert left == []


# The metrics of tablets, refusals and the disk.


def notification(row: bytes, observer: bytes) -> bytes:
    return encode(NOTIFY, row, b"c", 5, observer)[1:]


async def test_the_figures_follow_what_happened(machine: Machine) -> None:
    registry = CollectorRegistry()
    registry.register(
        TabletServerMetrics(
            machine.tablets, machine.collector, machine.disk, machine.handler.counts
        )
    )

    def figure(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"percolator_tabletserver_{name}", labels)

    assert figure("store_trouble") == 0
    machine.store_trouble = "the store hangs"
    assert figure("store_trouble") == 1
    await machine.open(1)
    request = pb.WatchNotificationsRequest(watched=[{"table_id": 3, "observers": [b"f"]}])
    stream = machine.handler.watch_notifications(request)
    await anext(stream)
    machine.tablets.watch.tell(3, [notification(b"a", b"f"), notification(b"a", b"g")])
    await machine.mutate(put(1, b"a", b"b"), put(9, b"a"))
    machine.store.disks[1].failures = 1
    await machine.mutate(put(1, b"c"))
    await machine.clock.sleep(1)
    await machine.mutate(put(1, b"d"))
    machine.store.open_fails = disk_full()
    with pytest.raises(StoreUnusable):
        await machine.open(2)
    await machine.disk_has(10)
    assert (figure("tablets"), figure("tablets_failed")) == (2, 1)
    assert figure("tablets_reopened_total") == 1
    assert figure("tablet_mutations_applied_total", table="3", tablet="1") == 1
    assert figure("batches_refused_total", error="TabletMoved") == 1
    assert (figure("notification_streams"), figure("notifications_told_total")) == (1, 1)
    assert (figure("notifications_left_out_total"), figure("disk_full")) == (0, 1)
    assert figure("disk_free_bytes") == 10
