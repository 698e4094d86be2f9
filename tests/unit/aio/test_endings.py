"""Answers that never come, cancelled callers, wrong event loops, and databases that are closed."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import traceback
from typing import Any, NoReturn

import pytest

import percolator
from percolator import (
    InvalidArgument,
    Limits,
    OutcomeLost,
    OutcomeUnknown,
    RetryPolicy,
    UsageError,
    observes,
)
from percolator.aio import Database, Outcome, Transaction
from percolator.aio.connecting import connect_to
from percolator.errors import DeadlineExceeded, Retry, SchemaError, SnapshotTooOld, Unavailable
from percolator.protocol import commit
from percolator.tablet.state import SafePoints
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.in_process_network import InProcessNetwork
from percolator.timestamps import Timestamp
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.master_pb2 import DescribeCollectionResponse
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.connected import Cluster, accounts, balance, connected, written_out


async def test_an_unanswered_commit_is_unknown_and_the_transaction_resolves_it() -> None:
    async with connected() as (db, cluster):
        tx = db.transaction(timeout=2.0)
        await tx.set("a", balance, 1)
        await tx.set("z", balance, 1)
        await tx.get("a", balance)
        cluster.answers_lost = True
        with pytest.raises(OutcomeUnknown):
            await _commit_once_locked(tx, cluster)
        assert tx.outcome is Outcome.UNKNOWN
        with pytest.raises(OutcomeUnknown):
            await tx.resolve(timeout=1.0)
        cluster.answers_lost = False
        assert await tx.resolve() is Outcome.COMMITTED
        assert tx.commit_timestamp is not None
        async with db.snapshot() as snapshot:
            assert await snapshot.get("z", balance) == 1


async def _commit_once_locked(tx: Transaction, cluster: Cluster) -> None:
    """Loses answers from the commit point on; prewrites are answered."""
    cluster.answers_lost = False
    mutate = cluster.mutate

    async def lose_commits(request: pb.MutateRequest) -> pb.MutateResponse:
        response = await mutate(request)
        spaces = {c.space for b in request.batches for m in written_out(b) for c in m.changes}
        cluster.answers_lost = cluster.answers_lost or 2 in spaces
        if cluster.answers_lost:
            raise Unavailable("connection reset")
        return response

    cluster.mutate = lose_commits  # type: ignore[method-assign]
    try:
        await tx.commit()
    finally:
        cluster.mutate = mutate  # type: ignore[method-assign]


async def test_an_unknown_outcome_travels_to_another_process_and_is_resolved_there() -> None:
    async with connected() as (db, cluster):
        tx = db.transaction(timeout=2.0)
        await tx.set("a", balance, 1)
        with pytest.raises(OutcomeUnknown) as caught:
            await _commit_once_locked(tx, cluster)
        cluster.answers_lost = False
        travelled = pickle.loads(pickle.dumps(caught.value))
        assert travelled.retry is Retry.UNKNOWN
        assert await db.resolve(travelled) is Outcome.COMMITTED


async def _left_open(db: Database, cluster: Cluster) -> tuple[Transaction, OutcomeUnknown]:
    """A transaction whose commit never arrived, and the error that says so."""
    tx = db.transaction(timeout=2.0)
    await tx.set("a", balance, 1)
    await tx.set("z", balance, 1)
    mutate = cluster.mutate

    async def lose(request: pb.MutateRequest) -> pb.MutateResponse:
        if 2 in {c.space for b in request.batches for m in written_out(b) for c in m.changes}:
            raise Unavailable("connection reset")
        return await mutate(request)

    cluster.mutate = lose  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown) as caught:
        await tx.commit()
    cluster.mutate = mutate  # type: ignore[method-assign]
    return tx, caught.value


async def test_an_outcome_older_than_the_history_is_lost_and_says_so() -> None:
    async with connected() as (db, cluster):
        tx, unknown = await _left_open(db, cluster)
        now = await db.timestamp()
        for tablet in cluster.tablets.values():
            await tablet.raise_safe_points(SafePoints(*(now,) * len(SafePoints._fields)))
        with pytest.raises(OutcomeLost, match="can no longer be determined") as caught:
            await db.resolve(unknown)
        assert caught.value.retry is Retry.USELESS
        assert caught.value.start_timestamp == unknown.start_timestamp
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), OutcomeLost)
        with pytest.raises(OutcomeLost):
            await tx.resolve()
        assert tx.outcome is Outcome.UNKNOWN


async def test_an_outcome_is_lost_with_the_table_that_decides_it() -> None:
    async with connected() as (db, cluster):
        _, unknown = await _left_open(db, cluster)
        await db.drop_table(accounts)
        with pytest.raises(OutcomeLost):
            await db.resolve(unknown)


async def test_a_cancelled_commit_leaves_no_locks() -> None:
    async with connected() as (db, cluster):
        tx = db.transaction()
        await tx.set("a", balance, 1)
        await tx.set("z", balance, 1)
        cluster.silent = True
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tx.commit()
        cluster.silent = False
        assert tx.outcome is Outcome.ABORTED
        async with db.transaction() as other:
            await other.set("a", balance, 2)
        assert other.statistics.lock_waits == []


async def test_calls_to_a_silent_cluster_end_at_their_time_outs() -> None:
    async with connected() as (db, cluster):
        tx = db.transaction(timeout=1.5)
        await tx.set("a", balance, 1)
        cluster.silent = True
        loop = asyncio.get_running_loop()
        before = loop.time()
        with pytest.raises(DeadlineExceeded) as caught:
            await tx.commit()
        assert loop.time() - before == pytest.approx(1.5, abs=0.2)
        assert caught.value.retry is Retry.SAFE, "nothing can have committed: no commit was sent"
        cluster.silent = False


async def test_an_address_that_does_not_answer_is_reported_at_once() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    world = World(clock, InProcessNetwork(), random.Random(1))
    with pytest.raises(Unavailable, match="no master or gateway answered"):
        await connect_to(world, ["nowhere:1"], Limits(), RetryPolicy())


@pytest.mark.parametrize(("address", "is_said"), [("localhost:1", True), ("nowhere:1", False)])
async def test_without_a_cluster_on_this_machine_the_error_says_how_to_start_one(
    address: str, is_said: bool
) -> None:
    world = World(VirtualClock(asyncio.get_running_loop()), InProcessNetwork(), random.Random(1))
    with pytest.raises(Unavailable) as caught:
        await connect_to(world, [address], Limits(), RetryPolicy())
    assert ("start one with `percolator dev`" in str(caught.value)) is is_said


def test_a_blocking_program_without_a_cluster_gets_a_short_traceback() -> None:
    with pytest.raises(Unavailable, match="start one with `percolator dev`") as caught:
        percolator.connect("127.0.0.1:1")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames][1:] == ["connect"]
    assert caught.value.__suppress_context__


def test_a_database_belongs_to_its_event_loop() -> None:
    async def connect() -> Database:
        async with connected() as (db, _):
            return db

    db = run_virtually(connect())

    async def use() -> None:
        db.transaction()

    with pytest.raises(UsageError):
        run_virtually(use())


async def test_using_a_database_in_another_loop_is_refused() -> None:
    async with connected() as (db, _):
        problems: list[Exception] = []

        def elsewhere() -> None:
            async def use() -> None:
                try:
                    db.transaction()
                except UsageError as error:
                    problems.append(error)

            asyncio.run(use())

        import threading

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "event loop" in str(problems[0])


async def test_closing_finishes_background_work() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = Cluster(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    db = await connect_to(world, [ADDRESS], Limits(), RetryPolicy())
    await db.create_table(accounts, splits=["m"])
    async with db.transaction() as tx:
        await tx.set("a", balance, 1)
        await tx.set("z", balance, 1)
    await db.close()
    assert sum(tablet.statistics().locks for tablet in cluster.tablets.values()) == 0


def test_using_a_database_outside_of_any_event_loop_is_refused() -> None:
    async def leave() -> Database:
        async with connected() as (db, _):
            db.internal.engine.close = _nothing  # type: ignore[method-assign]
            return db

    db = run_virtually(leave())
    for use in (db.transaction, db.snapshot):
        with pytest.raises(UsageError, match="belongs to the event loop"):
            use()


async def _nothing(drain_seconds: float) -> None:
    pass


async def test_a_second_close_waits_for_the_first() -> None:
    async with connected() as (db, _):
        going_on = db.internal.engine.env.background.start(asyncio.sleep(3.0))
        first = asyncio.create_task(db.close())
        await asyncio.sleep(0.5)
        await db.close()
        assert going_on.done()
        await first


async def test_a_pin_that_is_being_set_is_not_set_once_more() -> None:
    """Of two sessions, one would be renewed for ever."""
    async with connected() as (db, _):
        pin = db.pin()
        first, second = await asyncio.gather(pin.set(), pin.set(), return_exceptions=True)
        assert isinstance(first, Unavailable), "there is no lock service"
        assert isinstance(second, UsageError)


async def test_a_pin_asks_for_the_history_of_the_tables_that_a_generator_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without names, it would ask for that of all tables."""
    described = DescribeCollectionResponse()
    described.tables.add(table=accounts.name, safe_point=1)
    described.tables.add(table="short", safe_point=9)

    async def describe(_: float) -> DescribeCollectionResponse:
        return described

    async with connected() as (db, _):
        monkeypatch.setattr(db.internal.engine.catalog, "describe_collection", describe)
        tables: Any = (table for table in [accounts])
        await db.pin(tables=tables)._require_still_there(Timestamp(5), 1.0)
        with pytest.raises(SnapshotTooOld, match="'short'"):
            await db.pin()._require_still_there(Timestamp(5), 1.0)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("drain_seconds", [0, 0.5, 10.0])
