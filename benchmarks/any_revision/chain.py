"""A worker that works off a backlog of a chain of three observers. Run by benchmarks/revisions.py
with the library of any revision in PYTHONPATH, so it uses only what all of them have. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from percolator import Table, aio, codecs, observes
from percolator.services.local.cluster import LocalCluster

BACKLOG = 4_000
TABLETS = 4
POLL_SECONDS = 0.05
LIMIT_SECONDS = 100.0

chain = Table("chain")
links = [chain.column(name, codecs.integer) for name in ("a", "b", "c", "d")]


@observes(links[0], name="first")
async def first(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, links[1], (await tx.get(row, links[0]) or 0) + 1)


@observes(links[1], name="second")
async def second(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, links[2], (await tx.get(row, links[1]) or 0) + 1)


@observes(links[2], name="third")
async def third(tx: aio.Transaction, row: str) -> None:
    await tx.set(row, links[3], (await tx.get(row, links[2]) or 0) + 1)


observers = [first, second, third]


async def prepare(address: str) -> None:
    """Registers the observers without running them, and writes the backlog."""
    splits = [f"{BACKLOG * part // TABLETS:06}" for part in range(1, TABLETS)]
    async with aio.connect(address) as db:
        await db.create_table(chain, splits)
        async with db.run_observers(observers):
            pass
        await db.set_many((f"{number:06}", {links[0]: number}) for number in range(BACKLOG))


def commits(metrics_address: str) -> float:
    """Observer runs that the worker has committed."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("percolator_observer_commits_total")
    )


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(
            Path(directory), tablet_servers=1, workers=1, observers=["chain:observers"]
        )
        with cluster:
            worker = cluster.processes["worker"]
            worker.kill()
            asyncio.run(prepare(cluster.address))
            worker.start()
            cluster.wait_workers()
            metrics = worker.wait_ready(1.0).metrics_address
            clocks = [~one.pid << 3 | 2 for one in cluster.processes.values()]
            cpu, began = sum(map(time.clock_gettime, clocks)), time.perf_counter()
            done = before = commits(metrics)
            runs = BACKLOG * len(observers)
            while done < runs:
                if time.perf_counter() > began + LIMIT_SECONDS:
                    raise RuntimeError(f"{done:.0f} of {runs} runs in {LIMIT_SECONDS:.0f} s")
                time.sleep(POLL_SECONDS)
                done = commits(metrics)
            seconds = time.perf_counter() - began
            cpu = sum(map(time.clock_gettime, clocks)) - cpu
    measured = {
        "operations": runs - before,
        "runs": runs - before,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
