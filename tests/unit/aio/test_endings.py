"""Answers that never come, cancelled callers, wrong event loops, and databases that are closed."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
import threading
import traceback
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest

import percolator
from percolator import (
    InvalidArgument,
    Limits,
    Outcome,
    OutcomeLost,
    OutcomeUnknown,
    RetryPolicy,
    UsageError,
    aio,
    observes,
)
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.errors import (
    DeadlineExceeded,
    PercolatorError,
    Retry,
    SchemaError,
    SnapshotTooOld,
    Unauthenticated,
    Unavailable,
)
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.routing.lanes import PendingCommit
from percolator.routing.router import Router
from percolator.tablet.state import SafePoints
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.timestamps import Timestamp
from percolator.v1 import cluster_pb2, lockservice_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.master_pb2 import DescribeCollectionResponse
from percolator.world import Clock, World
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.connected import (
    Cluster,
    accounts,
    balance,
    connected,
    put,
    written_out,
)


async def test_an_unanswered_commit_is_unknown_and_the_transaction_resolves_it(
    db: Database, cluster: Cluster
) -> None:
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
    assert await db.get("z", balance) == 1


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


async def test_an_unknown_outcome_travels_to_another_process_and_is_resolved_there(
    db: Database, cluster: Cluster
) -> None:
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


async def test_an_outcome_older_than_the_history_is_lost_and_says_so(
    db: Database, cluster: Cluster
) -> None:
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


async def test_an_outcome_is_lost_with_the_table_that_decides_it(
    db: Database, cluster: Cluster
) -> None:
    _, unknown = await _left_open(db, cluster)
    await db.drop_table(accounts)
    with pytest.raises(OutcomeLost):
        await db.resolve(unknown)


async def test_a_cancelled_commit_leaves_no_locks(db: Database, cluster: Cluster) -> None:
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


async def test_calls_to_a_silent_cluster_end_at_their_time_outs(
    db: Database, cluster: Cluster
) -> None:
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


@pytest.mark.parametrize(("address", "is_said"), [("localhost:1", True), ("nowhere:1", False)])
async def test_without_a_cluster_on_this_machine_the_error_says_how_to_start_one(
    address: str, is_said: bool
) -> None:
    world = World(VirtualClock(asyncio.get_running_loop()), InProcessNetwork(), random.Random(1))
    with pytest.raises(Unavailable, match="no master or gateway answered") as caught:
        await connect_to(world, [address], Limits(), RetryPolicy())
    assert ("start one with `percolator dev`" in str(caught.value)) is is_said


def test_a_blocking_program_without_a_cluster_gets_a_short_traceback() -> None:
    with pytest.raises(Unavailable, match="start one with `percolator dev`") as caught:
        percolator.connect("127.0.0.1:1")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames][1:] == ["connect"]
    assert caught.value.__suppress_context__


async def test_using_a_database_in_another_loop_is_refused(db: Database) -> None:
    problems: list[Exception] = []

    def elsewhere() -> None:
        async def use() -> None:
            try:
                db.transaction()
            except UsageError as error:
                problems.append(error)

        asyncio.run(use())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "event loop" in str(problems[0])


async def test_closing_finishes_background_work() -> None:
    async with connected() as (db, cluster):
        await put(db, balance, a=1, z=1)
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


async def test_a_second_close_waits_for_the_first(db: Database) -> None:
    going_on = db.internal.engine.env.background.start(asyncio.sleep(3.0))
    first = asyncio.create_task(db.close())
    await asyncio.sleep(0.5)
    await db.close()
    assert going_on.done()
    await first


async def test_a_pin_that_is_being_set_is_not_set_once_more(db: Database) -> None:
    """Of two sessions, one would be renewed for ever."""
    pin = db.pin()
    first, second = await asyncio.gather(pin.set(), pin.set(), return_exceptions=True)
    assert isinstance(first, Unavailable), "there is no lock service"
    assert isinstance(second, UsageError)


async def test_a_pin_asks_for_the_history_of_the_tables_that_a_generator_names(
    monkeypatch: pytest.MonkeyPatch, db: Database
) -> None:
    """Without names, it would ask for that of all tables."""
    described = DescribeCollectionResponse()
    described.tables.add(table=accounts.name, safe_point=1)
    described.tables.add(table="short", safe_point=9)

    async def describe(_: float) -> DescribeCollectionResponse:
        return described

    monkeypatch.setattr(db.internal.engine.catalog, "describe_collection", describe)
    tables: Any = (table for table in [accounts])
    await db.pin(tables=tables)._require_still_there(Timestamp(5), 1.0)
    with pytest.raises(SnapshotTooOld, match="'short'"):
        await db.pin()._require_still_there(Timestamp(5), 1.0)


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("drain_seconds", [0, 0.5, 10.0])
async def test_closing_takes_no_longer_than_it_may_whatever_hangs(
    workers: int, drain_seconds: float, db: Database
) -> None:
    """Workers that hang, and then background work that hangs, have that time together."""
    running = asyncio.Event()

    @observes(balance)
    async def hang(tx: Transaction, row: str) -> None:
        running.set()
        await asyncio.get_running_loop().create_future()

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
    turns: int, db: Database
) -> None:
    @observes(balance)
    async def ignore(tx: Transaction, row: str) -> None:
        pass

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
async def test_closing_refuses_what_is_no_time_and_closes_nothing(
    db: Database, seconds: Any
) -> None:
    with pytest.raises(InvalidArgument, match="drain_seconds: expected a"):
        await db.close(drain_seconds=seconds)
    assert await db.tables() == [accounts.name]


async def test_calls_that_wait_while_the_database_is_closed_fail_at_once(
    db: Database, cluster: Cluster
) -> None:
    """Even calls that have not been sent yet."""
    await db.set_many([("bob", {balance: 1})])
    cluster.silent = True

    async def write(tx: Transaction, row: str) -> None:
        await tx.set(row, balance, 1)

    waiting = [
        asyncio.create_task(db.run(write, f"{i}"))
        for i in range(
            db.internal.engine.limits.batch_rows_max * db.internal.engine.limits.server_calls_max
        )
    ]
    await asyncio.sleep(0.5)
    before = db.internal.engine.now()
    await db.close(drain_seconds=0.1)
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert db.internal.engine.now() - before < 1.0
    assert {str(one) for one in told if "closed" not in str(one)} == set()


async def test_waiting_for_a_timestamp_ends_with_the_database(
    db: Database, cluster: Cluster
) -> None:
    async def silent(_: object) -> NoReturn:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    cluster.get_timestamps = silent  # type: ignore[assignment, method-assign]
    waiting = asyncio.create_task(db.timestamp())
    await asyncio.sleep(0.1)
    await db.close()
    with pytest.raises(UsageError, match="the database is closed"):
        await waiting


@pytest.mark.parametrize("limits", [Limits(background_tasks_max=1)])
async def test_a_committed_transaction_stays_committed_whatever_happens_to_its_other_cells(
    monkeypatch: pytest.MonkeyPatch, db: Database
) -> None:
    """Even if it finishes them itself, because too many others are already being finished."""

    async def fail(*_: object) -> None:
        raise SchemaError("a table has been deleted meanwhile")

    busy = db.internal.engine.env.background.start(asyncio.sleep(600))
    monkeypatch.setattr(commit, "commit_secondaries", fail)
    async with db.transaction() as tx:
        await tx.set("bob", balance, 1)
        await tx.set("joe", balance, 1)
    assert tx.outcome is Outcome.COMMITTED
    busy.cancel()


# Connecting to a cluster whose servers are still finding each other.


class YoungCluster(ClusterInMemory):
    """A cluster whose master learns of the oracle only after a while, as a standby does."""

    def __init__(self, clock: Clock, known_after_seconds: float) -> None:
        super().__init__(clock)
        self._time = clock
        self._known_after_seconds = known_after_seconds

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        described = await super().describe(request)
        if self._time.monotonic_seconds() < self._known_after_seconds:
            oracles = [
                server
                for server in described.servers
                if server.kind == cluster_pb2.SERVICE_KIND_ORACLE
            ]
            for oracle in oracles:
                described.servers.remove(oracle)
        return described


async def connect(known_after_seconds: float, timeout_seconds: float) -> Database:
    clock = VirtualClock(asyncio.get_running_loop())
    network = InProcessNetwork({ADDRESS: YoungCluster(clock, known_after_seconds)})
    world = World(clock, network, random.Random(1))
    return await connect_to(
        world, [ADDRESS], Limits(), RetryPolicy(), timeout_seconds=timeout_seconds
    )


async def test_connecting_waits_for_the_oracle_of_a_cluster_that_is_just_starting() -> None:
    database = await connect(known_after_seconds=3.0, timeout_seconds=10.0)
    assert await database.timestamp() > 0
    await database.close()


async def test_connecting_to_a_cluster_without_an_oracle_ends_at_the_time_out() -> None:
    with pytest.raises(Unavailable, match="no oracle"):
        await connect(known_after_seconds=1_000.0, timeout_seconds=5.0)
    assert asyncio.get_running_loop().time() == pytest.approx(5.0, abs=0.2)


class SlowLockService(ClusterInMemory):
    """A cluster whose lock service takes a second to open a session."""

    live = 0

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        described = await super().describe(request)
        described.servers.add(kind=cluster_pb2.SERVICE_KIND_LOCK_SERVICE, address=ADDRESS)
        return described

    async def open_session(
        self, request: lockservice_pb2.OpenSessionRequest
    ) -> lockservice_pb2.OpenSessionResponse:
        await asyncio.sleep(1.0)
        self.live += 1
        return lockservice_pb2.OpenSessionResponse(session_id=b"session")

    async def end_session(
        self, request: lockservice_pb2.EndSessionRequest
    ) -> lockservice_pb2.EndSessionResponse:
        self.live -= 1
        return lockservice_pb2.EndSessionResponse()


@pytest.mark.parametrize("seconds", [0.5, 1.0])
async def test_who_gives_up_connecting_leaves_no_session_behind(seconds: float) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = SlowLockService(clock)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    connecting = asyncio.create_task(connect_to(world, [ADDRESS], Limits(), RetryPolicy()))
    await asyncio.sleep(seconds)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.sleep(10.0)
    assert not cluster.live
    assert asyncio.all_tasks() == {asyncio.current_task()}


class ListedAtTimes(ClusterInMemory):
    """A cluster whose master does not know the lock service for a while."""

    def __init__(self, clock: Clock, unknown_from: float, unknown_until: float) -> None:
        super().__init__(clock)
        self._time = clock
        self._unknown_from = unknown_from
        self._unknown_until = unknown_until
        self.calls: list[str] = []

    async def describe(self, request: cluster_pb2.DescribeRequest) -> cluster_pb2.DescribeResponse:
        described = await super().describe(request)
        if not self._unknown_from <= self._time.monotonic_seconds() < self._unknown_until:
            described.servers.add(kind=cluster_pb2.SERVICE_KIND_LOCK_SERVICE, address=ADDRESS)
        return described

    async def open_session(
        self, request: lockservice_pb2.OpenSessionRequest
    ) -> lockservice_pb2.OpenSessionResponse:
        self.calls.append("open")
        return lockservice_pb2.OpenSessionResponse(session_id=b"session")

    async def renew_session(
        self, request: lockservice_pb2.RenewSessionRequest
    ) -> lockservice_pb2.RenewSessionResponse:
        self.calls.append("renew")
        return lockservice_pb2.RenewSessionResponse()

    async def end_session(
        self, request: lockservice_pb2.EndSessionRequest
    ) -> lockservice_pb2.EndSessionResponse:
        self.calls.append("end")
        return lockservice_pb2.EndSessionResponse()


async def test_who_connects_before_the_lock_service_is_listed_opens_a_session_when_it_is() -> None:
    """Without one, nothing keeps the history that its snapshots need."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = ListedAtTimes(clock, 0.0, 3.0)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    database = await connect_to(world, [ADDRESS], Limits(), RetryPolicy())
    owners = database.internal.engine.env.owners
    assert not cluster.calls
    await asyncio.sleep(20.0)
    assert owners.session_id == b"session"
    assert cluster.calls.count("open") == 1
    assert cluster.calls.count("renew") > 5
    await database.close()
    assert cluster.calls[-1] == "end"
    await asyncio.sleep(20.0)
    assert cluster.calls[-1] == "end"


