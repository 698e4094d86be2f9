"""A shared transaction that has ended: what comes late is refused, and blocks nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from percolator.aio import Database
from percolator.aio.shared import SharedTransaction
from percolator.errors import ConflictError, PercolatorError, UsageError
from percolator.testing.cluster_in_memory import ClusterInMemory
from percolator.v1 import tabletserver_pb2 as pb
from tests.unit.aio.shared_attempts import receipt_of, set_value, share_of, values_of
from tests.unit.connected import balance, connected

on_both_engines = pytest.mark.usefixtures("engine_of_cells")

Call = Callable[[pb.MutateTogetherRequest], Awaitable[pb.MutateTogetherResponse]]


async def _commits(db: Database, whole: SharedTransaction) -> None:
    await whole.commit([await receipt_of(db, whole.ticket, "0", zoe=0)])


async def _aborts(_: Database, whole: SharedTransaction) -> None:
    await whole.abort()


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
) -> None:
    async with connected() as (db, _), db.shared_transaction(ttl=1000.0) as whole:
        await ends(db, whole)
        with pytest.raises(PercolatorError, match=r"was committed while|comes too late"):
            await share_of(db, whole.ticket, "1", ann=1)
        await _is_free_at_once(db, "ann")


@on_both_engines
@pytest.mark.parametrize("ends", ENDINGS)
async def test_what_an_attempt_under_way_has_locked_and_locks_later_is_free_at_once(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
) -> None:
    async with connected() as (db, _), db.shared_transaction(ttl=1000.0) as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        await ends(db, whole)
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
) -> None:
    async with connected() as (db, _), db.shared_transaction(ttl=1000.0) as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        await ends(db, whole)
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
) -> None:
    """There is no third place for it: the tablet applies it before the end, or after it."""
    async with connected() as (db, _), db.shared_transaction(ttl=1000.0) as whole:
        arrived, ended = asyncio.Event(), asyncio.Event()
        correct: Call = ClusterInMemory.mutate_together.__get__(_)

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
        late = asyncio.ensure_future(share_of(db, whole.ticket, "late", ann=1))
        await arrived.wait()
        await ends(db, whole)
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
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for refused, it would be sent with another timestamp, although it was applied."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
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
        commit = await whole.commit([receipt])
        assert len(commits) == 2
        assert commits[0].batch.mutations == commits[1].batch.mutations
        assert await values_of(db, at=commit) == {"ann": 1}


@on_both_engines
async def test_a_transaction_that_another_process_has_given_up_cannot_be_committed() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
        async with db.internal.shared_transaction(None, None, 1.0, whole.ticket) as other:
            assert await other.abort() is None
        with pytest.raises(ConflictError, match="none of it is committed"):
            await whole.commit([receipt])
        assert await values_of(db) == {}


@on_both_engines
async def test_a_transaction_that_another_process_has_committed_is_not_given_up() -> None:
    async with connected() as (db, _):
        whole = db.shared_transaction()
        await whole.begin()
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
        async with db.internal.shared_transaction(None, None, 1.0, whole.ticket) as other:
            commit = await other.commit([receipt])
        assert await whole.abort() == commit
        assert await values_of(db) == {"ann": 1}


@on_both_engines
@pytest.mark.parametrize("ends", ENDINGS)
async def test_an_attempt_that_readers_have_just_pushed_is_found_and_rolled_back(
    ends: Callable[[Database, SharedTransaction], Awaitable[None]],
) -> None:
    """They push it ahead of all timestamps, so that no snapshot has its lock in the way."""
    async with connected() as (db, _), db.shared_transaction(ttl=1000.0) as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        assert await values_of(db) == {}
        await ends(db, whole)
        await asyncio.sleep(0.1)  # after a commit, they are rolled back in the background
        await _is_free_at_once(db, "ann")
        with pytest.raises(ConflictError, match="was rolled back"):
            await share.finish()
