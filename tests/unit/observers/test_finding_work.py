"""Asking tablets for work, and watching for it, wherever the tablets are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import observes
from percolator.errors import (
    CellAddress,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PercolatorError,
    SchemaError,
    TabletLocation,
    TabletMoved,
    Unavailable,
)
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.observers.backfill import backfill_owed
from percolator.observers.context import Claim, FoundWork, WorkHints, WorkRequest
from percolator.observers.intent_notifications import IntentNotifications
from percolator.observers.registration import register
from percolator.observers.scanner import QueueAdmission, RowLocks, Scanner, lock_name
from percolator.observers.tablet_notifications import TabletPass, find_work, watch_work
from percolator.observers.watched import Watched
from percolator.observers.work_queue import WorkQueue
from percolator.observers.worker import Worker, WorkerLimits
from percolator.protocol import steps
from percolator.protocol.cleanup import Cleanup
from percolator.routing.cells import APPLIED, CellMutation
from percolator.rowstore.intents import BUCKETS, Intent
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell, RowRange
from percolator.v1.master_pb2 import ChangeObserversRequest
from percolator.wire.advisory_locks import AdvisoryLocks
from percolator.wire.status import to_detail
from tests.simulation.virtual_time import VirtualClock
from tests.unit.history.row_site import ONE, OTHER, REST, VALUE, Site, site
from tests.unit.observers.observed_cluster import Observed, copy, observed, source, total
from tests.unit.routing.tablet_servers import Cluster, Server, tablet


class WorkServer(Server):
    """A server with one notification in the first row of every requested range."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_calls: list[pb.ScanNotificationsRequest] = []
        self.serves: set[int] | None = None
        """Ids of its tablets; None for any that it is asked about."""
        self.error: PercolatorError | None = None
        self.moved_to: tuple[TabletLocation, ...] = ()
        self.rows_max = 0
        self.watched: list[pb.WatchNotificationsRequest] = []
        self.hints: asyncio.Queue[pb.WatchNotificationsResponse | None] = asyncio.Queue()
        self.watching = 0

    async def scan_notifications(
        self, request: pb.ScanNotificationsRequest
    ) -> pb.ScanNotificationsResponse:
        self.scan_calls.append(request)
        await self._serve()
        return pb.ScanNotificationsResponse(scans=[self._found(one) for one in request.scans])

    def _found(self, scan: pb.NotificationScan) -> pb.NotificationScanResult:
        if self.error is not None:
            return pb.NotificationScanResult(error=to_detail(self.error))
        if self.serves is not None and scan.target.tablet_id not in self.serves:
            moved = TabletMoved("not here", tablet_id=1, epoch=1, locations=self.moved_to)
            return pb.NotificationScanResult(error=to_detail(moved))
        row = scan.range.start
        return pb.NotificationScanResult(
            notifications=[{"row": row, "column": b"c", "observer": b"f", "timestamps": [9, 7]}],
            locks=[Cell(row=row, column=b"c", value=b"lock")],
            rest=RowRange(start=row + b"\1", end=scan.range.end) if self.rows_max else None,
            notifications_written=5,
        )

    async def watch_notifications(
        self, request: pb.WatchNotificationsRequest
    ) -> AsyncGenerator[pb.WatchNotificationsResponse, None]:
        if self.down:
            raise Unavailable("connection refused")
        self.watched.append(request)
        self.watching += 1
        try:
            yield pb.WatchNotificationsResponse()
            while (hints := await self.hints.get()) is not None:
                yield hints
        finally:
            self.watching -= 1


@pytest.fixture
@asynccontextmanager
async def server() -> AsyncIterator[WorkServer]:
    """A tablet server that a test gives its work."""
    yield WorkServer()


def whole(start: bytes = b"", end: bytes = b"") -> WorkRequest:
    return WorkRequest(1, start, end, (b"f",), (b"c",), locks_before=99)