async def test_a_session_lasts_though_a_master_lists_no_lock_service_for_a_while() -> None:
    """As one that has just begun to lead. If the client believed it until it asks again, others
    would roll back its transactions."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = ListedAtTimes(clock, 4.0, 6.0)
    world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
    database = await connect_to(world, [ADDRESS], Limits(), RetryPolicy())
    owners = database.internal.engine.env.owners
    for _ in range(200):
        assert owners.session_id == b"session"
        await asyncio.sleep(0.1)
    await database.close()


def test_a_connection_that_was_neither_awaited_nor_entered_says_what_to_write() -> None:
    db: Any = aio.connect("localhost:7100")
    with pytest.raises(AttributeError, match=r"'transaction' of a database: .*async with"):
        db.transaction()
    with pytest.raises(UsageError, match=r"has not connected yet: .*async with"), db:
        pass
    assert not hasattr(db, "snapshot")


# The first message of a commit, when its caller is cancelled, or an answer does not come.


class Interrupted(BaseException):
    """Not an `Exception`, as Ctrl-C is none."""


class Held(Cluster):
    """Answers nothing while the test holds it; counts what would commit in one round."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.messages = 0
        self.oracle_says: PercolatorError | None = None
        self.gives_timestamps, self.answers_commits = asyncio.Event(), asyncio.Event()
        self.gives_timestamps.set()
        self.answers_commits.set()

    async def get_timestamps(
        self, request: oracle_pb2.GetTimestampsRequest
    ) -> oracle_pb2.GetTimestampsResponse:
        await self.gives_timestamps.wait()
        if self.oracle_says is not None:
            raise self.oracle_says
        return await super().get_timestamps(request)

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        self.messages += len(request.batches[0].start_timestamps)
        response = await super().commit_transactions(request)
        await self.answers_commits.wait()
        return response


