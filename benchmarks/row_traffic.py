"""Transfers between accounts, for benchmarks of a row store."""

from __future__ import annotations

import asyncio
import random

from benchmarks.transaction_traffic import row_key
from percolator import Limits, Table, aio, codecs
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.store import BigtableStore
from percolator.retries import RetryPolicy
from percolator.rowstore.layout import Times
from percolator.wire.channels import GrpcNetwork
from percolator.world import MachineClock, Network, World, machine_random

ACCOUNTS = 4_000
IN_FLIGHT = 64
DAY_MILLISECONDS = 86_400_000
SECONDS = 60.0

BANK = Table("bank")
BALANCE = BANK.column("balance", codecs.integer)

ALL = range(ACCOUNTS)


async def connected(
    master: str,
    store: BigtableStore,
    epoch_milliseconds: int,
    network: Network | None = None,
) -> aio.Database:
    """A client of the cluster whose cells are in that store."""
    world = World(MachineClock(), network or GrpcNetwork(), machine_random())
    rows = Rows(store, Times(epoch_milliseconds))
    return await connect_to(world, [master], Limits(), RetryPolicy(), rows=rows)


async def transfer(db: aio.Database, source: int, target: int) -> None:
    async with db.transaction() as tx:
        one, other = row_key(source), row_key(target)
        has, gets = await asyncio.gather(tx.get(one, BALANCE), tx.get(other, BALANCE))
        tx.set(one, BALANCE, (has or 0) - 1)
        tx.set(other, BALANCE, (gets or 0) + 1)


async def add_one(db: aio.Database, account: int) -> None:
    row = row_key(account)
    async with db.transaction() as tx:
        tx.set(row, BALANCE, (await tx.get(row, BALANCE) or 0) + 1)


async def transfers(
    db: aio.Database, count: int, chance: random.Random, accounts: range = ALL
) -> None:
    """Transfers between accounts that are distinct, so that none conflicts: from the lower half of
    the table to the upper one, or within a part of it."""
    if accounts is ALL:
        sources, targets = ALL[: ACCOUNTS // 2], ALL[ACCOUNTS // 2 :]
        pairs = iter(zip(chance.sample(sources, count), chance.sample(targets, count), strict=True))
    else:
        numbers = chance.sample(accounts, 2 * count)
        pairs = iter(zip(numbers[::2], numbers[1::2], strict=True))

    async def worker() -> None:
        for source, target in pairs:
            await transfer(db, source, target)

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


async def fill(db: aio.Database) -> None:
    for first in range(0, ACCOUNTS, 500):
        async with db.transaction() as tx:
            for number in range(first, first + 500):
                tx.set(row_key(number), BALANCE, 1_000)
