"""Finding work in a tablet: notifications, and old locks on observed columns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import InvalidArgument, NotReady, TabletMoved
from percolator.formats.records import RecordKind
from percolator.tablet import notification_scan, notification_watch
from percolator.tablet.cells import cell_prefix, component, inverted
from percolator.tablet.notification_watch import NotificationWatch
from percolator.tablet.state import TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import MemoryBatch, MemoryOwnership, MemoryStorage
from percolator.v1 import tabletserver_pb2 as pb
from tests.simulation.virtual_time import run_virtually
from tests.unit.tablet.tablets import (
    COLUMN,
    IDENTITY,
    LOCK,
    NOTIFY,
    TARGET,
    WRITE,
    Rig,
    SlowDisk,
    delete,
    lock_record,
    mutation,
    prewrite,
    put,
    under_way,
    write_record,
)

Found = tuple[bytes, bytes, bytes, tuple[int, ...]]


def notify(row: bytes, *timestamps: int, observer: bytes = b"f", column: bytes = COLUMN) -> Any:
    return mutation(row, *(put(NOTIFY, b"", at, observer) for at in timestamps), column=column)


async def look(rig: Rig, **fields: Any) -> pb.NotificationScanResult:
    return await rig.tablet.scan_notifications(pb.NotificationScan(target=TARGET, **fields))


async def look_at_all(rig: Rig, **fields: Any) -> tuple[list[Found], list[bytes]]:
    """All notifications found by following `rest`, and the rows with locks."""
    found, locked = [], []
    result = await look(rig, **fields)
    while True:
        found += told(result)
        locked += [lock.row for lock in result.locks]
        if not result.HasField("rest"):
            return found, locked
        result = await look(rig, range=result.rest, **fields)


def told(result: pb.NotificationScanResult) -> list[Found]:
    return [(n.row, n.column, n.observer, tuple(n.timestamps)) for n in result.notifications]


async def test_notifications_are_returned_by_cell_and_observer_newest_first(rig: Rig) -> None:
    await rig.apply(
        notify(b"b", 5),
        notify(b"a", 7, 9, 8),
        notify(b"a", 4, observer=b"g", column=b"other"),
        notify(b"\0", 6, column=b""),
    )
    assert told(await look(rig)) == [
        (b"\0", b"", b"f", (6,)),
        (b"a", COLUMN, b"f", (9, 8, 7)),
        (b"a", b"other", b"g", (4,)),
        (b"b", COLUMN, b"f", (5,)),
    ]


async def test_notifications_of_other_observers_are_left_out(rig: Rig) -> None:
    await rig.apply(
        notify(b"a", 5), notify(b"b", 6, observer=b"g"), notify(b"c", 7, observer=b"ff")
    )
    assert [row for row, *_ in told(await look(rig, observers=[b"f"]))] == [b"a"]
    assert [row for row, *_ in told(await look(rig, observers=[b"g", b"ff"]))] == [b"b", b"c"]


async def test_deleted_notifications_are_no_longer_found(rig: Rig) -> None:
    await rig.apply(notify(b"a", 5, 6))
    await rig.apply(mutation(b"a", delete(NOTIFY, 5, b"f")))
    assert told(await look(rig)) == [(b"a", COLUMN, b"f", (6,))]


async def test_with_very_many_timestamps_the_oldest_are_returned() -> None:
    """Otherwise, the one that has waited longest would never be deleted."""
    for indexed in (100_000, 10):
        rig = await Rig(notifications_indexed_max=indexed).open()
        for first in range(1, 1000, 100):
            await rig.apply(notify(b"a", *range(first, first + 100)))
        await rig.apply(notify(b"b", 3))
        oldest = tuple(range(notification_scan.TIMESTAMPS_MAX, 0, -1))
        assert told(await look(rig)) == [
            (b"a", COLUMN, b"f", oldest),
            (b"b", COLUMN, b"f", (3,)),
        ]


async def test_very_many_notifications_that_were_not_requested_cost_a_look_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If an observer is paused, one busy cell accumulates millions."""
    looked_at = 0
    every = notification_scan.NotificationLook._entries

    def counted(*arguments: Any) -> Iterator[bytes]:
        nonlocal looked_at
        for key in every(*arguments):
            looked_at += 1
            yield key

    monkeypatch.setattr(notification_scan.NotificationLook, "_entries", counted)
    for indexed in (100_000, 10):
        rig = await Rig(notifications_indexed_max=indexed).open()
        for first in range(1, 1000, 100):
            await rig.apply(notify(b"a", *range(first, first + 100), observer=b"e"))
        await rig.apply(notify(b"a", 5), notify(b"b", 6))
        looked_at = 0
        found = told(await look(rig, observers=[b"f"]))
        assert found == [(b"a", COLUMN, b"f", (5,)), (b"b", COLUMN, b"f", (6,))]
        assert looked_at < 100