async def find(cluster: Cluster, *requests: WorkRequest, seconds: float = 10) -> list[FoundWork]:
    deadline = cluster.deadline(seconds)
    return await find_work(cluster.world, cluster.tablets, requests, deadline)


def rows(found: Sequence[FoundWork]) -> list[bytes]:
    return [waiting.row for one in found for waiting in one.waiting]


async def test_all_tablets_of_a_server_are_asked_in_one_call() -> None:
    one, other = WorkServer(), WorkServer()
    cluster = Cluster({"a:1": one, "b:1": other})
    cluster.tablets.learn(
        [
            tablet("a:1", b"", b"k", tablet_id=1),
            tablet("b:1", b"k", b"t", tablet_id=2),
            tablet("a:1", b"t", b"", tablet_id=3, epoch=4),
        ]
    )
    found = await find(cluster, whole())
    assert rows(found) == [b"", b"k", b"t"]
    assert [len(call.scans) for call in one.scan_calls + other.scan_calls] == [2, 1]
    last = found[-1]
    assert (last.request.start, last.request.end, last.rest) == (b"t", b"", None)
    assert last.place == (3, 4)
    assert last.waiting[0].timestamps == (9, 7)
    assert (last.locks[0].value, last.mark, last.problem) == (b"lock", 5, None)
    scan = one.scan_calls[0].scans[1]
    assert (list(scan.observers), list(scan.locked_columns)) == ([b"f"], [b"c"])
    assert (scan.locks_before, scan.target.epoch, scan.range.start) == (99, 4, b"t")


async def test_an_answer_says_what_remains_of_its_range(server: WorkServer) -> None:
    server.rows_max = 1
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("a:1", b"m", b"", tablet_id=2)])
    found = await find(cluster, whole(start=b"b", end=b"p"))
    assert [one.rest for one in found] == [(b"b\1", b"m"), (b"m\1", b"p")]


async def test_after_a_split_both_halves_are_asked() -> None:
    old, new = WorkServer(), WorkServer()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    old.serves = {2}
    old.moved_to = (tablet("a:1", b"", b"m", tablet_id=2), tablet("b:1", b"m", b"", tablet_id=3))
    found = await find(cluster, whole())
    assert rows(found) == [b"", b"m"]
    assert [one.place for one in found] == [(2, 1), (3, 1)]


async def test_a_tablet_that_has_moved_is_located_through_the_master() -> None:
    old, new = WorkServer(), WorkServer()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    old.down = True
    assert rows(await find(cluster, whole())) == [b""]
    assert [call.scans[0].target.epoch for call in new.scan_calls] == [2]


async def test_a_master_is_asked_about_a_server_that_is_not_ready() -> None:
    """It may be about to end, and its tablets be elsewhere already."""
    old, new = WorkServer(), WorkServer()
    old.error = NotReady("the server is shutting down")
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    assert rows(await find(cluster, whole())) == [b""]
    assert cluster.clock.monotonic_seconds() < 1.0


async def test_other_tablets_are_answered_if_one_has_no_server() -> None:
    one, other = WorkServer(), WorkServer()
    cluster = Cluster({"a:1": one, "b:1": other})
    cluster.tablets.learn([tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2)])
    one.error = NotReady("it is being opened", retry_after_seconds=0.1)
    first, second = await find(cluster, whole(), seconds=3)
    assert isinstance(first.problem, NotReady)
    assert (first.place, first.rest, first.waiting) == (None, (b"", b"m"), [])
    assert rows([second]) == [b"m"]
    assert len(other.scan_calls) == 1


async def test_a_permanent_error_is_not_retried(server: WorkServer) -> None:
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    server.error = InvalidArgument("observers", "too many")
    (found,) = await find(cluster, whole())
    assert isinstance(found.problem, InvalidArgument)
    assert len(server.scan_calls) == 1

    async def no_table(table_id: int, row: bytes) -> list[TabletLocation]:
        raise SchemaError("there is no such table")

    empty = Cluster({})
    empty.tablets._find = no_table
    (found,) = await find(empty, whole())
    assert isinstance(found.problem, SchemaError)