on_a_held_cluster = pytest.mark.parametrize(
    ("kind_of_cluster", "limits"), [(Held, Limits())], ids=["held"]
)


@pytest.fixture
@asynccontextmanager
async def held(db: Database, cluster: Held) -> AsyncIterator[Held]:
    """The cluster, whose table the client knows already."""
    await put(db, balance, known=0)
    cluster.messages = 0
    yield cluster


async def cancelled(call: Coroutine[Any, Any, object]) -> None:
    """Lets the call get as far as it can, and cancels it."""
    running = asyncio.ensure_future(call)
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def written(db: Database, value: int) -> Transaction:
    tx = db.transaction()
    await tx.set("a", balance, value)
    return tx


@pytest.fixture
@asynccontextmanager
async def tx(db: Database, held: Held) -> AsyncIterator[Transaction]:
    """A transaction that has written a cell."""
    yield await written(db, 1)


@on_a_held_cluster
async def test_a_write_asks_for_its_timestamp_and_commits_in_two_round_trips(
    db: Database, held: Held, tx: Transaction
) -> None:
    before = await db.timestamp()
    commit = await tx.commit()
    assert commit is not None
    assert before < (tx.start_timestamp or 0) < commit == tx.commit_timestamp
    assert (tx.statistics.round_trips, held.messages) == (2, 1)
    assert await db.get("a", balance) == 1


