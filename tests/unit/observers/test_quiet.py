"""Waiting is exact: even work that is never in the tablet just asked is waited for."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator import Limits, RetryPolicy, Table
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.observing import worker_context
from percolator.errors import DeadlineExceeded, InvalidArgument, NotReady, TabletMoved
from percolator.observers.dead_letters import dead_letters_table
from percolator.observers.quiet import Quiet, Remaining, wait_until_quiet
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import cells_pb2, master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock

pages = Table("pages")
ROWS = (b"a", b"z")
"""A row in each tablet."""
AT = 1 << 60


class Restless(ClusterInMemory):
    """Has one notification, which moves to the other tablet as soon as its tablet has answered."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.moves_left = 0
        self.answers = 0
        self.refusing = False
        self.scans_refused = 0
        """Only dead letters are scanned."""
        self.serves_scans = True
        self._at = AT

    async def scan_notifications(
        self, request: pb.ScanNotificationsRequest
    ) -> pb.ScanNotificationsResponse:
        response = pb.ScanNotificationsResponse()
        for scan in request.scans:
            self.answers += 1
            if self.refusing:
                error = to_detail(NotReady("it is being opened", retry_after_seconds=0.1))
                response.scans.add(error=error)
                continue
            one = await super().scan_notifications(pb.ScanNotificationsRequest(scans=[scan]))
            response.scans.extend(one.scans)
            if self.moves_left:
                self.moves_left -= 1
                tablet = self.tablets[scan.target.tablet_id]
                here = tablet.identity.start != b""
                # In the order of an observer's run: its writes first, then it deletes its trigger.
                await self.change(ROWS[here], self._at + 1, put=True)
                await self.change(ROWS[not here], self._at, put=False)
                self._at += 1
        return response

    async def scan(self, request: pb.ScanRequest) -> AsyncIterator[pb.ScanResponse]:
        if not self.serves_scans:
            self.scans_refused += 1
            raise TabletMoved("not here", tablet_id=request.target.tablet_id, epoch=1)
        async for response in super().scan(request):
            yield response

    async def settle(self) -> None:
        """Removes the notification: the work is done."""
        for row in ROWS:
            for at in range(AT, self._at + 1):
                await self.change(row, at, put=False)

    async def change(self, row: bytes, at: int, *, put: bool) -> None:
        kind = pb.Change.KIND_PUT if put else pb.Change.KIND_DELETE
        change = pb.Change(
            kind=kind, space=cells_pb2.SPACE_NOTIFY, timestamp=at, qualifier=b"index"
        )
        (tablet,) = [
            one for one in self.tablets.values() if (one.identity.start != b"") is (row == b"z")
        ]
        target = pb.TabletTarget(
            tablet_id=tablet.identity.tablet_id, epoch=1, schema_version=tablet.schema_version
        )
        mutation = pb.Mutation(row=row, column=b"body", changes=[change])
        batch = pb.MutationBatch(target=target, mutations=[mutation])
        deadline = self._clock.monotonic_seconds() + 1
        answer = await tablet.mutate(batch, deadline_seconds=deadline)
        assert (answer.mutations, len(answer.unapplied)) == (1, 0)


@asynccontextmanager
async def observed() -> AsyncIterator[tuple[Restless, Database]]:
    clock = VirtualClock(asyncio.get_running_loop(), wall_milliseconds=(AT >> 18) + 1)
    cluster = Restless(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as db:
        await db.create_table(pages, splits=["m"])
        observer = master_pb2.Observer(name="index", columns=[b"body"])
        request = master_pb2.ChangeObserversRequest(table="pages", add=[observer])
        await cluster.change_observers(request)
        yield cluster, db


async def wait(db: Database, seconds: float | None = None) -> tuple[Quiet, list[Remaining]]:
    seen: list[Remaining] = []
    context = worker_context(db.internal.engine)
    return await wait_until_quiet(context, seconds, on_pass=seen.append), seen


async def test_an_idle_cluster_is_quiet_after_two_passes() -> None:
    async with observed() as (cluster, db):
        quiet, _ = await wait(db)
        assert (quiet.passes, cluster.answers) == (2, 4)
        assert not quiet.paused
        assert not quiet.dead_letters


async def test_work_that_keeps_moving_between_tablets_is_waited_for() -> None:
    async with observed() as (cluster, db):
        await cluster.change(ROWS[1], AT, put=True)
        cluster.moves_left = 40
        waiting = asyncio.create_task(wait(db))
        while cluster.moves_left:
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await asyncio.sleep(5)
        assert not waiting.done()
        await cluster.settle()
        _, seen = await waiting
        unseen = [one for one in seen if not one]
        assert len(unseen) >= 18, "the work was found, but this test is about work that is not"


async def test_a_tablet_that_does_not_answer_may_hide_work() -> None:
    async with observed() as (cluster, db):
        await cluster.change(ROWS[0], AT, put=True)
        cluster.refusing = True
        with pytest.raises(DeadlineExceeded, match="it is being opened"):
            await wait(db, 30)
        waiting = asyncio.create_task(wait(db))
        await asyncio.sleep(60)
        assert not waiting.done()
        await cluster.settle()
        cluster.refusing = False
        await waiting


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
async def test_a_timeout_that_is_not_positive_and_finite_is_refused(seconds: float) -> None:
    async with observed() as (_, db):
        with pytest.raises(InvalidArgument, match="timeout"):
            await wait(db, seconds)


async def test_a_deadline_is_kept_even_if_no_tablet_answers() -> None:
    async with observed() as (cluster, db):
        cluster.refusing = True
        started = db.internal.engine.now()
        with pytest.raises(DeadlineExceeded):
            await wait(db, 1)
        assert db.internal.engine.now() - started < 1.5


async def test_dead_letters_that_cannot_be_counted_yet_are_waited_for() -> None:
    async with observed() as (cluster, db):
        await dead_letters_table(worker_context(db.internal.engine))
        cluster.serves_scans = False
        waiting = asyncio.create_task(wait(db))
        await asyncio.sleep(60)
        assert not waiting.done()
        assert cluster.scans_refused
        cluster.serves_scans = True
        quiet, _ = await waiting
        assert not quiet.dead_letters


async def test_a_deadline_is_kept_even_if_dead_letters_cannot_be_counted() -> None:
    async with observed() as (cluster, db):
        await dead_letters_table(worker_context(db.internal.engine))
        cluster.serves_scans = False
        started = db.internal.engine.now()
        with pytest.raises(DeadlineExceeded, match=r"timed out after 1 s.*not here"):
            await wait(db, 1)
        assert db.internal.engine.now() - started < 1.5


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "no worker" in one.getMessage()]


async def test_waiting_for_an_observer_that_no_worker_runs_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with observed() as (cluster, db):
        await cluster.change(ROWS[0], AT, put=True)
        waiting = asyncio.create_task(wait(db))
        await asyncio.sleep(2)
        assert not _warnings(caplog), "a worker may just be starting"
        await asyncio.sleep(60)
        [said] = _warnings(caplog)
        assert "observer 'index' of table 'pages'" in said
        await cluster.settle()
        await waiting


async def test_nothing_is_said_if_a_worker_runs_it_or_if_nobody_knows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with observed() as (cluster, db):
        for known in ({("pages", "index")}, None):

            async def running(known: set[tuple[str, str]] | None = known) -> object:
                return known

            monkeypatch.setattr(db.internal.engine.activity, "running_observers", running)
            await cluster.change(ROWS[0], AT, put=True)
            waiting = asyncio.create_task(wait(db))
            await asyncio.sleep(30)
            await cluster.settle()
            await waiting
        assert not _warnings(caplog)
