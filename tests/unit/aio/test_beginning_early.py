"""Transactions that have read nothing begin early. It saves a round trip; all else is as before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator import Limits, Outcome, RetryPolicy, Table, codecs, transactional
from percolator.aio import Database, Transaction
from percolator.aio.one_message import OneMessage
from percolator.errors import ConflictError, OutcomeUnknown, SnapshotTooOld
from percolator.protocol.commit_point import CommitPoint
from percolator.protocol.early_starts import AGE_SECONDS_MAX, REST
from percolator.routing.router import Router
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_WRITE
from tests.unit.connected import Cluster, balance, connected_to

_orders = Table("orders")
_state = _orders.column("state", codecs.integer)


class Counting(Cluster):
    """Counts what would commit in one round, and answers it while the test does not hold it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.messages = 0
        self.answers_commits = asyncio.Event()
        self.answers_commits.set()
        self.locked = asyncio.Event()
        """A prewrite was executed."""

    async def mutate(self, request: pb.MutateRequest) -> pb.MutateResponse:
        response = await super().mutate(request)
        self.locked.set()
        return response

    async def commit_transactions(
        self, request: pb.CommitTransactionsRequest
    ) -> pb.CommitTransactionsResponse:
        self.messages += sum(len(batch.start_timestamps) for batch in request.batches)
        await self.answers_commits.wait()
        return await super().commit_transactions(request)


@asynccontextmanager
async def stocked() -> AsyncIterator[tuple[Database, Counting]]:
    """A client with a stock of early starts."""
    async with connected_to(Counting, Limits()) as (db, cluster):
        await _written(db, "first", 0)
        await asyncio.sleep(0.01)
        cluster.messages = 0
        yield db, cluster


async def _written(db: Database, row: str, value: int) -> Transaction:
    async with db.transaction() as tx:
        await tx.set(row, balance, value)
    return tx


async def _records(cluster: Cluster) -> list[int]:
    """The commit timestamps of all write records."""
    found: list[int] = []
    for tablet in cluster.tablets.values():
        target = pb.TabletTarget(
            tablet_id=tablet.identity.tablet_id,
            epoch=tablet.identity.epoch,
            schema_version=tablet.schema_version,
        )
        request = pb.ScanCellsRequest(target=target, space=SPACE_WRITE)
        async for page in tablet.scan_cells(request):
            found += [cell.timestamp for cell in page.cells]
    return sorted(found)


async def test_what_only_writes_commits_in_one_round_trip_above_all_that_came_before() -> None:
    async with stocked() as (db, cluster):
        before = await db.timestamp()
        tx = await _written(db, "a", 1)
        assert (tx.statistics.round_trips, cluster.messages) == (1, 1)
        assert (tx.start_timestamp or 0) < before < (tx.commit_timestamp or 0)
        assert await db.get("a", balance) == 1


async def test_many_at_once_have_starts_of_their_own_and_all_commit() -> None:
    async with stocked() as (db, _):
        done = await asyncio.gather(*(_written(db, f"row {n}", n) for n in range(12)))
        assert len({tx.start_timestamp for tx in done}) == 12
        assert {tx.statistics.round_trips for tx in done} == {1}
        async with db.snapshot() as snapshot:
            found = await snapshot.get_many([(f"row {n}", balance) for n in range(12)])
        assert found == list(range(12))


async def test_what_reads_first_shows_what_was_committed_before_it_began() -> None:
    async with stocked() as (db, _):
        await _written(db, "a", 1)
        async with db.transaction() as tx:
            await tx.set("b", balance, 2)
            assert await tx.get("a", balance) == 1
        assert tx.statistics.round_trips == 3


async def test_reading_only_its_own_writes_needs_no_snapshot() -> None:
    async with stocked() as (db, _):
        async with db.transaction() as tx:
            await tx.set("a", balance, 2)
            assert await tx.get("a", balance) == 2
        assert tx.statistics.round_trips == 1


async def test_a_timestamp_that_the_program_asks_for_is_no_early_one() -> None:
    async with stocked() as (db, _):
        before = await db.timestamp()
        async with db.transaction() as tx:
            begun = await tx.timestamp()
            await tx.set("a", balance, 2)
        assert before < begun == tx.start_timestamp


async def test_overwriting_what_was_committed_since_is_no_conflict() -> None:
    """It would be none if the start had been fetched when the transaction began."""
    async with stocked() as (db, cluster):
        async with db.transaction() as other:
            await other.set("a", balance, (await other.get("a", balance, default=0)) + 1)
        cluster.messages = 0
        tx = await _written(db, "a", 5)
        assert (tx.statistics.round_trips, cluster.messages) == (3, 2)
        assert (other.commit_timestamp or 0) < (tx.start_timestamp or 0)
        assert await db.get("a", balance) == 5
        assert db.internal.engine.activity.tally.conflicts == 0


async def test_a_row_that_is_overwritten_all_the_time_hardly_ever_costs_more() -> None:
    async with stocked() as (db, cluster):
        for number in range(400):
            await _written(db, "a", number)
        assert 400 <= cluster.messages <= 400 + 400 // REST + 1


async def test_rows_that_are_each_overwritten_all_the_time_hardly_ever_cost_more_either() -> None:
    """Although it takes much longer to hear of an obstacle than until the next stock comes."""

    class Slow(Counting):
        async def commit_transactions(
            self, request: pb.CommitTransactionsRequest
        ) -> pb.CommitTransactionsResponse:
            response = await super().commit_transactions(request)
            await asyncio.sleep(0.005)
            return response

    async with connected_to(Slow, Limits()) as (db, cluster):

        async def overwrite(row: str) -> None:
            for number in range(100):
                await _written(db, row, number)

        await asyncio.gather(*(overwrite(f"row {number}") for number in range(20)))
        assert 2_000 < cluster.messages <= 2_000 * 1.02


