"""Attempts at a task of a shared transaction: one counts, whatever the others do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from percolator import InvalidArgument, Limits, codecs
from percolator.errors import (
    ConflictError,
    DeadlineExceeded,
    Unavailable,
    UsageError,
    WrittenTwice,
)
from percolator.routing.cells import Answer, CellMutation
from percolator.routing.router import Router
from tests.unit.aio.shared_attempts import (
    TTL_SECONDS,
    dies,
    fails_to_set,
    receipt_of,
    set_value,
    share_of,
    values_of,
)
from tests.unit.connected import accounts, balance, connected

TURN_SECONDS = 4.0
on_both_engines = pytest.mark.usefixtures("engine_of_cells")

# ---------------------------------------------------------------- attempts


@on_both_engines
async def test_an_attempt_of_which_a_write_has_failed_cannot_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if the write failed before anything was sent: the rest would be committed without it."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        for fails in ("set", "delete"):
            share = db.share(whole.ticket, task="1")
            await share.begin()
            await share.set("ann", balance, 1)

            async def no_answer(*given: object) -> None:
                raise Unavailable("no answer in time")

            with monkeypatch.context() as patch:
                patch.setattr(share, "_tables", {})
                patch.setattr(share, "_table", no_answer)
                with pytest.raises(Unavailable):
                    await (
                        share.set("bob", balance, 1)
                        if fails == "set"
                        else share.delete("bob", balance)
                    )
            with pytest.raises(UsageError, match="has failed to write a cell"):
                share.set("joe", balance, 1)
            with pytest.raises(UsageError, match="has failed to write a cell"):
                await share.finish()
            await share.abandon()


@on_both_engines
async def test_what_cannot_be_written_is_refused_by_name_and_the_attempt_goes_on() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        async with db.share(whole.ticket, task="1") as share:
            await share.set("ann", balance, 1)
            family: Any = accounts.family("f:", codecs.integer)
            long = "x" * (Limits.row_bytes_max + 1)
            for write in (partial(share.set, value=1), share.delete):
                with pytest.raises(UsageError, match="expected a Column, got Family"):
                    write("bob", family)
                with pytest.raises(InvalidArgument, match=r"^row: has \d+ bytes, at most"):
                    write(long, balance)
            await share.set("joe", balance, 2)
            await whole.commit([await share.finish()])
        assert await values_of(db) == {"ann": 1, "joe": 2}


@on_both_engines
async def test_an_attempt_that_died_is_replaced_at_once() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        dies(await share_of(db, whole.ticket, "1", ann=1, bob=1))
        began = asyncio.get_running_loop().time()
        await whole.commit([await receipt_of(db, whole.ticket, "1", ann=2, joe=2)])
        assert asyncio.get_running_loop().time() - began < 1.0
        assert await values_of(db) == {"ann": 2, "joe": 2}


@on_both_engines
async def test_the_replaced_attempt_cannot_finish() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        slow = await share_of(db, whole.ticket, "1", ann=1, bob=1)
        fast = await share_of(db, whole.ticket, "1", ann=2, bob=2)
        with pytest.raises(ConflictError, match="another attempt"):
            await slow.finish()
        await whole.commit([await fast.finish()])
        assert await values_of(db) == {"ann": 2, "bob": 2}


@on_both_engines
async def test_an_earlier_attempt_does_not_replace_a_later_one() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        slow = await share_of(db, whole.ticket, "1", ann=1)
        fast = await receipt_of(db, whole.ticket, "1", bob=2)
        await slow.set("bob", balance, 1)
        with pytest.raises(ConflictError, match="a later attempt"):
            await slow.finish()
        await whole.commit([fast])
        assert await values_of(db) == {"bob": 2}


@on_both_engines
async def test_only_the_attempt_whose_receipt_is_passed_counts() -> None:
    """Both have finished, with different rows; what the other one wrote is never committed."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        await receipt_of(db, whole.ticket, "1", ann=1)
        await whole.commit([await receipt_of(db, whole.ticket, "1", bob=2)])
        assert await values_of(db) == {"bob": 2}
        await asyncio.sleep(2 * TTL_SECONDS)
        await set_value(db, "ann", 7)
        assert await values_of(db) == {"ann": 7, "bob": 2}