async def test_an_answer_says_what_remains_and_splits_no_row(rig: Rig) -> None:
    await rig.apply(*(notify(b"%d" % row, 5, 6) for row in range(5)))
    await rig.apply(notify(b"1", 7, column=b"more"))
    first = await look(rig, row_limit=2)
    assert [row for row, *_ in told(first)] == [b"0", b"1", b"1"]
    assert (first.rest.start, first.rest.end) == (b"2", b"")
    found, _ = await look_at_all(rig, row_limit=2)
    assert [row for row, *_ in found] == [b"0", b"1", b"1", b"2", b"3", b"4"]
    inside = await look(rig, range={"start": b"1", "end": b"3"})
    assert [row for row, *_ in told(inside)] == [b"1", b"1", b"2"]
    assert not inside.HasField("rest")


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([b"", b"\0", b"a", b"a\0", b"b", b"c"]), st.integers(1, 9)),
        unique=True,
        max_size=15,
    ),
    indexed=st.integers(0, 6),
    row_limit=st.integers(1, 3),
    done=st.integers(0, 10),
)
def test_everything_is_found_once_however_little_memory_holds(
    rows: list[tuple[bytes, int]], indexed: int, row_limit: int, done: int
) -> None:
    async def check() -> None:
        rig = await Rig(notifications_indexed_max=indexed).open()
        for row, at in rows:
            await rig.apply(notify(row, at))
        for row, at in rows[:done]:
            await rig.apply(mutation(row, delete(NOTIFY, at, b"f")))
        left = rows[done:]
        found, _ = await look_at_all(rig, row_limit=row_limit)
        assert [(row, times) for row, _, _, times in found] == [
            (row, tuple(sorted((at for r, at in left if r == row), reverse=True)))
            for row in sorted({row for row, _ in left})
        ]

    run_virtually(check())


# ---------------------------------------------------------------- locks


async def test_old_locks_on_the_named_columns_are_returned_with_their_records(rig: Rig) -> None:
    await rig.apply(
        prewrite(b"a", 10, b"value"),
        prewrite(b"b", 20),
        prewrite(b"c", 11, kind=RecordKind.LOCK_ONLY),
        mutation(b"a", put(LOCK, lock_record(10)), column=b"unobserved"),
    )
    result = await look(rig, locked_columns=[COLUMN], locks_before=20)
    assert [(lock.row, lock.column, lock.value) for lock in result.locks] == [
        (b"a", COLUMN, lock_record(10, b"value"))
    ]
    assert not (await look(rig, locked_columns=[b"other"], locks_before=2**64 - 1)).locks
    assert not (await look(rig, locked_columns=[COLUMN])).locks