async def test_it_is_one_attempt_of_a_transactional_function() -> None:
    runs = 0

    @transactional(retry=RetryPolicy(attempts_max=1))
    async def put(tx: Transaction, value: int) -> None:
        nonlocal runs
        runs += 1
        await tx.set("a", balance, value)

    async with stocked() as (db, _):
        async with db.transaction() as other:
            await other.set("a", balance, (await other.get("a", balance, default=0)) + 1)
        await put(db, 7)
        assert (runs, await db.get("a", balance)) == (1, 7)


async def test_a_lock_of_a_younger_transaction_is_waited_for_as_by_any_that_begins_then() -> None:
    async with stocked() as (db, cluster):
        other = db.transaction()
        await other.timestamp()
        for row in ("a", "z"):  # in two tablets, so it takes locks
            await other.set(row, balance, 1)
        committing = asyncio.ensure_future(other.commit())
        await cluster.locked.wait()
        await _written(db, "a", 9)
        assert await committing is not None
        assert await db.get("a", balance) == 9


async def test_a_start_below_the_safe_point_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stocked() as (db, _):
        correct = Router.commit
        refused = 0

        def commit(self: Router, commit: Any, deadline: float, answer: Any = None) -> Any:
            nonlocal refused
            if refused == 0:
                refused += 1
                answer.set_result(SnapshotTooOld("is below the safe point"))
                return answer
            return correct(self, commit, deadline, answer)

        monkeypatch.setattr(Router, "commit", commit)
        tx = await _written(db, "a", 1)
        assert (refused, tx.outcome) == (1, Outcome.COMMITTED)
        assert await db.get("a", balance) == 1


async def test_an_unknown_outcome_is_never_tried_at_another_start() -> None:
    async with stocked() as (db, cluster):
        before = await _records(cluster)
        cluster.answers_lost = True
        tx = db.transaction()
        await tx.set("a", balance, 1)
        with pytest.raises(OutcomeUnknown) as unknown:
            await tx.commit(timeout=1.0)
        cluster.answers_lost = False
        assert unknown.value.start_timestamp == tx.start_timestamp
        assert await tx.resolve() is Outcome.COMMITTED
        assert len(await _records(cluster)) == len(before) + 1


async def test_a_caller_cancelled_in_the_same_turn_has_sent_nothing_and_never_will() -> None:
    async with stocked() as (db, cluster):
        tx = db.transaction()
        await tx.set("a", balance, 1)
        committing = asyncio.ensure_future(tx.commit())
        await asyncio.sleep(0)
        committing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await committing
        await asyncio.sleep(0.05)
        assert (tx.outcome, cluster.messages) == (Outcome.ABORTED, 0)
        assert await db.get("a", balance) is None


async def test_ctrl_c_before_the_message_leaves_has_sent_nothing_and_never_will(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stocked() as (db, cluster):
        tx = db.transaction()
        await tx.set("a", balance, 1)
        correct = OneMessage._answer_to

        def interrupted(self: OneMessage, first: Any) -> Any:
            correct(self, first)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(OneMessage, "_answer_to", interrupted)
            with pytest.raises(KeyboardInterrupt):
                tx.commit().send(None)
        await asyncio.sleep(0.05)
        assert (tx.outcome, cluster.messages) == (Outcome.ABORTED, 0)


async def test_a_table_created_since_the_stock_came_is_written() -> None:
    async with stocked() as (db, _):
        await db.create_table(_orders)
        async with db.transaction() as tx:
            await tx.set("b", _state, 3)
        assert tx.statistics.round_trips == 2
        assert await db.get("b", _state) == 3


async def test_after_an_obstacle_it_begins_early_again_later() -> None:
    async with stocked() as (db, _):
        await _written(db, "a", 1)
        trips = [(await _written(db, "a", 2)).statistics.round_trips]
        others = [await _written(db, f"row {number}", 1) for number in range(REST + 4)]
        trips += [other.statistics.round_trips for other in others]
        assert trips[0] == 3
        assert trips[1:].count(2) in (REST, REST + 1)
        assert trips[-1] == 1


async def test_a_lock_that_it_would_have_met_anyway_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock is older than its start: beginning anew would not make it go away."""
    async with stocked() as (db, cluster):
        other = db.transaction(timeout=60.0)
        await other.timestamp()
        for row in ("a", "z"):  # in two tablets, so it takes locks
            await other.set(row, balance, 1)
        await asyncio.sleep(AGE_SECONDS_MAX * 0.6)
        await _written(db, "b", 1)  # a stock that is younger is on its way
        await asyncio.sleep(0.01)
        correct, may_commit = CommitPoint.reach, asyncio.Event()

        async def slowly(self: CommitPoint, deadline: float) -> int:
            await may_commit.wait()
            return await correct(self, deadline)

        monkeypatch.setattr(CommitPoint, "reach", slowly)
        committing = asyncio.ensure_future(other.commit())
        await cluster.locked.wait()
        began = asyncio.get_running_loop().time()
        tx = db.transaction()
        await tx.set("a", balance, 9)
        with pytest.raises(ConflictError, match="is locked by") as conflict:
            await tx.commit()
        waited = asyncio.get_running_loop().time() - began
        assert conflict.value.other_start_timestamp == other.start_timestamp
        assert Limits().lock_wait_seconds <= waited < Limits().lock_wait_seconds + 1.0
        may_commit.set()
        assert await committing is not None
        await _written(db, "c", 9)  # the stock is old by now
        later = await _written(db, "d", 9)
        assert later.statistics.round_trips == 1, "it rests for nothing"
