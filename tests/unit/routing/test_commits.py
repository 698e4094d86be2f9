"""One-round commits on their way: sent once, to the tablet that has their cells, or not at all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator import (
    ConflictError,
    Limits,
    Outcome,
    OutcomeUnknown,
    RetryPolicy,
    SchemaError,
    Table,
    codecs,
)
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotReady,
    PercolatorError,
    Retry,
    SchemaChanged,
    TabletMoved,
    UsageError,
)
from percolator.protocol import commit
from percolator.routing.cells import (
    CommitAnswer,
    FollowedCommit,
    NotInOneRound,
    NotSent,
    OneRoundCommit,
    Refused,
)
from percolator.testing.cluster_in_memory import ADDRESS, ClusterInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell
from percolator.wire.status import to_detail
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.routing.tablet_servers import Cluster, Server, failure, tablet


class Commits(Server):
    """Commits transaction s at s + 1, unless told otherwise."""

    def __init__(self, seconds: float = 0.01) -> None:
        super().__init__(seconds)
        self.commit_calls: list[pb.CommitTransactionsRequest] = []
        self.malform: Callable[[pb.TransactionBatchResult], object] = lambda result: None

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        self.commit_calls.append(request)
        await self._serve()
        response = pb.CommitTransactionsResponse()
        for batch in request.batches:
            result = response.batches.add()
            error = self.refuse_batch(batch.target, list(batch.rows))
            if error is not None:
                result.error.CopyFrom(to_detail(error))
                continue
            result.commit_timestamps.extend(start + 1 for start in batch.start_timestamps)
            result.followed.extend(batch.followed)
            self.malform(result)
        return response


@pytest.fixture
@asynccontextmanager
async def server() -> AsyncIterator[Commits]:
    """A tablet server that commits all transactions."""
    yield Commits()


def one_round(start: int, *rows: bytes, version: int = 3) -> OneRoundCommit:
    count = len(rows)
    return OneRoundCommit(1, version, start, rows, [b"c"] * count, [1] * count, [b"v"] * count)


def _cluster(server: Server, limits: Limits | None = None) -> Cluster:
    cluster = Cluster({"a:1": server, "b:1": Commits()}, limits)
    cluster.tablets.learn(
        [tablet("a:1", b"", b"m"), tablet("b:1", b"m", b"", tablet_id=2)],
    )
    return cluster


async def _answers(
    cluster: Cluster, *commits: OneRoundCommit, seconds: float = 10.0
) -> list[CommitAnswer]:
    """The answers to commits that are sent at the same moment."""
    deadline = cluster.deadline(seconds)
    return await asyncio.gather(*(cluster.router.commit(one, deadline) for one in commits))


async def test_transactions_of_one_turn_of_the_loop_share_a_call(server: Commits) -> None:
    cluster = _cluster(server)
    first = OneRoundCommit(
        1, 3, 20, [b"a", b"b"], [b"c", b"d"], [1, 3], [b"v", b""], [(b"c", (b"f",))],
        [(b"e", b"w", (b"g",))],
    )  # fmt: skip
    assert await _answers(cluster, first, one_round(30, b"c"), one_round(40, b"n")) == [21, 31, 41]
    (call,) = server.commit_calls
    (batch,) = call.batches
    assert (batch.target.tablet_id, batch.target.epoch, batch.target.schema_version) == (1, 1, 3)
    assert (list(batch.start_timestamps), list(batch.cells)) == ([20, 30], [2, 1])
    assert (list(batch.rows), list(batch.columns)) == ([b"a", b"b", b"c"], [b"c", b"d", b"c"])
    assert (list(batch.kinds), list(batch.values)) == ([1, 3, 1], [b"v", b"", b"v"])
    assert [(one.column, list(one.observers)) for one in batch.observed] == [(b"c", [b"f"])]
    (notified,) = batch.notifications
    assert (notified.transaction, notified.row, notified.column) == (0, b"e", b"w")


async def test_who_is_followed_is_told_whether_a_timestamp_was_set_aside(server: Commits) -> None:
    cluster = _cluster(server)
    sent = (one_round(20, b"a"), one_round(30, b"c")._replace(is_followed=True))
    plain, followed = await _answers(cluster, *sent)
    assert list(server.commit_calls[0].batches[0].followed) == [1]
    assert not isinstance(plain, FollowedCommit)
    assert isinstance(followed, FollowedCommit)
    assert followed == 31
    server.malform = lambda result: result.ClearField("followed")  # a server that knows nothing
    answer = await cluster.router.commit(sent[1], cluster.deadline())
    assert answer == 31
    assert not isinstance(answer, FollowedCommit)


async def test_a_server_is_told_how_long_transactions_may_wait(server: Commits) -> None:
    """Some of their time is kept for the marker that follows if they are not executed. What counts
    is the time that is left, so the server's clock does not matter."""
    cluster = _cluster(server, Limits(attempt_seconds_max=5.0))
    for left in ((10.0,), (2.0,), (4.0, 1.0)):
        await asyncio.gather(
            *(cluster.router.commit(one_round(20, b"a"), cluster.deadline(one)) for one in left)
        )
    assert [call.wait_milliseconds for call in server.commit_calls] == [0, 1600, 800]