async def test_an_unknown_tablet_is_searched_for_until_the_deadline() -> None:
    cluster = Cluster({})
    started = cluster.clock.monotonic_seconds()
    (found,) = await find(cluster, whole(), seconds=2)
    assert "no tablet is known" in str(found.problem)
    assert cluster.clock.monotonic_seconds() - started >= 2


# ---------------------------------------------------------------- watching


class Watcher:
    """Reads the hints of a cluster whose masters say `cluster.now_at`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.heard: list[WorkHints] = []
        self.searches = 0
        self.task = asyncio.create_task(self._read())

    async def _find(self, table_id: int, deadline: float) -> list[TabletLocation]:
        self.searches += 1
        if not self.cluster.now_at:
            raise DeadlineExceeded("no master answers")
        self.cluster.tablets.replace(table_id, self.cluster.now_at)
        return self.cluster.now_at

    async def _read(self) -> None:
        watching = {1: [b"f"]}
        hints = watch_work(self.cluster.world, self.cluster.tablets, self._find, watching)
        async with aclosing(hints) as stream:
            async for one in stream:
                self.heard.append(one)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def hint(row: bytes, left_out: int = 0) -> pb.WatchNotificationsResponse:
    return pb.WatchNotificationsResponse(
        notifications=[{"table_id": 1, "row": row, "observer": b"f"}], left_out=left_out
    )


async def unanswered(table_id: int, row: bytes) -> list[TabletLocation]:
    await asyncio.sleep(5.0)
    raise DeadlineExceeded("no master answered in time")


async def test_while_no_master_answers_many_unknown_tablets_cost_no_more_than_one(
    server: WorkServer,
) -> None:
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1", b"m", b"", tablet_id=9)])
    cluster.tablets._find = unanswered
    lost = [whole(bytes([row]), bytes([row + 1])) for row in b"abcdefgh"]
    finding = asyncio.ensure_future(find(cluster, *lost, whole(b"m")))
    await asyncio.sleep(6.0)
    assert len(server.scan_calls) == 1
    found = await finding
    assert rows(found) == [b"m"]
    assert [str(one.problem) for one in found[:-1]] == ["no master answered in time"] * len(lost)
    assert cluster.clock.monotonic_seconds() < 16.0


async def test_while_no_master_answers_many_refused_tablets_cost_no_more_than_one(
    server: WorkServer,
) -> None:
    server.error = NotReady("the server is shutting down")
    cluster = Cluster({"a:1": server})
    starts = [b"", *(bytes([letter]) for letter in b"bcdefgh")]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], b""], strict=True)):
        cluster.tablets.learn([tablet("a:1", start, end, tablet_id=number + 1)])
    cluster.tablets._find = unanswered
    found = await find(cluster, whole())
    assert {type(one.problem) for one in found} == {NotReady}
    assert cluster.clock.monotonic_seconds() < 16.0


async def test_hints_from_all_servers_of_a_table_are_delivered() -> None:
    one, other, idle = WorkServer(), WorkServer(), WorkServer()
    cluster = Cluster({"a:1": one, "b:1": other, "c:1": idle})
    cluster.now_at = [tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2)]
    watcher = Watcher(cluster)
    await asyncio.sleep(0.1)
    assert [(h.address, h.began) for h in watcher.heard] == [("a:1", True), ("b:1", True)]
    assert one.watched[0].watched[0].observers == [b"f"]
    one.hints.put_nowait(hint(b"x"))
    other.hints.put_nowait(hint(b"y", left_out=3))
    await asyncio.sleep(0.1)
    told = [(h.address, h.notifications[0].row, h.left_out, h.began) for h in watcher.heard[2:]]
    assert told == [("a:1", b"x", 0, False), ("b:1", b"y", 3, False)]
    assert idle.watched == []
    await watcher.stop()
    assert one.watching == other.watching == 0


async def test_a_new_server_of_the_table_is_watched_and_a_former_one_no_longer() -> None:
    old, new = WorkServer(), WorkServer()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.now_at = [tablet("a:1")]
    watcher = Watcher(cluster)
    await asyncio.sleep(1)
    cluster.tablets.learn([tablet("b:1", epoch=2)])  # as a transaction of this process learned it
    await asyncio.sleep(0.6)
    assert (old.watching, new.watching) == (0, 1)
    cluster.now_at = [tablet("a:1", epoch=3)]  # only the master knows this
    await asyncio.sleep(6)
    assert (old.watching, new.watching) == (1, 0)
    await watcher.stop()


async def test_a_stream_that_ends_or_breaks_is_reopened(server: WorkServer) -> None:
    cluster = Cluster({"a:1": server})
    cluster.now_at = [tablet("a:1")]
    watcher = Watcher(cluster)
    await asyncio.sleep(0.1)
    server.hints.put_nowait(None)
    server.down = True
    await asyncio.sleep(5)
    assert (len(server.watched), server.watching) == (1, 0)
    server.down = False
    await asyncio.sleep(3)
    assert [h.began for h in watcher.heard] == [True, True]
    await watcher.stop()


async def test_watching_continues_while_no_master_answers(server: WorkServer) -> None:
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    watcher = Watcher(cluster)
    await asyncio.sleep(20)
    assert server.watching == 1
    assert watcher.searches > 2
    server.hints.put_nowait(hint(b"x"))
    await asyncio.sleep(0.1)
    assert len(watcher.heard) == 2
    await watcher.stop()


async def test_a_new_server_is_watched_in_time_though_no_master_answers_about_many_tables(
    server: WorkServer,
) -> None:
    cluster = Cluster({"a:1": server})

    async def unanswered(table_id: int, deadline: float) -> Sequence[TabletLocation]:
        await asyncio.sleep(deadline - cluster.clock.monotonic_seconds())
        raise DeadlineExceeded("no master answered in time")

    async def watch() -> None:
        watching = {table_id: [b"f"] for table_id in range(1, 21)}
        hints = watch_work(cluster.world, cluster.tablets, unanswered, watching)
        async with aclosing(hints) as stream:
            async for _ in stream:
                pass

    watching = asyncio.create_task(watch())
    await asyncio.sleep(1)
    cluster.tablets.learn([tablet("a:1")])
    await asyncio.sleep(10)
    assert server.watching == 1
    watching.cancel()
    await asyncio.wait([watching])


CELLS = 3_000
LIVES_MILLISECONDS = 1_000_000
_OBSERVER = b"watcher"


class Observer:
    """An observer that a pass asks about."""

    id = _OBSERVER

    def __init__(self, table_id: int) -> None:
        self.table_id = table_id


class EagerWorker:
    """Takes everything that a pass finds, as `percolator.observers.context.Admission`."""

    def __init__(self, table_id: int) -> None:
        self.watched = [Observer(table_id)]
        self.rows: set[bytes] = set()

    @property
    def admitted(self) -> int:
        return len(self.rows)

    def observer(self, table_id: int, observer: bytes) -> Any:
        (one,) = self.watched
        return one if (table_id, observer) == (one.table_id, one.id) else None

    def has_space(self, watched: object) -> bool:
        return True

    def knows(self, claim: Claim) -> bool:
        return claim.row in self.rows

    async def claim(self, claims: Sequence[Claim]) -> list[bool]:
        return [True] * len(claims)

    def admit(self, claim: Claim, timestamps: Iterable[int]) -> None:
        self.rows.add(claim.row)

    def release(self, claims: Iterable[Claim]) -> None:
        """Nothing is held."""


class Watching:
    """A worker beside one transaction, and what its passes cost."""

    def __init__(self, at: Site, table_id: int, primary: CellAddress) -> None:
        self.at = at
        self.table_id = table_id
        self.primary = primary
        self.start = 0
        self.worker = EagerWorker(table_id)
        self.asked = 0
        self.pages = 0
        self._mutate, self._page = at.env.cells.mutate, at.intents.page
        cells = SimpleNamespace(mutate=self._counted)
        env: Any = SimpleNamespace(
            cells=cells,
            limits=at.env.limits,
            timestamps=at.env.timestamps,
            now=at.env.now,
            deadline=at.env.deadline,
        )
        intents: Any = SimpleNamespace(
            page=self._read, delete=at.intents.delete, touch=at.intents.touch
        )
        world = at.database.internal.engine.world
        self.notifications = IntentNotifications(world, env, Cleanup(at.env), intents)

    async def _counted(self, mutations: Sequence[CellMutation], deadline: float) -> list[Any]:
        self.asked += len(mutations)
        return await self._mutate(mutations, deadline)

    async def _read(self, *arguments: Any) -> Any:
        self.pages += 1
        return await self._page(*arguments)

    async def announce(self, cells: int, *, ttl_milliseconds: int = LIVES_MILLISECONDS) -> None:
        """Locks the primary, and so many cells that are observed."""
        self.start = await self.at.now()
        lock = LockRecord(
            self.start, self.start + 1, ttl_milliseconds, RecordKind.PUT, b"", self.primary, b"3"
        )
        cells_of_it = [self.primary, *map(self.cell, range(cells))]
        prewrites = [
            CellMutation(
                one[0], steps.prewrite(one.row, one.column, self.start, lock.encode(), None)
            )
            for one in cells_of_it
        ]
        answers = await self._mutate(prewrites, self.at.env.now() + 60.0)
        assert set(answers) == {APPLIED}
        intents = [Intent(*one, _OBSERVER, self.start, is_certain=False) for one in cells_of_it[1:]]
        if intents:
            await self.at.intents.write(intents, self.at.env.now() + 60.0)

    def cell(self, number: int) -> CellAddress:
        return CellAddress(self.table_id, b"row %05d" % number, VALUE.name)

    async def commit(self, *cells: CellAddress) -> None:
        commit = await self.at.now()
        record = WriteRecord(self.start, RecordKind.PUT, b"3").encode()
        done = [
            CellMutation(
                one.table_id,
                steps.commit_secondary(one.row, one.column, self.start, commit, record, ()),
            )
            for one in cells
        ]
        assert set(await self._mutate(done, self.at.env.now() + 60.0)) == {APPLIED}

    async def look(self) -> tuple[int, int]:
        """A pass. Returns how many steps and pages it has asked for."""
        self.asked = self.pages = 0
        await self.notifications.look(cast("Any", self.worker), everything=True)
        return self.asked, self.pages


@pytest.fixture(name="at")
@asynccontextmanager
async def watching() -> AsyncIterator[Watching]:
    async with site(VirtualClock(asyncio.get_running_loop())) as at:
        other = await at.table_id(OTHER)
        yield Watching(at, await at.table_id(ONE), CellAddress(other, b"primary", REST.name))


async def test_a_pass_asks_once_for_an_open_transaction_however_many_cells_it_has(
    at: Watching,
) -> None:
    await at.announce(CELLS)
    asked, _ = await at.look()
    assert asked <= CELLS
    asked, pages = await at.look()
    assert asked == 1
    assert pages <= 2 * len(BUCKETS), "behind one page, all others of it are passed"


async def test_it_is_asked_about_the_less_often_the_longer_it_is_open(at: Watching) -> None:
    await at.announce(100)
    await at.look()
    await asyncio.sleep(160.0)
    looks = 0
    for _ in range(100):
        looks += (await at.look())[0]
        await asyncio.sleep(0.2)
    assert 20.0 / 2.0 <= looks <= 20.0 / 2.0 + 2


async def test_its_changes_are_found_in_the_next_pass_after_it_has_committed(at: Watching) -> None:
    await at.announce(CELLS)
    for _ in range(10):
        await at.look()
        await asyncio.sleep(0.2)
    await asyncio.sleep(12.0)  # the passes that follow begin far behind its intents
    await at.look()
    await at.commit(at.primary, *map(at.cell, range(CELLS)))
    await asyncio.sleep(2.0)
    await at.look()
    assert len(at.worker.rows) == CELLS


async def test_of_a_cell_that_the_owner_did_not_commit_any_more_the_change_is_found(
    at: Watching,
) -> None:
    await at.announce(10, ttl_milliseconds=100)
    await at.look()
    await at.commit(at.primary, at.cell(0))
    for _ in range(3):
        await asyncio.sleep(2.0)
        await at.look()
    assert len(at.worker.rows) == 10


async def test_what_a_dead_owner_has_announced_is_rolled_back_and_cleared(at: Watching) -> None:
    await at.announce(300, ttl_milliseconds=100)
    for _ in range(4):
        await at.look()
        await asyncio.sleep(2.0)
    assert await at.at.all_intents() == []
    assert not at.worker.rows


async def test_other_changes_are_found_while_it_is_open(at: Watching) -> None:
    await at.announce(CELLS)
    await at.look()
    first, at.start = at.start, 0
    await asyncio.sleep(1.0)
    at.primary = at.cell(CELLS)
    await at.announce(0)
    intent = Intent(*at.primary, _OBSERVER, at.start, is_certain=False)
    await at.at.intents.write([intent], at.at.env.now() + 60.0)
    await at.commit(at.primary)
    await at.look()
    assert at.worker.rows == {at.primary.row}
    assert first < at.start


# Finding work by scanning: rows that others have locked are skipped, and no place is missed.


class Locks(AdvisoryLocks):
    """The locks of one of several workers. Each name is held by at most one of them."""

    def __init__(self, holders: dict[bytes, object]) -> None:
        self._holders = holders
        self.asked: list[bytes] = []

    async def try_lock(self, names: Sequence[bytes]) -> list[bool]:
        self.asked += names
        return [self._holders.setdefault(name, self) is self for name in names]

    async def renew(self, names: Sequence[bytes]) -> list[bool]:
        return [self._holders.get(name) is self for name in names]

    async def unlock(self, names: Sequence[bytes]) -> None:
        for name in names:
            if self._holders.get(name) is self:
                del self._holders[name]


@observes(source, name="copying")
async def copying(tx: Any, row: str) -> None:
    await tx.set(row, copy, await tx.get(row, source))


ROWS = [f"{letter}{number}" for letter in "aghmtz" for number in range(10)]


async def backlog(world: Observed) -> Watched:
    """Creates a backlog in two tablets. Returns the observer that it is for."""
    (watched,) = await register(world.context, [copying])
    await backfill_owed(world.context, watched)
    for row in ROWS:
        await world.put(row, 1)
    await world.db.internal.engine.env.background.drain(1.0)
    return watched


async def one_pass(world: Observed, watched: Watched, locks: Locks) -> set[bytes]:
    """The rows that a worker takes in one pass that begins now."""
    context = replace(world.context, locks=locks)
    queue = WorkQueue(
        rows_max=1_000,
        bytes_max=1 << 20,
        now=context.env.now,
        hot_cells=context.env.hot_cells,
        on_ready=lambda: None,
        on_finished_before=Mock(),
        on_space=Mock(),
    )
    admission = QueueAdmission(queue, RowLocks(context, queue), [watched])
    await context.notifications.look(admission, everything=True)
    return {work.row for work in queue.all()}


async def test_a_pass_finds_everything_wherever_it_begins() -> None:
    for seed in range(10):
        async with observed(seed=seed) as world:
            watched = await backlog(world)
            taken = await one_pass(world, watched, Locks({}))
            assert taken == {row.encode() for row in ROWS}


async def test_locks_that_cannot_be_resolved_hold_up_a_pass_once_and_nothing_is_missed(
    world: Observed,
) -> None:
    watched = await backlog(world)
    background = world.db.internal.engine.env.background
    with patch.object(background, "start", lambda work: work.close()):
        for row in ("a-locked", "z-locked"):
            tx = world.db.transaction()
            tx._only_two_phases = True  # only they leave locks
            await tx.set("0", total, 1)
            await tx.set(row, source, 7)
            await tx.commit()
    await asyncio.sleep(2.0)
    silent = DeadlineExceeded("no server has the primary")
    with patch.object(world.context.cleanup, "resolve", side_effect=silent) as resolve:
        taken = await one_pass(world, watched, Locks({}))
    assert taken == {row.encode() for row in ROWS}
    assert resolve.call_count == 1


async def test_rows_that_another_worker_has_locked_are_left_to_it_and_no_row_is_taken_twice() -> (
    None
):
    for seed in range(10):
        async with observed(seed=seed) as world:
            watched = await backlog(world)
            holders: dict[bytes, object] = {lock_name(watched, b"h5"): "another worker"}
            first = await one_pass(world, watched, Locks(holders))
            second = await one_pass(world, watched, Locks(holders))
            assert first
            assert b"h5" not in first | second
            assert not first & second


async def test_locks_are_kept_for_a_while_when_the_work_is_done(world: Observed) -> None:
    """A pass of another worker that has just seen the notifications would take them."""
    holders: dict[bytes, object] = {}
    await backlog(world)
    async with Worker(replace(world.context, locks=Locks(holders)), [copying]):
        await world.until_nothing_waits()
        assert len(holders) == len(ROWS)
        await asyncio.sleep(2.5)
        assert holders == {}


async def test_a_lock_that_is_taken_again_is_not_released_for_the_work_before(
    world: Observed,
) -> None:
    holders: dict[bytes, object] = {}
    watched = await backlog(world)
    worker = Worker(replace(world.context, locks=Locks(holders)), [copying])
    async with worker:
        await world.until_nothing_waits()
        assert worker._parts is not None
        name = lock_name(watched, ROWS[0].encode())
        assert await worker._parts.locks.take([name]) == [True]
        await asyncio.sleep(2.5)
        assert list(holders) == [name]


async def test_a_worker_that_stops_releases_the_locks_of_handled_work(world: Observed) -> None:
    holders: dict[bytes, object] = {}
    await backlog(world)
    async with Worker(replace(world.context, locks=Locks(holders)), [copying]):
        await world.until_nothing_waits()
    await world.db.internal.engine.env.background.drain(1.0)
    assert holders == {}


async def test_a_worker_that_is_started_twice_at_once_starts_once(world: Observed) -> None:
    worker = Worker(world.context, [copying])
    started = await asyncio.gather(worker.start(), worker.start(), return_exceptions=True)
    assert [str(one) for one in started if one] == ["this worker was already started"]
    assert await worker.stop()


@observes(source, name="copying")
async def never_copying(tx: Any, row: str) -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_worker_that_stops_releases_the_locks_of_runs_that_it_gives_up(
    world: Observed,
) -> None:
    """Otherwise, other workers would leave the rows alone until the locks expire."""
    holders: dict[bytes, object] = {}
    await backlog(world)
    worker = Worker(replace(world.context, locks=Locks(holders)), [never_copying])
    async with worker:
        await asyncio.sleep(5.0)
        assert len(holders) == len(ROWS)
        assert not await worker.stop(drain_seconds=0.5)
    await world.db.internal.engine.env.background.drain(1.0)
    assert holders == {}


async def test_a_worker_releases_the_locks_of_an_observer_that_is_paused(world: Observed) -> None:
    holders: dict[bytes, object] = {}
    await backlog(world)
    limits = WorkerLimits(concurrency_max=1)
    worker = Worker(replace(world.context, locks=Locks(holders)), [never_copying], limits)
    async with worker:
        await asyncio.sleep(5.0)
        assert len(holders) == len(ROWS)
        pause = ChangeObserversRequest(table="docs", pause=["copying"])
        await world.context.catalog.change_observers(pause, world.context.env.deadline())
        await asyncio.sleep(5.0)
        assert len(holders) == 1, "the one whose run is in progress"
        await worker.stop(drain_seconds=0.0)


async def test_work_that_a_dead_worker_had_locked_is_found_once_its_locks_are_gone(
    world: Observed,
) -> None:
    holders: dict[bytes, object] = {}
    watched = await backlog(world)
    holders |= {lock_name(watched, row.encode()): "dead" for row in ROWS}
    worker = Worker(
        replace(world.context, locks=Locks(holders)),
        [copying],
        WorkerLimits(scan_pause_seconds_max=2.0),
    )
    async with worker:
        await asyncio.sleep(10.0)
        assert worker.counters["docs", "copying"].runs == 0
        holders.clear()
        await world.until_nothing_waits()
        assert worker.counters["docs", "copying"].commits == len(ROWS)


async def test_young_notifications_are_left_to_the_worker_that_was_told_of_them(
    world: Observed,
) -> None:
    watched = await backlog(world)
    queue = WorkQueue(
        rows_max=1_000,
        bytes_max=1 << 20,
        now=world.context.env.now,
        hot_cells=world.context.env.hot_cells,
        on_ready=lambda: None,
        on_finished_before=Mock(),
        on_space=Mock(),
    )
    admission = QueueAdmission(queue, RowLocks(world.context, queue), [watched])
    assert await world.context.notifications.look(admission, everything=False) == 0
    await asyncio.sleep(3.0)
    admission = QueueAdmission(queue, RowLocks(world.context, queue), [watched])
    assert await world.context.notifications.look(admission, everything=False) == len(ROWS)


async def test_a_scanner_with_nothing_to_do_scans_less_and_less_often(world: Observed) -> None:
    (watched,) = await register(world.context, [copying])
    queue = Mock()
    scanner = Scanner(world.context, queue, Mock(), lambda: [watched], pause_seconds_max=5.0)
    async with _running(scanner.scan_forever):
        await asyncio.sleep(100.0)
        before = scanner.passes
        await asyncio.sleep(100.0)
        assert 20 <= scanner.passes - before <= 41
        scanner.wake()
        await asyncio.sleep(0.01)
        assert scanner.passes - before <= 42


@asynccontextmanager
async def _running(work: Callable[[], Any]) -> Any:
    task = asyncio.ensure_future(work())
    try:
        yield
    finally:
        task.cancel()


@given(st.binary(max_size=12), st.binary(max_size=12), st.integers())
def test_a_random_row_is_inside_its_tablet(one: bytes, other: bytes, seed: int) -> None:
    start, end = min(one, other), max(one, other)
    if end and start == end:
        return
    tablet = TabletLocation(1, 1, 1, start, end, "somewhere")
    context = Mock()
    context.world.random = Random(seed)
    row = TabletPass(context, QueueAdmission(Mock(), Mock(), []))._random_row(tablet)
    if row is not None:
        assert start < row
        assert not end or row < end
    else:
        assert end


async def test_a_worker_that_ends_with_a_long_run_leaves_the_rest_to_others_at_once(
    world: Observed,
) -> None:
    began, may_end = asyncio.Event(), asyncio.Event()

    @observes(source, name="slow", concurrency=1, deadline=1_000.0)
    async def slow(tx: Any, row: str) -> None:
        if not began.is_set():
            began.set()
            await may_end.wait()
        await tx.set(row, copy, 1)

    await register(world.context, [slow])
    for row in ROWS:
        await world.put(row, 1)
    holders: dict[bytes, object] = {}
    first, second = (Worker(replace(world.context, locks=Locks(holders)), [slow]) for _ in range(2))
    await first.start()
    await began.wait()
    await asyncio.sleep(5.0)  # by now, everything in its queue is locked
    stopping = asyncio.create_task(first.stop(drain_seconds=500.0))
    async with second:

        async def is_done() -> bool:
            return len(await world.waiting()) == 1

        await world.until(is_done)
        assert not stopping.done()
        may_end.set()
        assert await stopping
        await world.until_nothing_waits()
