"""make bench-job-readers: how long readers take while a shared transaction locks what they read.

A process writes ROWS rows, in TASKS attempts of which two are under way at a time, and commits them
at once. Four threads of another process read rows of the same table, one or a hundred at a time,
each in a snapshot of its own: first while as many rows are written in plain transactions of 250;
then while the job locks them, while it holds them all, and after its commit.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import percolator
from benchmarks.report import Report
from percolator import Table, aio, codecs
from services.local.cluster import LocalCluster

ROWS = 200_000
TASKS = 8
READERS = 4
PLAIN_ROWS = 250
HELD_SECONDS = 5.0
AFTER_SECONDS = 5.0
SCANNED = 100
TABLE = Table("rows", key=codecs.ordered_integer)
COLUMN = TABLE.column("value", codecs.text)
VALUE = "x" * 100


async def plain(address: str, rows: int) -> None:
    """Writes them in transactions of their own."""
    async with aio.connect(address) as db:

        async def some(first: int) -> None:
            async with db.transaction() as tx:
                for row in range(first, first + PLAIN_ROWS):
                    await tx.set(row, COLUMN, VALUE)

        for first in range(0, rows, 4 * PLAIN_ROWS):
            await asyncio.gather(*(some(first + n * PLAIN_ROWS) for n in range(4)))


async def job(address: str, rows: int, locked: multiprocessing.synchronize.Event) -> None:
    """Writes them in one shared transaction."""
    async with aio.connect(address) as db, db.shared_transaction() as whole:
        turns = asyncio.Semaphore(2)

        async def task(number: int) -> object:
            async with turns, db.share(whole.ticket, task=str(number), timeout=60.0) as share:
                for row in range(number, rows, TASKS):
                    await share.set(row, COLUMN, VALUE)
                return await share.finish()

        receipts = await asyncio.gather(*(task(number) for number in range(TASKS)))
        locked.set()
        await asyncio.sleep(HELD_SECONDS)
        await whole.commit(receipts)  # type: ignore[arg-type]


class Readers:
    """Threads that read, and how long each read took."""

    def __init__(self, db: percolator.Database, rows: int) -> None:
        self._db = db
        self._rows = rows
        self.seconds: dict[str, list[float]] = {"one row": [], f"{SCANNED} rows": []}
        self.errors: list[Exception] = []
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._read, args=(seed,)) for seed in range(READERS)
        ]

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _read(self, seed: int) -> None:
        chosen = random.Random(seed)
        names = list(self.seconds)
        while not self._ended.is_set():
            name = chosen.choice(names)
            row = chosen.randrange(self._rows - SCANNED)
            began = time.perf_counter()
            try:
                with self._db.snapshot() as snapshot:
                    if name == names[0]:
                        snapshot.get(row, COLUMN)
                    else:
                        list(snapshot.scan(TABLE, start=row, end=row + SCANNED))
            except percolator.PercolatorError as error:
                self.errors.append(error)
            self.seconds[name].append(time.perf_counter() - began)
            time.sleep(0.002)


def percentile(sorted_seconds: Sequence[float], share: float) -> float:
    return sorted_seconds[min(int(len(sorted_seconds) * share), len(sorted_seconds) - 1)] * 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job_readers", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of the job ({ROWS})")
    parser.add_argument("--directory", type=Path, help="where the store is (default: temporary)")
    given = parser.parse_args()
    report = Report("job_readers")
    with tempfile.TemporaryDirectory(prefix="bench-readers-", dir=given.directory) as directory:
        measure(Path(directory), given.rows, report)
    return report.finish()


def measure(directory: Path, rows: int, report: Report) -> None:
    context = multiprocessing.get_context("spawn")
    with (
        LocalCluster(directory / "cluster", tablet_servers=1) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(TABLE, [rows // 2])
        with Readers(db, rows) as beside:
            writer = context.Process(target=_run, args=(plain, cluster.address, rows))
            writer.start()
            writer.join()
        locked, began = context.Event(), time.perf_counter()
        with Readers(db, rows) as during:
            driver = context.Process(target=_run, args=(job, cluster.address, rows, locked))
            driver.start()
            locked.wait(600)
        report.add("rows of the job", rows, "rows")
        report.add("locked in", time.perf_counter() - began, "s")
        with Readers(db, rows) as held:
            driver.join()
        with Readers(db, rows) as after:
            time.sleep(AFTER_SECONDS)
        if driver.exitcode or writer.exitcode:
            raise SystemExit("a writer has failed")
    for title, readers in (
        ("plain writes", beside),
        ("job locks rows", during),
        ("all are locked", held),
        ("after commit", after),
    ):
        for name, seconds in readers.seconds.items():
            ordered = sorted(seconds)
            report.add(f"{title}: {name}, median", percentile(ordered, 0.5), "ms")
            for share in (0.95, 0.99):
                report.add(f"    p{share * 100:.0f}", percentile(ordered, share), "ms")
            report.add(f"    slowest of {len(ordered):,}", ordered[-1] * 1000, "ms")
        report.add("    errors", len(readers.errors), "", must=0)
        for error in readers.errors[:1]:
            print(error)


def _run(write: object, *arguments: object) -> None:
    asyncio.run(write(*arguments))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
