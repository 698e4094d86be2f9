"""Attempts at a task of a shared transaction: one counts, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from percolator import InvalidArgument, Limits, RetryPolicy, codecs
from percolator.aio import Database
from percolator.aio.connecting import connect_to
from percolator.aio.shared import Receipt, Share, SharedTransaction
from percolator.errors import (
    ConflictError,
    DeadlineExceeded,
    PercolatorError,
    TransactionTooLarge,
    Unavailable,
    UsageError,
    WrittenTwice,
)
from percolator.formats.records import ATTEMPT_FINISHED, LockRecord
from percolator.protocol.cleanup import push_step
from percolator.protocol.shared.participant import Job, locks_of, roll_back
from percolator.routing.cells import APPLIED, Answer, CellMutation
from percolator.routing.router import Router
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.v1.tabletserver_pb2 import Mutation
from tests.unit.aio.shared_attempts import (
    TTL_SECONDS,
    dies,
    fails_to_set,
    receipt_of,
    set_value,
    share_of,
    values_of,
)
from tests.unit.connected import TWO_PHASES, Cluster, accounts, balance

TURN_SECONDS = 4.0
on_both_engines = pytest.mark.usefixtures("engine_of_cells")

# ---------------------------------------------------------------- attempts


@on_both_engines
async def test_an_attempt_of_which_a_write_has_failed_cannot_finish(
    monkeypatch: pytest.MonkeyPatch, db: Database, shared: SharedTransaction
) -> None:
    """Even if the write failed before anything was sent: the rest would be committed without it."""
    for fails in ("set", "delete"):
        share = db.share(shared.ticket, task="1")
        await share.begin()
        await share.set("ann", balance, 1)

        async def no_answer(*given: object) -> None:
            raise Unavailable("no answer in time")

        with monkeypatch.context() as patch:
            patch.setattr(share, "_tables", {})
            patch.setattr(share, "_table", no_answer)
            with pytest.raises(Unavailable):
                await (
                    share.set("bob", balance, 1) if fails == "set" else share.delete("bob", balance)
                )
        with pytest.raises(UsageError, match="has failed to write a cell"):
            share.set("joe", balance, 1)
        with pytest.raises(UsageError, match="has failed to write a cell"):
            await share.finish()
        await share.abandon()


@on_both_engines
async def test_what_cannot_be_written_is_refused_by_name_and_the_attempt_goes_on(
    db: Database, shared: SharedTransaction
) -> None:
    async with db.share(shared.ticket, task="1") as share:
        await share.set("ann", balance, 1)
        family: Any = accounts.family("f:", codecs.integer)
        long = "x" * (Limits.row_bytes_max + 1)
        for write in (partial(share.set, value=1), share.delete):
            with pytest.raises(UsageError, match="expected a Column, got Family"):
                write("bob", family)
            with pytest.raises(InvalidArgument, match=r"^row: has \d+ bytes, at most"):
                write(long, balance)
        await share.set("joe", balance, 2)
        await shared.commit([await share.finish()])
    assert await values_of(db) == {"ann": 1, "joe": 2}


@on_both_engines
async def test_an_attempt_that_died_is_replaced_at_once(
    db: Database, shared: SharedTransaction
) -> None:
    dies(await share_of(db, shared.ticket, "1", ann=1, bob=1))
    began = asyncio.get_running_loop().time()
    await shared.commit([await receipt_of(db, shared.ticket, "1", ann=2, joe=2)])
    assert asyncio.get_running_loop().time() - began < 1.0
    assert await values_of(db) == {"ann": 2, "joe": 2}


@on_both_engines
async def test_the_replaced_attempt_cannot_finish(db: Database, shared: SharedTransaction) -> None:
    slow = await share_of(db, shared.ticket, "1", ann=1, bob=1)
    fast = await share_of(db, shared.ticket, "1", ann=2, bob=2)
    with pytest.raises(ConflictError, match="another attempt"):
        await slow.finish()
    await shared.commit([await fast.finish()])
    assert await values_of(db) == {"ann": 2, "bob": 2}


@on_both_engines
async def test_an_earlier_attempt_does_not_replace_a_later_one(
    db: Database, shared: SharedTransaction
) -> None:
    slow = await share_of(db, shared.ticket, "1", ann=1)
    fast = await receipt_of(db, shared.ticket, "1", bob=2)
    await slow.set("bob", balance, 1)
    with pytest.raises(ConflictError, match="a later attempt"):
        await slow.finish()
    await shared.commit([fast])
    assert await values_of(db) == {"bob": 2}


@on_both_engines
async def test_only_the_attempt_whose_receipt_is_passed_counts(
    db: Database, shared: SharedTransaction
) -> None:
    """Both have finished, with different rows; what the other one wrote is never committed."""
    await receipt_of(db, shared.ticket, "1", ann=1)
    await shared.commit([await receipt_of(db, shared.ticket, "1", bob=2)])
    assert await values_of(db) == {"bob": 2}
    await asyncio.sleep(2 * TTL_SECONDS)
    await set_value(db, "ann", 7)
    assert await values_of(db) == {"ann": 7, "bob": 2}


@on_both_engines
async def test_a_finished_attempt_is_spared_for_a_while(
    db: Database, shared: SharedTransaction
) -> None:
    """Its receipt may be on its way to the driver."""
    first = await receipt_of(db, shared.ticket, "1", ann=1)
    second = asyncio.ensure_future(receipt_of(db, shared.ticket, "1", ann=2))
    await asyncio.sleep(5.0)
    await shared.commit([first])
    with pytest.raises(UsageError, match="was committed"):
        await second
    assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_a_finished_attempt_is_replaced_in_the_end(
    db: Database, shared: SharedTransaction
) -> None:
    first = await receipt_of(db, shared.ticket, "1", ann=1)
    share = db.internal.share(shared.ticket, "1", 0, 10.0, replace_after_seconds=1.0)
    async with share:
        await share.set("ann", balance, 2)
        second = await share.finish()
    with pytest.raises(UsageError, match="two receipts"):
        await shared.commit([first, second])
    await shared.commit([second])
    assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_a_lost_receipt_is_replaced_with_any_time_out(db: Database) -> None:
    """The wait for a finished attempt does not begin anew with each try."""
    for timeout in (None, 1.0):
        async with db.shared_transaction() as shared:
            await receipt_of(db, shared.ticket, "1", ann=1, zoe=1)
            async with db.share(shared.ticket, task="1", timeout=timeout) as share:
                await share.set("ann", balance, 2)
                receipt = await share.finish()
            await shared.commit([receipt])
    assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_with_a_replaced_attempt_nothing_is_committed(
    db: Database, shared: SharedTransaction
) -> None:
    first = await receipt_of(db, shared.ticket, "1", ann=1)
    other = await receipt_of(db, shared.ticket, "2", zoe=1)
    share = db.internal.share(shared.ticket, "1", 0, 10.0, replace_after_seconds=1.0)
    async with share:
        await share.set("ann", balance, 2)
        await share.finish()
    with pytest.raises(ConflictError, match="none of it is committed"):
        await shared.commit([first, other])
    assert await values_of(db) == {}


@on_both_engines
async def test_a_zombie_that_writes_after_the_commit_adds_nothing(
    db: Database, shared: SharedTransaction
) -> None:
    zombie = await share_of(db, shared.ticket, "1", ann=1)
    commit = await shared.commit([await receipt_of(db, shared.ticket, "1", bob=2)])
    await zombie.set("joe", balance, 1)
    await zombie._flush()
    assert await values_of(db, commit) == {"bob": 2}
    dies(zombie)
    await asyncio.sleep(2 * TTL_SECONDS)
    assert await values_of(db) == {"bob": 2}


@on_both_engines
async def test_a_later_generation_may_have_the_rows_in_other_tasks(
    db: Database, shared: SharedTransaction
) -> None:
    dies(await share_of(db, shared.ticket, "1", ann=1))
    share = await share_of(db, shared.ticket, "2", generation=1, ann=2)
    await shared.commit([await share.finish()])
    assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_an_attempt_that_has_failed_cannot_finish(
    db: Database, cluster: Cluster, shared: SharedTransaction
) -> None:
    """One of its messages may arrive after the commit."""
    share = db.share(shared.ticket, task="1", timeout=1.0)
    await share.begin()
    await share.set("ann", balance, 1)
    cluster.silent = True
    with pytest.raises(Exception, match=r"."):
        await share.finish()
    cluster.silent = False
    with pytest.raises(UsageError, match="could not be finished"):
        await share.finish()
    dies(share)


# ---------------------------------------------------------------- written twice


@on_both_engines
async def test_two_tasks_may_not_write_one_cell(db: Database, shared: SharedTransaction) -> None:
    await receipt_of(db, shared.ticket, "1", ann=1)
    with pytest.raises(WrittenTwice, match="tasks '1' and '2' both write row 'ann'"):
        await receipt_of(db, shared.ticket, "2", ann=1)


@on_both_engines
async def test_a_task_may_not_write_two_values_to_one_cell(
    shared: SharedTransaction, share: Share
) -> None:
    await share.set("ann", balance, 1)
    await share._flush()
    await share.set("ann", balance, 2)
    with pytest.raises(WrittenTwice, match="task '1' writes row 'ann'"):
        await share.set("ann", balance, 3)
    with pytest.raises(WrittenTwice, match="task '1' writes row 'ann'"):
        await share.finish()


# ---------------------------------------------------------------- writes that nobody awaits


@on_both_engines
@pytest.mark.parametrize("known", [True, False], ids=["known table", "unknown table"])
@pytest.mark.parametrize(
    ("limits", "unit"),
    [
        (replace(TWO_PHASES, transaction_cells_max=9), "cells"),
        (replace(TWO_PHASES, transaction_bytes_max=200), "bytes"),
    ],
)
async def test_only_so_many_writes_wait_to_be_locked(
    db: Database, shared: SharedTransaction, known: bool, unit: str
) -> None:
    async with db.share(shared.ticket, task="1") as share:
        if known:
            await share.set("r0", balance, 0)
            await share._flush()
        expected = {"r0": 0} if known else {}

        def write_all() -> None:
            for number in range(1, 100):
                share.set(f"r{number}", balance, number)
                expected[f"r{number}"] = number

        with pytest.raises(TransactionTooLarge, match=f"{unit} wait to be locked, at most"):
            write_all()
        assert 5 <= len(expected) < 20
        await share._late.settle(share._deadline())
        await share._flush()
        share.set("after", balance, 5)
        await shared.commit([await share.finish()])
    assert await values_of(db) == {**expected, "after": 5}


# ---------------------------------------------------------------- staying alive


@on_both_engines
async def test_parts_live_as_long_as_the_driver(db: Database, shared: SharedTransaction) -> None:
    """The process of the first task has ended; that of the second one is at work."""
    first = await receipt_of(db, shared.ticket, "1", ann=1)
    second = await share_of(db, shared.ticket, "2", bob=2)
    await asyncio.sleep(10 * TTL_SECONDS)
    await fails_to_set(db, "ann")
    await shared.commit([first, await second.finish()])
    assert await values_of(db) == {"ann": 1, "bob": 2}


@on_both_engines
async def test_parts_live_as_long_as_any_attempt(db: Database, shared: SharedTransaction) -> None:
    """A driver may have no process of its own while the tasks are at work."""
    assert shared._keeper is not None
    db._engine.participant_heartbeats.discard(shared._keeper)
    first = await receipt_of(db, shared.ticket, "1", ann=1)
    second = await share_of(db, shared.ticket, "2", bob=2)
    await asyncio.sleep(10 * TTL_SECONDS)
    await shared.commit([first, await second.finish()])
    assert await values_of(db) == {"ann": 1, "bob": 2}


async def test_parts_live_on_while_each_message_waits_seconds_to_be_sent(
    monkeypatch: pytest.MonkeyPatch, db: Database, shared: SharedTransaction
) -> None:
    """Behind what the client writes itself, or in a busy cluster. With a short time-out, each beat
    would be given up before it was sent."""
    finished = await receipt_of(db, shared.ticket, "1", ann=1)
    writing = await share_of(db, shared.ticket, "2", bob=2)
    with monkeypatch.context() as patch:
        mutate = Router.mutate

        async def later(
            router: Router, mutations: Sequence[CellMutation], deadline: float
        ) -> list[Answer]:
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.sleep(min(left, TURN_SECONDS))
            if left <= TURN_SECONDS:
                return [DeadlineExceeded("it was not sent")] * len(mutations)
            return await mutate(router, mutations, deadline)

        patch.setattr(Router, "mutate", later)
        await asyncio.sleep(5 * TTL_SECONDS + 0.5)
    await fails_to_set(db, "ann")
    await shared.commit([finished, await writing.finish()])
    assert await values_of(db) == {"ann": 1, "bob": 2}


@on_both_engines
async def test_without_a_driver_everything_is_rolled_back(db: Database) -> None:
    shared = db.shared_transaction()
    await shared.begin()
    receipt = await receipt_of(db, shared.ticket, "1", ann=1, zoe=1)
    dies(shared)
    await fails_to_set(db, "ann")
    await asyncio.sleep(TTL_SECONDS + 1.0)
    await set_value(db, "ann", 7)
    shared._ended = ""
    with pytest.raises(ConflictError, match="presumed dead"):
        await shared.commit([receipt])
    assert await values_of(db) == {"ann": 7}


@on_both_engines
async def test_a_longer_time_to_live_is_possible(db: Database) -> None:
    shared = db.shared_transaction(ttl=100.0)
    await shared.begin()
    receipt = await receipt_of(db, shared.ticket, "1", ann=1)
    assert shared._keeper is not None
    db._engine.participant_heartbeats.discard(shared._keeper)
    await asyncio.sleep(90.0)
    await fails_to_set(db, "ann")
    assert await shared.commit([receipt])


# What keeps a shared transaction alive arrives, however slow the cluster and however many readers
# push what it raises.


class SlowMutations:
    """The mutations of one client wait in line, and are not sent once it is too late."""

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
                await other.snapshot().get(row, balance)
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
@pytest.mark.parametrize("finished", [False, True])
async def test_a_part_lives_on_among_readers_who_push_faster_than_its_messages_travel(
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
    seconds: float,
    db: Database,
    shared: SharedTransaction,
    share: Share,
) -> None:
    receipt = await share.finish() if finished else None
    slow = SlowMutations(monkeypatch, db, seconds)
    async with _crowd(db, "ann"):
        await asyncio.sleep(1.5 * TTL_SECONDS + 0.5)
        await _fails_at_once_to_set(db, "ann")
        await shared.commit([receipt or await share.finish()], timeout=30.0)
    slow.seconds = 0.0
    assert await values_of(db) == {"ann": 1}


async def test_a_part_whose_beginning_takes_seconds_is_not_taken_for_lost(
    monkeypatch: pytest.MonkeyPatch, db: Database, shared: SharedTransaction
) -> None:
    """A beat must not overtake its first lock, and find none."""
    router = db.internal.engine.router
    together = router.mutate_together

    async def later(
        table_id: int, mutations: Sequence[Mutation], deadline: float
    ) -> Sequence[Answer]:
        await asyncio.sleep(4.5)
        return await together(table_id, mutations, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(router, "mutate_together", later)
        share = await share_of(db, shared.ticket, "1", ann=1)
    await asyncio.sleep(2 * TTL_SECONDS)
    await share.set("bob", balance, 2)
    await shared.commit([await share.finish()])
    assert await values_of(db) == {"ann": 1, "bob": 2}


async def test_without_readers_the_driver_need_not_wait_for_the_oracle(
    db: Database, shared: SharedTransaction, receipt: Receipt
) -> None:
    """A part that nobody has pushed is not raised ahead of the clock."""
    await asyncio.sleep(1.5 * TTL_SECONDS + 0.5)
    (lock,) = await _locks(db, shared.ticket.job)
    assert lock.min_commit_timestamp < await db.timestamp()
    began = asyncio.get_running_loop().time()
    await shared.commit([receipt])
    assert asyncio.get_running_loop().time() - began < 0.05


async def test_a_late_copy_of_a_beat_does_not_replace_what_finished(
    monkeypatch: pytest.MonkeyPatch, db: Database, shared: SharedTransaction, share: Share
) -> None:
    """It says that the attempt is at work: the driver would let the part expire. The copies here
    had no answer, and arrive when the attempt has finished without them."""
    router = db.internal.engine.router
    lost: list[CellMutation] = []

    async def lose(mutations: Sequence[CellMutation], deadline: float) -> list[Answer]:
        lost.extend(mutations)
        return [DeadlineExceeded("no answer")] * len(mutations)

    share._attempt.participants[0]._margin.refused(
        1.0
    )  # by readers: the beats are ahead of the clock
    with monkeypatch.context() as patch:
        patch.setattr(router, "mutate", lose)
        for _ in range(3):
            with pytest.raises(DeadlineExceeded):
                await share._attempt.beat()
    receipt = await share.finish()
    (before,) = await _locks(db, shared.ticket.job)
    answers = await router.mutate(lost, asyncio.get_running_loop().time() + 1.0)
    assert len(lost) == 3
    assert APPLIED not in answers
    assert await _locks(db, shared.ticket.job) == [before]
    assert before.value == ATTEMPT_FINISHED
    await shared.commit([receipt])


async def test_a_beat_that_is_under_way_does_not_replace_what_finishes_meanwhile(
    monkeypatch: pytest.MonkeyPatch, db: Database, shared: SharedTransaction, share: Share
) -> None:
    """A reader's push makes it fail: it must not be repeated above what finished."""
    router, loop = db.internal.engine.router, asyncio.get_running_loop()
    mutate = router.mutate
    (lock,) = await _locks(db, shared.ticket.job)
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
    (after,) = await _locks(db, shared.ticket.job)
    assert after.value == ATTEMPT_FINISHED
    await shared.commit([receipt])


