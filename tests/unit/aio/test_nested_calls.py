"""`db.run` inside of `db.run`, and first reads at the same time: no one waits for themselves."""

from __future__ import annotations

import asyncio

import pytest

from percolator import ConflictError, RetryPolicy, transactional
from percolator.aio import Database, Transaction
from tests.unit.aio.test_taking_turns import Increments, held_turn, lose_once, now
from tests.unit.connected import accounts, balance, connected

pytestmark = pytest.mark.filterwarnings("ignore:a transaction is run inside of another one")

ATTEMPTS_FEW = 100
"""In thirty seconds. Without pauses, there are a thousand in each second."""


async def value(db: Database, row: str = "bob") -> int | None:
    async with db.snapshot() as snapshot:
        return await snapshot.get(row, balance)


async def add_one(tx: Transaction, row: str = "bob") -> None:
    await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


async def test_one_that_always_loses_to_its_own_inner_call_pauses_between_its_attempts() -> None:
    attempts = 0
    async with connected() as (db, _):

        async def outer(tx: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            await tx.get("bob", balance)
            await db.run(add_one)
            await add_one(tx)

        with pytest.raises(ConflictError, match="gave up after"):
            await db.run(outer)
        assert 5 < attempts < ATTEMPTS_FEW
        assert await value(db) == attempts
        assert len(db.internal.engine.env.hot_cells) == 0


async def test_others_go_on_while_one_that_lost_in_its_turn_pauses() -> None:
    increments = Increments()
    async with connected() as (db, _):

        async def outer(tx: Transaction) -> None:
            await tx.get("bob", balance)
            await db.run(add_one)
            await add_one(tx)

        losing = asyncio.create_task(db.run(outer, retry=RetryPolicy(deadline_seconds=5.0)))
        await asyncio.sleep(1.0)
        began = now()
        await asyncio.gather(*(increments.run(db, "bob", number) for number in range(10)))
        assert now() - began < 0.1
        with pytest.raises(ConflictError):
            await losing


async def test_a_function_that_calls_itself_does_not_wait_behind_itself() -> None:
    inner_calls = 0
    async with connected() as (db, _):

        @transactional
        async def recursive(tx: Transaction, *, is_inner: bool) -> None:
            nonlocal inner_calls
            await add_one(tx)
            if not is_inner and inner_calls < 2:  # when it calls itself again, it has its turn
                inner_calls += 1
                await recursive(db, is_inner=True)

        began = now()
        await recursive(db, is_inner=False)
        assert inner_calls == 2
        assert await value(db) == 3
        assert now() - began < 0.1
        assert len(db.internal.engine.env.hot_cells) == 0


async def test_an_inner_call_that_lost_in_the_outer_ones_turn_does_not_wait_for_its_end() -> None:
    async with connected() as (db, _):
        lost, inner_lost = list[int](), list[int]()

        async def outer(tx: Transaction) -> None:
            await lose_once(db, tx, lost)
            if tx.statistics.retries == 1:
                await db.run(lambda inner: lose_once(db, inner, inner_lost))

        began = now()
        await db.run(outer)
        assert inner_lost
        assert now() - began < 0.1


@pytest.mark.parametrize("others", ["get", "get_many", "scan", "timestamp"])
@pytest.mark.parametrize("hot_first", [True, False])
async def test_first_reads_at_the_same_time_all_wait_for_the_turn(
    others: str, *, hot_first: bool
) -> None:
    """If one of them fetched the timestamp meanwhile, the transaction would lose."""
    attempts = 0

    async def read(tx: Transaction, row: str) -> object:
        if others == "get":
            return await tx.get(row, balance)
        if others == "get_many":
            return await tx.get_many(accounts, [row])
        if others == "scan":
            return [row async for row in tx.scan(accounts, prefix=row)]
        return await tx.timestamp()

    async def add(tx: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        reads = [tx.get("bob", balance, default=0), read(tx, "joe" if others == "get" else "bob")]
        if hot_first:
            found, _ = await asyncio.gather(*reads)
        else:
            await asyncio.gather(tx.get("bob", balance), *reads[1:])
            found = await reads[0]
        assert isinstance(found, int)
        await tx.set("bob", balance, found + 1)

    async with connected() as (db, _):
        owner = await held_turn(db, caller=add.__code__)
        adding = asyncio.create_task(db.run(add))
        await asyncio.sleep(0.1)
        await db.run(add_one)
        owner.leave()
        await adding
        assert attempts == 1
        assert await value(db) == 2


async def test_a_first_read_that_is_cancelled_in_line_does_not_hold_up_the_others() -> None:
    async with connected() as (db, _):

        async def add(tx: Transaction) -> None:
            reading = asyncio.create_task(tx.get("bob", balance))
            await asyncio.sleep(0)
            other = asyncio.create_task(tx.get("joe", balance))
            await asyncio.sleep(0.1)
            reading.cancel()
            began = now()
            await other
            assert now() == began
            await tx.set("joe", balance, 1)

        await held_turn(db, caller=add.__code__)
        await db.run(add)
        assert await value(db, "joe") == 1
