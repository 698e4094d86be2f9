"""make bench-contention: what transactions cost that contend for few cells, and how long they wait.

One cluster of processes on this machine. "By itself" is a program that runs each attempt in a
`db.transaction()` block, and pauses after a conflict, longer each time; the other rows let
`db.run` retry.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

from benchmarks.contended import (
    TOTAL_ROW,
    Waits,
    contents,
    documents,
    fought,
    increments_by_clients,
    increments_by_threads,
    observers,
    total,
)
from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from benchmarks.transaction_cost import Meter
from percolator import aio
from percolator.services.local.cluster import LocalCluster

STORM_THREADS = 20
STORM_INCREMENTS = 1_000
STORM_CELLS = 5
CLIENTS = 50
CLIENT_CELLS = 2
CLIENT_SECONDS = 20.0
CLIENT_PROCESSES = 5
WAIT_MUST = 5.0
ATTEMPTS_MUST = 1.2
CLIENTS_MUST = 0.6
"""The rate of clients with a connection each, to that of one connection."""
DOCUMENTS = 1_000
RUNS_MUST = {1: 1.5, 4: 3.0}

_POLL_SECONDS = 0.05
_LIMIT_SECONDS = 300.0


def storm(report: Report) -> None:
    """Many threads of one process, few cells."""
    cpu: dict[bool, float] = {}
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory)) as cluster:
        asyncio.run(_create(cluster.address))
        meter = Meter(cluster)
        for lines in (False, True):
            with meter.measured(STORM_INCREMENTS) as cost:
                waits = increments_by_threads(
                    cluster.address, STORM_THREADS, STORM_INCREMENTS, STORM_CELLS, lines=lines
                )
            cpu[lines] = cost.cpu_micros
            how = "with db.run" if lines else "by itself"
            report.add(
                f"increment of {STORM_CELLS} cells, {STORM_THREADS} threads, {how}", cost.rate, "/s"
            )
            report.add("    attempts for each commit", waits.attempts / len(waits.seconds), "times")
            report.add("    CPU of all processes", cost.cpu_micros, "µs")
    # The bound is on the ratio with code that took no turns: benchmarks/revisions.py.
    report.add("CPU: increment with db.run / by itself", cpu[True] / cpu[False], "×")


async def _create(address: str) -> None:
    async with aio.connect(address) as db:
        await db.create_table(fought)


def clients(report: Report, processes: int, connections: int, tasks: int, what: str) -> float:
    """How long transactions wait, if all clients contend all the time. Returns their rate."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(Path(directory)) as cluster:
        asyncio.run(_create(cluster.address))
        waits = increments_by_clients(
            cluster.address, processes, connections, tasks, CLIENT_CELLS, CLIENT_SECONDS
        )
    _fill_in(report, f"{CLIENTS} clients on {CLIENT_CELLS} cells, {what}", waits)
    return len(waits.seconds) / CLIENT_SECONDS


def _fill_in(report: Report, what: str, waits: Waits) -> None:
    middle, late = median(waits.seconds), quantiles(waits.seconds, n=100)[98]
    report.add(what, len(waits.seconds) / CLIENT_SECONDS, "/s")
    attempts = waits.attempts / len(waits.seconds)
    report.add("    attempts for each commit", attempts, "times", must=ATTEMPTS_MUST)
    report.add("    median", middle * 1e3, "ms")
    report.add("    99 of 100", late * 1e3, "ms")
    report.add("    slowest", max(waits.seconds) * 1e3, "ms")
    report.add("    99 of 100 / median", late / middle, "×", must=WAIT_MUST)


def count_documents(report: Report, workers: int) -> None:
    """Documents that all bump one counter."""
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(
            Path(directory), workers=workers, observers=["benchmarks.contended:observers"]
        )
        with cluster:
            found = [cluster.processes[name] for name in cluster.processes if "worker" in name]
            for one in found:
                one.kill()
            asyncio.run(_write_documents(cluster.address))
            for one in found:
                one.start()
            cluster.wait_workers()
            metrics = [one.wait_ready(1.0).metrics_address for one in found]
            began = time.perf_counter()
            while asyncio.run(_total(cluster.address)) < DOCUMENTS:
                if time.perf_counter() - began > _LIMIT_SECONDS:
                    raise RuntimeError("the documents were not counted in time")
                # Counting costs CPU, which the workers should have.
                time.sleep(_POLL_SECONDS)
            seconds = time.perf_counter() - began
            runs = sum(_metric(one, "runs") for one in metrics)
            cpu = sum(time.clock_gettime(process_clock(one.pid)) for one in found)
    what = f"{DOCUMENTS:,} documents, one counter, {workers} worker{'s' * (workers > 1)}"
    report.add(what, DOCUMENTS / seconds, "/s")
    report.add("    runs for each commit", runs / DOCUMENTS, "times", must=RUNS_MUST[workers])
    report.add("    CPU of the workers, with their start", cpu, "s")


async def _write_documents(address: str) -> None:
    async with aio.connect(address) as db:
        await db.create_table(documents)
        await db.register_observers(observers)
        await db.set_many((f"{number:06}", {contents: number}) for number in range(DOCUMENTS))


async def _total(address: str) -> int:
    async with aio.connect(address) as db, db.snapshot() as snapshot:
        return await snapshot.get(TOTAL_ROW, total, default=0)


def _metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found = re.findall(rf"^percolator_observer_{name}_total{{.*}} (.+)$", text, re.MULTILINE)
    return sum(map(float, found))


def few_cells(report: Report) -> None:
    """All clients share a connection; then, they know nothing of each other."""
    one = clients(report, 1, 1, CLIENTS, "one connection")
    each = CLIENTS // CLIENT_PROCESSES
    many = clients(report, CLIENT_PROCESSES, each, 1, "a connection each")
    report.add(
        "a connection each / one connection", many / one, "×", must=CLIENTS_MUST, at_least=True
    )


def workers(report: Report) -> None:
    """One worker, and several."""
    for number in RUNS_MUST:
        count_documents(report, number)


PARTS: dict[str, Callable[[Report], None]] = {
    "storm": storm,
    "clients": few_cells,
    "documents": workers,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contention", description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="measure only this, and write no file")
    options = parser.parse_args()
    report = Report("contention")
    for name, part in PARTS.items():
        if options.part in (None, name):
            print(f"measuring: {name}", flush=True)
            part(report)
    return report.show() if options.part else report.finish()


if __name__ == "__main__":
    sys.exit(main())
