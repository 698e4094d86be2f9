"""make bench-small: what a small program gets, with 8 threads and nothing else on the cluster.

Each thread increments one row after another with `db.run`: spread over many rows, where nothing
conflicts, and all on one row, where each increment has to wait for the one before it. The two take
turns, and the figures are medians of the turns. No increment may be lost.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import percolator
from benchmarks.report import Report
from percolator import Table, Transaction, codecs
from percolator.errors import InvariantViolation
from percolator.services.local.cluster import LocalCluster

THREADS = 8
TURNS = 3
INCREMENTS = 250
"""By each thread, in one turn."""
ROWS = 10_000
TABLET_SERVERS = 1

counters = Table("counters")
count = counters.column("count", codecs.integer)

Rows = Callable[[random.Random], str]


def many(chance: random.Random) -> str:
    return f"{chance.randrange(ROWS):05d}"


def one(_: random.Random) -> str:
    return "the only one"


SLICES: dict[str, Rows] = {"spread over 10,000 rows": many, "all on one row": one}


def increment(tx: Transaction, row: str) -> None:
    tx.set(row, count, tx.get(row, count, default=0) + 1)


def turn(db: percolator.Database, rows: Rows, number: int) -> tuple[float, list[float]]:
    """One turn of all threads: commits per second, and the seconds of each increment."""

    def work(thread: int) -> list[float]:
        chance, seconds = random.Random(f"{number} {thread}"), []
        for _ in range(INCREMENTS):
            began = time.perf_counter()
            db.run(increment, rows(chance))
            seconds.append(time.perf_counter() - began)
        return seconds

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        found = [seconds for part in threads.map(work, range(THREADS)) for seconds in part]
    return len(found) / (time.perf_counter() - began), found


def main() -> int:
    logging.getLogger("percolator").setLevel(logging.ERROR)  # it says that a row is contended
    report = Report("small_programs")
    with (
        tempfile.TemporaryDirectory() as directory,
        LocalCluster(Path(directory), tablet_servers=TABLET_SERVERS) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(counters)
        rates: dict[str, list[float]] = {name: [] for name in SLICES}
        waits: dict[str, list[float]] = {name: [] for name in SLICES}
        for number in range(TURNS + 1):
            for name, rows in SLICES.items():
                rate, seconds = turn(db, rows, number)
                if number:  # the first one warms up
                    rates[name].append(rate)
                    waits[name] += seconds
        for name in SLICES:
            report.add(f"{THREADS} threads, {name}", median(rates[name]), "1/s")
            slow = sorted(waits[name])[round(0.99 * (len(waits[name]) - 1))]
            report.add(f"{THREADS} threads, {name}: median", 1000 * median(waits[name]), "ms")
            report.add(f"{THREADS} threads, {name}: 99 %", 1000 * slow, "ms")
        with db.snapshot() as snapshot:
            counted = sum(row[count] for row in snapshot.scan(counters, columns=[count]))
        if counted != (committed := (TURNS + 1) * len(SLICES) * THREADS * INCREMENTS):
            raise InvariantViolation(f"{committed} increments were committed, {counted} counted")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
