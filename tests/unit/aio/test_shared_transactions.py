"""Transactions of several processes: what the driver commits appears at once, and only that."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from percolator import Index, Outcome, Timestamp
from percolator.aio import Database, SharedTransaction
from percolator.aio.shared import Receipt, Share
from percolator.errors import (
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    OtherDriverCommitted,
    OutcomeUnknown,
    PercolatorError,
    SchemaError,
    UsageError,
)
from percolator.protocol.commit import Sent
from percolator.protocol.shared.driver import SharedCommit
from percolator.protocol.shared.participant import roll_back
from percolator.testing.cluster_in_memory import ClusterInMemory
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit import connected
from tests.unit.aio.shared_attempts import (
    ROWS,
    TTL_SECONDS,
    receipt_of,
    set_value,
    share_of,
    values_of,
)
from tests.unit.connected import TWO_PHASES, Cluster, accounts, balance, put

on_both_engines = pytest.mark.usefixtures("engine_of_cells")


@pytest.fixture
def in_a_row_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tablets refuse what such a row store would take."""
    monkeypatch.setattr(connected, "over_rows", True)


@pytest.fixture
@asynccontextmanager
async def hasty(db: Database) -> AsyncIterator[SharedTransaction]:
    """A transaction whose driver gives up after a second."""
    async with db.shared_transaction(timeout=1.0) as shared:
        yield shared


