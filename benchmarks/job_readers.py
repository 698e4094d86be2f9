"""make bench-job-readers: how long readers take while a shared transaction locks what they read.

A process writes ROWS rows, in TASKS attempts of which two are under way at a time, and commits them
at once. Four threads of another process read rows of the same table, one or a hundred at a time,
each in a snapshot of its own: first while PLAIN_ROWS_MAX rows at most are written in plain
transactions of 250; then while the job locks its rows, while it holds them all, and after its
commit, beside a first scan of the table, which settles the locks.

With `--rows 10000000` it shows how large a job may be: the memory of the tablet server and of the
job's process, how long each tenth of the rows takes, and what the first scan costs.
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
from itertools import pairwise
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import NamedTuple

import psutil

import percolator
from benchmarks.report import Report
from benchmarks.watched_memory import WatchedMemory
from percolator import Table, aio, codecs
from percolator.aio.shared import Receipt
from percolator.services.local.cluster import LocalCluster

ROWS = 200_000
TASKS = 8
READERS = 4
PLAIN_ROWS = 250
PLAIN_ROWS_MAX = 200_000
HELD_SECONDS = 5.0
SCANNED = 100
KEEP_SECONDS = 60.0
"""As Spark's jobs are kept."""
TENTHS = 10
COUNTED_ROWS = 1_000
TABLE = Table("rows", key=codecs.ordered_integer)
COLUMN = TABLE.column("value", codecs.text)
VALUE = "x" * 100


async def plain(address: str, rows: int) -> None:
    """Writes them in transactions of their own."""
    async with aio.connect(address) as db:

        async def some(first: int) -> None:
            async with db.transaction() as tx:
                for row in range(first, first + PLAIN_ROWS):
                    tx.set(row, COLUMN, VALUE)

        for first in range(0, rows, 4 * PLAIN_ROWS):
            await asyncio.gather(*(some(first + n * PLAIN_ROWS) for n in range(4)))


async def job(address: str, rows: int, progress: Progress) -> None:
    """Writes them in one shared transaction."""
    async with aio.connect(address) as db, db.shared_transaction(ttl=KEEP_SECONDS) as whole:
        turns = asyncio.Semaphore(2)

        async def task(number: int) -> Receipt:
            async with turns, db.share(whole.ticket, task=str(number), timeout=60.0) as share:
                for count, row in enumerate(range(number, rows, TASKS), 1):
                    await share.set(row, COLUMN, VALUE)
                    if not count % COUNTED_ROWS:
                        progress.rows.value += COUNTED_ROWS
                return await share.finish()

        receipts = await asyncio.gather(*(task(number) for number in range(TASKS)))
        progress.locked.set()
        await asyncio.sleep(HELD_SECONDS)
        began = time.perf_counter()
        await whole.commit(receipts)
        progress.commit_seconds.value = time.perf_counter() - began


async def scan(address: str, rows: int) -> None:
    """Scans all of them, in a process of its own."""
    found, began = 0, time.perf_counter()
    async with aio.connect(address) as db, db.snapshot() as snapshot:
        async for page in snapshot.scan_cells(TABLE):
            tenths = found * TENTHS // rows
            found += len(page.rows)
            if found * TENTHS // rows > tenths:
                print(f"{found:,} rows scanned in {time.perf_counter() - began:.0f} s", flush=True)
    if found != rows:
        raise SystemExit(f"the scan found {found:,} of {rows:,} rows")


class Progress:
    """The report of the job's process."""

    def __init__(self, context: SpawnContext) -> None:
        self.rows = context.Value("q", 0, lock=False)
        """How many are locked, or about to be."""
        self.locked = context.Event()
        self.commit_seconds = context.Value("d", 0.0, lock=False)

    def tenths(self, rows: int, driver: SpawnProcess, server: int) -> list[Spent]:
        """Waits until all are locked. Returns what each tenth took."""
        spent = [Spent.by(server, driver.pid)]
        while not self.locked.wait(0.02):
            if driver.exitcode is not None:
                raise SystemExit("the job has failed")
            now = Spent.by(server, driver.pid)
            if not self.rows.value:
                spent = [now]  # its process is starting
            elif self.rows.value * TENTHS >= len(spent) * rows and len(spent) < TENTHS:
                spent.append(now)
                print(f"{self.rows.value:,} rows locked in {now.seconds - spent[0].seconds:.0f} s")
        spent.append(Spent.by(server, driver.pid))
        return [after - before for before, after in pairwise(spent)]


