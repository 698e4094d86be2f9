"""make bench-gc: does a store stay small and fast while its cells are overwritten forever?

16 clients overwrite 1,000 hot cells of 100 bytes, one cell per transaction, while history is kept
for 5 s and collected every second. The benchmark shows the time of a read and the size of the store
over time (a table, and var/benchmarks/collection.svg). LevelDB's log, of up to 8 MB, is part of the
store and grows first. Then slices with a pin, which stops collection, alternate with slices without
one, to show how much throughput collection costs. A slice without a pin also collects what the
pinned slice left, so the true cost is about half the figure. The tablet server's CPU time per
commit shows the same with less noise. Last, a table is exported and imported again. Everything runs
on one machine, with synced writes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from benchmarks.report import RUNS, Report
from benchmarks.tablet_traffic import process_clock
from percolator import Table, codecs
from percolator.aio import Database, Transaction
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect
from percolator.backup.exporter import export
from percolator.backup.importer import import_tables
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess

CELLS = 1_000
VALUE_BYTES = 100
CLIENTS = 16
READS = 200
SAMPLES = 20
SLICES = 8
PIN_TTL = 4.0
SETTINGS = {
    "PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX": "4000",
    "PERCOLATOR_MASTER_COLLECTION_SECONDS": "1",
    "PERCOLATOR_MASTER_RETENTION_SECONDS": "5",
    "PERCOLATOR_MASTER_RETENTION_MIN_SECONDS": "1",
}
hot = Table("hot")
value = hot.column("value", codecs.raw)
copied = Table("copied", key=codecs.raw)


@dataclass(frozen=True)
class Sample:
    """The state at one moment."""

    seconds: float
    read_milliseconds: float
    store_megabytes: float
    commits_per_second: float


class Overwriting:
    """Clients that overwrite the hot cells for a given time."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._random = Random(1)
        self.commits = 0

    async def for_seconds(self, seconds: float) -> float:
        """Runs for this long, and returns commits per second."""
        began, before = time.monotonic(), self.commits
        await asyncio.gather(*(self._client(began + seconds) for _ in range(CLIENTS)))
        return (self.commits - before) / (time.monotonic() - began)

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            row = f"{self._random.randrange(CELLS):04}"

            async def write(tx: Transaction, row: str = row) -> None:
                tx.set(row, value, self._random.randbytes(VALUE_BYTES))

            await self._db.run(write)
            self.commits += 1


async def read_milliseconds(db: Database, random: Random) -> float:
    """The median time of single reads, one after another."""
    took = []
    for _ in range(READS):
        async with db.snapshot() as snapshot:
            # The timestamp is not what is measured.
            await snapshot.timestamp()
            began = time.perf_counter()
            await snapshot.get(f"{random.randrange(CELLS):04}", value)
            took.append(time.perf_counter() - began)
    return median(took) * 1000


def megabytes(directory: Path) -> float:
    """The size of all files. LevelDB may delete some of them meanwhile."""
    found = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                found += (Path(parent) / name).stat().st_size
            except FileNotFoundError:
                continue
    return found / 1e6


async def over_time(db: Database, store: Path, seconds: float) -> list[Sample]:
    overwriting, random, began = Overwriting(db), Random(2), time.monotonic()
    samples = []
    for _ in range(SAMPLES):
        rate = await overwriting.for_seconds(seconds / SAMPLES)
        took = await read_milliseconds(db, random)
        samples.append(Sample(time.monotonic() - began, took, megabytes(store), rate))
        last = samples[-1]
        print(
            f"{last.seconds:6.1f} s  {took:6.2f} ms a read  {last.store_megabytes:7.1f} MB  "
            f"{rate:7.0f} commits/s",
            flush=True,
        )
    return samples


class Cost(NamedTuple):
    """Costs of collection, as fractions."""

    throughput: float
    """The share of commits lost."""
    server_cpu: float
    """The share added to the tablet server's CPU time per commit."""