async def test_in_a_row_store_an_index_that_comes_after_the_entries_fails_the_commit(
    in_a_row_store: None,
    db: Database,
    shared: SharedTransaction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receipt = await receipt_of(db, shared.ticket, "one", ann=1)
    engine = db.internal.engine
    added = Index(accounts, "balance", (balance,)).definition()
    correct = shared._add_entries

    async def too_early(timeout: float | None) -> object:
        indexes = await correct(timeout)
        await engine.catalog.change_indexes("accounts", [added], deadline=engine.now() + 10.0)
        return indexes

    monkeypatch.setattr(shared, "_add_entries", too_early)
    with pytest.raises(ConflictError, match="the indexes of 'accounts' were changed"):
        await shared.commit([receipt])
    assert await values_of(db) == {}


@pytest.fixture
@asynccontextmanager
async def lasting(db: Database) -> AsyncIterator[SharedTransaction]:
    """A transaction whose locks outlast the test."""
    async with db.shared_transaction(ttl=1000.0) as shared:
        yield shared


@contextmanager
def unanswered(
    cluster: Cluster, how: str = "silent", *, error: type[PercolatorError] = OutcomeUnknown
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Calls made meanwhile get no answer, and raise this error."""
    setattr(cluster, how, True)
    with pytest.raises(error) as caught:
        yield caught
    setattr(cluster, how, False)


# ---------------------------------------------------------------- committing


@on_both_engines
async def test_everything_appears_at_one_timestamp(db: Database) -> None:
    async with db.shared_transaction() as shared:
        receipts = [
            await receipt_of(db, shared.ticket, "1", ann=1, zoe=2),
            await receipt_of(db, shared.ticket, "2", bob=3),
        ]
        assert await values_of(db) == {}
        commit = await shared.commit(receipts)
    assert commit is not None
    assert await values_of(db, Timestamp(commit - 1)) == {}
    assert await values_of(db, commit) == {"ann": 1, "bob": 3, "zoe": 2}


@on_both_engines
async def test_tickets_and_receipts_travel_between_processes(
    db: Database, shared: SharedTransaction
) -> None:
    ticket = pickle.loads(pickle.dumps(shared.ticket))
    receipt = pickle.loads(pickle.dumps(await receipt_of(db, ticket, "1", ann=1)))
    assert receipt.cells == 1
    assert await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_begun_twice_at_once_it_begins_once(db: Database) -> None:
    shared = db.shared_transaction()
    begun = await asyncio.gather(shared.begin(), shared.begin(), return_exceptions=True)
    assert [str(one) for one in begun if one] == ["the shared transaction has begun already"]
    assert await shared.commit([await receipt_of(db, shared.ticket, "1", ann=1)])
    assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_one_process_begins_it_and_another_decides(db: Database) -> None:
    ticket = await db.internal.shared_ticket(60.0, 1.0)
    receipt = await receipt_of(db, ticket, "1", ann=1)
    async with db.internal.shared_transaction(None, None, 1.0, ticket) as shared:
        with pytest.raises(UsageError, match="has begun already"):
            await shared.begin()
        assert await shared.commit([receipt])
    assert ticket.ttl_seconds == 60.0
    assert await values_of(db) == {"ann": 1}


@on_both_engines
@pytest.mark.parametrize("rolled_back_first", [False, True])
async def test_a_driver_that_lost_to_another_is_told_which_parts_are_not_committed(
    db: Database,
    rolled_back_first: bool,
) -> None:
    """It was told the other driver's commit timestamp, and had tablets commit its own cells."""
    one = db.shared_transaction()
    await one.begin()
    two = db.internal.shared_transaction(None, None, 30.0, one.ticket)
    await two.begin()
    of_one = await receipt_of(db, one.ticket, "1", ann=1)
    of_both = await receipt_of(db, one.ticket, "2", bob=2)
    of_two = await receipt_of(db, one.ticket, "3", joe=3)
    commit = await one.commit([of_one, of_both])
    if rolled_back_first:
        await db.internal.engine.env.background.drain(10.0)
    with pytest.raises(
        OtherDriverCommitted, match=f"at {commit}, without 1 of the 2 participants.*task '3'"
    ) as lost:
        await two.commit([of_both, of_two])
    assert lost.value.commit_timestamp == commit
    assert lost.value.without == ("participant 0 of task '3'",)
    assert two.commit_timestamp is None
    assert await two.abort() is None
    with pytest.raises(UsageError, match="was committed by another driver"):
        await two.commit([of_two])
    await set_value(db, "joe", 7)  # nothing is in the way
    assert await values_of(db) == {"ann": 1, "bob": 2, "joe": 7}


@on_both_engines
async def test_a_driver_whose_parts_another_one_has_committed_with_more_has_committed(
    db: Database,
) -> None:
    async with db.shared_transaction() as one:
        two = db.internal.shared_transaction(None, None, 30.0, one.ticket)
        await two.begin()
        receipts = [
            await receipt_of(db, one.ticket, "1", ann=1),
            await receipt_of(db, one.ticket, "2", bob=2),
        ]
        commit = await one.commit(receipts)
        assert await two.commit(receipts[1:]) == commit
    assert await values_of(db) == {"ann": 1, "bob": 2}


@on_both_engines
async def test_a_driver_that_commits_nothing_is_told_of_one_that_has_committed(
    db: Database,
) -> None:
    async with db.shared_transaction() as one:
        two = db.internal.shared_transaction(None, None, 30.0, one.ticket)
        await two.begin()
        commit = await one.commit([await receipt_of(db, one.ticket, "1", ann=1)])
        with pytest.raises(OtherDriverCommitted, match=f"at {commit}, and nothing more"):
            await two.commit([])
    assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_a_driver_without_an_answer_that_lost_to_another_is_not_told_of_a_commit(
    db: Database, cluster: Cluster
) -> None:
    one = db.shared_transaction()
    await one.begin()
    two = db.internal.shared_transaction(None, None, 1.0, one.ticket)
    await two.begin()
    of_one = await receipt_of(db, one.ticket, "1", ann=1)
    of_two = await receipt_of(db, one.ticket, "2", bob=2)
    with unanswered(cluster):
        await two.commit([of_two])
    await one.commit([of_one])
    with pytest.raises(OtherDriverCommitted, match="without 1 of the 1 participants"):
        await two.abort()
    assert two.commit_timestamp is None
    assert await values_of(db) == {"ann": 1}


@on_both_engines
@pytest.mark.parametrize("limits", [replace(TWO_PHASES, value_inline_bytes_max=1)])
async def test_a_deletion_and_large_values_are_committed_as_such(db: Database) -> None:
    await put(db, balance, ann=1)
    async with db.shared_transaction() as shared, db.share(shared.ticket, task="1") as share:
        await share.delete("ann", balance)
        await share.set("bob", balance, 123_456_789)
        await shared.commit([await share.finish()])
    assert await values_of(db) == {"bob": 123_456_789}


@on_both_engines
async def test_a_transaction_without_receipts_commits_nothing(
    db: Database, shared: SharedTransaction
) -> None:
    await receipt_of(db, shared.ticket, "1", ann=1)
    assert await shared.commit([]) is None
    assert await values_of(db) == {}


@on_both_engines
async def test_leaving_the_block_without_a_commit_rolls_back(db: Database) -> None:
    async with db.shared_transaction() as shared:
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
    with pytest.raises(UsageError, match="was rolled back"):
        await shared.commit([receipt])
    await set_value(db, "ann", 7)  # nothing is in the way
    assert await values_of(db) == {"ann": 7}


@on_both_engines
async def test_abort_undoes_nothing_that_was_committed(db: Database, cluster: Cluster) -> None:
    async with db.shared_transaction(timeout=1.0) as shared:
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
        with unanswered(cluster, "answers_lost") as unknown:
            await shared.commit([receipt])
        commit = await shared.abort()
    assert commit is not None
    assert await values_of(db, commit) == {"ann": 1}
    assert await db.resolve(unknown.value) is Outcome.COMMITTED


@on_both_engines
@pytest.mark.parametrize("committed", [True, False])
async def test_abort_says_what_became_of_one_that_was_left_without_an_answer(
    committed: bool, db: Database, cluster: Cluster
) -> None:
    """It had said that it was rolled back, without asking anybody."""
    shared = db.shared_transaction(timeout=1.0)
    with pytest.raises(OutcomeUnknown):
        await _left_without_an_answer(db, cluster, shared, committed=committed)
    cluster.answers_lost = cluster.silent = False
    commit = await shared.abort()
    assert (commit is not None) is committed
    assert shared.commit_timestamp == commit == await shared.abort()
    assert await values_of(db) == ({"ann": 1} if committed else {})


async def _left_without_an_answer(
    db: Database, cluster: Cluster, shared: SharedTransaction, *, committed: bool
) -> None:
    async with shared:
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
        if committed:
            cluster.answers_lost = True
        else:
            cluster.silent = True
        await shared.commit([receipt])


async def test_abort_after_the_database_was_closed_does_not_say_that_it_was_rolled_back(
    db: Database,
) -> None:
    shared = db.shared_transaction()
    await shared.begin()
    await receipt_of(db, shared.ticket, "1", ann=1)
    await db.close()
    with pytest.raises(UsageError, match="is closed"):
        await shared.__aexit__(None, None, None)
    with pytest.raises(UsageError, match="is closed"):
        await shared.abort()


@on_both_engines
async def test_a_commit_without_an_answer_may_be_repeated(
    db: Database, cluster: Cluster, hasty: SharedTransaction
) -> None:
    receipts = [
        await receipt_of(db, hasty.ticket, "1", ann=1),
        await receipt_of(db, hasty.ticket, "2", bob=1),
    ]
    with unanswered(cluster, "answers_lost"):
        await hasty.commit(receipts)
    assert await hasty.commit(receipts)
    assert await values_of(db) == {"ann": 1, "bob": 1}


class Refusing(Cluster):
    """A server that does not have the tablet of the parts yet, and that loses markers."""

    refused: pb.MutateTogetherRequest | None = None
    refuses = False

    async def mutate_together(self, request: pb.MutateTogetherRequest) -> pb.MutateTogetherResponse:
        if self.refuses:
            self.refused = request
            raise NotReady("the tablet is not served here")
        return await super().mutate_together(request)


@pytest.mark.parametrize("kind_of_cluster", [Refusing])
async def test_a_refused_commit_whose_rollback_fails_may_be_committed_by_a_late_copy(
    db: Database, cluster: Refusing
) -> None:
    async with db.shared_transaction(timeout=1.0) as shared:
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
        cluster.refuses = cluster.silent = True
        with pytest.raises(OutcomeUnknown) as unknown:
            await shared.commit([receipt])
        assert isinstance(unknown.value.__cause__, NotReady)
        cluster.refuses = cluster.silent = False
        assert cluster.refused is not None
        await cluster.mutate_together(cluster.refused)
        assert await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1}


@pytest.mark.parametrize("kind_of_cluster", [Refusing])
async def test_a_refused_commit_that_was_rolled_back_raises_its_cause(
    db: Database, cluster: Refusing
) -> None:
    async with db.shared_transaction(timeout=1.0) as shared:
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
        cluster.refuses = True
        with pytest.raises(NotReady):
            await shared.commit([receipt])
        cluster.refuses = False
        assert cluster.refused is not None
        await cluster.mutate_together(cluster.refused)
    assert await values_of(db) == {}


@on_both_engines
async def test_a_commit_that_lost_to_a_marker_is_no_unknown_outcome_if_its_rollback_fails(
    monkeypatch: pytest.MonkeyPatch, db: Database, hasty: SharedTransaction
) -> None:
    async def late(*_: object) -> int:
        raise DeadlineExceeded("no answer in time")

    receipt = await receipt_of(db, hasty.ticket, "1", ann=1)
    (part,) = receipt.parts
    engine = db.internal.engine
    primary = hasty.ticket.job.primary_of(part)
    assert await roll_back(engine.env, [(primary, part.start)], engine.now() + 1.0) == [0]
    with monkeypatch.context() as patch:
        patch.setattr("percolator.aio.shared.roll_back_all", late)
        with pytest.raises(ConflictError, match="none of it is committed"):
            await hasty.commit([receipt])


@on_both_engines
async def test_a_commit_is_unknown_until_all_of_its_parts_have_been_asked_for(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: Cluster, hasty: SharedTransaction
) -> None:
    async def late(*_: object) -> None:
        raise DeadlineExceeded("no answer in time")

    receipt = await receipt_of(db, hasty.ticket, "1", ann=1)
    with unanswered(cluster, "answers_lost"):
        await hasty.commit([receipt])
    assert hasty._shared_commit is not None
    hasty._shared_commit.sent = Sent.LATE_COPY  # as for a copy of the first message
    with monkeypatch.context() as patch:
        patch.setattr("percolator.protocol.shared.driver.require_committed", late)
        with pytest.raises(OutcomeUnknown, match="no answer in time"):
            await hasty.commit([receipt])
    assert await hasty.commit([receipt])
    assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_an_unknown_outcome_that_is_resolved_first_is_an_abort(
    db: Database, cluster: Cluster, hasty: SharedTransaction
) -> None:
    receipts = [
        await receipt_of(db, hasty.ticket, "1", ann=1),
        await receipt_of(db, hasty.ticket, "2", bob=1),
    ]
    with unanswered(cluster) as unknown:
        await hasty.commit(receipts)
    assert await db.resolve(unknown.value) is Outcome.ABORTED
    with pytest.raises(ConflictError, match="none of it is committed"):
        await hasty.commit(receipts)
    assert await values_of(db) == {}


@on_both_engines
async def test_what_cannot_be_rolled_back_is_left_to_expire(db: Database, cluster: Cluster) -> None:
    shared = db.shared_transaction(timeout=1.0)
    await shared.begin()
    await receipt_of(db, shared.ticket, "1", ann=1)
    with unanswered(cluster, error=DeadlineExceeded):
        await shared.__aexit__(None, None, None)
    await asyncio.sleep(2 * TTL_SECONDS)
    await set_value(db, "ann", 7)
    assert await values_of(db) == {"ann": 7}


@on_both_engines
async def test_the_first_error_is_the_one_that_is_raised(db: Database, cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="of the program"):
        await _fails_in_both_blocks(db, cluster)
    cluster.silent = False


async def _fails_in_both_blocks(db: Database, cluster: Cluster) -> None:
    async with (
        db.shared_transaction(timeout=1.0) as shared,
        db.share(shared.ticket, task="1", timeout=1.0) as share,
    ):
        await share.set("ann", balance, 1)
        await share._flush()
        cluster.silent = True
        raise ValueError("of the program")


# ---------------------------------------------------------------- other transactions


@on_both_engines
async def test_readers_pass_after_a_short_wait(db: Database) -> None:
    await set_value(db, "ann", 0)
    async with db.shared_transaction() as shared:
        receipts = [await receipt_of(db, shared.ticket, str(n), **{ROWS[n]: 1}) for n in range(4)]
        began = asyncio.get_running_loop().time()
        assert await values_of(db) == {"ann": 0}
        assert asyncio.get_running_loop().time() - began < 0.3
        before = await db.timestamp()
        assert await values_of(db, before) == {"ann": 0}
        commit = await shared.commit(receipts)
    assert commit is not None
    assert commit > before
    assert await values_of(db, before) == {"ann": 0}
    assert await values_of(db) == dict.fromkeys(ROWS, 1)


@on_both_engines
async def test_a_commit_that_came_first_is_written_over(
    db: Database, shared: SharedTransaction, share: Share
) -> None:
    """Without `unchanged_since`, a task needs only that no one writes while it does."""
    await set_value(db, "bob", 5)
    await share.set("bob", balance, 1)
    receipt = await share.finish()
    assert len(receipt.parts) == 2
    await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1, "bob": 1}


