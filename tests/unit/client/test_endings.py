"""Answers that never come, callers that leave, loops that are others, and databases that close."""

from __future__ import annotations

import asyncio
import pickle
import random

import pytest

from percolator import (
    Limits,
    OutcomeUnknown,
    RetryPolicy,
    UsageError,
)
from percolator.aio import Database, Outcome, Transaction
from percolator.aio.connecting import connect_to
from percolator.errors import DeadlineExceeded, Retry, SchemaError, Unavailable
from percolator.protocol import aftermath
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.virtual_time import VirtualClock, run_virtually
from percolator.v1 import tabletserver_pb2 as wire
from percolator.world import World
from tests.unit.client.connected import Cluster, accounts, balance, connected


async def test_an_unanswered_commit_is_unknown_and_resolved_by_the_transaction() -> None:
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
    """Answers are lost from the commit point on; prewrites come through."""
    cluster.answers_lost = False
    mutate = cluster.mutate

    async def lose_commits(request: wire.MutateRequest) -> wire.MutateResponse:
        response = await mutate(request)
        spaces = {c.space for b in request.batches for m in b.mutations for c in m.changes}
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


async def test_whoever_gives_up_a_commit_leaves_no_locks() -> None:
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


async def test_a_silent_cluster_ends_each_call_with_its_time_out() -> None:
    async with connected() as (db, cluster):
        tx = db.transaction(timeout=1.5)
        await tx.set("a", balance, 1)
        cluster.silent = True
        loop = asyncio.get_running_loop()
        before = loop.time()
        with pytest.raises(DeadlineExceeded) as caught:
            await tx.commit()
        assert loop.time() - before == pytest.approx(1.5, abs=0.2)
        assert caught.value.retry is Retry.SAFE, "nothing can be committed: no commit was sent"
        cluster.silent = False


async def test_an_address_that_does_not_answer_is_said_at_once() -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    world = World(clock, InProcessNetwork(), random.Random(1))
    with pytest.raises(Unavailable, match="no master or gateway answered"):
        await connect_to(world, ["nowhere:1"], Limits(), RetryPolicy())


def test_a_database_belongs_to_its_event_loop() -> None:
    async def connect() -> Database:
        async with connected() as (db, _):
            return db

    db = run_virtually(connect())

    async def use() -> None:
        db.transaction()

    with pytest.raises(UsageError):
        run_virtually(use())


async def test_a_database_used_in_another_loop_says_so() -> None:
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


async def test_closing_finishes_what_the_background_has_begun() -> None:
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


def test_outside_of_any_event_loop_a_database_says_where_it_belongs() -> None:
    async def leave() -> Database:
        async with connected() as (db, _):
            db.engine.close = _nothing  # type: ignore[method-assign]
            return db

    db = run_virtually(leave())
    for use in (db.transaction, db.snapshot):
        with pytest.raises(UsageError, match="belongs to the event loop"):
            use()


async def _nothing(drain_seconds: float) -> None:
    pass


async def test_whoever_closes_a_database_again_waits_for_the_end_of_the_first_close() -> None:
    async with connected() as (db, _):
        going_on = db.engine.around.background.start(asyncio.sleep(3.0))
        first = asyncio.create_task(db.close())
        await asyncio.sleep(0.5)
        await db.close()
        assert going_on.done()
        await first


async def test_whoever_waits_while_the_database_is_closed_is_told_so_at_once() -> None:
    """Also those whose turn has not come yet."""
    async with connected() as (db, cluster):
        await db.set_many([("bob", {balance: 1})])
        cluster.silent = True

        async def write(tx: Transaction, row: str) -> None:
            await tx.set(row, balance, 1)

        waiting = [
            asyncio.create_task(db.run(write, f"{i}"))
            for i in range(db.engine.limits.batch_rows_max * db.engine.limits.server_calls_max)
        ]
        await asyncio.sleep(0.5)
        before = db.engine.now()
        await db.close(drain_seconds=0.1)
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert db.engine.now() - before < 1.0
        assert {str(one) for one in told if "closed" not in str(one)} == set()


async def test_a_committed_transaction_is_committed_whatever_becomes_of_its_other_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when it finishes them itself, since too many others are being finished already."""

    async def fail(*_: object) -> None:
        raise SchemaError("a table has been deleted meanwhile")

    async with connected(Limits(background_tasks_max=1)) as (db, _):
        busy = db.engine.around.background.start(asyncio.sleep(600))
        monkeypatch.setattr(aftermath, "commit_secondaries", fail)
        async with db.transaction() as tx:
            await tx.set("bob", balance, 1)
            await tx.set("joe", balance, 1)
        assert tx.outcome is Outcome.COMMITTED
        busy.cancel()