class Spent(NamedTuple):
    """Time, and CPU time of some processes: the latter depends less on others on the machine."""

    seconds: float
    cpu_seconds: float
    main_seconds: float
    """Without the threads beside the main ones: they write, and compact what was written."""

    @classmethod
    def by(cls, *pids: int | None) -> Spent:
        """By these processes so far."""
        processes = [psutil.Process(pid) for pid in pids if pid]
        times = [one.cpu_times() for one in processes]
        mains = [thread for one in processes for thread in one.threads() if thread.id == one.pid]
        return cls(
            time.perf_counter(),
            sum(one.user + one.system for one in times),
            sum(one.user_time + one.system_time for one in mains),
        )

    def __sub__(self, before: Spent) -> Spent:
        return Spent(*(now - then for now, then in zip(self, before, strict=True)))


class Readers:
    """Threads that read, and how long each read took. Each phase says so at its end: with millions
    of rows, the report comes much later."""

    def __init__(self, phase: str, db: percolator.Database, rows: int) -> None:
        self.phase = phase
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
        for name, found in self.seconds.items():
            ordered = sorted(found)
            print(
                f"{self.phase}: {name}, {len(ordered):,} reads, median "
                f"{percentile(ordered, 0.5):.1f} ms, p99 {percentile(ordered, 0.99):.1f} ms, "
                f"slowest {ordered[-1] * 1000:.0f} ms, {len(self.errors)} errors",
                flush=True,
            )

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
    progress = Progress(context)

    def begun(work: object, *arguments: object) -> SpawnProcess:
        process = context.Process(target=_run, args=(work, cluster.address, *arguments))
        process.start()
        return process

    with (
        LocalCluster(directory / "cluster", tablet_servers=1) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(TABLE, [rows // 2])
        server = next(p.pid for n, p in cluster.processes.items() if n.startswith("tabletserver"))
        with Readers("plain writes", db, rows) as beside:
            _ended(begun(plain, min(rows, PLAIN_ROWS_MAX)))
        with WatchedMemory({"tablet server": server}) as memory:
            before = memory.now()["tablet server"]
            with Readers("job locks rows", db, rows) as during:
                driver = begun(job, rows, progress)
                memory.add("the job's process", driver.pid or 0)
                tenths = progress.tenths(rows, driver, server)
            locked = memory.now()["tablet server"]
            print(f"all locked; the tablet server has {locked:.0f} MiB, {before:.0f} before")
            with Readers("all are locked", db, rows) as held:
                _ended(driver)
            print("committed; first scan, beside readers", flush=True)
            began = Spent.by(server)
            with Readers("after commit", db, rows) as after:
                _ended(begun(scan, rows))
            scanned = Spent.by(server)
            print(f"scanned in {(scanned - began).seconds:.0f} s; second scan", flush=True)
            _ended(begun(scan, rows))
            again = Spent.by(server)
    report.add("rows of the job", rows, "rows")
    report.add("locked in", sum(one.seconds for one in tenths), "s")
    micros = [one.cpu_seconds / rows * TENTHS * 1e6 for one in tenths]
    report.add("    CPU per row, server and job", sum(micros) / TENTHS, "µs")
    for number, one in enumerate(micros, 1):
        report.add(f"        tenth {number}", one, "µs")
    report.add("        last tenth / second", micros[-1] / micros[1], "×", must=1.5)
    grown = tenths[-1].main_seconds / tenths[1].main_seconds
    report.add("            without threads that write and compact", grown, "×")
    report.add("commit", progress.commit_seconds.value * 1000, "ms")
    for title, spent in (
        ("first scan, beside readers", scanned - began),
        ("second scan", again - scanned),
    ):
        report.add(title, spent.seconds, "s")
        report.add("    CPU per row, server", spent.cpu_seconds / rows * 1e6, "µs")
    report.add("tablet server, before the job", before, "MiB")
    report.add("    all rows locked", locked, "MiB")
    report.add("    for each lock", (locked - before) * (1 << 20) / rows, "bytes")
    for name, most in memory.most.items():
        report.add(f"{name}, at most", most, "MiB")
    for readers in (beside, during, held, after):
        for name, found in readers.seconds.items():
            ordered = sorted(found)
            report.add(f"{readers.phase}: {name}, median", percentile(ordered, 0.5), "ms")
            for share in (0.95, 0.99):
                report.add(f"    p{share * 100:.0f}", percentile(ordered, share), "ms")
            report.add(f"    slowest of {len(ordered):,}", ordered[-1] * 1000, "ms")
        report.add("    errors", len(readers.errors), "", must=0)
        for error in readers.errors[:1]:
            print(error)


def _ended(process: SpawnProcess) -> None:
    process.join()
    if process.exitcode:
        raise SystemExit("a process of the benchmark has failed")


def _run(write: object, *arguments: object) -> None:
    asyncio.run(write(*arguments))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