@on_both_engines
async def test_a_younger_lock_is_waited_for_under_a_newer_timestamp(
    db: Database, shared: SharedTransaction, share: Share
) -> None:
    async with db.shared_transaction() as other:
        await receipt_of(db, other.ticket, "1", bob=2)
        await share.set("bob", balance, 1)
        finishing = asyncio.ensure_future(share.finish())
        await asyncio.sleep(2.0)
        assert not finishing.done()
    await shared.commit([await finishing])
    assert await values_of(db) == {"ann": 1, "bob": 1}


@on_both_engines
async def test_what_was_changed_since_is_a_conflict(db: Database) -> None:
    since = await db.timestamp()
    await set_value(db, "bob", 5)
    async with db.shared_transaction(unchanged_since=since) as shared:
        share = await share_of(db, shared.ticket, "1", ann=1)
        await share.set("bob", balance, 1)
        with pytest.raises(ConflictError, match="not changed since") as conflict:
            await share.finish()
        assert conflict.value.other_commit_timestamp > since
    async with db.shared_transaction(unchanged_since=await db.timestamp()) as shared:
        await shared.commit([await receipt_of(db, shared.ticket, "1", bob=1)])
    assert await values_of(db) == {"bob": 1}


@on_both_engines
async def test_a_table_younger_than_the_transaction_is_refused(
    db: Database, shared: SharedTransaction
) -> None:
    await db.drop_table(accounts)
    await db.create_table(accounts)
    with pytest.raises(SchemaError, match="younger"):
        await share_of(db, shared.ticket, "1", ann=1)