async def test_a_look_at_a_million_locks_ends_early(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, one answer would stop the server for a second while a job holds them."""
    monkeypatch.setattr(notification_scan, "LOCKS_LOOKED_AT_MAX", 3)
    await rig.apply(*(prewrite(b"%d" % row, 10) for row in range(8)), notify(b"4", 5))
    assert (await look(rig, locked_columns=[b"other"], locks_before=99)).rest.start == b"3"
    found, locked = await look_at_all(rig, locked_columns=[COLUMN], locks_before=99)
    assert locked == [b"%d" % row for row in range(8)]
    assert [row for row, *_ in found] == [b"4"]


async def test_locks_after_the_last_row_of_an_answer_are_left_for_the_next_one(rig: Rig) -> None:
    await rig.apply(notify(b"a", 5), notify(b"b", 5), prewrite(b"a1", 3), prewrite(b"c", 3))
    first = await look(rig, locked_columns=[COLUMN], locks_before=99, row_limit=1)
    assert [row for row, *_ in told(first)] == [b"a"]
    found, locked = await look_at_all(rig, locked_columns=[COLUMN], locks_before=99, row_limit=1)
    assert ([row for row, *_ in found], locked) == ([b"a", b"b"], [b"a1", b"c"])


class VisibleEarly(MemoryStorage):
    """Like LevelDB: what is durable can be read a little before its writer continues."""

    async def write(self, batch: MemoryBatch, then: Callable[[], bool] | None = None) -> bool:
        owned = await super().write(batch, then)
        await asyncio.sleep(1)
        return owned


@pytest.mark.parametrize("kind", [MemoryStorage, VisibleEarly])
async def test_a_commit_in_progress_is_found_as_lock_or_as_notification_at_every_moment(
    kind: type[MemoryStorage],
) -> None:
    """`percolator wait` relies on this: it would miss a change that is in neither for a moment."""
    rig = await Rig(storage=kind(SlowDisk())).open()
    await rig.apply(prewrite(b"a", 10))
    commit = mutation(
        b"a",
        delete(LOCK),
        put(WRITE, write_record(10), 20),
        put(NOTIFY, b"", 20, b"f"),
    )
    committing = asyncio.create_task(rig.mutate(commit))
    looks = 0
    while not committing.done():
        result = await look(rig, locked_columns=[COLUMN], locks_before=99)
        assert len(result.locks) + len(result.notifications) == 1
        looks += 1
        await asyncio.sleep(0.1)
    result = await look(rig, locked_columns=[COLUMN], locks_before=99)
    assert told(result) == [(b"a", COLUMN, b"f", (20,))]
    assert looks > 5


async def test_an_answer_counts_all_notifications_ever_written(rig: Rig) -> None:
    assert (await look(rig)).notifications_written == 0
    await rig.apply(notify(b"a", 5, 6))
    await rig.apply(mutation(b"a", delete(NOTIFY, 5, b"f"), delete(NOTIFY, 6, b"f")))
    assert (await look(rig)).notifications_written == 2


# ---------------------------------------------------------------- refusals


async def test_a_scan_means_a_tablet_at_an_epoch_and_any_schema(rig: Rig) -> None:
    target = pb.TabletTarget(tablet_id=1, epoch=2, schema_version=99)
    await rig.tablet.scan_notifications(pb.NotificationScan(target=target))
    target.epoch = 3
    with pytest.raises(TabletMoved):
        await rig.tablet.scan_notifications(pb.NotificationScan(target=target))


async def test_nonsensical_scans_are_refused_by_name() -> None:
    rig = await Rig(columns_max=1).open()
    asked: list[tuple[str, Any]] = [
        ("range", {"start": b"b", "end": b"a"}),
        ("observers", [b"f", b"g"]),
        ("locked_columns", [b"f", b"g"]),
    ]
    for field, value in asked:
        with pytest.raises(InvalidArgument, match=field):
            await look(rig, **{field: value})


async def test_a_tablet_that_was_lost_answers_nothing(rig: Rig) -> None:
    await rig.apply(notify(b"a", 5))
    rig.owner = False
    with pytest.raises(TabletMoved):
        await look(rig)


# Notifying workers: after notifications are durable, each row to one worker, in short streams.

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


async def test_notifications_are_sent_when_they_are_durable_and_not_before() -> None:
    rig = await WatchedRig().open()
    stream = await opened(rig.watch, b"f")
    told = asyncio.ensure_future(anext(stream))
    writing = asyncio.create_task(rig.mutate(notify(b"a", 5)))
    await asyncio.sleep(0.5)  # half of the second that the disk takes
    assert not told.done()
    await writing
    (hint,) = (await told).notifications
    assert (hint.table_id, hint.row, hint.column) == (TABLE, b"a", COLUMN)
    assert (hint.observer, hint.timestamp) == (b"f", 5)


async def test_what_may_not_be_durable_is_never_reported() -> None:
    for losing in ("owner", "disk"):
        rig = await WatchedRig().open()
        stream = await opened(rig.watch, b"f")
        if losing == "owner":
            rig.owner = False
        else:
            assert isinstance(rig.disk, SlowDisk)
            rig.disk.failure = OSError("broken")
        await rig.mutate(notify(b"a", 5))
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
    await (await opened(watch, b"f", b"g")).aclose()
    assert watch.streams == 0
    watch.tell(TABLE, [key(b"a")])
    assert watch.told == 0


async def test_streams_end_at_the_drain_and_no_others_begin() -> None:
    watch = NotificationWatch()
    stream = await opened(watch, b"f")
    waiting = await under_way(anext(stream, None), seconds=0)
    watch.close()
    assert await waiting is None
    with pytest.raises(NotReady):
        await anext(watch.stream(watching(b"f")))


async def test_nonsensical_watches_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
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