@on_a_held_cluster
async def test_a_caller_cancelled_before_the_timestamp_has_sent_nothing_and_never_will(
    db: Database, held: Held, tx: Transaction
) -> None:
    held.gives_timestamps.clear()
    await cancelled(tx.commit())
    assert tx.outcome is Outcome.ABORTED
    held.gives_timestamps.set()
    await asyncio.sleep(0.05)
    assert held.messages == 0
    assert await db.get("a", balance) is None


@on_a_held_cluster
async def test_a_caller_cancelled_after_it_can_find_out_that_it_has_committed(
    db: Database, held: Held, tx: Transaction
) -> None:
    held.answers_commits.clear()
    await cancelled(tx.commit())
    assert tx.outcome is Outcome.UNKNOWN
    held.answers_commits.set()
    assert await tx.resolve() is Outcome.COMMITTED
    assert tx.commit_timestamp is not None
    assert await db.get("a", balance) == 1


@on_a_held_cluster
async def test_a_caller_cancelled_in_the_turn_of_the_answer_is_not_told_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch, tx: Transaction
) -> None:
    running = asyncio.ensure_future(tx.commit())
    correct = PendingCommit.answer

    def answer(self: PendingCommit, index: int, answer: object) -> None:
        correct(self, index, answer)
        running.cancel()

    monkeypatch.setattr(PendingCommit, "answer", answer)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert tx.outcome is Outcome.UNKNOWN
    assert await tx.resolve() is Outcome.COMMITTED


