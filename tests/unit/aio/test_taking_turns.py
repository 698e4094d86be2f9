"""`db.run`: those that have lost at a cell take turns there, and the others notice nothing."""

from __future__ import annotations

import asyncio

import pytest

from percolator import ConflictError, Limits, RetryPolicy
from percolator.aio import Database, Transaction
from percolator.errors import CellAddress
from percolator.protocol.contention import TURN_SECONDS, Contender
from tests.unit.connected import accounts, balance, connected

INCREMENTS = 50


def now() -> float:
    return asyncio.get_running_loop().time()


async def cell(db: Database, row: str = "bob") -> CellAddress:
    engine = db.internal.engine
    table = await engine.table(accounts, engine.now() + 1.0)
    return CellAddress(table.table_id, row.encode(), balance.name)


async def held_turn(db: Database, row: str = "bob", *, caller: object = None) -> Contender:
    """Someone who has their turn at the cell, and does nothing in it."""
    owner = Contender(db.internal.engine.env.hot_cells, caller, 0.0)
    owner.lost_at(await cell(db, row))
    await owner.stand_in_line()
    return owner


class Increments:
    """Increments that count their attempts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.committed: list[int] = []

    async def add(self, tx: Transaction, row: str, number: int) -> None:
        self.attempts += 1
        await tx.set(row, balance, await tx.get(row, balance, default=0) + 1)

    async def run(self, db: Database, row: str, number: int) -> None:
        await db.run(self.add, row, number)
        self.committed.append(number)


async def set_balance(db: Database, value: int) -> None:
    async with db.transaction() as tx:
        await tx.set("bob", balance, value)


async def lose_once(db: Database, tx: Transaction, lost: list[int]) -> None:
    """Reads and writes; at the first attempt, another transaction commits in between."""
    value = await tx.get("bob", balance, default=0)
    if not lost:
        lost.append(value)
        await set_balance(db, value + 10)
    await tx.set("bob", balance, value + 1)


async def test_increments_of_one_cell_lose_once_at_most() -> None:
    increments = Increments()
    async with connected() as (db, _):
        await asyncio.gather(*(increments.run(db, "bob", n) for n in range(INCREMENTS)))
        async with db.snapshot() as snapshot:
            assert await snapshot.get("bob", balance) == INCREMENTS
        assert increments.attempts <= 2 * INCREMENTS
        assert len(db.internal.engine.env.hot_cells) == 0


async def test_the_next_in_line_begins_above_the_winner_without_a_timestamp_and_a_read() -> None:
    trips: list[int] = []

    async def add(tx: Transaction) -> None:
        await tx.set("bob", balance, await tx.get("bob", balance, default=0) + 1)
        trips.append(tx.statistics.round_trips)

    async with connected(Limits()) as (db, _):
        owner = await held_turn(db, caller=add.__code__)
        tasks = [asyncio.create_task(db.run(add)) for _ in range(INCREMENTS)]
        await asyncio.sleep(0.1)
        owner.leave()
        await asyncio.gather(*tasks)
        assert trips == [2, *[0] * (INCREMENTS - 1)]
        assert await db.get("bob", balance) == INCREMENTS


async def test_the_oldest_commit_first_and_newcomers_last() -> None:
    increments = Increments()
    async with connected() as (db, _):
        owner = await held_turn(db, caller=Increments.add.__code__)
        tasks = []
        for number in range(INCREMENTS):
            tasks.append(asyncio.create_task(increments.run(db, "bob", number)))
            await asyncio.sleep(0.001)
        assert increments.committed == []
        owner.leave()
        await asyncio.gather(*tasks)
        assert increments.committed == list(range(INCREMENTS))
        assert increments.attempts == INCREMENTS


async def test_one_that_lost_to_its_own_client_tries_again_without_a_pause() -> None:
    async with connected() as (db, _):
        began, lost = now(), list[int]()
        await db.run(lambda tx: lose_once(db, tx, lost))
        assert lost
        assert now() == began


async def test_without_contention_there_is_no_line_and_no_pause() -> None:
    increments = Increments()
    async with connected() as (db, _):
        began = now()
        for number in range(INCREMENTS):
            await increments.run(db, "bob", number)
        assert increments.attempts == INCREMENTS
        assert now() == began


async def test_cells_that_are_not_hot_are_not_held_up() -> None:
    increments = Increments()
    async with connected() as (db, _):
        await held_turn(db, "joe", caller=Increments.add.__code__)
        began = now()
        await increments.run(db, "bob", 1)
        assert now() == began


async def test_a_function_that_only_reads_a_hot_cell_does_not_wait() -> None:
    async with connected() as (db, _):
        await held_turn(db, caller=Increments.add.__code__)
        began = now()

        async def read(tx: Transaction) -> int:
            return await tx.get("bob", balance, default=0)

        assert await db.run(read) == 0
        async with db.snapshot() as snapshot, db.transaction() as tx:
            assert await snapshot.get("bob", balance) is None
            assert await tx.get("bob", balance) is None
        assert now() == began


async def test_the_deadline_is_obeyed_in_line() -> None:
    async with connected() as (db, _):
        await held_turn(db)
        began, lost = now(), list[int]()
        with pytest.raises(ConflictError):
            await db.run(
                lambda tx: lose_once(db, tx, lost), retry=RetryPolicy(deadline_seconds=0.5)
            )
        assert now() == began + 0.5
        assert len(db.internal.engine.env.hot_cells) == 1  # the one that does nothing


async def test_a_newcomer_waits_for_half_of_its_time_at_most() -> None:
    increments = Increments()
    async with connected() as (db, _):
        await held_turn(db, caller=Increments.add.__code__)
        began = now()
        await db.run(increments.add, "bob", 1, retry=RetryPolicy(deadline_seconds=0.5))
        assert now() == began + 0.25


async def test_one_that_is_cancelled_leaves_the_line() -> None:
    increments = Increments()
    async with connected() as (db, _):
        owner = await held_turn(db, caller=Increments.add.__code__)
        first, second = (
            asyncio.create_task(increments.run(db, "bob", number)) for number in (1, 2)
        )
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        owner.leave()
        await second
        assert increments.committed == [2]
        assert len(db.internal.engine.env.hot_cells) == 0


async def test_one_that_dies_in_its_turn_lets_the_next_go_at_once() -> None:
    async with connected() as (db, _):
        lost = list[int]()

        async def fail_at_last(tx: Transaction) -> None:
            had_lost = bool(lost)
            await lose_once(db, tx, lost)
            if had_lost:
                assert await cell(db) in db.internal.engine.env.hot_cells.lines
                raise ValueError("a mistake of the program")

        with pytest.raises(ValueError, match="a mistake"):
            await db.run(fail_at_last)
        assert len(db.internal.engine.env.hot_cells) == 0


async def test_one_that_waits_for_something_else_in_its_turn_holds_up_others_for_a_while() -> None:
    increments = Increments()
    async with connected() as (db, _):
        lost, forever = list[int](), asyncio.Event()

        async def hang(tx: Transaction) -> None:
            had_lost = bool(lost)
            await lose_once(db, tx, lost)
            if had_lost:
                await forever.wait()

        hanging = asyncio.create_task(db.run(hang))
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.001)
        owner = await cell(db)
        assert owner in db.internal.engine.env.hot_cells.lines
        began = now()
        other = Contender(db.internal.engine.env.hot_cells, None, 0.0)
        other.lost_at(owner)
        await other.stand_in_line()
        other.leave()
        assert now() - began == pytest.approx(TURN_SECONDS, abs=0.01)
        await increments.run(db, "bob", 1)
        forever.set()
        await hanging  # it loses, and then has its turn again


async def test_transfers_between_two_hot_cells_take_turns_at_both() -> None:
    attempts = 0

    async def transfer(tx: Transaction, source: str, target: str) -> None:
        nonlocal attempts
        attempts += 1
        await tx.set(source, balance, await tx.get(source, balance, default=0) - 1)
        await tx.set(target, balance, await tx.get(target, balance, default=0) + 1)

    async with connected() as (db, _):
        ways = [("bob", "joe"), ("joe", "bob"), ("joe", "ann"), ("ann", "bob")]
        await asyncio.gather(*(db.run(transfer, *ways[n % 4]) for n in range(2 * INCREMENTS)))
        async with db.snapshot() as snapshot:
            rows = [row[balance] async for row in snapshot.scan(accounts)]
        assert sum(rows) == 0
        assert attempts <= 4 * 2 * INCREMENTS
        assert len(db.internal.engine.env.hot_cells) == 0