# ---------------------------------------------------------------- misuse


@on_both_engines
async def test_misuse_is_refused_with_its_reason(db: Database) -> None:
    with pytest.raises(InvalidArgument, match="ttl"):
        db.shared_transaction(ttl=-1.0)
    future = Timestamp(await db.timestamp() + (1 << 40))
    with pytest.raises(InvalidArgument, match="unchanged_since"):
        await db.shared_transaction(unchanged_since=future).begin()
    async with db.shared_transaction() as shared, db.shared_transaction() as other:
        for task in ("", "x" * 200, 7):
            with pytest.raises(InvalidArgument, match="task"):
                db.share(shared.ticket, task=task)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="generation"):
            db.share(shared.ticket, task="1", generation=-1)
        with pytest.raises(UsageError, match="Ticket"):
            db.share("ticket", task="1")  # type: ignore[arg-type]
        receipt = await receipt_of(db, other.ticket, "1", ann=1)
        with pytest.raises(UsageError, match="another transaction"):
            await shared.commit([receipt])
        with pytest.raises(UsageError, match="Receipt"):
            await shared.commit([None])  # type: ignore[list-item]
        share = db.share(shared.ticket, task="1")
        with pytest.raises(UsageError, match="not begun"):
            await share.set("ann", balance, 1)


