"""What keeps a shared transaction alive arrives, however slow the cluster and however many readers
push what it raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from percolator import RetryPolicy
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.errors import DeadlineExceeded, PercolatorError
from percolator.formats.records import ATTEMPT_FINISHED, LockRecord
from percolator.protocol.cleanup import push_step
from percolator.protocol.shared.participant import Job, locks_of, roll_back
from percolator.routing.cells import APPLIED, Answer, CellMutation
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.v1.tabletserver_pb2 import Mutation
from tests.unit.aio.shared_attempts import (
    TTL_SECONDS,
    dies,
    receipt_of,
    set_value,
    share_of,
    values_of,
)
from tests.unit.connected import TWO_PHASES, balance, connected


class SlowMutations:
    """The mutations of one client wait for their turn, and are not sent if that comes too late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, db: Database, seconds: float) -> None:
        self.seconds = seconds
        self._mutate = db.internal.engine.router.mutate
        monkeypatch.setattr(db.internal.engine.router, "mutate", self._later)

    async def _later(self, mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        left = deadline - asyncio.get_running_loop().time()
        await asyncio.sleep(min(left, self.seconds))
        if left < self.seconds:
            return [DeadlineExceeded("it was not sent")] * len(mutations)
        return await self._mutate(mutations, deadline)


@asynccontextmanager
async def _crowd(db: Database, row: str) -> AsyncIterator[None]:
    """Readers of another client, who push what is in their way."""
    world = db.internal.engine.world
    async with await connect_to(world, [ADDRESS], TWO_PHASES, RetryPolicy()) as other:

        async def read() -> None:
            while True:
                async with other.snapshot() as snapshot:
                    await snapshot.get(row, balance)
                await asyncio.sleep(0.04)

        readers = [asyncio.ensure_future(read()) for _ in range(2)]
        yield
        for reader in readers:
            assert not reader.done() or reader.exception() is None
            reader.cancel()
        await asyncio.wait(readers)


async def _fails_at_once_to_set(db: Database, row: str) -> None:
    """Another client, which is not slow, finds the lock alive."""
    world = db.internal.engine.world
    async with await connect_to(world, [ADDRESS], TWO_PHASES, RetryPolicy()) as other:
        with pytest.raises(PercolatorError, match="locked by"):
            async with other.transaction(timeout=0.3) as tx:
                await tx.set(row, balance, 0)


@pytest.mark.parametrize("seconds", [0.2, 1.0, 3.0])
async def test_a_part_at_work_lives_on_among_readers_who_push_faster_than_its_messages_travel(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        slow = SlowMutations(monkeypatch, db, seconds)
        async with _crowd(db, "ann"):
            await asyncio.sleep(1.5 * TTL_SECONDS + 0.5)
            await _fails_at_once_to_set(db, "ann")
            await whole.commit([await share.finish()], timeout=30.0)
        slow.seconds = 0.0
        assert await values_of(db) == {"ann": 1}


@pytest.mark.parametrize("seconds", [0.2, 1.0, 3.0])
async def test_so_does_a_part_that_has_finished(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
        slow = SlowMutations(monkeypatch, db, seconds)
        async with _crowd(db, "ann"):
            await asyncio.sleep(1.5 * TTL_SECONDS + 0.5)
            await _fails_at_once_to_set(db, "ann")
            await whole.commit([receipt], timeout=30.0)
        slow.seconds = 0.0
        assert await values_of(db) == {"ann": 1}


async def test_a_part_whose_beginning_takes_seconds_is_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A beat must not overtake its first lock, and find none."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        router = db.internal.engine.router
        together = router.mutate_together

        async def later(
            table_id: int, mutations: Sequence[Mutation], deadline: float
        ) -> Sequence[Answer]:
            await asyncio.sleep(4.5)
            return await together(table_id, mutations, deadline)

        with monkeypatch.context() as patch:
            patch.setattr(router, "mutate_together", later)
            share = await share_of(db, whole.ticket, "1", ann=1)
        await asyncio.sleep(2 * TTL_SECONDS)
        await share.set("bob", balance, 2)
        await whole.commit([await share.finish()])
        assert await values_of(db) == {"ann": 1, "bob": 2}


async def test_without_readers_the_driver_need_not_wait_for_the_oracle() -> None:
    """A part that nobody has pushed is not raised ahead of the clock."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
        await asyncio.sleep(1.5 * TTL_SECONDS + 0.5)
        (lock,) = await _locks(db, whole.ticket.job)
        assert lock.min_commit_timestamp < await db.timestamp()
        began = asyncio.get_running_loop().time()
        await whole.commit([receipt])
        assert asyncio.get_running_loop().time() - began < 0.05


async def test_a_late_copy_of_a_beat_does_not_replace_what_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that the attempt is at work: the driver would let the part expire. The copies here
    had no answer, and arrive when the attempt has finished without them."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        router = db.internal.engine.router
        lost: list[CellMutation] = []

        async def lose(mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
            lost.extend(mutations)
            return [DeadlineExceeded("no answer")] * len(mutations)

        share._attempt.participants[0]._lead.refused(
            1.0
        )  # by readers: the beats are ahead of the clock
        with monkeypatch.context() as patch:
            patch.setattr(router, "mutate", lose)
            for _ in range(3):
                with pytest.raises(DeadlineExceeded):
                    await share._attempt.beat()
        receipt = await share.finish()
        (before,) = await _locks(db, whole.ticket.job)
        answers = await router.mutate(lost, asyncio.get_running_loop().time() + 1.0)
        assert len(lost) == 3
        assert APPLIED not in answers
        assert await _locks(db, whole.ticket.job) == [before]
        assert before.value == ATTEMPT_FINISHED
        await whole.commit([receipt])


async def test_a_beat_that_is_under_way_does_not_replace_what_finishes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader's push makes it fail: it must not be repeated above what finished."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        router, loop = db.internal.engine.router, asyncio.get_running_loop()
        mutate = router.mutate
        (lock,) = await _locks(db, whole.ticket.job)
        held: list[asyncio.Future[None]] = []

        async def hold(mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
            held.append(loop.create_future())
            await held[-1]
            return await mutate(mutations, deadline)

        async def arrives(message: int) -> None:
            held[message].set_result(None)
            await asyncio.sleep(0.01)

        with monkeypatch.context() as patch:
            patch.setattr(router, "mutate", hold)
            beat = asyncio.ensure_future(share._attempt.beat())
            await asyncio.sleep(0)
            finish = asyncio.ensure_future(share.finish())
            await asyncio.sleep(0.01)
            push = push_step(lock.primary, lock, lock.min_commit_timestamp + 1)
            assert await mutate([push], loop.time() + 1.0) == [APPLIED]
            await arrives(0)
            await arrives(1)
            for late in range(2, len(held)):
                await arrives(late)
            await beat
            receipt = await finish
        (after,) = await _locks(db, whole.ticket.job)
        assert after.value == ATTEMPT_FINISHED
        await whole.commit([receipt])


async def test_a_beat_does_not_bring_back_a_part_that_was_rolled_back() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        dies(share)
        dies(whole)
        await asyncio.sleep(TTL_SECONDS + 1.0)
        await set_value(db, "ann", 7)
        with pytest.raises(PercolatorError, match="was rolled back"):
            await share._attempt.beat()
        assert await _locks(db, whole.ticket.job) == []
        assert await values_of(db) == {"ann": 7}


async def test_a_part_that_was_rolled_back_does_not_keep_the_others_from_living_on() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        await set_value(db, "bob", 5)
        await share.set("bob", balance, 1)  # under a further part: it was committed meanwhile
        await share._flush()
        first, second = share._attempt.participants
        env = db.internal.engine.env
        await roll_back(env, [(first.primary, first.start)], env.now() + 1.0)
        dies(share)
        dies(whole)
        await asyncio.sleep(TTL_SECONDS / 2)
        (before,) = await _locks(db, whole.ticket.job)
        assert before.start_timestamp == second.start
        with pytest.raises(PercolatorError, match="was rolled back"):
            await share._attempt.beat()
        (after,) = await _locks(db, whole.ticket.job)
        assert after.ttl_milliseconds >= before.ttl_milliseconds + 1000 * TTL_SECONDS / 2


async def _locks(db: Database, job: Job) -> Sequence[LockRecord]:
    env = db.internal.engine.env
    return await locks_of(env, job, env.now() + 1.0)
