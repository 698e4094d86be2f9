"""make bench-tablet: what a row costs a tablet server and its client.

Server and client are separate processes on one machine, with synced writes and real gRPC. Prewrites
are those of the protocol (four conditions, one lock with a value of 100 bytes inlined), each
followed by its commit. Every figure is the median of five runs, which take turns, so that a noisy
neighbour spoils one run of each rather than all of one.

What history costs is told by pairs of tablets that differ in nothing else: a million cells with and
without the tombstones of their locks, and as many records as versions of few cells and as cells.
Their ratios have an upper bound only: history may cost no more than a quarter. Where it costs less
than nothing (few cells are better cached than many) there is nothing to mend.
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
from benchmarks.tablet_population import populate
from benchmarks.tablet_traffic import Cost, Served, row_key, served

RUNS = 5
TABLETS = (1, 10, 100)
ROWS_BY_BATCH = {1: 300, 10: 2_000, 100: 6_000, 1000: 8_000}
"""Rows of one slice: about a third of a second each."""
BATCH = 100
MANY_CELLS = 1_000_000
DEEP_CELLS = 250
VERSIONS = 1_000
REPEATS = 8
"""Of a slice on the few deep cells: each transaction can have a cell only once."""
MEBIBYTE = 1 << 20

PREWRITE_SERVER_MUST = {1: 25.0, 10: 45.0}
"""µs per row at batch 100, by tablets."""
PREWRITE_CLIENT_MUST = 12.0
READ_SERVER_MUST = 18.0
CHANGE_MUST = 1.25
SCANNED_ROWS_MUST = 200_000.0
RSS_MEBIBYTES_MUST = 250.0

FRESH = f"x{BATCH}, 1 tablets"
TOMBSTONES = "1,000,000 cells, locks deleted"
NEVER_LOCKED = "1,000,000 cells, never locked"
DEEP = "250 cells with 1,000 versions"
SHALLOW = "250,000 cells with 1 version"


class Measurements:
    """All costs, by what was measured."""

    def __init__(self) -> None:
        self.costs: defaultdict[str, list[Cost]] = defaultdict(list)

    def add(self, name: str, cost: Cost) -> None:
        self.costs[name].append(cost)

    def server(self, name: str) -> float:
        """µs of CPU per row, the median of all runs."""
        return statistics.median(cost.server_micros for cost in self.costs[name])

    def client(self, name: str) -> float:
        return statistics.median(cost.client_micros for cost in self.costs[name])

    def rate(self, name: str) -> float:
        return statistics.median(cost.rows_per_second for cost in self.costs[name])


async def by_batch_size(measured: Measurements, server: Served, chance: random.Random) -> None:
    """Prewrite, commit and read fresh rows at every batch size."""
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
    """New rows between a million old ones, and reads of the old ones."""
    rows = server.new_rows(ROWS_BY_BATCH[BATCH])
    prewritten, start = await server.prewrite(rows, BATCH)
    measured.add(f"prewrite, {name}", prewritten)
    measured.add(f"commit, {name}", await server.commit(rows, BATCH, start))
    old = [row_key(chance.randrange(MANY_CELLS)) for _ in rows]
    measured.add(f"read, {name}", await server.read(old, BATCH))


async def of_few(measured: Measurements, name: str, server: Served, rows: list[bytes]) -> None:
    """One more version of each of these rows, several times over, and reads of the newest."""
    costs: defaultdict[str, list[Cost]] = defaultdict(list)
    for _ in range(REPEATS):
        prewritten, start = await server.prewrite(rows, BATCH)
        costs["prewrite"].append(prewritten)
        costs["commit"].append(await server.commit(rows, BATCH, start))
        costs["read"].append(await server.read(rows, BATCH))
    for what, parts in costs.items():
        measured.add(f"{what}, {name}", reduce(add, parts))


async def run(directory: Path, found: Report) -> None:
    """All measurements, into the report."""
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
        rss = psutil.Process(tombstones.process.pid).memory_info().rss / MEBIBYTE
    _costs(found, measured)
    _demands(found, measured, rss)


def _costs(found: Report, measured: Measurements) -> None:
    for name in measured.costs:
        found.add(f"{name}: throughput", measured.rate(name), "rows/s")
        found.add(f"{name}: server", measured.server(name), "µs CPU/row")
        found.add(f"{name}: client", measured.client(name), "µs CPU/row")


def _demands(found: Report, measured: Measurements, rss_mebibytes: float) -> None:
    for tablets, must in PREWRITE_SERVER_MUST.items():
        name = f"prewrite x{BATCH}, {tablets} tablets"
        found.add(f"server CPU, {name}", measured.server(name), "µs/row", must=must)
    client = measured.client(f"prewrite {FRESH}")
    found.add(f"client CPU, prewrite {FRESH}", client, "µs/row", must=PREWRITE_CLIENT_MUST)
    found.add(
        f"server CPU, read {FRESH}", measured.server(f"read {FRESH}"), "µs/row",
        must=READ_SERVER_MUST,
    )  # fmt: skip
    for what in ("prewrite", "read"):
        for history, without in ((TOMBSTONES, NEVER_LOCKED), (DEEP, SHALLOW)):
            change = measured.server(f"{what}, {history}") / measured.server(f"{what}, {without}")
            found.add(f"{what}: {history} / {without}", change, "×", must=CHANGE_MUST)
    for history in (TOMBSTONES, DEEP):
        change = measured.server(f"prewrite, {history}") / measured.server(f"prewrite {FRESH}")
        found.add(f"prewrite: {history} / fresh tablet", change, "×", must=CHANGE_MUST)
    for history in (TOMBSTONES, DEEP):
        # History is not all that differs here; what it costs alone is demanded above.
        change = measured.server(f"read, {history}") / measured.server(f"read {FRESH}")
        found.add(f"read: {history} (in files) / fresh tablet (in memory), no demand", change, "×")
    found.add(
        "scan, per second of server CPU", 1e6 / measured.server("scan"), "rows",
        must=SCANNED_ROWS_MUST, at_least=True,
    )  # fmt: skip
    found.add(
        "RSS of the server with 1,000,000 cells of 100 bytes", rss_mebibytes, "MiB",
        must=RSS_MEBIBYTES_MUST,
    )  # fmt: skip


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