@on_both_engines
async def test_misuse_of_receipts_tasks_and_times_names_the_argument(db: Database) -> None:
    for ttl in (1.0, 14.9, 1e7):
        with pytest.raises(InvalidArgument, match="ttl: expected 15 to 4294967 seconds, got"):
            db.shared_transaction(ttl=ttl)
    async with db.shared_transaction() as shared:
        with pytest.raises(InvalidArgument, match=r"task: .* cannot be encoded"):
            db.share(shared.ticket, task="\ud800")
        receipt = await receipt_of(db, shared.ticket, "1", ann=1)
        for wrong in (receipt, None):
            with pytest.raises(UsageError, match="expected a sequence"):
                await shared.commit(wrong)  # type: ignore[arg-type]
        assert await shared.commit([receipt])


# ---------------------------------------------------------------- several calls at a time


@on_both_engines
async def test_only_one_call_at_a_time_decides(db: Database, shared: SharedTransaction) -> None:
    """A second commit would take a timestamp of its own, and parts could end up at both."""
    receipt = await receipt_of(db, shared.ticket, "1", ann=1, zoe=1)
    first = asyncio.ensure_future(shared.commit([receipt]))
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="is being committed"):
        await shared.commit([receipt])
    with pytest.raises(UsageError, match="is being committed"):
        await shared.abort()
    commit = await first
    assert commit is not None
    assert await values_of(db, Timestamp(commit - 1)) == {}
    assert await values_of(db, commit) == {"ann": 1, "zoe": 1}