@pytest.mark.parametrize(
    "commit",
    [
        one_round(20, b"a", b"n"),
        one_round(20, b"a")._replace(notifications=[(b"n", b"w", (b"g",))]),
    ],
    ids=["cells", "a weak notification"],
)
async def test_what_is_not_in_one_tablet_is_not_sent(
    server: Commits, commit: OneRoundCommit
) -> None:
    cluster = _cluster(server)
    assert isinstance(await cluster.router.commit(commit, cluster.deadline()), NotInOneRound)
    assert server.commit_calls == []


async def test_a_tablet_that_is_not_known_is_asked_for_first(server: Commits) -> None:
    cluster = Cluster({"a:1": server})
    assert isinstance(
        await cluster.router.commit(one_round(20, b"a"), cluster.deadline(1.0)), NotSent
    )
    cluster.now_at = [tablet("a:1")]
    assert await cluster.router.commit(one_round(20, b"a"), cluster.deadline()) == 21


@pytest.mark.parametrize(
    "error",
    [
        NotReady("closed for a load", retry_after_seconds=9.0),
        TabletMoved("moved", tablet_id=1, epoch=1),
        SchemaChanged("newer", table_id=1, schema_version=4),
        ExecutionUnknown("broken"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_the_answer_is_nothing_is_sent_again(
    server: Commits, error: PercolatorError
) -> None:
    server.refuse_batch = lambda target, rows: error
    cluster = _cluster(server)
    cluster.now_at = [tablet("a:1", b"", b"m", epoch=2)]
    answer = await cluster.router.commit(one_round(20, b"a"), cluster.deadline())
    assert isinstance(answer, type(error))
    await asyncio.sleep(10.0)
    assert len(server.commit_calls) == 1
    searched = isinstance(error, TabletMoved | ExecutionUnknown)
    assert cluster.searches == searched


async def test_only_the_transaction_that_is_invalid_is_blamed(server: Commits) -> None:
    server.refuse_batch = lambda target, rows: (
        InvalidArgument("values[1]", "too large") if b"b" in rows else None
    )
    cluster = _cluster(server)
    sent = (one_round(20, b"a"), one_round(30, b"b"), one_round(40, b"c"))
    first, second, third = await _answers(cluster, *sent)
    assert (first, third) == (21, 41)
    assert isinstance(second, InvalidArgument)
    sizes = [len(batch.start_timestamps) for call in server.commit_calls for batch in call.batches]
    assert sizes == [3, 1, 1, 1]


async def test_a_message_is_full_of_weak_notifications_too(server: Commits) -> None:
    cluster = _cluster(server, Limits(batch_rows_max=4))
    notified = [(b"%d" % number, b"w", (b"g",)) for number in range(3)]
    sent = [one_round(start, b"a")._replace(notifications=notified) for start in (20, 30)]
    assert await _answers(cluster, *sent) == [21, 31]
    counts = [len(batch.notifications) for call in server.commit_calls for batch in call.batches]
    assert counts == [3, 3]


async def test_a_refusal_names_the_condition_and_the_cell(server: Commits) -> None:
    def refuse(result: pb.TransactionBatchResult) -> None:
        result.commit_timestamps[0] = 0
        found = result.uncommitted.add(transaction=0).result
        found.outcome = pb.OUTCOME_REFUSED
        found.failed_condition = 3
        found.cell.row = b"a"

    server.malform = refuse
    (answer,) = await _answers(_cluster(server), one_round(20, b"a"))
    assert isinstance(answer, Refused)
    assert (answer.condition, answer.cell) == (3, Cell(row=b"a"))


@pytest.mark.parametrize(
    "malform",
    [
        lambda result: result.commit_timestamps.pop(),
        lambda result: result.commit_timestamps.append(1),
        lambda result: result.commit_timestamps.__setitem__(0, 0),
        lambda result: result.uncommitted.add(transaction=9),
        lambda result: result.uncommitted.add(transaction=0),
        lambda result: result.followed.append(9),
    ],
    ids=[
        "one less",
        "one more",
        "no outcome",
        "no such transaction",
        "an empty result",
        "none that is followed",
    ],
)
async def test_a_malformed_response_leaves_the_outcome_open(
    server: Commits,
    malform: Callable[[pb.TransactionBatchResult], object],
) -> None:
    server.malform = malform
    (answer,) = await _answers(_cluster(server), one_round(20, b"a"))
    assert isinstance(answer, ExecutionUnknown)


async def test_a_deadline_tells_whether_it_was_sent() -> None:
    server = Commits(seconds=60.0)
    cluster = _cluster(server, Limits(server_calls_max=2, server_rows_max=2))
    sent = [one_round(20 + number, b"a") for number in range(3)]
    *answers, last = await _answers(cluster, *sent, seconds=1.0)
    assert [failure(one) for one in answers] == [(DeadlineExceeded, Retry.UNKNOWN)] * 2
    assert isinstance(last, NotSent)


async def test_a_silent_server_whose_tablets_are_elsewhere_is_left() -> None:
    server = Commits(seconds=60.0)
    cluster = _cluster(server, Limits(server_calls_max=2))
    sent = cluster.router.commit(one_round(20, b"a"), cluster.deadline(10.0))
    await asyncio.sleep(0.5)
    queued = cluster.router.commit(one_round(30, b"a"), cluster.deadline(10.0))
    cluster.now_at = [tablet("b:1", b"", b"m", epoch=2)]
    assert isinstance(await sent, DeadlineExceeded)
    assert await queued == 31, "it was not sent, so it can be sent elsewhere"
    assert cluster.clock.monotonic_seconds() < 3.0
    assert await cluster.router.commit(one_round(20, b"a"), cluster.deadline()) == 21


async def test_a_closed_router_answers_at_once() -> None:
    cluster = _cluster(Commits())
    await cluster.router.close()
    answer = await cluster.router.commit(one_round(20, b"a"), cluster.deadline())
    assert isinstance(answer, UsageError)


# Locks with primaries in a table that is being deleted, or is gone.

deleted = Table("deleted")
kept = Table("kept")
primary = deleted.column("c", codecs.integer)
other = kept.column("c", codecs.integer)

READ_SECONDS_MAX = 5.0
"""Half of the time that a call may take: a reader that waits without success takes all of it."""


class ForgetfulCluster(ClusterInMemory):
    """Can remove deleted tables that are still needed, which neither a master nor its base does."""

    def drop(self) -> None:
        for table_id in self._deleting:
            for served in self._tablets_of(table_id):
                del self.tablets[served.identity.tablet_id]
        self._deleting.clear()


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Database, Database, ForgetfulCluster]]:
    """Two clients: one that writes and dies, and one that comes after it."""
    clock = VirtualClock(asyncio.get_running_loop())
    cluster = ForgetfulCluster(clock)

    async def client() -> Database:
        world = World(clock, InProcessNetwork({ADDRESS: cluster}), random.Random(1))
        return await connect_to(world, [ADDRESS], Limits(), RetryPolicy())

    async with await client() as one, await client() as two:
        await one.create_table(deleted)
        await one.create_table(kept)
        yield one, two, cluster


async def left_behind(
    db: Database, monkeypatch: pytest.MonkeyPatch, *, committed: bool
) -> Transaction:
    """A transaction whose client died right before or after its commit point."""

    async def never(*_: object) -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    tx = db.transaction()
    await tx.set("a", primary, 1)
    await tx.set("a", other, 1)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "commit_secondaries", never)
        patch.setattr(commit, "roll_back_all", never)
        if committed:
            await tx.commit()
        else:
            patch.setattr(commit.Commit, "commit_primary", never)
            patch.setattr(db.internal.engine.heartbeats, "add", lambda _: None)
            stuck = asyncio.create_task(tx.commit())
            await asyncio.sleep(1.0)
            stuck.cancel()
            await asyncio.wait([stuck])
    return tx


