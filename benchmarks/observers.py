"""make bench-observers: what observers cost, and how soon they run.

A chain of three asynchronous observers runs in one worker process, on a cluster of processes on
this machine with synced writes and real gRPC. Throughput is measured on a backlog: the worker finds
the first changes by scanning, and servers stream the changes that follow. The delay between two
commits of a chain is taken from their timestamps, which are the oracle's, so clocks of processes do
not matter.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from benchmarks.observed import chain, links, observers
from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from percolator import aio
from percolator.services.local.cluster import LocalCluster

SERVERS = 1
TABLETS = 4
BACKLOG = 8_000
LIGHT_CHANGES = 300
LIGHT_PER_SECOND = 30.0
IDLE_SECONDS = 10.0
HOPS = len(observers)

_BECOMES_IDLE_SECONDS = 4.0
"""How long a worker that finds nothing takes until its scans have become rare."""
_POLL_SECONDS = 0.05
_LIMIT_SECONDS = 120.0


def row(number: int) -> str:
    return f"{number:06}"


async def prepare(address: str, backlog: int = BACKLOG) -> None:
    """Creates the table, registers the observers without running them, and writes the backlog."""
    splits = [row(backlog * part // TABLETS) for part in range(1, TABLETS)]
    async with aio.connect(address) as db:
        await db.create_table(chain, splits)
        async with db.run_observers(observers):
            pass
        await db.set_many((row(number), {links[0]: number}) for number in range(backlog))


class Processes:
    """The CPU time of the cluster's processes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._clocks = {name: process_clock(one.pid) for name, one in cluster.processes.items()}

    def read(self) -> dict[str, float]:
        return {name: time.clock_gettime(clock) for name, clock in self._clocks.items()}


def commits(metrics_address: str) -> float:
    """Observer runs that the worker has committed."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("percolator_observer_commits_total")
    )


@dataclass(frozen=True)
class Worked:
    """Work that a worker has done of a backlog, and its cost."""

    runs: float
    seconds: float
    cpu_seconds: dict[str, float]
    """By process."""

    @property
    def rate(self) -> float:
        return self.runs / self.seconds


def worked_off(cluster: LocalCluster, backlog: int = BACKLOG) -> Worked:
    """Waits until the worker, which was just started, has worked through its backlog."""
    cluster.wait_workers()
    ready = cluster.processes["worker"].wait_ready(1.0)
    processes = Processes(cluster)
    cpu, began, before = processes.read(), time.perf_counter(), commits(ready.metrics_address)
    deadline = began + _LIMIT_SECONDS
    done = before
    while done < backlog * HOPS and time.perf_counter() < deadline:
        time.sleep(_POLL_SECONDS)
        done = commits(ready.metrics_address)
    seconds = time.perf_counter() - began
    spent = {name: now - cpu[name] for name, now in processes.read().items()}
    return Worked(done - before, seconds, spent)


def work_off(cluster: LocalCluster, report: Report) -> None:
    """Throughput of a worker that finds a backlog."""
    worked = worked_off(cluster)
    runs, seconds, spent = worked.runs, worked.seconds, worked.cpu_seconds
    report.add(f"runs, chain of {HOPS}, 1 worker", worked.rate, "/s")
    report.add("    runs measured", runs, "")
    report.add("    cores used by all processes", sum(spent.values()) / seconds, "")
    report.add("    if the worker's one core were the only limit", runs / spent["worker"], "/s")
    report.add("CPU per run", sum(spent.values()) / runs * 1e6, "µs")
    report.add("    of which worker", spent["worker"] / runs * 1e6, "µs")
    report.add("    of which tablet server", spent["tabletserver-1"] / runs * 1e6, "µs")
    report.add("    of which lock service", spent["lockservice"] / runs * 1e6, "µs")


async def delays(
    address: str,
    first: int = BACKLOG,
    changes: int = LIGHT_CHANGES,
    per_second: float = LIGHT_PER_SECOND,
    end_seconds: float = 1.0,
) -> list[list[float]]:
    """Milliseconds between commits of neighbours in the chain, at light load, by hop. The rows are
    numbered from `first` on; `end_seconds` is how long the last chain may take."""
    async with aio.connect(address) as db:
        for number in range(changes):
            async with db.transaction() as tx:
                tx.set(row(first + number), links[0], number)
            await asyncio.sleep(1.0 / per_second)
        await asyncio.sleep(end_seconds)
        found: dict[bytes, dict[bytes, int]] = {}
        async with db.snapshot() as snapshot:
            pages = snapshot.scan_cells(chain, start=row(first).encode())
            async for page in pages:
                for cell in zip(page.rows, page.columns, page.commit_timestamps, strict=True):
                    found.setdefault(cell[0], {})[cell[1]] = cell[2] >> 18
    names = [link.name for link in links]
    complete = [cells for cells in found.values() if len(cells) == len(names)]
    if len(complete) != changes:
        raise RuntimeError(f"{len(complete)} of {changes} chains ran to their end")
    return [
        [cells[after] - cells[before] for cells in complete]
        for before, after in itertools.pairwise(names)
    ]


def light_load(cluster: LocalCluster, report: Report) -> None:
    """How soon an observer runs when there is little to do."""
    hops = asyncio.run(delays(cluster.address))
    everything = [delay for hop in hops for delay in hop]
    report.add("commit to the observer's commit, median", median(everything), "ms")
    report.add("    99 of 100", quantiles(everything, n=100)[98], "ms")
    report.add(
        f"    through a chain of {HOPS}, median", median(map(sum, zip(*hops, strict=True))), "ms"
    )


def idle(cluster: LocalCluster, report: Report) -> None:
    """Cost of an idle worker."""
    time.sleep(_BECOMES_IDLE_SECONDS)  # its scans slow down once nothing is found
    processes = Processes(cluster)
    before = processes.read()
    time.sleep(IDLE_SECONDS)
    spent = processes.read()["worker"] - before["worker"]
    report.add("idle worker", spent / IDLE_SECONDS * 100, "% of a core")


def main() -> int:
    """Runs all measurements and reports."""
    report = Report("observers")
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(
            Path(directory),
            tablet_servers=SERVERS,
            workers=1,
            observers=["benchmarks.observed:observers"],
        )
        with cluster:
            worker = cluster.processes["worker"]
            worker.kill()
            print(f"writing {BACKLOG:,} changes", flush=True)
            asyncio.run(prepare(cluster.address))
            worker.start()
            print("working through them", flush=True)
            work_off(cluster, report)
            print("light load", flush=True)
            light_load(cluster, report)
            print("idle", flush=True)
            idle(cluster, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
