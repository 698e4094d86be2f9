"""Notifying workers: after notifications are durable, each row to one worker, in short streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from percolator.errors import InvalidArgument, NotReady
from percolator.tablet import notification_watch
from percolator.tablet.cells import cell_prefix, component, inverted
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.state import TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import MemoryOwnership, MemoryStorage
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.tablet.tablets import COLUMN, IDENTITY, NOTIFY, Rig, SlowDisk, mutation, put

TABLE = IDENTITY.table_id


def watching(*observers: bytes, table_id: int = TABLE) -> pb.WatchNotificationsRequest:
    return pb.WatchNotificationsRequest(watched=[{"table_id": table_id, "observers": observers}])


def key(row: bytes, observer: bytes = b"f", at: int = 5) -> bytes:
    return cell_prefix(row, COLUMN) + component(observer) + inverted(at)


Stream = AsyncGenerator[pb.WatchNotificationsResponse, None]


async def opened(watch: NotificationWatch, *observers: bytes) -> Stream:
    stream = watch.stream(watching(*observers))
    assert await anext(stream) == pb.WatchNotificationsResponse()
    return stream


class WatchedRig(Rig):
    """A tablet that is watched for notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = NotificationWatch()
        self.tablet = Tablet(
            IDENTITY,
            schema_version=3,
            storage=MemoryStorage(self.disk),
            clock=self.clock,
            ownership=MemoryOwnership(lambda: self.owner),
            on_closed=self.closed.append,
            guard=TimestampGuard.by_own_clock(self.clock),
            watch=self.watch,
        )


def notified(row: bytes, at: int) -> Any:
    return mutation(row, put(NOTIFY, b"", at, b"f"))


async def test_notifications_are_sent_when_they_are_durable_and_not_before() -> None:
    rig = WatchedRig()
    await rig.open()
    stream = await opened(rig.watch, b"f")
    told = asyncio.ensure_future(anext(stream))
    writing = asyncio.create_task(rig.mutate(notified(b"a", 5)))
    await asyncio.sleep(0.5)  # half of the second that the disk takes
    assert not told.done()
    await writing
    (hint,) = (await told).notifications
    assert (hint.table_id, hint.row, hint.column) == (TABLE, b"a", COLUMN)
    assert (hint.observer, hint.timestamp) == (b"f", 5)


async def test_what_may_not_be_durable_is_never_reported() -> None:
    for losing in ("owner", "disk"):
        rig = WatchedRig()
        await rig.open()
        stream = await opened(rig.watch, b"f")
        if losing == "owner":
            rig.owner = False
        else:
            assert isinstance(rig.disk, SlowDisk)
            rig.disk.failure = OSError("broken")
        await rig.mutate(notified(b"a", 5))
        rig.watch.close()
        assert [answer async for answer in stream] == []


async def test_each_row_goes_to_one_of_the_workers_that_watch_its_observer() -> None:
    watch = NotificationWatch()
    streams = [await opened(watch, b"f") for _ in range(3)]
    other = await opened(watch, b"g")
    rows = [b"%d" % row for row in range(300)]
    watch.tell(TABLE, [key(row, at=at) for at in (5, 6) for row in rows])
    watch.tell(TABLE + 1, [key(b"elsewhere")])
    watch.close()
    heard = [
        [hint.row for answer in [a async for a in stream] for hint in answer.notifications]
        for stream in streams
    ]
    assert sorted(row for rows_of_one in heard for row in set(rows_of_one)) == sorted(rows)
    assert all(len(rows_of_one) > 100 for rows_of_one in heard)
    assert [answer async for answer in other] == []


async def test_a_listener_hears_everything_and_takes_nothing_from_others() -> None:
    watch = NotificationWatch()
    worker = await opened(watch, b"f")
    request = watching(b"f")
    request.listen_only = True
    listeners = [watch.stream(request), watch.stream(request)]
    for listener in listeners:
        await anext(listener)
    watch.tell(TABLE, [key(b"%d" % row) for row in range(20)])
    watch.close()
    for stream in (worker, *listeners):
        assert sum([len(answer.notifications) async for answer in stream]) == 20
    watch.tell(TABLE, [key(b"no worker is left")])
    assert watch.told == 60


async def test_a_slow_reader_holds_up_no_other_and_is_told_how_much_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notification_watch, "HINTS_WAITING_MAX", 4)
    watch = NotificationWatch()
    stream = await opened(watch, b"f")
    watch.tell(TABLE, [key(b"%d" % row) for row in range(7)])
    answer = await anext(stream)
    assert [hint.row for hint in answer.notifications] == [b"0", b"1", b"2", b"3"]
    assert (answer.left_out, watch.left_out, watch.told) == (3, 3, 4)
    watch.tell(TABLE, [key(b"later")])
    answer = await anext(stream)
    assert ([hint.row for hint in answer.notifications], answer.left_out) == ([b"later"], 0)


async def test_an_answer_holds_a_limited_number_of_notifications(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notification_watch, "HINTS_PER_ANSWER_MAX", 2)
    watch = NotificationWatch()
    stream = await opened(watch, b"f")
    watch.tell(TABLE, [key(b"%d" % row) for row in range(5)])
    watch.close()
    assert [len(answer.notifications) async for answer in stream] == [2, 2, 1]


async def test_a_reader_that_disconnected_is_forgotten() -> None:
    watch = NotificationWatch()
    stream = await opened(watch, b"f", b"g")
    await stream.aclose()
    assert watch.streams == 0
    watch.tell(TABLE, [key(b"a")])
    assert watch.told == 0


async def test_streams_end_at_the_drain_and_no_others_begin() -> None:
    watch = NotificationWatch()
    stream = await opened(watch, b"f")
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    watch.close()
    assert await waiting is None
    with pytest.raises(NotReady):
        await anext(watch.stream(watching(b"f")))


async def test_nonsensical_requests_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = NotificationWatch()
    for request, field in (
        (pb.WatchNotificationsRequest(), "watched"),
        (watching(), r"watched\[0\].observers"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            await anext(watch.stream(request))
    monkeypatch.setattr(notification_watch, "OBSERVERS_WATCHED_MAX", 1)
    with pytest.raises(InvalidArgument, match="at most 1"):
        await anext(watch.stream(watching(b"f", b"g")))
    assert watch.streams == 0
