"""Waiting is exact: even work that is never in the tablet just asked is waited for."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from percolator import Limits, RetryPolicy, Table, aio, observes
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.observing import worker_context
from percolator.cli.app import app
from percolator.errors import DeadlineExceeded, InvalidArgument, NotReady, TabletMoved
from percolator.observers.dead_letters import dead_letters_table
from percolator.observers.quiet import Quiet, Remaining, wait_until_quiet
from percolator.observers.trace import Trace, logger, read_trace, trace_to
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import cells_pb2, master_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.observers.observed_cluster import Observed, copy, observed, source, total

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


@pytest.fixture
@asynccontextmanager
async def restless() -> AsyncIterator[tuple[Restless, Database]]:
    clock = VirtualClock(asyncio.get_running_loop(), wall_milliseconds=(AT >> 18) + 1)
    cluster = Restless(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    async with await connect_to(world, [ADDRESS], Limits(), RetryPolicy()) as db:
        await db.create_table(pages, splits=["m"])
        observer = master_pb2.Observer(name="index", columns=[b"body"])
        request = master_pb2.ChangeObserversRequest(table="pages", add=[observer])
        await cluster.change_observers(request)
        yield cluster, db


@pytest.fixture
@asynccontextmanager
async def cluster(restless: tuple[Restless, Database]) -> AsyncIterator[Restless]:
    yield restless[0]


@pytest.fixture
@asynccontextmanager
async def db(restless: tuple[Restless, Database]) -> AsyncIterator[Database]:
    yield restless[1]


async def wait(db: Database, seconds: float | None = None) -> tuple[Quiet, list[Remaining]]:
    seen: list[Remaining] = []
    context = worker_context(db.internal.engine)
    return await wait_until_quiet(context, seconds, on_pass=seen.append), seen


async def test_an_idle_cluster_is_quiet_after_two_passes(cluster: Restless, db: Database) -> None:
    quiet, _ = await wait(db)
    assert (quiet.passes, cluster.answers) == (2, 4)
    assert not quiet.paused
    assert not quiet.dead_letters


async def test_work_that_keeps_moving_between_tablets_is_waited_for(
    cluster: Restless, db: Database
) -> None:
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


async def test_a_tablet_that_does_not_answer_may_hide_work(cluster: Restless, db: Database) -> None:
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
async def test_a_timeout_that_is_not_positive_and_finite_is_refused(
    seconds: float, db: Database
) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        await wait(db, seconds)


@pytest.mark.parametrize(
    ("answers", "said"),
    [(False, "it is being opened"), (True, "not here")],
    ids=["no tablet answers", "dead letters cannot be counted"],
)
async def test_a_deadline_is_kept(
    answers: bool, said: str, cluster: Restless, db: Database
) -> None:
    await dead_letters_table(worker_context(db.internal.engine))
    cluster.refusing, cluster.serves_scans = not answers, not answers
    started = db.internal.engine.now()
    with pytest.raises(DeadlineExceeded, match=f"timed out after 1 s.*{said}"):
        await wait(db, 1)
    assert db.internal.engine.now() - started < 1.5


async def test_dead_letters_that_cannot_be_counted_yet_are_waited_for(
    cluster: Restless, db: Database
) -> None:
    await dead_letters_table(worker_context(db.internal.engine))
    cluster.serves_scans = False
    waiting = asyncio.create_task(wait(db))
    await asyncio.sleep(60)
    assert not waiting.done()
    assert cluster.scans_refused
    cluster.serves_scans = True
    quiet, _ = await waiting
    assert not quiet.dead_letters


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "no worker" in one.getMessage()]


async def test_waiting_for_an_observer_that_no_worker_runs_is_said_once(
    caplog: pytest.LogCaptureFixture, cluster: Restless, db: Database
) -> None:
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
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    cluster: Restless,
    db: Database,
) -> None:
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


# Traces: which change has caused each run, directly or through others, and what it has cost.


@observes(source, name="first")
async def first(tx: aio.Transaction, row: str) -> None:
    value = await tx.get(row, source, 0)
    if value < 10:
        await tx.set(row, copy, value)
    else:
        await tx.lock(row, copy)


@observes(copy, name="second")
async def second(tx: aio.Transaction, row: str) -> None:
    await tx.get("another", source)
    await tx.set(row, total, 1)
    await tx.set("sum", total, 1)


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "trace"
    trace_to(path)
    yield path
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


async def run_all(world: Observed, **changes: int) -> list[int]:
    async with world.db.run_observers([first, second]):
        commits = [await world.put(row, value) for row, value in changes.items()]
        await world.db.wait_for_observers()
    return commits


def read(path: Path) -> Trace:
    with path.open() as lines:
        return read_trace({"trace": lines})


async def test_runs_belong_to_the_change_that_has_caused_them(traced: Path) -> None:
    async with observed() as world:
        a, b = await run_all(world, a=1, b=2)
    found = read(traced)
    assert sorted(found.origins) == [a, b]
    for change, row in ((a, "a"), (b, "b")):
        committed = [one for one in found.origins[change] if one.ended == "committed"]
        assert [(one.observer, one.row) for one in committed] == [("first", row), ("second", row)]
        assert found.parent(committed[0]) is None
        assert found.parent(committed[1]) == committed[0]


async def test_a_run_says_what_it_has_read_and_written(traced: Path) -> None:
    async with observed() as world:
        await run_all(world, a=1)
    by_observer = {one.observer: one for one in read(traced).runs}
    assert (by_observer["first"].written, by_observer["first"].locked) == (1, 0)
    assert (by_observer["second"].written, by_observer["second"].rows_read) == (2, 2)
    assert by_observer["second"].round_trips > by_observer["first"].round_trips


async def test_a_run_that_only_locks_is_without_effect(traced: Path) -> None:
    async with observed() as world:
        await run_all(world, a=10)
    (run,) = read(traced).runs
    assert run.is_without_effect
    assert (run.written, run.locked) == (0, 1)


async def test_nothing_is_written_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with observed() as world:
        await run_all(world, a=1)
    assert not [one for one in caplog.records if one.name == logger.name]


LINE: dict[str, Any] = {
    "table": "docs",
    "observer": "first",
    "row": "a",
    "changes": [5],
    "start": 7,
    "commit": 9,
    "ended": "committed",
    "rows_read": 1,
    "round_trips": 3,
    "written": 1,
    "locked": 0,
    "seconds": 0.1,
    "cpu_seconds": 1.0,
}


def lines(*changes: dict[str, Any]) -> list[str]:
    return [json.dumps(LINE | change) for change in changes]


def test_runs_of_several_workers_are_put_together_and_a_repeated_one_counts_twice() -> None:
    one = lines({}, {"changes": [11], "commit": 13, "cpu_seconds": 4.0})
    other = lines(
        {"changes": [9], "ended": "conflicted", "commit": None}, {"changes": [9], "commit": 12}
    )
    found = read_trace({"one": one, "other": other})
    assert {origin: len(runs) for origin, runs in found.origins.items()} == {5: 3, 11: 1}
    assert [run.is_repeated for run in found.origins[5]] == [False, True, False]
    assert found.cpu_seconds == 3.0


def test_a_run_for_several_changes_belongs_to_the_oldest_and_all_are_counted() -> None:
    found = read_trace({"one": lines({"changes": [4, 5]})})
    assert {origin: len(runs) for origin, runs in found.origins.items()} == {4: 1, 5: 0}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "one, line 2.*is not JSON"),
        ("[]", "one, line 2.*is not a line of a trace"),
        (lines({"commit": "9"})[0], "one, line 2.*commit is missing or wrong"),
        (json.dumps({"table": "docs"}), "one, line 2.*observer is missing or wrong"),
        (lines({"changes": ["x"]})[0], "one, line 2.*changes are not timestamps"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_file_and_line(line: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        read_trace({"one": [*lines({}), line]})


def test_the_command_shows_what_a_change_costs(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    again = {"changes": [9], "observer": "second", "ended": "conflicted", "commit": None}
    path.write_text(
        "\n".join(lines({}, again, {"changes": [9], "observer": "second", "commit": 12}))
    )
    shown = CliRunner().invoke(app, ["observers", "trace", str(path)], env={"COLUMNS": "150"})
    assert shown.exit_code == 0, shown.output
    assert "1 changes; CPU of the workers: 0.0 ms per change" in shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert ["second", "2.00", "1.00", "0.00", "2.00", "6.00", "2.00", "0.00"] in rows
    assert ["0", "ms", "second", "of", "a", "conflicted", "1", "3", "1", "0"] in rows
    found = json.loads(CliRunner().invoke(app, ["--json", "observers", "trace", str(path)]).output)
    assert found["per_change"]["runs"] == 3
    missing = CliRunner().invoke(app, ["observers", "trace", str(tmp_path / "none")])
    assert missing.exit_code
    assert "none" in missing.output
