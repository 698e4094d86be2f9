"""`tx.get(..., for_update=True)`, and what `db.run` does by itself: transactions go in turn."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import percolator.testing
from percolator import (
    ConflictError,
    InvalidArgument,
    Limits,
    RetryPolicy,
    SchemaError,
    Table,
    UsageError,
    codecs,
)
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.protocol.turns import GIVE_WAY_SECONDS, HOLD_SECONDS
from percolator.testing.cluster_in_memory import ADDRESS
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import World
from tests.simulation.virtual_time import VirtualClock
from tests.unit.connected import Cluster, accounts, balance, put

INCREMENTS = 50


class Increments:
    """Adds one to cells, and notes each attempt."""

    def __init__(self) -> None:
        self.attempts = 0
        self.committed: list[int] = []

    async def add(self, tx: Transaction, number: int, rows: Sequence[str] = ("bob",)) -> None:
        self.attempts += 1
        for row in rows:
            before = await tx.get(row, balance, default=0, for_update=True)
            tx.set(row, balance, before + 1)
            await asyncio.sleep(0.001)

    async def run(self, db: Database, number: int, rows: Sequence[str] = ("bob",)) -> None:
        await db.run(self.add, number, rows)
        self.committed.append(number)


@pytest.fixture
def increments() -> Increments:
    return Increments()


@asynccontextmanager
async def clients(number: int) -> AsyncIterator[list[Database]]:
    """Clients of one cluster that know nothing of each other."""
    clock = VirtualClock(asyncio.get_running_loop())
    network = InProcessNetwork({ADDRESS: Cluster(clock)})
    async with AsyncExitStack() as stack:
        found = []
        for seed in range(number):
            world = World(clock, network, random.Random(seed))
            client = await connect_to(world, [ADDRESS], Limits(), RetryPolicy())
            found.append(await stack.enter_async_context(client))
        await found[0].create_table(accounts, splits=["m"])
        yield found


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.usefixtures("engine_of_cells")
async def test_increments_are_not_lost(db: Database, increments: Increments) -> None:
    await asyncio.gather(*(increments.run(db, number) for number in range(10)))
    assert await db.get("bob", balance) == 10


async def test_whoever_comes_first_goes_first_and_nobody_loses(
    db: Database, increments: Increments
) -> None:
    tasks = []
    for number in range(INCREMENTS):
        tasks.append(asyncio.create_task(increments.run(db, number)))
        await asyncio.sleep(0.0001)
    await asyncio.gather(*tasks)
    assert increments.committed == list(range(INCREMENTS))
    assert increments.attempts == INCREMENTS


async def test_one_that_has_begun_before_runs_again_with_its_place_kept(db: Database) -> None:
    begun, order = asyncio.Event(), list[str]()
    attempts = 0

    async def slow(tx: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await tx.get("joe", balance)
            begun.set()
            await asyncio.sleep(0.01)
        tx.set("bob", balance, await tx.get("bob", balance, default=0, for_update=True) + 1)

    async def add(tx: Transaction, seconds: float) -> None:
        tx.set("bob", balance, await tx.get("bob", balance, default=0, for_update=True) + 1)
        await asyncio.sleep(seconds)

    async def run(name: str, seconds: float) -> None:
        await db.run(add, seconds)
        order.append(name)

    async def run_slow() -> None:
        await db.run(slow)
        order.append("slow")

    waits = asyncio.create_task(run_slow())
    await begun.wait()
    first = asyncio.create_task(run("first", 0.1))
    await asyncio.sleep(0.05)  # the slow one is in the queue by now
    last = asyncio.create_task(run("last", 0.0))
    await asyncio.gather(waits, first, last)
    assert order == ["first", "slow", "last"]
    assert attempts == 2
    assert await db.get("bob", balance) == 3


@pytest.mark.parametrize("deleted", [False, True], ids=["written", "deleted"])
async def test_a_cell_that_changed_above_the_snapshot_is_a_conflict(
    db: Database, deleted: bool
) -> None:
    await put(db, balance, bob=6)
    async with db.transaction() as tx:
        await tx.get("joe", balance)
        async with db.transaction() as other:
            other.delete("bob", balance) if deleted else other.set("bob", balance, 7)
        with pytest.raises(ConflictError, match="was written at") as conflict:
            await tx.get("bob", balance, for_update=True)
        tx.rollback()
    assert conflict.value.cell is not None
    assert conflict.value.cell.row == b"bob"


@pytest.mark.usefixtures("engine_of_cells")
async def test_what_is_only_read_for_update_is_locked(db: Database) -> None:
    tx = db.transaction()
    assert await tx.get("bob", balance, for_update=True) is None
    await put(db, balance, bob=7)
    tx.set("joe", balance, 1)
    with pytest.raises(ConflictError):
        await tx.commit()
    assert await db.get("joe", balance) is None


@pytest.mark.usefixtures("engine_of_cells")
async def test_it_shows_what_the_transaction_has_written(db: Database) -> None:
    async with db.transaction() as tx:
        tx.set("bob", balance, 5)
        assert await tx.get("bob", balance, for_update=True) == 5
    assert await db.get("bob", balance) == 5


async def test_the_turn_of_one_that_does_not_end_passes_on(
    db: Database, increments: Increments
) -> None:
    began = now()
    tx = db.transaction()
    await tx.get("bob", balance, for_update=True)
    await increments.run(db, 1)
    assert now() - began == pytest.approx(HOLD_SECONDS, abs=0.1)
    tx.rollback()


async def test_a_rollback_passes_the_turn_on_at_once(db: Database, increments: Increments) -> None:
    began = now()
    async with db.transaction() as tx:
        await tx.get("bob", balance, for_update=True)
        tx.rollback()
    await increments.run(db, 1)
    assert now() - began < HOLD_SECONDS / 2


async def test_two_that_want_two_cells_in_different_orders_end_within_a_second(
    db: Database, increments: Increments
) -> None:
    began = now()
    both = ("bob", "zoe"), ("zoe", "bob")
    await asyncio.gather(*(increments.run(db, number, both[number % 2]) for number in range(10)))
    assert now() - began < 1.0
    assert increments.attempts <= 20
    assert await db.get("zoe", balance) == 10


async def test_in_one_tablet_those_who_want_cells_in_different_orders_give_way_at_once(
    db: Database, increments: Increments
) -> None:
    began = now()
    both = ("bob", "joe"), ("joe", "bob")
    await asyncio.gather(*(increments.run(db, number, both[number % 2]) for number in range(10)))
    assert now() - began < 0.002 * increments.attempts + GIVE_WAY_SECONDS
    assert await db.get("joe", balance) == 10


@pytest.mark.parametrize("limits", [Limits()])
async def test_a_deadline_ends_the_wait_for_a_turn(db: Database) -> None:
    began = now()
    tx = db.transaction()
    await tx.get("bob", balance, for_update=True)
    async with db.transaction(timeout=0.4) as other:
        assert await other.get("bob", balance, for_update=True) is None
    assert now() - began == pytest.approx(0.2, abs=0.05)
    tx.rollback()


async def test_anything_but_a_bool_is_refused(db: Database) -> None:
    async with db.transaction() as tx:
        with pytest.raises(InvalidArgument, match="for_update"):
            await tx.get("bob", balance, for_update="yes")  # type: ignore[call-overload]


async def test_what_is_refused_locks_nothing(db: Database) -> None:
    missing = Table("missing").column("balance", codecs.integer)
    async with db.transaction() as tx:
        with pytest.raises(InvalidArgument, match="timeout"):
            await tx.get("bob", balance, for_update=True, timeout=-1)
        with pytest.raises(SchemaError, match="no table 'missing'"):
            await tx.get("bob", missing, for_update=True)
    assert tx.commit_timestamp is None


async def test_one_that_is_rolled_back_while_it_waits_is_told_so(db: Database) -> None:
    first, second, third = db.transaction(), db.transaction(), db.transaction()
    await first.get("bob", balance, for_update=True)
    await third.get("joe", balance)
    waiting = [
        asyncio.create_task(one.get("bob", balance, for_update=True)) for one in (second, third)
    ]
    await asyncio.sleep(0.001)
    for one in (second, third):
        one.rollback()
    for task in waiting:
        with pytest.raises(UsageError, match="was rolled back"):
            await task
    first.rollback()


def test_one_can_be_rolled_back_while_its_event_loop_does_not_run() -> None:
    async def begin() -> tuple[Database, Transaction]:
        db = await percolator.testing.connect_async()
        await db.create_table(accounts)
        tx = db.transaction()
        await tx.get("bob", balance, for_update=True)
        return db, tx

    with asyncio.Runner() as runner:
        db, tx = runner.run(begin())
        tx.rollback()
        runner.run(db.close())


async def test_a_wait_may_be_as_long_as_any_other(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.get("bob", balance, for_update=True, timeout=1e9)


async def test_a_forgotten_await_is_named_as_it_was_written(db: Database) -> None:
    tx = db.transaction()
    tx.get("bob", balance, for_update=True)  # type: ignore[unused-coroutine]
    with pytest.raises(UsageError, match=r"tx\.get\(.*without await"):
        await tx.commit()


async def test_one_that_waits_while_its_table_is_dropped_runs_in_the_next(
    db: Database, increments: Increments
) -> None:
    first = db.transaction()
    await first.get("bob", balance, for_update=True)
    waiting = asyncio.create_task(increments.run(db, 1))
    await asyncio.sleep(0.001)
    await db.drop_table(accounts)
    await db.create_table(accounts)
    await waiting
    assert await db.get("bob", balance) == 1
    first.rollback()


async def test_clients_that_lose_to_each_other_go_in_turn() -> None:
    attempts = 0

    async def add(tx: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        before = await tx.get("bob", balance, default=0)
        await asyncio.sleep(0.001)
        tx.set("bob", balance, before + 1)

    async def work(client: Database) -> None:
        for _ in range(INCREMENTS):
            await client.run(add)

    async with clients(4) as found:
        await asyncio.gather(*map(work, found))
        assert await found[0].get("bob", balance) == 4 * INCREMENTS
    assert attempts <= 1.1 * 4 * INCREMENTS


async def test_a_turn_at_a_cell_that_is_only_read_locked_ends_with_the_transaction() -> None:
    async with clients(2) as (one, other):
        attempts = 0

        async def copy(tx: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            found = await tx.get("bob", balance, default=0)
            tx.set("joe", balance, found)
            if attempts == 1:
                await put(other, balance, bob=1)

        await one.run(copy, serializable=True)
        assert attempts == 2
        began = now()
        async with other.transaction() as tx:
            assert await tx.get("bob", balance, for_update=True) == 1
        assert now() - began < HOLD_SECONDS / 2


async def test_one_that_has_lost_once_at_a_cell_that_it_only_reads_waits_for_no_turns() -> None:
    async with clients(2) as (one, other):
        attempts = 0

        async def copy(tx: Transaction, to: str) -> None:
            nonlocal attempts
            attempts += 1
            found = await tx.get("bob", balance, default=0)
            tx.set(to, balance, found)
            if attempts == 1:
                await put(other, balance, bob=1)
            await asyncio.sleep(HOLD_SECONDS / 10)

        await one.run(copy, "joe", serializable=True)
        began = now()
        await asyncio.gather(*(one.run(copy, f"r{n}", serializable=True) for n in range(10)))
        assert now() - began < HOLD_SECONDS / 5


async def test_one_that_loses_in_its_turn_keeps_it_from_nobody_it_waits_for() -> None:
    async def copy(tx: Transaction, to: str) -> None:
        found = await tx.get("bob", balance, default=0)
        await asyncio.sleep(0.001)
        tx.set(to, balance, found)

    async def add(tx: Transaction) -> None:
        await copy(tx, "bob")

    async def readers(client: Database, to: str) -> None:
        for _ in range(20):
            await client.run(copy, to, serializable=True)

    async def writer(client: Database) -> None:
        for _ in range(20):
            await client.run(add, serializable=True)
            await asyncio.sleep(0.01)

    async with clients(2) as found:
        began = now()
        await asyncio.gather(
            *(readers(found[number % 2], f"r{number}") for number in range(10)),
            *map(writer, found),
        )
        assert now() - began < 2 * HOLD_SECONDS


async def test_without_turns_clients_that_lose_to_each_other_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_such_procedure(*_: object) -> None:
        raise UsageError("this server has no such procedure")

    monkeypatch.setattr(Cluster, "await_turn", no_such_procedure)
    attempts = 0

    async def add(tx: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        before = await tx.get("bob", balance, default=0, for_update=attempts % 2 == 0)
        await asyncio.sleep(0.001)
        tx.set("bob", balance, before + 1)

    async with clients(4) as found:
        await asyncio.gather(*(client.run(add) for client in found))
        assert await found[0].get("bob", balance) == 4
    assert attempts <= 20