async def test_a_lock_whose_primary_is_gone_for_good_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master removes no table that holds the primary of a committed transaction's lock."""
    async with connected() as (dead, db, cluster):
        await left_behind(dead, monkeypatch, committed=False)
        await db.drop_table(deleted)
        cluster.drop()
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            assert await snapshot.get("a", other) is None


async def test_what_is_known_of_a_transaction_outlasts_the_table_of_its_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is decided after a reader has met its lock, and the table is gone before the reader asks
    the primary."""
    async with connected() as (dead, db, cluster):
        left = await left_behind(dead, monkeypatch, committed=False)
        await db.drop_table(deleted)
        cluster.drop()
        env, start = db.internal.engine.env, left.start_timestamp
        assert env.deleted_tables is not None
        assert start is not None
        ask = env.deleted_tables.mutate

        async def decided(*arguments: Any) -> Any:
            env.verdicts.put(start, start + 1)
            return await ask(*arguments)

        monkeypatch.setattr(env.deleted_tables, "mutate", decided)
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            await snapshot.get("a", other)
        assert env.verdicts.get(start) == start + 1


async def test_a_transaction_is_not_taken_for_rolled_back_because_its_primary_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was committed and rolled forward after a reader had met its lock, and the table was
    removed before the reader asked."""
    async with connected() as (one, db, cluster):
        tx = await left_behind(one, monkeypatch, committed=True)
        await db.drop_table(deleted)
        env = db.internal.engine.env
        assert env.deleted_tables is not None
        ask = env.deleted_tables.mutate

        async def late(*arguments: Any) -> Any:
            async with one.transaction() as resolving:
                await resolving.lock("a", other)  # waits until the cell is rolled forward
            cluster.drop()
            return await ask(*arguments)

        monkeypatch.setattr(env.deleted_tables, "mutate", late)
        async with db.snapshot(timeout=READ_SECONDS_MAX) as snapshot:
            assert await snapshot.get("a", other) == 1
        assert tx.start_timestamp is not None
        # Whoever repeats the commit would be told the verdict, and its answer contradict it.
        assert env.verdicts.get(tx.start_timestamp) is None


