"""make bench-tablet: what a row costs a tablet server and its client.

Server and client are separate processes on one machine, with synced writes and real gRPC. Prewrites
are the protocol's own (four conditions, one lock with an inline value of 100 bytes), each followed
by its commit. Every figure is the median of five runs in which the slices take turns, so that other
load on the machine spoils one run of each slice rather than all runs of one.

The cost of history is measured with pairs of tablets that differ in nothing else: a million cells
with and without the tombstones of their locks, and the same number of records as many versions of
few cells or as one version of many cells. A cell under a million lock-only commits is compared with
cells of the same tablet that were never locked. All these ratios have only an upper bound: history
may add at most a quarter, lock-only commits a tenth. A ratio below 1 (few cells are cached better
than many) is fine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack
from functools import reduce
from operator import add
from pathlib import Path

import psutil

from benchmarks.report import Report
from benchmarks.tablet_population import (
    FIRST_START,
    NEIGHBOURS,
    populate,
    populate_locked,
)
from benchmarks.tablet_traffic import Cost, Served, row_key, served

RUNS = 5
TABLETS = (1, 10, 100)
ROWS_BY_BATCH = {1: 300, 10: 2_000, 100: 6_000, 1000: 8_000}
"""Rows of one slice, by batch size; a slice takes about a third of a second."""
BATCH = 100
MANY_CELLS = 1_000_000
DEEP_CELLS = 250
VERSIONS = 1_000
REPEATS = 8
"""Repetitions of a slice on the few deep cells: a transaction can have each cell only once."""
MEBIBYTE = 1 << 20

CHANGE_MUST = 1.25
LOCKED_MUST = 1.10
TEN_TABLETS_MUST = 2.0
"""Server CPU per prewritten row when a batch of 100 meets ten tablets instead of one."""

FRESH = f"x{BATCH}, 1 tablets"
TOMBSTONES = "1,000,000 cells, locks deleted"
NEVER_LOCKED = "1,000,000 cells, never locked"
DEEP = "250 cells with 1,000 versions"
SHALLOW = "250,000 cells with 1 version"
LOCKED = "cell under 1,000,000 lock-only commits"
LOCKED_THEN = "cell amid 1,000,000 lock-only commits, in the past"
UNLOCKED = "cell that was never locked"
LOCKED_ROW = b"locked"


class Measurements:
    """All costs, by the name of what was measured."""

    def __init__(self) -> None:
        self.costs: defaultdict[str, list[Cost]] = defaultdict(list)

    def add(self, name: str, cost: Cost) -> None:
        self.costs[name].append(cost)

    def server(self, name: str) -> float:
        """Server CPU per row in µs, the median of all runs."""
        return statistics.median(cost.server_micros for cost in self.costs[name])

    def client(self, name: str) -> float:
        return statistics.median(cost.client_micros for cost in self.costs[name])

    def rate(self, name: str) -> float:
        return statistics.median(cost.rows_per_second for cost in self.costs[name])


async def by_batch_size(measured: Measurements, server: Served, chance: random.Random) -> None:
    """Prewrites, commits and reads fresh rows at every batch size."""
    for batch, count in ROWS_BY_BATCH.items():
        where = f"x{batch}, {len(server.tablets)} tablets"
        rows = server.new_rows(count)
        prewritten, start = await server.prewrite(rows, batch)
        measured.add(f"prewrite {where}", prewritten)
        measured.add(f"commit {where}", await server.commit(rows, batch, start))
        chance.shuffle(rows)
        measured.add(f"read {where}", await server.read(rows, batch))


async def among_many(
    measured: Measurements, name: str, server: Served, chance: random.Random
) -> None:
    """Adds new rows among a million old ones, and reads old ones."""
    rows = server.new_rows(ROWS_BY_BATCH[BATCH])
    prewritten, start = await server.prewrite(rows, BATCH)
    measured.add(f"prewrite, {name}", prewritten)
    measured.add(f"commit, {name}", await server.commit(rows, BATCH, start))
    old = [row_key(chance.randrange(MANY_CELLS)) for _ in rows]
    measured.add(f"read, {name}", await server.read(old, BATCH))


async def of_few(measured: Measurements, name: str, server: Served, rows: list[bytes]) -> None:
    """Adds a version to each of these rows, several times, and reads the newest."""
    costs: defaultdict[str, list[Cost]] = defaultdict(list)
    for _ in range(REPEATS):
        prewritten, start = await server.prewrite(rows, BATCH)
        costs["prewrite"].append(prewritten)
        costs["commit"].append(await server.commit(rows, BATCH, start))
        costs["read"].append(await server.read(rows, BATCH))
    for what, parts in costs.items():
        measured.add(f"{what}, {name}", reduce(add, parts))


async def of_locked(measured: Measurements, server: Served) -> None:
    """Reads one locked cell many times, as a hot cell is read, and each of its neighbours once."""
    neighbours = [b"%s/%d" % (LOCKED_ROW, number) for number in range(NEIGHBOURS)]
    middle = FIRST_START + (MANY_CELLS << 3)
    for _ in range(REPEATS):
        measured.add(f"read, {LOCKED}", await server.read([LOCKED_ROW] * NEIGHBOURS, BATCH))
        measured.add(f"read, {UNLOCKED}", await server.read(neighbours, BATCH))
        then = await server.read([LOCKED_ROW] * NEIGHBOURS, BATCH, middle)
        measured.add(f"read, {LOCKED_THEN}", then)


async def run(directory: Path, found: Report) -> None:
    """Runs all measurements and fills in the report."""
    measured = Measurements()
    chance = random.Random(1)
    async with AsyncExitStack() as stack:

        async def started(name: str, tablets: int = 1) -> Served:
            ids = list(range(1, tablets + 1))
            return await stack.enter_async_context(served(name, directory / name, ids))

        plain = [await started(f"tablets-{tablets}", tablets) for tablets in TABLETS]
        await populate(directory / "tombstones", 1, MANY_CELLS)
        await populate(directory / "never-locked", 1, MANY_CELLS, locked=False)
        await populate(directory / "deep", 1, DEEP_CELLS, versions=VERSIONS)
        await populate(directory / "shallow", 1, DEEP_CELLS * VERSIONS)
        await populate_locked(directory / "locked", 1, LOCKED_ROW, MANY_CELLS)
        locked = await started("locked")
        tombstones, never_locked = await started("tombstones"), await started("never-locked")
        deep, shallow = await started("deep"), await started("shallow")
        for many in (tombstones, never_locked):
            many.new_rows(MANY_CELLS)
        few = [row_key(number) for number in range(DEEP_CELLS)]
        spread = [row_key(number * VERSIONS) for number in range(DEEP_CELLS)]
        scanned = MANY_CELLS
        for number in range(RUNS):
            print(f"run {number + 1} of {RUNS}", flush=True)
            for server in plain:
                await by_batch_size(measured, server, chance)
            measured.add("scan", await tombstones.scan(scanned))
            scanned += ROWS_BY_BATCH[BATCH]
            await among_many(measured, TOMBSTONES, tombstones, chance)
            await among_many(measured, NEVER_LOCKED, never_locked, chance)
            await of_few(measured, DEEP, deep, few)
            await of_few(measured, SHALLOW, shallow, spread)
            await of_locked(measured, locked)
        rss = psutil.Process(tombstones.process.pid).memory_info().rss / MEBIBYTE
    _costs(found, measured)
    _ratios(found, measured)
    _others(found, measured, rss)


def _costs(found: Report, measured: Measurements) -> None:
    for name in measured.costs:
        found.add(f"{name}: throughput", measured.rate(name), "rows/s")
        found.add(f"{name}: server", measured.server(name), "µs CPU/row")
        found.add(f"{name}: client", measured.client(name), "µs CPU/row")


def _ratios(found: Report, measured: Measurements) -> None:
    spread = measured.server(f"prewrite x{BATCH}, 10 tablets")
    ten = spread / measured.server(f"prewrite {FRESH}")
    found.add(f"prewrite x{BATCH}: 10 tablets / 1 tablet", ten, "×", must=TEN_TABLETS_MUST)
    for what in ("prewrite", "read"):
        for history, without in ((TOMBSTONES, NEVER_LOCKED), (DEEP, SHALLOW)):
            change = measured.server(f"{what}, {history}") / measured.server(f"{what}, {without}")
            found.add(f"{what}: {history} / {without}", change, "×", must=CHANGE_MUST)
    for history in (TOMBSTONES, DEEP):
        change = measured.server(f"prewrite, {history}") / measured.server(f"prewrite {FRESH}")
        found.add(f"prewrite: {history} / fresh tablet", change, "×", must=CHANGE_MUST)
    unlocked = measured.server(f"read, {UNLOCKED}")
    change = measured.server(f"read, {LOCKED}") / unlocked
    found.add(f"read: {LOCKED} / {UNLOCKED}", change, "×", must=LOCKED_MUST)
    change = measured.server(f"read, {LOCKED_THEN}") / unlocked
    found.add(f"read: {LOCKED_THEN} / {UNLOCKED}", change, "×", must=CHANGE_MUST)
    for history in (TOMBSTONES, DEEP):
        # No must: more than history differs here. The ratios above bound the cost of history alone.
        change = measured.server(f"read, {history}") / measured.server(f"read {FRESH}")
        found.add(f"read: {history} (in files) / fresh tablet (in memory)", change, "×")


def _others(found: Report, measured: Measurements, rss_mebibytes: float) -> None:
    for tablets in (1, 10):
        name = f"prewrite x{BATCH}, {tablets} tablets"
        found.add(f"server CPU, {name}", measured.server(name), "µs/row")
    found.add(f"client CPU, prewrite {FRESH}", measured.client(f"prewrite {FRESH}"), "µs/row")
    found.add(f"server CPU, read {FRESH}", measured.server(f"read {FRESH}"), "µs/row")
    found.add("scan, per second of server CPU", 1e6 / measured.server("scan"), "rows")
    found.add("RSS of the server with 1,000,000 cells of 100 bytes", rss_mebibytes, "MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tablet", description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the stores are (default: temporary)")
    options = parser.parse_args()
    report = Report("tablet")
    with tempfile.TemporaryDirectory(prefix="bench-tablet-", dir=options.directory) as directory:
        asyncio.run(run(Path(directory), report))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
