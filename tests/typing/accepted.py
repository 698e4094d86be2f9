"""Programs that a type checker must accept."""

from __future__ import annotations

import asyncio
from typing import Any

import percolator
from percolator import (
    Column,
    Database,
    Observer,
    Row,
    Table,
    Transaction,
    WorkerLimits,
    aio,
    both_kinds,
    codecs,
    observes,
    transactional,
)
from percolator.retries import RetryPolicy

accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)
owner = accounts.column("owner", codecs.text)
edges = accounts.family("edge:", codecs.integer)
events = Table("events", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
numbered = Table("numbered", key=codecs.ordered_integer)
clicks = events.column("clicks", codecs.integer)
typed: Column[int, tuple[Any, ...]] = clicks
any_keys: Column[int] = clicks


@transactional
def transfer(tx: Transaction, source: str, target: str, amount: int) -> int:
    left = tx.get(source, balance, default=0) - amount
    tx.set(source, balance, left)
    tx.set(target, balance, tx.get(target, balance, default=0) + amount)
    return left


@transactional(retry=RetryPolicy(attempts_max=3))
def rename(tx: Transaction, row: str, *, name: str) -> None:
    tx.set(row, owner, name)
    tx.set(row, {balance: 1, owner: name})
    visits: int = tx.increment(row, balance, 2)
    tx.delete_row(accounts, row + str(visits))
    number: int = tx.increment(("page", 1), clicks)
    tx.set(("page", number), typed, 2)
    tx.set(("page", 1), {clicks: 3})
    tx.delete(("page", 1), any_keys)


def of_any_table(tx: Transaction, row: object, column: Column[int]) -> int | None:
    tx.lock(row, column)
    first: int = tx.get(row, column, default=0, for_update=True)
    return first or tx.get(row, column, for_update=True)


@transactional
async def transfer_async(tx: aio.Transaction, source: str, amount: int) -> int:
    left = await tx.get(source, balance, default=0) - amount
    tx.set(source, balance, left)
    tx.set(source, {balance: left, owner: "Bob"})
    tx.delete(source, owner)
    tx.lock(source, balance, shared=True)
    tx.notify(source, balance)
    await tx.set(source, balance, left)
    await asyncio.gather(tx.set(source, owner, "Bob"), tx.delete(source, owner))
    await asyncio.create_task(tx.set(source, {balance: left}))
    return left


async def sharing(db: aio.Database) -> None:
    async with db.shared_transaction() as whole, db.share(whole.ticket, task="1") as share:
        share.set("bob", balance, 1)
        await share.set("bob", balance, 1)
        share.delete("bob", owner)
        await whole.commit([await share.finish()])


def blocking(db: Database) -> int:
    with db.transaction() as tx:
        maybe: int | None = tx.get("bob", balance)
        surely: int = tx.get("bob", balance, default=0)
        name: str | None = tx.get("bob", owner, default=None)
        transfer(tx, "bob", "joe", 7)
        rename(tx, "bob", name=name or "Bob")
    with db.snapshot() as snapshot:
        for row in snapshot.scan(accounts, prefix="b", columns=[balance, owner]):
            text: str = row.key + row.get(owner, "")
            number: int = row[balance]
            print(text, number)
        found: list[Row[str]] = snapshot.get_many(accounts, ["bob"], [balance])
        values: list[int | None] = snapshot.get_many([("bob", balance), ("joe", balance)])
        mixed = snapshot.get_many([("bob", balance), ("bob", owner)])
        print(values, mixed)
        hub = next(snapshot.scan(accounts, columns=[balance, edges]))
        weights: dict[str, int] = hub.family(edges)
        edge: Column[int] = edges.column("bob")
        print(weights, hub[edge])
        key: int = next(snapshot.scan(numbered, start=5)).key
    db.set_many((name, {balance: 1, owner: "x"}) for name in ["a", "b"])
    rename(db, "bob", name="Robert")
    return transfer(db, "bob", "joe", 7) + surely + (maybe or 0) + len(found) + key


async def asynchronous(db: aio.Database) -> int:
    async with db.transaction() as tx:
        one, other = await asyncio.gather(tx.get("a", balance), tx.get("b", owner, "missing"))
        number: int | None = one
        text: str = other
        print(number, text)
        await transfer_async(tx, "a", 1)
    async with db.snapshot() as snapshot:
        keys: list[str] = [row.key async for row in snapshot.scan(accounts)]
    return await transfer_async(db, "a", amount=len(keys))


@observes(balance, owner, name="both", attempts=3)
async def both(tx: aio.Transaction, row: str, column: Column[Any]) -> None:
    await tx.set(row, owner, str(await tx.get(row, balance, default=0)))


@observes(balance)
def one(tx: Transaction, row: str) -> None:
    tx.set(row, owner, "somebody")


async def observing(db: aio.Database, blocking_db: Database) -> None:
    observers: list[Observer] = [both, one]
    async with db.run_observers(observers, limits=WorkerLimits(threads_max=4)) as worker:
        runs: int = worker.counters["accounts", "one"].runs
        print(runs)
    with blocking_db.run_observers(observers) as blocking_worker:
        blocking_worker.stop(drain_seconds=1.0)


async def connecting() -> None:
    async with percolator.aio.connect("localhost:7100") as db:
        await asynchronous(db)
    other: aio.Database = await aio.connect()
    await other.close()


@both_kinds
async def spend(tx: aio.Transaction, name: str, *, amount: int) -> int:
    await tx.set(name, balance, await total(tx, [name]) - amount)
    return amount


@both_kinds
async def total(reads: aio.Transaction | aio.Snapshot, names: list[str]) -> int:
    return sum([await reads.get(name, balance, default=0) for name in names])


def with_blocking_ones(db: Database) -> int:
    with db.transaction() as tx:
        spent: int = spend(tx, "bob", amount=1) + total(tx, ["bob"])
    with db.snapshot() as snapshot:
        return spent + total(snapshot, ["bob"])


async def with_those_of_asyncio(db: aio.Database) -> int:
    async with db.transaction() as tx:
        spent: int = await spend(tx, "bob", amount=1) + await total(tx, ["bob"])
    async with db.snapshot() as snapshot:
        return spent + await total(snapshot, ["bob"])
