"""make bench-recipes: hot cells, the strong way and with a CombineQueue, side by side.

Documents that all bump one counter, and a trie that counts different numbers. The strong way is
what observers alone offer: each run reads and writes the cell. One worker; CPU is that of all
processes of the cluster and of the program that writes.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

from benchmarks import hot_cells
from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from percolator import Limits, RetryPolicy, aio
from services.local.cluster import LocalCluster

DOCUMENTS = 1_000
NUMBERS = 2_000
RATIO_MUST = 0.75
"""The aim is 0.2. What is left is the commit of each addition, and small batches: the observer runs
as soon as something was added."""
_IN_FLIGHT = 16
_POLICY = RetryPolicy(attempts_max=1_000_000, deadline_seconds=600.0)
_QUIET = Limits(slow_transaction_seconds=600.0)


async def _write(address: str, way: hot_cells.Way, items: list[int]) -> int:
    """Writes everything with several tasks, and returns the result when observers have rested."""
    async with aio.connect(address, retry=_POLICY, limits=_QUIET) as db:
        waiting = iter(items)

        async def write() -> None:
            for item in waiting:
                await db.run(way.write, item)

        await asyncio.gather(*(write() for _ in range(_IN_FLIGHT)))
        await db.wait_for_observers()
        async with db.snapshot() as snapshot:
            return await way.result(snapshot)


async def _create(address: str, create: Callable[[aio.Database], Awaitable[None]]) -> None:
    async with aio.connect(address) as db:
        await create(db)


def measure(report: Report, what: str, way: hot_cells.Way, items: list[int]) -> float:
    """Adds the measured figures; returns the CPU for each item, in seconds."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(
            Path(directory), workers=1, observers=[f"benchmarks.hot_cells:{way.observers}"]
        )
        with cluster:
            worker = cluster.processes["worker"]
            worker.kill()
            asyncio.run(_create(cluster.address, way.create))
            worker.start()
            cluster.wait_workers()
            clocks = {name: process_clock(one.pid) for name, one in cluster.processes.items()}

            def read() -> dict[str, float]:
                return {name: time.clock_gettime(clock) for name, clock in clocks.items()}

            before, own, began = read(), time.process_time(), time.perf_counter()
            found = asyncio.run(_write(cluster.address, way, items))
            seconds, own = time.perf_counter() - began, time.process_time() - own
            spent = {name: now - before[name] for name, now in read().items()}
    if found != way.expected(items):
        raise RuntimeError(f"{what}: counted {found}, not {way.expected(items)}")
    cpu = (sum(spent.values()) + own) / len(items)
    report.add(what, len(items) / seconds, "/s")
    report.add("    CPU of all processes, for each", cpu * 1e6, "µs")
    report.add("    of which worker", spent["worker"] / len(items) * 1e6, "µs")
    return cpu


def main() -> int:
    report = Report("recipes")
    chance = Random(1)
    numbers = [chance.randrange(1 << 4 * hot_cells.LEVELS) for _ in range(NUMBERS)]
    loads = {
        f"{DOCUMENTS:,} documents, one counter": (hot_cells.COUNTER, list(range(DOCUMENTS))),
        f"{NUMBERS:,} numbers, trie": (hot_cells.TRIE, numbers),
    }
    for what, (ways, items) in loads.items():
        cpu = {}
        for way in ways:
            print(f"measuring: {what}, {way.name}", flush=True)
            cpu[way.name] = measure(report, f"{what}, {way.name}", way, items)
        ratio = cpu["CombineQueue"] / cpu["strong"]
        report.add(f"CPU: {what}, CombineQueue / strong", ratio, "×", must=RATIO_MUST)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