@on_both_engines
async def test_a_commit_during_an_abort_is_refused(
    shared: SharedTransaction, receipt: Receipt
) -> None:
    aborting = asyncio.ensure_future(shared.abort())
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="is being rolled back"):
        await shared.commit([receipt])
    await aborting


@on_both_engines
async def test_a_cancelled_commit_may_be_repeated(
    db: Database, cluster: Cluster, shared: SharedTransaction, receipt: Receipt
) -> None:
    cluster.silent = True
    first = asyncio.ensure_future(shared.commit([receipt]))
    await asyncio.sleep(0.5)
    first.cancel()
    await asyncio.wait([first])
    cluster.silent = False
    assert await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_nothing_can_be_written_while_an_attempt_finishes(
    db: Database, shared: SharedTransaction
) -> None:
    """It would return without an error, and never be locked."""
    async with db.share(shared.ticket, task="1") as share:
        await share.set("ann", balance, 1)
        finishing = asyncio.ensure_future(share.finish())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="is being finished"):
            await share.set("zoe", balance, 1)
        with pytest.raises(UsageError, match="is being finished"):
            await share.finish()
        receipt = await finishing
    await shared.commit([receipt])
    assert await values_of(db) == {"ann": 1}


async def test_a_flush_under_way_is_part_of_what_is_finished(
    monkeypatch: pytest.MonkeyPatch, db: Database, shared: SharedTransaction
) -> None:
    monkeypatch.setattr("percolator.aio.shared.FLUSH_CELLS", 1)
    async with db.share(shared.ticket, task="1") as share:
        writing = [asyncio.ensure_future(share.set(row, balance, 1)) for row in ROWS]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        receipt = await share.finish()
        done = await asyncio.gather(*writing, return_exceptions=True)
    assert receipt.cells == done.count(None)
    await shared.commit([receipt])
    assert len(await values_of(db)) == receipt.cells


# ---------------------------------------------------------------- commits that fail


async def test_a_failed_commit_raises_its_cause_and_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch, db: Database, hasty: SharedTransaction
) -> None:
    """Even if it has used up its time."""

    async def fails(_self: SharedCommit, deadline: float) -> int:
        await asyncio.sleep(deadline - asyncio.get_running_loop().time() + 0.1)
        raise DeadlineExceeded("the disk is full")

    monkeypatch.setattr(SharedCommit, "commit", fails)
    receipt = await receipt_of(db, hasty.ticket, "1", ann=1)
    with pytest.raises(DeadlineExceeded, match="the disk is full"):
        await hasty.commit([receipt])
    with pytest.raises(UsageError, match="was rolled back"):
        await hasty.commit([receipt])


