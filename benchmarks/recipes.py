"""make bench-recipes: hot cells, done in several ways side by side. Part of make bench-observers.

Documents that all bump one counter, and a trie that counts different numbers: the strong way, where
each run reads and writes the cell; by hand, with an inbox or with weak notifications; and with a
CombineQueue. One worker; CPU is that of all processes of the cluster and of the writing program.

Then programs without observers: a storm of increments, and edges that are added at one node, which
depend on it and do not change it.
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
from benchmarks.contended import create_graph, edges_at_a_hub
from benchmarks.contention import storm
from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from benchmarks.transaction_cost import Meter
from percolator import Limits, RetryPolicy, aio
from percolator.services.local.cluster import LocalCluster

DOCUMENTS = 1_000
NUMBERS = 2_000
RATIO_MUST = 0.2
"""Missed so far: an entry is added, taken and counted, for each number and the nodes above it."""
ADDERS = 200
RUNS_WITH_READ_LOCKS_MUST = 1.0
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


def add_edges(report: Report) -> None:
    """Transactions that depend on one node, and do not change it."""
    cpu: dict[bool, float] = {}
    for shared in (False, True):
        with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory)) as cluster:
            asyncio.run(_create(cluster.address, create_graph))
            meter = Meter(cluster)
            with meter.measured(ADDERS) as cost:
                runs = edges_at_a_hub(cluster.address, ADDERS, shared=shared)
        cpu[shared] = cost.cpu_micros
        how = "read locks" if shared else "exclusive locks"
        report.add(f"{ADDERS} edges at one node, {how}", cost.rate, "/s")
        must = RUNS_WITH_READ_LOCKS_MUST if shared else None
        report.add("    runs for each commit", runs / ADDERS, "times", must=must)
        report.add("    CPU of all processes", cost.cpu_micros, "µs")
    report.add("CPU: edge with a read lock / exclusive lock", cpu[True] / cpu[False], "×")


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
    print("measuring: storm", flush=True)
    storm(report)
    print("measuring: edges at one node", flush=True)
    add_edges(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