@on_a_held_cluster
async def test_without_a_timestamp_nothing_was_done_and_it_may_be_done_again(
    held: Held, tx: Transaction
) -> None:
    held.oracle_says = Unavailable("connection refused")
    with pytest.raises(DeadlineExceeded, match="did not answer in time") as late:
        await tx.commit(timeout=1.0)
    assert late.value.retry is Retry.SAFE
    assert (tx.outcome, held.messages) == (Outcome.ABORTED, 0)


@on_a_held_cluster
async def test_a_refusal_by_the_oracle_is_raised_as_it_is(held: Held, tx: Transaction) -> None:
    held.oracle_says = Unauthenticated("who are you?")
    with pytest.raises(Unauthenticated, match="who are you"):
        await tx.commit()
    assert (tx.outcome, held.messages) == (Outcome.ABORTED, 0)


@on_a_held_cluster
async def test_closing_the_database_ends_a_commit_that_waits_for_its_timestamp(
    db: Database, held: Held, tx: Transaction
) -> None:
    held.gives_timestamps.clear()
    committing = asyncio.ensure_future(tx.commit())
    await asyncio.sleep(0.05)
    await db.close()
    with pytest.raises(UsageError, match="closed"):
        await committing
    assert (tx.outcome, held.messages) == (Outcome.ABORTED, 0)
    held.gives_timestamps.set()


@on_a_held_cluster
async def test_an_unanswered_message_is_sent_again_and_its_outcome_is_found(
    db: Database, held: Held, tx: Transaction
) -> None:
    held.answers_lost = True
    with pytest.raises(OutcomeUnknown):
        await tx.commit(timeout=1.0)
    assert held.messages > 1
    held.answers_lost = False
    assert await tx.resolve() is Outcome.COMMITTED
    assert await db.get("a", balance) == 1


async def _scanned(tx: Transaction) -> list[str]:
    return [row.key async for row in tx.scan(accounts)]


@on_a_held_cluster
async def test_a_commit_shares_the_timestamp_that_a_scan_of_its_transaction_waits_for(
    held: Held, tx: Transaction
) -> None:
    held.gives_timestamps.clear()
    reading = asyncio.ensure_future(_scanned(tx))
    await asyncio.sleep(0.05)
    committing = asyncio.ensure_future(tx.commit())
    await asyncio.sleep(0.05)
    held.gives_timestamps.set()
    assert await committing is not None
    with pytest.raises(UsageError, match="commit"):
        await reading
    assert held.messages == 1