async def test_closing_takes_no_longer_than_it_may_whatever_hangs(
    workers: int, drain_seconds: float
) -> None:
    """Workers that hang, and then background work that hangs, have that time together."""
    running = asyncio.Event()

    @observes(balance)
    async def hang(tx: Transaction, row: str) -> None:
        running.set()
        await asyncio.get_running_loop().create_future()

    async with connected() as (db, _):
        started = [db.run_observers([hang]) for _ in range(workers)]
        for worker in started:
            await worker.start()
        await db.set_many([("bob", {balance: 1})])
        if workers:
            await running.wait()
        db.internal.engine.env.background.start(asyncio.sleep(60.0))
        began = asyncio.get_running_loop().time()
        await db.close(drain_seconds=drain_seconds)
        assert asyncio.get_running_loop().time() - began == pytest.approx(drain_seconds, abs=1.5)


@pytest.mark.parametrize("turns", range(8))
async def test_a_worker_that_is_still_starting_when_its_database_is_closed_never_runs(
    turns: int,
) -> None:
    @observes(balance)
    async def ignore(tx: Transaction, row: str) -> None:
        pass

    async with connected() as (db, _):
        worker = db.run_observers([ignore])
        starting = asyncio.create_task(worker.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        assert not worker.is_running, "it starts sooner than this test assumes"
        await db.close()
        with pytest.raises(UsageError, match="stopped before it had started"):
            await starting
        await asyncio.sleep(10.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("seconds", [-1, math.nan, "1", None, True])
async def test_closing_refuses_what_is_no_time_and_closes_nothing(seconds: Any) -> None:
    async with connected() as (db, _):
        with pytest.raises(InvalidArgument, match="drain_seconds: expected a"):
            await db.close(drain_seconds=seconds)
        assert await db.tables() == [accounts.name]


async def test_calls_that_wait_while_the_database_is_closed_fail_at_once() -> None:
    """Even those whose turn has not come yet."""
    async with connected() as (db, cluster):
        await db.set_many([("bob", {balance: 1})])
        cluster.silent = True

        async def write(tx: Transaction, row: str) -> None:
            await tx.set(row, balance, 1)

        waiting = [
            asyncio.create_task(db.run(write, f"{i}"))
            for i in range(
                db.internal.engine.limits.batch_rows_max
                * db.internal.engine.limits.server_calls_max
            )
        ]
        await asyncio.sleep(0.5)
        before = db.internal.engine.now()
        await db.close(drain_seconds=0.1)
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert db.internal.engine.now() - before < 1.0
        assert {str(one) for one in told if "closed" not in str(one)} == set()


async def test_waiting_for_a_timestamp_ends_with_the_database() -> None:
    async with connected() as (db, cluster):

        async def silent(_: object) -> NoReturn:
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        cluster.get_timestamps = silent  # type: ignore[assignment, method-assign]
        waiting = asyncio.create_task(db.timestamp())
        await asyncio.sleep(0.1)
        await db.close()
        with pytest.raises(UsageError, match="the database is closed"):
            await waiting


async def test_a_committed_transaction_stays_committed_whatever_happens_to_its_other_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if it finishes them itself, because too many others are already being finished."""

    async def fail(*_: object) -> None:
        raise SchemaError("a table has been deleted meanwhile")

    async with connected(Limits(background_tasks_max=1)) as (db, _):
        busy = db.internal.engine.env.background.start(asyncio.sleep(600))
        monkeypatch.setattr(commit, "commit_secondaries", fail)
        async with db.transaction() as tx:
            await tx.set("bob", balance, 1)
            await tx.set("joe", balance, 1)
        assert tx.outcome is Outcome.COMMITTED
        busy.cancel()
