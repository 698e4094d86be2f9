"""Increments of few cells by many threads of one process. Run by benchmarks/revisions.py with the
library of any revision in PYTHONPATH, so it uses only what all of them have. Prints JSON.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import percolator
from percolator import RetryPolicy, Table, codecs
from percolator.services.local.cluster import LocalCluster

THREADS = 20
INCREMENTS = 1_000
CELLS = 5
POLICY = RetryPolicy(attempts_max=1_000_000, deadline_seconds=600.0)

counters = Table("counters")
count = counters.column("count", codecs.integer)


def cpu_seconds(cluster: LocalCluster) -> float:
    """CPU of the cluster's processes and of this one, with all their threads."""
    clocks = [~one.pid << 3 | 2 for one in cluster.processes.values()]
    return time.process_time() + sum(map(time.clock_gettime, clocks))


def main() -> int:
    attempts = 0

    def increment(tx: percolator.Transaction, row: str) -> None:
        nonlocal attempts
        attempts += 1
        tx.set(row, count, tx.get(row, count, default=0) + 1)

    def work(rows: list[str]) -> None:
        for row in rows:
            db.run(increment, row)

    chance = random.Random(1)
    rows = [str(chance.randrange(CELLS)) for _ in range(INCREMENTS)]
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(Path(directory)) as cluster,
        percolator.connect(cluster.address, retry=POLICY) as db,
    ):
        db.create_table(counters)
        with ThreadPoolExecutor(THREADS) as pool:
            cpu, began = cpu_seconds(cluster), time.perf_counter()
            list(pool.map(work, [rows[first::THREADS] for first in range(THREADS)]))
            seconds, cpu = time.perf_counter() - began, cpu_seconds(cluster) - cpu
        with db.snapshot() as snapshot:
            found = {row.key: row[count] for row in snapshot.scan(counters)}
    expected = {row: rows.count(row) for row in set(rows)}
    if found != expected:
        raise RuntimeError(f"counted {found}, not {expected}")
    measured = {
        "operations": INCREMENTS,
        "runs": attempts,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
