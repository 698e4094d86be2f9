"""The first message of a commit, when its caller is cancelled, or an answer does not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from percolator import Limits, Outcome, UsageError
from percolator.aio import Database, Transaction
from percolator.errors import (
    DeadlineExceeded,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    Unauthenticated,
    Unavailable,
)
from percolator.protocol.commit import Commit
from percolator.routing.lanes import PendingCommit
from percolator.routing.router import Router
from percolator.v1 import oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.connected import Cluster, accounts, balance, connected_to


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


@asynccontextmanager
async def held() -> AsyncIterator[tuple[Database, Held]]:
    async with connected_to(Held, Limits()) as (db, cluster):
        async with db.transaction() as tx:
            await tx.set("known", balance, 0)
        cluster.messages = 0
        yield db, cluster


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


async def test_a_write_asks_for_its_timestamp_and_commits_in_two_round_trips() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        before = await db.timestamp()
        commit = await tx.commit()
        assert commit is not None
        assert before < (tx.start_timestamp or 0) < commit == tx.commit_timestamp
        assert (tx.statistics.round_trips, cluster.messages) == (2, 1)
        assert await db.get("a", balance) == 1


async def test_a_caller_cancelled_before_the_timestamp_has_sent_nothing_and_never_will() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.gives_timestamps.clear()
        await cancelled(tx.commit())
        assert tx.outcome is Outcome.ABORTED
        cluster.gives_timestamps.set()
        await asyncio.sleep(0.05)
        assert cluster.messages == 0
        assert await db.get("a", balance) is None


async def test_a_caller_cancelled_after_it_can_find_out_that_it_has_committed() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.answers_commits.clear()
        await cancelled(tx.commit())
        assert tx.outcome is Outcome.UNKNOWN
        cluster.answers_commits.set()
        assert await tx.resolve() is Outcome.COMMITTED
        assert tx.commit_timestamp is not None
        assert await db.get("a", balance) == 1


async def test_a_caller_cancelled_in_the_turn_of_the_answer_is_not_told_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with held() as (db, _):
        tx = await written(db, 1)
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


async def test_without_a_timestamp_nothing_was_done_and_it_may_be_done_again() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.oracle_says = Unavailable("connection refused")
        with pytest.raises(DeadlineExceeded, match="did not answer in time") as late:
            await tx.commit(timeout=1.0)
        assert late.value.retry is Retry.SAFE
        assert (tx.outcome, cluster.messages) == (Outcome.ABORTED, 0)


async def test_a_refusal_by_the_oracle_is_raised_as_it_is() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.oracle_says = Unauthenticated("who are you?")
        with pytest.raises(Unauthenticated, match="who are you"):
            await tx.commit()
        assert (tx.outcome, cluster.messages) == (Outcome.ABORTED, 0)


async def test_closing_the_database_ends_a_commit_that_waits_for_its_timestamp() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.gives_timestamps.clear()
        committing = asyncio.ensure_future(tx.commit())
        await asyncio.sleep(0.05)
        await db.close()
        with pytest.raises(UsageError, match="closed"):
            await committing
        assert (tx.outcome, cluster.messages) == (Outcome.ABORTED, 0)
        cluster.gives_timestamps.set()


async def test_an_unanswered_message_is_sent_again_and_its_outcome_is_found() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.answers_lost = True
        with pytest.raises(OutcomeUnknown):
            await tx.commit(timeout=1.0)
        assert cluster.messages > 1
        cluster.answers_lost = False
        assert await tx.resolve() is Outcome.COMMITTED
        assert await db.get("a", balance) == 1


async def _scanned(tx: Transaction) -> list[str]:
    return [row.key async for row in tx.scan(accounts)]


async def test_a_commit_shares_the_timestamp_that_a_scan_of_its_transaction_waits_for() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.gives_timestamps.clear()
        reading = asyncio.ensure_future(_scanned(tx))
        await asyncio.sleep(0.05)
        committing = asyncio.ensure_future(tx.commit())
        await asyncio.sleep(0.05)
        cluster.gives_timestamps.set()
        assert await committing is not None
        with pytest.raises(UsageError, match="commit"):
            await reading
        assert cluster.messages == 1


async def test_a_commit_begins_at_the_timestamp_for_which_a_scan_has_asked_again() -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.gives_timestamps.clear()
        reading, left = (asyncio.ensure_future(_scanned(tx)) for _ in range(2))
        await asyncio.sleep(0.05)
        left.cancel()  # and with it the request that both had waited for
        cluster.gives_timestamps.set()
        cluster.gives_timestamps.clear()
        await asyncio.sleep(0.05)  # the other one has asked again, and waits
        committing = asyncio.ensure_future(tx.commit())
        await asyncio.sleep(0.05)
        cluster.gives_timestamps.set()
        cluster.gives_timestamps.clear()
        with pytest.raises(UsageError, match="commit"):
            await reading
        begun = tx.start_timestamp
        cluster.gives_timestamps.set()
        assert await committing is not None
        assert begun == tx.start_timestamp


async def test_commits_that_wait_for_one_answer_of_the_oracle_share_a_message() -> None:
    async with held() as (db, cluster):
        open_ones = [await written(db, number) for number in range(3)]
        others = [db.transaction() for _ in range(20)]
        for number, tx in enumerate(others):
            await tx.set(f"row {number}", balance, number)
        cluster.gives_timestamps.clear()
        committing = [asyncio.ensure_future(tx.commit()) for tx in (*others, *open_ones)]
        await asyncio.sleep(0.05)
        committing[3].cancel()
        cluster.gives_timestamps.set()
        ended = await asyncio.gather(*committing, return_exceptions=True)
        committed = [one for one in ended if isinstance(one, int)]
        assert isinstance(ended[3], asyncio.CancelledError)
        assert others[3].outcome is Outcome.ABORTED
        assert await db.get("row 3", balance) is None
        # Of the three that write one cell, one has committed.
        assert len(committed) == len(set(committed)) == 20
        assert sum(tx.outcome is Outcome.COMMITTED for tx in open_ones) == 1


@pytest.mark.parametrize("reads_first", [False, True])
async def test_a_message_that_may_have_left_before_a_bug_had_an_effect_has_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch, *, reads_first: bool
) -> None:
    async with held() as (db, _):
        tx = await written(db, 1)
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


async def test_ctrl_c_while_the_message_is_handed_over_is_not_told_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
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
        assert cluster.messages == 1
        assert tx.outcome is Outcome.UNKNOWN
        assert await tx.resolve() is Outcome.COMMITTED


async def test_ctrl_c_before_the_answer_is_heard_is_not_told_of_a_rollback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with held() as (db, cluster):
        tx = await written(db, 1)
        cluster.answers_lost = True

        def interrupted(self: Commit, answer: object) -> None:
            raise Interrupted  # a `KeyboardInterrupt` would end the test's loop

        with monkeypatch.context() as patch:
            patch.setattr(Commit, "_heard", interrupted)
            with pytest.raises(Interrupted):
                await tx.commit()
        cluster.answers_lost = False
        assert tx.outcome is Outcome.UNKNOWN
        assert await tx.resolve() is Outcome.COMMITTED