@on_a_held_cluster
async def test_a_commit_begins_at_the_timestamp_for_which_a_scan_has_asked_again(
    held: Held, tx: Transaction
) -> None:
    held.gives_timestamps.clear()
    reading, left = (asyncio.ensure_future(_scanned(tx)) for _ in range(2))
    await asyncio.sleep(0.05)
    left.cancel()  # and with it the request that both had waited for
    held.gives_timestamps.set()
    held.gives_timestamps.clear()
    await asyncio.sleep(0.05)  # the other one has asked again, and waits
    committing = asyncio.ensure_future(tx.commit())
    await asyncio.sleep(0.05)
    held.gives_timestamps.set()
    held.gives_timestamps.clear()
    with pytest.raises(UsageError, match="commit"):
        await reading
    begun = tx.start_timestamp
    held.gives_timestamps.set()
    assert await committing is not None
    assert begun == tx.start_timestamp


@on_a_held_cluster
async def test_commits_that_wait_for_one_answer_of_the_oracle_share_a_message(
    db: Database, held: Held
) -> None:
    open_ones = [await written(db, number) for number in range(3)]
    others = [db.transaction() for _ in range(20)]
    for number, tx in enumerate(others):
        await tx.set(f"row {number}", balance, number)
    held.gives_timestamps.clear()
    committing = [asyncio.ensure_future(tx.commit()) for tx in (*others, *open_ones)]
    await asyncio.sleep(0.05)
    committing[3].cancel()
    held.gives_timestamps.set()
    ended = await asyncio.gather(*committing, return_exceptions=True)
    committed = [one for one in ended if isinstance(one, int)]
    assert isinstance(ended[3], asyncio.CancelledError)
    assert others[3].outcome is Outcome.ABORTED
    assert await db.get("row 3", balance) is None
    # Of the three that write one cell, one has committed.
    assert len(committed) == len(set(committed)) == 20
    assert sum(tx.outcome is Outcome.COMMITTED for tx in open_ones) == 1


@pytest.mark.parametrize("reads_first", [False, True])
@on_a_held_cluster
async def test_a_message_that_may_have_left_before_a_bug_had_an_effect_has_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch, db: Database, tx: Transaction, *, reads_first: bool
) -> None:
    if reads_first:
        assert await tx.get("known", balance) == 0
    cells = db.internal.engine.cells
    correct = cells.commit

    def broken(*arguments: Any) -> object:
        correct(*arguments)
        raise RuntimeError("a bug")

    monkeypatch.setattr(cells, "commit", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await tx.commit()
    assert tx.outcome is Outcome.UNKNOWN
    monkeypatch.undo()
    assert await tx.resolve() is Outcome.COMMITTED


@on_a_held_cluster
async def test_ctrl_c_while_the_message_is_handed_over_is_not_told_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch, held: Held, tx: Transaction
) -> None:
    await tx.timestamp()
    correct = Router.commit

    def interrupted(self: Router, *arguments: Any) -> object:
        correct(self, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Router, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tx.commit().send(None)
    await asyncio.sleep(0.05)
    assert held.messages == 1
    assert tx.outcome is Outcome.UNKNOWN
    assert await tx.resolve() is Outcome.COMMITTED


@on_a_held_cluster
async def test_ctrl_c_before_the_answer_is_heard_is_not_told_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch, held: Held, tx: Transaction
) -> None:
    held.answers_lost = True

    def interrupted(self: Commit, answer: object) -> None:
        raise Interrupted  # a `KeyboardInterrupt` would end the test's loop

    with monkeypatch.context() as patch:
        patch.setattr(Commit, "_heard", interrupted)
        with pytest.raises(Interrupted):
            await tx.commit()
    held.answers_lost = False
    assert tx.outcome is Outcome.UNKNOWN
    assert await tx.resolve() is Outcome.COMMITTED
