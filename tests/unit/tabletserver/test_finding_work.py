"""Scans of notifications, and streams of them, over many tablets of one server."""

from __future__ import annotations

import asyncio

from percolator.services.tabletserver.settings import RequestLimits
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import RETRY_SAFETY_SAFE
from tests.unit.tabletserver.memory_store import COLUMN, COMMIT, Machine, outcomes, target


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


async def test_every_scan_has_its_own_answer() -> None:
    machine = Machine()
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
    assert rows(told) == [b"a"]
    assert full.error.retry == RETRY_SAFETY_SAFE


async def test_a_watcher_hears_of_every_tablet_of_its_tables_also_of_those_that_come_later() -> (
    None
):
    machine = Machine()
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


async def test_the_count_of_notifications_never_shrinks_within_an_epoch() -> None:
    """`percolator wait` compares two counts: one that was reset could hide what came between."""
    machine = Machine()
    await machine.open(1)
    await machine.mutate(notified(1, b"a", b"b"))
    machine.store.disks[1].failures = 1
    (failed,) = await machine.mutate(notified(1, b"c"))
    assert outcomes(failed) == ["UNKNOWN"]
    await asyncio.sleep(1)
    (result,) = await scan(machine, of(1))
    assert result.notifications_written > 2