async def cost(db: Database, server: ServiceProcess, seconds: float) -> Cost:
    """Compares slices with collection to slices without."""
    overwriting, clock = Overwriting(db), process_clock(server.pid)

    def cpu_seconds() -> float:
        return time.clock_gettime_ns(clock) / 1e9

    async def one_slice() -> tuple[float, float]:
        cpu, commits = cpu_seconds(), overwriting.commits
        rate = await overwriting.for_seconds(seconds / SLICES)
        return rate, (cpu_seconds() - cpu) / (overwriting.commits - commits)

    throughput, server_cpu = [], []
    for _ in range(SLICES // 2):
        async with db.pin(ttl=PIN_TTL, description="bench-gc"):
            rate_kept, cpu_kept = await one_slice()
        rate, cpu = await one_slice()
        throughput.append(1 - rate / rate_kept)
        server_cpu.append(cpu / cpu_kept - 1)
    return Cost(median(throughput), median(server_cpu))


async def there_and_back(db: Database, directory: Path, cells: int) -> tuple[float, float]:
    """Returns cells per second of the export and of the import."""
    splits = [b"%010d" % (cells * part // 4) for part in (1, 2, 3)]
    await db.create_table(copied, splits)
    load = BulkLoad(db, LoadPlan(copied.name, "bench", b"", b"", notify=False))
    timestamps = await load.begin()
    random = Random(3)
    for start in range(0, cells, 10_000):
        rows = range(start, min(start + 10_000, cells))
        await load.load(
            [(b"%010d" % row, b"value", random.randbytes(VALUE_BYTES)) for row in rows], timestamps
        )
    await load.finish(timestamps)
    began = time.monotonic()
    made = await export(db, directory, tables=[copied.name], pin_ttl_seconds=PIN_TTL)
    exported = made.cells / (time.monotonic() - began)
    if made.cells != cells:
        raise SystemExit(f"{made.cells} cells were exported, not {cells}")
    await db.drop_table(copied)
    began = time.monotonic()
    await import_tables(db, directory)
    return exported, cells / (time.monotonic() - began)


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Draws both curves, each scaled to its own maximum."""
    curves = {
        "read, ms": ("#1f77b4", [one.read_milliseconds for one in samples]),
        "store, MB": ("#d62728", [one.store_megabytes for one in samples]),
    }
    end = samples[-1].seconds
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" font-family="sans-serif">'
    ]
    parts.append('<rect width="640" height="300" fill="white"/>')
    parts.append('<path d="M40 20V260H620" fill="none" stroke="black"/>')
    parts.append(f'<text x="560" y="280" font-size="12">{end:.0f} s</text>')
    for at, (name, (colour, values)) in enumerate(curves.items()):
        most = max(values) or 1.0
        points = " ".join(
            f"{40 + 580 * sample.seconds / end:.1f},{260 - 220 * number / most:.1f}"
            for sample, number in zip(samples, values, strict=True)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{60 + 240 * at}" y="16" font-size="12" fill="{colour}">'
            f"{name}, at most {most:.2f}</text>"
        )
    path.write_text("\n".join([*parts, "</svg>", ""]))


def fill_in(report: Report, samples: Sequence[Sample]) -> None:
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    for name, unit, field, most in (
        ("a read", "ms", "read_milliseconds", 1.5),
        ("the store", "MB", "store_megabytes", 1.5),
    ):
        before = median(getattr(one, field) for one in middle)
        after = median(getattr(one, field) for one in last)
        report.add(f"{name}, second third of the time", before, unit)
        report.add(f"{name}, last third", after, unit)
        report.add("    grown to", after / before, "times", must=most)
    report.add("commits", median(one.commits_per_second for one in samples), "1/s")


async def run(report: Report, directory: Path, seconds: float, cells: int) -> None:
    store = directory / "cluster"
    with LocalCluster(store, tablet_servers=1) as cluster:
        async with connect(cluster.address, description="bench-gc") as db:
            await db.create_table(hot)
            samples = await over_time(db, store, seconds)
            fill_in(report, samples)
            RUNS.mkdir(parents=True, exist_ok=True)
            plot(samples, RUNS / "collection.svg")
            found = await cost(db, cluster.processes["tabletserver-1"], seconds)
            report.add(
                "throughput lost to collection (of twice the usual garbage)",
                found.throughput * 100,
                "%",
                must=15.0,
            )
            report.add(
                "    CPU of the tablet server added to a commit", found.server_cpu * 100, "%"
            )
            exported, imported = await there_and_back(db, directory / "copy", cells)
            report.add("export", exported, "cells/s")
            report.add("import", imported, "cells/s")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collection", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to overwrite")
    parser.add_argument("--cells", type=int, default=400_000, help="size of the table to export")
    parser.add_argument("--directory", type=Path, help="where the store is (default: temporary)")
    given = parser.parse_args()
    os.environ.update(SETTINGS)
    report = Report("collection")
    with tempfile.TemporaryDirectory(prefix="bench-gc-", dir=given.directory) as directory:
        asyncio.run(run(report, Path(directory), given.seconds, given.cells))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
