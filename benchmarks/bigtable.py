"""make bench-bigtable: what a transaction on a row store costs its client, next to tablet servers.

One cluster of processes on this machine, and next to it a store that answers at once: the model of
Bigtable behind real gRPC, in a process whose own cost does not count. The same transactions run on
both, taking turns, in one client process; ratios compare the CPU of that process. A "transfer"
reads two rows, in two tablets, and writes them; a "one-row" transaction reads a cell and writes it
back.

How clients scale is judged with a store in each client's own process, so that they share nothing
but the oracle, and by the CPU that they use: with two cores, four clients and an oracle take turns,
so throughput alone would say how many cores there are.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.instant_store import instant_store
from benchmarks.report import Report
from benchmarks.transaction_cost import CLIENT, Meter
from benchmarks.transaction_traffic import row_key
from percolator import Limits, Table, aio, codecs, tune_garbage_collector
from percolator.aio.connecting import connect_to
from percolator.aio.engine import Rows
from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tables import create_table
from percolator.retries import RetryPolicy
from percolator.rowstore.port import Change, Check, Selection, StoredRow
from percolator.rowstore.times import Times
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.testing.in_process_network import InProcessNetwork
from percolator.wire.channels import GrpcNetwork
from percolator.world import MachineClock, World, machine_random
from services.local.cluster import LocalCluster

RUNS = 5
ACCOUNTS = 4_000
IN_FLIGHT = 64
TRANSFERS = 800
GETS = 60
ROWS_PER_GET = 100
CLIENTS = (1, 2, 4)
CLIENT_TRANSFERS = 1_500
_DAY_MILLISECONDS = 86_400_000
_SECONDS = 60.0

TRANSFER_MUST = 6.0
TRANSFER_CALLS_MUST = 6
ONE_ROW_CALLS_MUST = 3
GET_MANY_MUST = 60.0
SCALING_MUST = 0.9

BANK = Table("bank")
BALANCE = BANK.column("balance", codecs.integer)


ALL = range(ACCOUNTS)


class CountingStore(BigtableStore):
    """Counts its calls."""

    calls = 0

    def check_and_mutate(
        self,
        table_id: int,
        key: bytes,
        check: Check,
        changes: Sequence[Change],
        timeout_seconds: float,
    ) -> Coroutine[Any, Any, bool]:
        self.calls += 1
        return super().check_and_mutate(table_id, key, check, changes, timeout_seconds)

    def read(
        self,
        table_id: int,
        keys: Sequence[bytes],
        selections: Sequence[Selection],
        timeout_seconds: float,
    ) -> Coroutine[Any, Any, list[StoredRow]]:
        self.calls += 1
        return super().read(table_id, keys, selections, timeout_seconds)


async def connected(master: str, store: BigtableStore, epoch_milliseconds: int) -> aio.Database:
    """A client of the cluster whose cells are in that store."""
    world = World(MachineClock(), GrpcNetwork(), machine_random())
    rows = Rows(store, Times(epoch_milliseconds))
    return await connect_to(world, [master], Limits(), RetryPolicy(), rows=rows)


async def transfer(db: aio.Database, source: int, target: int) -> None:
    async with db.transaction() as tx:
        one, other = row_key(source), row_key(target)
        has, gets = await asyncio.gather(tx.get(one, BALANCE), tx.get(other, BALANCE))
        await tx.set(one, BALANCE, (has or 0) - 1)
        await tx.set(other, BALANCE, (gets or 0) + 1)


async def add_one(db: aio.Database, account: int) -> None:
    row = row_key(account)
    async with db.transaction() as tx:
        await tx.set(row, BALANCE, (await tx.get(row, BALANCE) or 0) + 1)


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


async def reads(db: aio.Database, count: int, chance: random.Random) -> None:
    """Reads of many rows at once, all at one timestamp."""
    async with db.snapshot() as snapshot:
        for _ in range(count):
            keys = [row_key(number) for number in chance.sample(ALL, ROWS_PER_GET)]
            found = await snapshot.get_many(BANK, keys)
            if len(found) != ROWS_PER_GET:
                raise RuntimeError("the benchmark measures nothing: rows are missing")


async def fill(db: aio.Database) -> None:
    for first in range(0, ACCOUNTS, 500):
        async with db.transaction() as tx:
            for number in range(first, first + 500):
                await tx.set(row_key(number), BALANCE, 1_000)


async def costs(cluster: LocalCluster, address: str, epoch: int, report: Report) -> None:
    """CPU of the client, on both engines in turns."""
    network = BigtableNetwork()
    place = Place(address, "bench-project", "bench-instance")
    store = CountingStore(network, place)
    tablets = await aio.connect(cluster.address)
    rows = await connected(cluster.address, store, epoch)
    await tablets.create_table(BANK, [row_key(ACCOUNTS // 2)])
    info = await rows.internal.engine.table(BANK, rows.internal.engine.now() + _SECONDS)
    await create_table(network, place, info.table_id, _SECONDS)
    for db in (tablets, rows):
        await fill(db)
    meter, chance = Meter(cluster), random.Random(1)
    micros: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(RUNS + 1):
        for engine, db in (("tablet servers", tablets), ("row store", rows)):
            with meter.measured(TRANSFERS) as transferring:
                await transfers(db, TRANSFERS, chance)
                await asyncio.sleep(0.05)  # what commits leave to the background
            with meter.measured(TRANSFERS) as within:
                await transfers(db, TRANSFERS, chance, ALL[: ACCOUNTS // 2])
                await asyncio.sleep(0.05)
            with meter.measured(GETS * ROWS_PER_GET) as reading:
                await reads(db, GETS, chance)
            if turn:  # the first one warms up
                micros[engine, "transfer"].append(transferring.micros_of(CLIENT))
                micros[engine, "within a tablet"].append(within.micros_of(CLIENT))
                micros[engine, "get_many"].append(reading.micros_of(CLIENT))
    for name in ("transfer", "get_many"):
        for engine in ("tablet servers", "row store"):
            unit = "µs CPU" if name == "transfer" else "µs CPU/row"
            report.add(f"{name}, {engine}: client", median(micros[engine, name]), unit)
    ratios = [
        there / here
        for there, here in zip(
            micros["row store", "transfer"], micros["tablet servers", "transfer"], strict=True
        )
    ]
    report.add("transfer: row store / tablet servers", median(ratios), "×", must=TRANSFER_MUST)
    lone = median(micros["tablet servers", "within a tablet"])
    report.add("transfer within a tablet, in one round: client", lone, "µs CPU")
    per_row = median(micros["row store", "get_many"])
    report.add(
        f"get_many of {ROWS_PER_GET}, of the {GET_MANY_MUST:g} µs a row that it may cost",
        100.0 * per_row / GET_MANY_MUST,
        "%",
        must=100.0,
    )
    await calls(rows, store, report)
    for db in (tablets, rows):
        await db.close()
    await network.close()


async def calls(rows: aio.Database, store: CountingStore, report: Report) -> None:
    """Calls of one transaction when nothing is in its way."""
    for name, work, must in (
        ("transfer", transfer(rows, 1, 2), TRANSFER_CALLS_MUST),
        ("one-row read-write", add_one(rows, 3), ONE_ROW_CALLS_MUST),
    ):
        await asyncio.sleep(0.2)
        before = store.calls
        await work
        await asyncio.sleep(0.2)
        report.add(f"{name}: calls of the store", store.calls - before, "", must=must)


async def client(master: str, epoch: int) -> None:
    """One of several clients, with a store of its own: prints its transfers per second, and per
    second of its CPU."""
    tune_garbage_collector()
    place = Place("instant:1", "bench-project", "bench-instance")
    network = InProcessNetwork({place.address: BigtableInMemory()})
    db = await connected(master, BigtableStore(network, place), epoch)
    info = await db.internal.engine.table(BANK, db.internal.engine.now() + _SECONDS)
    await create_table(network, place, info.table_id, _SECONDS)
    chance = random.Random()
    await transfers(db, 100, chance)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began, cpu = time.perf_counter(), time.process_time()
    done = 0
    while done < CLIENT_TRANSFERS:
        await transfers(db, 300, chance)
        done += 300
    print(done / (time.perf_counter() - began), done / (time.process_time() - cpu), flush=True)
    await db.close()
    await network.close()


def scaling(cluster: LocalCluster, epoch: int, report: Report) -> None:
    """Transfers of 1, 2 and 4 client processes."""
    per_cpu: dict[int, float] = {}
    for number in CLIENTS:
        command = [sys.executable, "-m", "benchmarks.bigtable", "--client"]
        command += [cluster.address, str(epoch)]
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(number)
        ]
        for process in started:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise RuntimeError("a client did not start")
        for process in started:  # all of them at the same time
            if process.stdin is not None:
                process.stdin.write("go\n")
                process.stdin.flush()
        said = [process.communicate()[0].split() for process in started]
        report.add(f"{number} clients: transfers", sum(float(rate) for rate, _ in said), "1/s")
        per_cpu[number] = sum(float(rate) for _, rate in said) / number
        report.add(f"{number} clients: transfers", per_cpu[number], "1/s of client CPU")
        if number > 1:
            report.add(
                f"{number} clients / 1, per core that they use",
                per_cpu[number] / per_cpu[1],
                "×",
                must=SCALING_MUST,
                at_least=True,
            )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    parsed = arguments.parse_args()
    if parsed.client:
        master, epoch = parsed.client
        asyncio.run(client(master, int(epoch)))
        return 0
    tune_garbage_collector()
    report = Report("bigtable")
    epoch = round(time.time() * 1000) - _DAY_MILLISECONDS
    with (
        tempfile.TemporaryDirectory() as directory,
        instant_store() as address,
        LocalCluster(Path(directory) / "cluster", tablet_servers=1) as cluster,
    ):
        asyncio.run(costs(cluster, address, epoch, report))
        scaling(cluster, epoch, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