async def test_the_outcome_can_be_learned_while_the_primarys_table_is_being_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (dead, db, cluster):
        committed = await left_behind(dead, monkeypatch, committed=True)
        await db.drop_table(deleted)
        assert committed.start_timestamp is not None
        unknown = OutcomeUnknown(
            "no answer",
            start_timestamp=committed.start_timestamp,
            primary=next(iter(committed.internal.writes.cells)),
        )
        assert await db.resolve(unknown) is Outcome.COMMITTED
        cluster.drop()
        with pytest.raises(OutcomeUnknown):  # the record went with the table
            await db.resolve(unknown)


async def test_a_transaction_that_cannot_commit_to_a_deleted_table_leaves_no_lock_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (db, other_db, cluster):
        locked = asyncio.Event()
        reach = commit.Commit.commit_primary

        async def slowly(point: commit.Commit, deadline: float) -> int:
            locked.set()
            await asyncio.sleep(0.1)
            return await reach(point, deadline)

        monkeypatch.setattr(commit.Commit, "commit_primary", slowly)
        tx = db.transaction()
        await tx.set("a", primary, 1)
        await tx.set("a", other, 1)
        committing = asyncio.create_task(tx.commit())
        await locked.wait()
        await other_db.drop_table(deleted)
        with pytest.raises(SchemaError):
            await committing
        assert tx.outcome is Outcome.ABORTED
        await asyncio.sleep(1.0)
        assert [tablet.statistics().locks for tablet in cluster.tablets.values()] == [0, 0]


async def test_the_map_for_settling_locks_leads_no_write_to_a_deleted_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with connected() as (dead, db, _):
        await left_behind(dead, monkeypatch, committed=True)
        async with db.transaction() as tx:
            await tx.set("b", primary, 1)  # from now on it knows the table
        await dead.drop_table(deleted)
        assert await db.get("a", other) == 1
        with pytest.raises((SchemaError, ConflictError)):
            async with db.transaction() as tx:
                await tx.set("c", primary, 1)