async def test_a_failed_commit_whose_rollback_fails_raises_its_cause(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: Cluster, hasty: SharedTransaction
) -> None:
    async def fails(_self: SharedCommit, _deadline: float) -> int:
        raise DeadlineExceeded("the disk is full")

    receipt = await receipt_of(db, hasty.ticket, "1", ann=1)
    with monkeypatch.context() as patch:
        patch.setattr(SharedCommit, "commit", fails)
        cluster.silent = True
        with pytest.raises(DeadlineExceeded, match="the disk is full") as failed:
            await hasty.commit([receipt])
        cluster.silent = False
    assert "could not be rolled back" in failed.value.__notes__[0]
    assert await hasty.commit([receipt])  # nothing has decided it


async def test_one_marker_settles_that_it_was_rolled_back(
    monkeypatch: pytest.MonkeyPatch, db: Database, cluster: Cluster, hasty: SharedTransaction
) -> None:
    receipt = await receipt_of(db, hasty.ticket, "1", ann=1)
    with unanswered(cluster):
        await hasty.commit([receipt])

    async def fails(*_arguments: object) -> list[object]:
        raise DeadlineExceeded("the row cannot be read")

    monkeypatch.setattr("percolator.protocol.shared.driver.locks_of", fails)
    with pytest.raises(DeadlineExceeded, match="cannot be read"):
        await hasty.abort()
    with pytest.raises(UsageError, match="was rolled back"):
        await hasty.commit([receipt])


# A shared transaction that has ended: what comes late is refused, and blocks nothing.


Call = Callable[[pb.MutateTogetherRequest], Awaitable[pb.MutateTogetherResponse]]


async def _commits(db: Database, shared: SharedTransaction) -> None:
    await shared.commit([await receipt_of(db, shared.ticket, "0", zoe=0)])


async def _aborts(_: Database, shared: SharedTransaction) -> None:
    await shared.abort()


ENDINGS = (_commits, _aborts)


async def _is_free_at_once(db: Database, row: str) -> None:
    """Nothing has to expire before others can write the row."""
    began = asyncio.get_running_loop().time()
    await set_value(db, row, 7)
    assert asyncio.get_running_loop().time() - began < 1.0


@on_both_engines
@pytest.mark.parametrize("ends", ENDINGS)
async def test_an_attempt_that_begins_after_the_end_is_refused_before_it_locks(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
    db: Database,
    lasting: SharedTransaction,
) -> None:
    await ends(db, lasting)
    with pytest.raises(PercolatorError, match=r"was committed while|comes too late"):
        await share_of(db, lasting.ticket, "1", ann=1)
    await _is_free_at_once(db, "ann")


@on_both_engines
@pytest.mark.parametrize("ends", ENDINGS)
async def test_what_an_attempt_under_way_has_locked_and_locks_later_is_free_at_once(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
    db: Database,
    lasting: SharedTransaction,
) -> None:
    share = await share_of(db, lasting.ticket, "1", ann=1)
    await ends(db, lasting)
    await asyncio.sleep(0.1)  # after a commit, they are rolled back in the background
    await share.set("bob", balance, 1)
    await share._flush()
    await _is_free_at_once(db, "ann")
    await _is_free_at_once(db, "bob")
    with pytest.raises(ConflictError, match="was rolled back"):
        await share.finish()


@on_both_engines
@pytest.mark.parametrize("ends", ENDINGS)
async def test_a_further_part_of_an_attempt_under_way_is_refused(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
    db: Database,
    lasting: SharedTransaction,
) -> None:
    share = await share_of(db, lasting.ticket, "1", ann=1)
    await ends(db, lasting)
    await set_value(db, "bob", 5)  # the attempt loses this cell, and needs another part for it
    await share.set("bob", balance, 1)
    with pytest.raises((ConflictError, UsageError)):
        await share._flush()
    await _is_free_at_once(db, "bob")


