"""make bench-bigtable: what a transaction on a row store costs its client, next to tablet servers.

One cluster of processes on this machine, and next to it Bigtable's emulator, a process whose own
cost does not count. It has to be fast: a client that waits wakes up for each answer by itself. The
same transactions run on both, taking turns, in one client process; ratios compare the CPU of that
process. A "transfer" reads two rows, in two tablets, and writes them; a "one-row" transaction reads
a cell and writes it back.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hollow_store import HollowNetwork
from benchmarks.report import Report
from benchmarks.row_scaling import scaling
from benchmarks.row_traffic import (
    ACCOUNTS,
    ALL,
    BANK,
    DAY_MILLISECONDS,
    SECONDS,
    add_one,
    connected,
    fill,
    transfer,
    transfers,
)
from benchmarks.transaction_cost import CLIENT, Meter
from benchmarks.transaction_traffic import row_key
from percolator import aio, tune_garbage_collector
from percolator.bigtable.admin import create_table
from percolator.bigtable.connection import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.rowstore.port import Change, Check, Selection, StoredRow
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator

RUNS = 5
TRANSFERS = 800
GETS = 60
ROWS_PER_GET = 100

_HOLLOW = "row store without calls"

TRANSFER_MUST = 6.0
TRANSFER_CALLS_MUST = 6
ONE_ROW_CALLS_MUST = 3
GET_MANY_MUST = 60.0


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


async def reads(db: aio.Database, count: int, chance: random.Random) -> None:
    """Reads of many rows at once, all at one timestamp."""
    async with db.snapshot() as snapshot:
        for _ in range(count):
            keys = [row_key(number) for number in chance.sample(ALL, ROWS_PER_GET)]
            found = await snapshot.get_many(BANK, keys)
            if len(found) != ROWS_PER_GET:
                raise RuntimeError("the benchmark measures nothing: rows are missing")


async def costs(cluster: LocalCluster, address: str, epoch: int, report: Report) -> None:
    """CPU of the client, on both engines in turns."""
    network = BigtableNetwork()
    place = Place(address, "bench-project", "bench-instance")
    store = CountingStore(network, place)
    tablets = await aio.connect(cluster.address)
    hollow = await connected(cluster.address, BigtableStore(HollowNetwork(), place), epoch)
    rows = await connected(cluster.address, store, epoch)
    await tablets.create_table(BANK, [row_key(ACCOUNTS // 2)])
    info = await rows.internal.engine.table(BANK, rows.internal.engine.now() + SECONDS)
    await create_table(network, place, info.table_id, SECONDS)
    for db in (tablets, rows):
        await fill(db)
    engines = {"tablet servers": tablets, "row store": rows, _HOLLOW: hollow}
    meter, chance = Meter(cluster), random.Random(1)
    micros: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(RUNS + 1):
        for engine, db in engines.items():
            with meter.measured(TRANSFERS) as transferring:
                await transfers(db, TRANSFERS, chance)
                await asyncio.sleep(0.05)  # what commits leave to the background
            if turn:  # the first one warms up
                micros[engine, "transfer"].append(transferring.micros_of(CLIENT))
            if db is hollow:
                continue
            with meter.measured(TRANSFERS) as within:
                await transfers(db, TRANSFERS, chance, ALL[: ACCOUNTS // 2])
                await asyncio.sleep(0.05)
            with meter.measured(GETS * ROWS_PER_GET) as reading:
                await reads(db, GETS, chance)
            if turn:
                micros[engine, "within a tablet"].append(within.micros_of(CLIENT))
                micros[engine, "get_many"].append(reading.micros_of(CLIENT))
    for name in ("transfer", "get_many"):
        for engine in engines:
            if (engine, name) not in micros:
                continue
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
    for db in engines.values():
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


def main() -> int:
    tune_garbage_collector()
    report = Report("bigtable")
    epoch = round(time.time() * 1000) - DAY_MILLISECONDS
    with (
        tempfile.TemporaryDirectory() as directory,
        emulator() as address,
        LocalCluster(Path(directory) / "cluster", tablet_servers=1) as cluster,
    ):
        asyncio.run(costs(cluster, address, epoch, report))
        scaling(cluster, epoch, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