@on_both_engines
async def test_a_finished_attempt_is_spared_for_a_while() -> None:
    """Its receipt may be on its way to the driver."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        first = await receipt_of(db, whole.ticket, "1", ann=1)
        second = asyncio.ensure_future(receipt_of(db, whole.ticket, "1", ann=2))
        await asyncio.sleep(5.0)
        await whole.commit([first])
        with pytest.raises(UsageError, match="was committed"):
            await second
        assert await values_of(db) == {"ann": 1}


@on_both_engines
async def test_a_finished_attempt_is_replaced_in_the_end() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        first = await receipt_of(db, whole.ticket, "1", ann=1)
        share = db.internal.share(whole.ticket, "1", 0, 10.0, replace_after_seconds=1.0)
        async with share:
            await share.set("ann", balance, 2)
            second = await share.finish()
        with pytest.raises(UsageError, match="two receipts"):
            await whole.commit([first, second])
        await whole.commit([second])
        assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_a_lost_receipt_is_replaced_with_any_time_out() -> None:
    """The wait for a finished attempt does not begin anew with each try."""
    async with connected() as (db, _):
        for timeout in (None, 1.0):
            async with db.shared_transaction() as whole:
                await receipt_of(db, whole.ticket, "1", ann=1, zoe=1)
                async with db.share(whole.ticket, task="1", timeout=timeout) as share:
                    await share.set("ann", balance, 2)
                    receipt = await share.finish()
                await whole.commit([receipt])
        assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_with_a_replaced_attempt_nothing_is_committed() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        first = await receipt_of(db, whole.ticket, "1", ann=1)
        other = await receipt_of(db, whole.ticket, "2", zoe=1)
        share = db.internal.share(whole.ticket, "1", 0, 10.0, replace_after_seconds=1.0)
        async with share:
            await share.set("ann", balance, 2)
            await share.finish()
        with pytest.raises(ConflictError, match="none of it is committed"):
            await whole.commit([first, other])
        assert await values_of(db) == {}


@on_both_engines
async def test_a_zombie_that_writes_after_the_commit_adds_nothing() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        zombie = await share_of(db, whole.ticket, "1", ann=1)
        commit = await whole.commit([await receipt_of(db, whole.ticket, "1", bob=2)])
        await zombie.set("joe", balance, 1)
        await zombie._flush()
        assert await values_of(db, commit) == {"bob": 2}
        dies(zombie)
        await asyncio.sleep(2 * TTL_SECONDS)
        assert await values_of(db) == {"bob": 2}


@on_both_engines
async def test_a_later_generation_may_have_the_rows_in_other_tasks() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        dies(await share_of(db, whole.ticket, "1", ann=1))
        share = await share_of(db, whole.ticket, "2", generation=1, ann=2)
        await whole.commit([await share.finish()])
        assert await values_of(db) == {"ann": 2}


@on_both_engines
async def test_an_attempt_that_has_failed_cannot_finish() -> None:
    """One of its messages may arrive after the commit."""
    async with connected() as (db, cluster), db.shared_transaction() as whole:
        share = db.share(whole.ticket, task="1", timeout=1.0)
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
async def test_two_tasks_may_not_write_one_cell() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        await receipt_of(db, whole.ticket, "1", ann=1)
        with pytest.raises(WrittenTwice, match="tasks '1' and '2' both write row 'ann'"):
            await receipt_of(db, whole.ticket, "2", ann=1)


@on_both_engines
async def test_a_task_may_not_write_two_values_to_one_cell() -> None:
    async with connected() as (db, _), db.shared_transaction() as whole:
        share = await share_of(db, whole.ticket, "1", ann=1)
        await share.set("ann", balance, 1)
        await share._flush()
        await share.set("ann", balance, 2)
        with pytest.raises(WrittenTwice, match="task '1' writes row 'ann'"):
            await share.set("ann", balance, 3)
        with pytest.raises(WrittenTwice, match="task '1' writes row 'ann'"):
            await share.finish()


# ---------------------------------------------------------------- staying alive


@on_both_engines
async def test_parts_live_as_long_as_the_driver() -> None:
    """The process of the first task has ended; that of the second one is at work."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        first = await receipt_of(db, whole.ticket, "1", ann=1)
        second = await share_of(db, whole.ticket, "2", bob=2)
        await asyncio.sleep(10 * TTL_SECONDS)
        await fails_to_set(db, "ann")
        await whole.commit([first, await second.finish()])
        assert await values_of(db) == {"ann": 1, "bob": 2}


@on_both_engines
async def test_parts_live_as_long_as_any_attempt() -> None:
    """A driver may have no process of its own while the tasks are at work."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        assert whole._keeper is not None
        db._engine.beats.discard(whole._keeper)
        first = await receipt_of(db, whole.ticket, "1", ann=1)
        second = await share_of(db, whole.ticket, "2", bob=2)
        await asyncio.sleep(10 * TTL_SECONDS)
        await whole.commit([first, await second.finish()])
        assert await values_of(db) == {"ann": 1, "bob": 2}


async def test_parts_live_on_while_each_message_waits_seconds_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind what the client writes itself, or in a busy cluster. With a short time-out, each beat
    would be given up before it was sent."""
    async with connected() as (db, _), db.shared_transaction() as whole:
        finished = await receipt_of(db, whole.ticket, "1", ann=1)
        writing = await share_of(db, whole.ticket, "2", bob=2)
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
        await whole.commit([finished, await writing.finish()])
        assert await values_of(db) == {"ann": 1, "bob": 2}


@on_both_engines
async def test_without_a_driver_everything_is_rolled_back() -> None:
    async with connected() as (db, _):
        whole = db.shared_transaction()
        await whole.begin()
        receipt = await receipt_of(db, whole.ticket, "1", ann=1, zoe=1)
        dies(whole)
        await fails_to_set(db, "ann")
        await asyncio.sleep(TTL_SECONDS + 1.0)
        await set_value(db, "ann", 7)
        whole._ended = ""
        with pytest.raises(ConflictError, match="presumed dead"):
            await whole.commit([receipt])
        assert await values_of(db) == {"ann": 7}


@on_both_engines
async def test_a_longer_time_to_live_is_possible() -> None:
    async with connected() as (db, _):
        whole = db.shared_transaction(ttl=100.0)
        await whole.begin()
        receipt = await receipt_of(db, whole.ticket, "1", ann=1)
        assert whole._keeper is not None
        db._engine.beats.discard(whole._keeper)
        await asyncio.sleep(90.0)
        await fails_to_set(db, "ann")
        assert await whole.commit([receipt])
