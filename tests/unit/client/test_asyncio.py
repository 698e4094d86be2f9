"""What only the API for asyncio can get wrong: loops, cancellation, answers that never come."""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator import (
    InvalidArgument,
    Limits,
    OutcomeUnknown,
    RetryPolicy,
    Table,
    UsageError,
    codecs,
)
from percolator.aio import Database, Outcome, Transaction
from percolator.aio.connecting import connect_to
from percolator.decorators import transactional
from percolator.errors import ConflictError, DeadlineExceeded, Retry, Unavailable
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.virtual_time import VirtualClock, run_virtually
from percolator.v1 import master_pb2
from percolator.v1 import tabletserver_pb2 as wire
from percolator.v1.cells_pb2 import SPACE_NOTIFY
from percolator.wire import methods
from percolator.world import World

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


class Cluster(ClusterInMemory):
    """Loses answers, or everything, while a test wants it to."""

    answers_lost = False
    silent = False

    async def mutate(self, request: wire.MutateRequest) -> wire.MutateResponse:
        if self.silent:
            await asyncio.get_running_loop().create_future()
        response = await super().mutate(request)
        if self.answers_lost:
            raise Unavailable("connection reset")
        return response


@asynccontextmanager
async def connected(limits: Limits | None = None) -> AsyncIterator[tuple[Database, Cluster]]:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = Cluster(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    async with await connect_to(world, [ADDRESS], limits or Limits(), RetryPolicy()) as db:
        await db.create_table(accounts, splits=["m"])
        yield db, cluster


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


async def test_several_reads_of_one_transaction_share_one_timestamp() -> None:
    async with connected() as (db, _):
        async with db.transaction() as tx:
            await asyncio.gather(*(tx.get(f"{i}", balance) for i in range(10)))
        assert tx.statistics.round_trips == 11


async def test_a_reader_that_gives_up_takes_the_start_from_nobody() -> None:
    async with connected() as (db, _):
        tx = db.transaction()
        one = asyncio.create_task(tx.get("a", balance))
        other = asyncio.create_task(tx.get("b", balance))
        await asyncio.sleep(0)
        one.cancel()
        assert await other is None
        assert one.cancelled()
        tx.rollback()


@pytest.mark.parametrize("kind", ["transaction", "snapshot"])
async def test_what_ended_while_its_start_was_on_the_way_holds_no_history_back(kind: str) -> None:
    async with connected() as (db, _):
        reading = db.transaction() if kind == "transaction" else db.snapshot()
        getting = asyncio.create_task(reading.get("a", balance))
        await asyncio.sleep(0)
        if isinstance(reading, Transaction):
            reading.rollback()
        else:
            await reading.close()
        with pytest.raises(UsageError):
            await getting
        assert db._engine.open_starts.oldest() == 0


async def test_what_is_open_holds_history_back_until_it_ends_or_is_dropped() -> None:
    async with connected() as (db, _):
        starts = db._engine.open_starts
        tx = db.transaction()
        snapshot = db.snapshot()
        first = await tx.timestamp()
        second = await snapshot.timestamp()
        assert starts.oldest() == first
        tx.rollback()
        assert starts.oldest() == second
        del snapshot
        gc.collect()
        assert starts.oldest() == 0
        dropped = db.transaction()
        await dropped.timestamp()
        assert starts.oldest() != 0
        del dropped
        gc.collect()
        assert starts.oldest() == 0


async def test_a_coroutine_function_is_run_again_after_a_conflict() -> None:
    runs = 0

    @transactional(retry=RetryPolicy(attempts_max=5))
    async def increment(tx: Transaction, row: str) -> int:
        nonlocal runs
        runs += 1
        value = await tx.get(row, balance, default=0)
        if runs < 3:
            async with db.transaction() as other:
                await other.set(row, balance, 100 * runs)
        await tx.set(row, balance, value + 1)
        return value

    async with connected() as (db, _):
        assert await increment(db, "a") == 200
        assert runs == 3
        async with db.transaction() as tx:
            assert await increment(tx, "a") == 201


async def test_a_function_that_always_conflicts_gives_up_in_the_end() -> None:
    @transactional(retry=RetryPolicy(attempts_max=3))
    async def hopeless(tx: Transaction) -> None:
        await tx.get("a", balance)
        async with db.transaction() as other:
            await other.set("a", balance, 1)
        await tx.set("a", balance, 2)

    async with connected() as (db, _):
        with pytest.raises(ConflictError):
            await hopeless(db)


async def test_transactional_functions_want_a_database_or_a_transaction() -> None:
    @transactional
    async def function(tx: Transaction) -> None:
        """Never called."""

    with pytest.raises(UsageError, match="takes a Database or a Transaction first"):
        await function("a string")  # type: ignore[arg-type]


async def test_a_value_that_is_too_long_is_refused_and_nothing_written() -> None:
    async with connected(Limits(value_bytes_max=100)) as (db, _):
        blob = accounts.column("blob", codecs.raw)
        async with db.transaction() as tx:
            await tx.set("a", blob, bytes(100))
            with pytest.raises(InvalidArgument, match="101 bytes, at most 100"):
                await tx.set("a", blob, bytes(101))
            tx.rollback()
        async with db.snapshot() as snapshot:
            assert await snapshot.get("a", blob) is None


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


async def test_a_slow_transaction_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(Limits(slow_transaction_seconds=1.0)) as (db, _):
        with caplog.at_level(logging.WARNING, "percolator.transactions"):
            async with db.transaction() as tx:
                await tx.get("a", balance)
                await asyncio.sleep(1.5)
                await tx.set("a", balance, 1)
            async with db.transaction() as tx:
                await tx.set("a", balance, 2)
        (line,) = caplog.messages
        assert "slow transaction: committed after 1.5" in line
        caplog.clear()
        many = [db.transaction() for _ in range(50)]
        await asyncio.sleep(2.0)
        for tx in many:
            tx.rollback()
        assert len(caplog.messages) == 10


async def test_a_dropped_and_recreated_table_is_found_again() -> None:
    async with connected() as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("a", balance, 1)
        # Somebody else drops and creates it: this client knows the old one only.
        await cluster.delete_table(master_pb2.DeleteTableRequest(name="accounts"))
        await cluster.create_table(master_pb2.CreateTableRequest(name="accounts"))
        with pytest.raises(Exception, match="no table"):
            async with db.snapshot() as snapshot:
                await snapshot.get("a", balance)
        async with db.snapshot() as snapshot:
            assert await snapshot.get("a", balance) is None


async def test_bulk_writes_take_asynchronous_sources_too() -> None:
    async def rows() -> AsyncIterator[tuple[str, dict[object, object]]]:
        for i in range(100):
            await asyncio.sleep(0)
            yield f"{i:03}", {balance: i}

    async with connected() as (db, _):
        assert await db.set_many(rows(), in_flight_max=7) == 100
        async with db.snapshot() as snapshot:
            assert [row[balance] async for row in snapshot.scan(accounts)] == list(range(100))


async def test_a_bulk_write_stops_at_the_first_error() -> None:
    async with connected() as (db, _):
        with pytest.raises(Exception, match="expected int"):
            await db.set_many([("a", {balance: 1}), ("b", {balance: "x"}), ("c", {balance: 1})])


async def test_weak_notifications_reach_the_observers_of_the_column() -> None:
    async with connected() as (db, cluster):
        observer = master_pb2.Observer(name="w", columns=[b"balance"], weak=True)
        await cluster.change_observers(
            master_pb2.ChangeObserversRequest(table="accounts", add=[observer])
        )
        info = db._engine.catalog.known("accounts")
        assert info is not None
        await db._engine.catalog.refresh(info.table_id, db._engine.now() + 1)
        async with db.transaction() as tx:
            await tx.notify("a", balance)
            await tx.set("z", balance, 1)
        async with db.transaction() as only:
            await only.notify("b", balance)
        assert only.commit_timestamp is not None
        notified = [
            (cell.row, cell.timestamp)
            for tablet in cluster.tablets.values()
            async for page in tablet.scan_cells(
                methods.SCAN_CELLS.request(
                    target=wire.TabletTarget(
                        tablet_id=tablet.identity.tablet_id, epoch=1, schema_version=2
                    ),
                    space=SPACE_NOTIFY,
                )
            )
            for cell in page.cells
        ]
        assert sorted(notified) == [
            (b"a", tx.commit_timestamp),
            (b"b", only.commit_timestamp),
        ]
