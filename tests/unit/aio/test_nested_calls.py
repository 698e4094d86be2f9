"""`db.run` inside of `db.run`, and first reads at the same time: no one waits for themselves."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

import percolator.testing
from percolator import ConflictError, RetryPolicy, transactional
from percolator import Database as BlockingDatabase
from percolator.aio import Database, Transaction
from percolator.testing.pytest_plugin import percolator_db
from tests.unit.aio.test_taking_turns import Increments, held_turn, lose_once, now
from tests.unit.connected import accounts, balance, connected

nested = pytest.mark.filterwarnings("ignore:a transaction is run inside of another one")

ATTEMPTS_FEW = 100
"""In thirty seconds. Without pauses, there are a thousand in each second."""


async def value(db: Database, row: str = "bob") -> int | None:
    return await db.get(row, balance)


async def increment(tx: Transaction, row: str = "bob") -> None:
    await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


@nested
async def test_one_that_always_loses_to_its_own_inner_call_pauses_between_its_attempts(
    db: Database,
) -> None:
    attempts = 0

    async def outer(tx: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        await tx.get("bob", balance)
        await db.run(increment)
        await increment(tx)

    with pytest.raises(ConflictError, match="gave up after"):
        await db.run(outer)
    assert 5 < attempts < ATTEMPTS_FEW
    assert await value(db) == attempts
    assert len(db.internal.engine.env.hot_cells) == 0


@nested
async def test_others_go_on_while_one_that_lost_as_the_first_in_line_pauses(db: Database) -> None:
    increments = Increments()

    async def outer(tx: Transaction) -> None:
        await tx.get("bob", balance)
        await db.run(increment)
        await increment(tx)

    losing = asyncio.create_task(db.run(outer, retry=RetryPolicy(deadline_seconds=5.0)))
    await asyncio.sleep(1.0)
    began = now()
    await asyncio.gather(*(increments.run(db, "bob", number) for number in range(10)))
    assert now() - began < 0.1
    with pytest.raises(ConflictError):
        await losing


@nested
async def test_a_function_that_calls_itself_does_not_wait_behind_itself(db: Database) -> None:
    inner_calls = 0

    @transactional
    async def recursive(tx: Transaction, *, is_inner: bool) -> None:
        nonlocal inner_calls
        await increment(tx)
        if not is_inner and inner_calls < 2:  # when it calls itself again, it has its turn
            inner_calls += 1
            await recursive(db, is_inner=True)

    began = now()
    await recursive(db, is_inner=False)
    assert inner_calls == 2
    assert await value(db) == 3
    assert now() - began < 0.1
    assert len(db.internal.engine.env.hot_cells) == 0


@nested
async def test_an_inner_call_that_lost_while_the_outer_one_is_first_does_not_wait_for_its_end(
    db: Database,
) -> None:
    lost, inner_lost = list[int](), list[int]()

    async def outer(tx: Transaction) -> None:
        await lose_once(db, tx, lost)
        if tx.statistics.retries == 1:
            await db.run(lambda inner: lose_once(db, inner, inner_lost))

    began = now()
    await db.run(outer)
    assert inner_lost
    assert now() - began < 0.1


@nested
@pytest.mark.parametrize("others", ["get", "get_many", "scan", "timestamp"])
@pytest.mark.parametrize("hot_first", [True, False])
async def test_first_reads_at_the_same_time_all_wait_in_line(
    others: str, db: Database, *, hot_first: bool
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

    owner = await held_turn(db, caller=add.__code__)
    adding = asyncio.create_task(db.run(add))
    await asyncio.sleep(0.1)
    await db.run(increment)
    owner.leave()
    await adding
    assert attempts == 1
    assert await value(db) == 2


@nested
async def test_a_first_read_that_is_cancelled_in_line_does_not_hold_up_the_others(
    db: Database,
) -> None:

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


# A transaction that is run inside of another one warns; one that joins it does not.

INNER = r"a transaction is run inside of another one.*Pass the transaction"


@transactional
async def add_one(tx: Transaction, row: str) -> None:
    await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)


async def test_an_inner_call_with_the_database_warns_where_it_is_called(db: Database) -> None:

    async def outer(tx: Transaction) -> None:
        await add_one(db, "inner")

    with pytest.warns(RuntimeWarning, match=INNER) as shown:
        await db.run(outer)
    assert [one.filename for one in shown] == [__file__]
    assert await db.get("inner", balance) == 1


async def test_an_inner_call_with_the_transaction_joins_it_silently(db: Database) -> None:

    async def outer(tx: Transaction) -> None:
        await add_one(tx, "inner")
        await add_one(tx, "inner")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await db.run(outer)
        await db.run(outer)
    assert await db.get("inner", balance) == 4


async def test_a_task_that_outlasts_the_transaction_that_started_it_is_not_inside(
    db: Database,
) -> None:
    tasks: list[asyncio.Task[None]] = []
    may_run = asyncio.Event()

    async def later() -> None:
        await may_run.wait()
        await add_one(db, "later")

    async def outer(tx: Transaction) -> None:
        tasks.append(asyncio.create_task(later()))

    await db.run(outer)
    may_run.set()
    await tasks[0]
    assert await db.get("later", balance) == 1


async def test_a_transaction_of_another_database_is_not_inside(db: Database) -> None:
    async with connected() as (other, _):

        async def outer(tx: Transaction) -> None:
            await add_one(other, "copy")

        await db.run(outer)
        assert await other.get("copy", balance) == 1


def test_an_inner_call_of_a_blocking_function_warns_where_it_is_called() -> None:
    with percolator.testing.connect() as db:
        db.create_table(accounts)

        def inner(tx: percolator.Transaction) -> None:
            tx.set("inner", balance, 1)

        def outer(tx: percolator.Transaction) -> None:
            db.run(inner)

        with pytest.warns(RuntimeWarning, match=INNER) as shown:
            db.run(outer)
        assert [one.filename for one in shown] == [__file__]


# A transaction that is dropped with writes in it warns: they are lost, and no error says so.

__all__ = ["percolator_db"]


async def test_a_transaction_dropped_with_writes_warns(db: Database) -> None:
    tx = db.transaction()
    await tx.set("bob", balance, 1)
    with pytest.warns(RuntimeWarning, match=r"are lost \(cells: 1\): leave its block"):
        del tx
    assert await db.get("bob", balance) is None


async def test_transactions_that_ended_or_have_nothing_to_write_do_not_warn(db: Database) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        committed, rolled_back, reader = (db.transaction() for _ in range(3))
        await committed.set("bob", balance, 1)
        await committed.commit()
        await rolled_back.set("bob", balance, 1)
        rolled_back.rollback()
        assert await reader.get("bob", balance) == 1
        del committed, rolled_back, reader
        gc.collect()
    assert caught == []


def test_a_blocking_transaction_warns_too(percolator_db: BlockingDatabase) -> None:
    percolator_db.create_table(accounts)
    tx = percolator_db.transaction()
    tx.set("bob", balance, 1)
    with pytest.warns(RuntimeWarning, match="writes of a dropped transaction are lost"):
        del tx