async def test_a_beat_does_not_bring_back_a_part_that_was_rolled_back(
    db: Database, shared: SharedTransaction, share: Share
) -> None:
    dies(share)
    dies(shared)
    await asyncio.sleep(TTL_SECONDS + 1.0)
    await set_value(db, "ann", 7)
    with pytest.raises(PercolatorError, match="was rolled back"):
        await share._attempt.beat()
    assert await _locks(db, shared.ticket.job) == []
    assert await values_of(db) == {"ann": 7}


async def test_a_part_that_was_rolled_back_does_not_keep_the_others_from_living_on(
    db: Database, shared: SharedTransaction, share: Share
) -> None:
    await set_value(db, "bob", 5)
    await share.set("bob", balance, 1)  # under a further part: it was committed meanwhile
    await share._flush()
    first, second = share._attempt.participants
    env = db.internal.engine.env
    await roll_back(env, [(first.primary, first.start)], env.now() + 1.0)
    dies(share)
    dies(shared)
    await asyncio.sleep(TTL_SECONDS / 2)
    (before,) = await _locks(db, shared.ticket.job)
    assert before.start_timestamp == second.start
    with pytest.raises(PercolatorError, match="was rolled back"):
        await share._attempt.beat()
    (after,) = await _locks(db, shared.ticket.job)
    assert after.ttl_milliseconds >= before.ttl_milliseconds + 1000 * TTL_SECONDS / 2


async def _locks(db: Database, job: Job) -> Sequence[LockRecord]:
    env = db.internal.engine.env
    return await locks_of(env, job, env.now() + 1.0)
