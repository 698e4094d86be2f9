"""A program that moves money between accounts in Bigtable until it is killed.

Usage: python -m tests.bigtable.bank_client MASTER EMULATOR INSTANCE EPOCH_MILLISECONDS NAME
"""

from __future__ import annotations

import asyncio
import random
import sys

from percolator import Table, codecs
from percolator.aio import Database, Transaction
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.errors import PercolatorError, Retry
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.rowstore.times import Times
from percolator.wire.channels import GrpcNetwork
from percolator.world import MachineClock, World, machine_random

ACCOUNTS = [f"account-{number}" for number in range(6)]
START_BALANCE = 100
BANK = Table("bank")
BALANCE = BANK.column("balance", codecs.integer)
TRANSFERS = BANK.column("transfers", codecs.integer)


async def connected(
    master: str, network: BigtableNetwork, place: Place, epoch_milliseconds: int
) -> Database:
    """A client of a cluster of processes, whose cells are in Bigtable."""
    world = World(MachineClock(), GrpcNetwork(), machine_random())
    rows = Rows(BigtableStore(network, place), Times(epoch_milliseconds))
    return await connect_to(world, [master], Limits(), RetryPolicy(), rows=rows)


async def transfer(tx: Transaction, name: str) -> None:
    source, target = random.sample(ACCOUNTS, 2)
    amount = random.randint(1, 5)
    await tx.set(source, BALANCE, (await tx.get(source, BALANCE) or 0) - amount)
    await tx.set(target, BALANCE, (await tx.get(target, BALANCE) or 0) + amount)
    await tx.set(name, TRANSFERS, (await tx.get(name, TRANSFERS) or 0) + 1)


async def main() -> None:
    master, emulator, instance, epoch, name = sys.argv[1:]
    network = BigtableNetwork()
    place = Place(emulator, "bank-project", instance, scans_backwards=False)
    database = await connected(master, network, place, int(epoch))
    while True:
        try:
            await database.run(transfer, name)
        except PercolatorError as error:
            if error.retry is Retry.USELESS:
                raise


if __name__ == "__main__":
    asyncio.run(main())