@pytest.mark.parametrize("is_applied_first", [True, False])
@pytest.mark.parametrize("ends", ENDINGS)
async def test_a_part_whose_beginning_is_on_its_way_is_refused_or_found(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
    is_applied_first: bool,
    monkeypatch: pytest.MonkeyPatch,
    db: Database,
    cluster: Cluster,
    lasting: SharedTransaction,
) -> None:
    """There is no third place for it: the tablet applies it before the end, or after it."""
    arrived, ended = asyncio.Event(), asyncio.Event()
    correct: Call = ClusterInMemory.mutate_together.__get__(cluster)

    async def held(
        self: ClusterInMemory, request: pb.MutateTogetherRequest
    ) -> pb.MutateTogetherResponse:
        is_late = any(b".late" in one.column for one in request.batch.mutations)
        if not is_late:
            return await correct(request)
        response = await correct(request) if is_applied_first else None
        arrived.set()
        await ended.wait()
        return response or await correct(request)

    monkeypatch.setattr(ClusterInMemory, "mutate_together", held)
    late = asyncio.ensure_future(share_of(db, lasting.ticket, "late", ann=1))
    await arrived.wait()
    await ends(db, lasting)
    await asyncio.sleep(0.1)
    ended.set()
    if is_applied_first:
        with pytest.raises(ConflictError, match="was rolled back"):
            await (await late).finish()
    else:
        with pytest.raises(PercolatorError, match=r"was committed while|comes too late"):
            await late
    await _is_free_at_once(db, "ann")


@pytest.mark.parametrize("place", [0, 1])
async def test_a_commit_of_which_one_answer_says_nothing_is_asked_again_at_the_same_timestamp(
    place: int,
    monkeypatch: pytest.MonkeyPatch,
    db: Database,
    shared: SharedTransaction,
    receipt: Receipt,
) -> None:
    """Taken for refused, it would be sent with another timestamp, although it was applied."""
    correct = ClusterInMemory.mutate_together
    commits: list[pb.MutateTogetherRequest] = []

    async def garbled(
        self: ClusterInMemory, request: pb.MutateTogetherRequest
    ) -> pb.MutateTogetherResponse:
        commits.append(request)
        response = await correct(self, request)
        if len(commits) == 1:
            response = pb.MutateTogetherResponse.FromString(response.SerializeToString())
            response.results[place].Clear()
        return response

    monkeypatch.setattr(ClusterInMemory, "mutate_together", garbled)
    commit = await shared.commit([receipt])
    assert len(commits) == 2
    assert commits[0].batch.mutations == commits[1].batch.mutations
    assert await values_of(db, at=commit) == {"ann": 1}


@on_both_engines
async def test_a_transaction_that_another_process_has_given_up_cannot_be_committed(
    db: Database, shared: SharedTransaction, receipt: Receipt
) -> None:
    async with db.internal.shared_transaction(None, None, 1.0, shared.ticket) as other:
        assert await other.abort() is None
    with pytest.raises(ConflictError, match="none of it is committed"):
        await shared.commit([receipt])
    assert await values_of(db) == {}


@on_both_engines
async def test_a_transaction_that_another_process_has_committed_is_not_given_up(
    db: Database,
) -> None:
    shared = db.shared_transaction()
    await shared.begin()
    receipt = await receipt_of(db, shared.ticket, "1", ann=1)
    async with db.internal.shared_transaction(None, None, 1.0, shared.ticket) as other:
        commit = await other.commit([receipt])
    assert await shared.abort() == commit
    assert await values_of(db) == {"ann": 1}


@on_both_engines
@pytest.mark.parametrize("ends", ENDINGS)
async def test_an_attempt_that_readers_have_just_pushed_is_found_and_rolled_back(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
    db: Database,
    lasting: SharedTransaction,
) -> None:
    """They push it ahead of all timestamps, so that no snapshot has its lock in the way."""
    share = await share_of(db, lasting.ticket, "1", ann=1)
    assert await values_of(db) == {}
    await ends(db, lasting)
    await asyncio.sleep(0.1)  # after a commit, they are rolled back in the background
    await _is_free_at_once(db, "ann")
    with pytest.raises(ConflictError, match="was rolled back"):
        await share.finish()
