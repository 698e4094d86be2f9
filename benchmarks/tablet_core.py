"""Cost of one tablet without gRPC: CPU microseconds per row, in this process, on LevelDB.

    python -m benchmarks.tablet_core [--rows N] [--profile]

The CPU time of the whole process is measured, so it includes the thread that syncs writes.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from percolator.errors import CellAddress, PercolatorError
from percolator.formats.records import LockRecord, RecordKind, WriteRecord
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.storage import LevelDBStorage
from percolator.tablet.state import CommitTimestamps, TabletIdentity, TimestampGuard
from percolator.tablet.tablet import Tablet
from percolator.testing.memory_storage import MemoryOwnership
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.world import MachineClock

TARGET = pb.TabletTarget(tablet_id=1, epoch=1, schema_version=1)
COLUMN = b"balance"
SESSION = b"s" * 16
VALUE = b"v" * 100


def row_name(number: int) -> bytes:
    return b"row%012d" % number


class Timestamps:
    """Increasing timestamps, close to the current time."""

    def __init__(self) -> None:
        self.last = time.time_ns() // 1_000_000 << 18

    def next(self) -> int:
        self.last += 1
        return self.last


def prewrite(row: bytes, start: int, value: bytes = VALUE) -> pb.Mutation:
    own = start.to_bytes(8, "big")
    lock = LockRecord(
        start, start + 1, 3000, RecordKind.PUT, SESSION, CellAddress(1, row, COLUMN), value
    )
    absent = pb.Condition.EXPECTATION_ABSENT
    return pb.Mutation(
        row=row,
        column=COLUMN,
        not_below=start,
        conditions=[
            pb.Condition(
                space=cells_pb2.SPACE_WRITE, expectation=absent, from_timestamp=start, prefix=own
            ),
            pb.Condition(
                space=cells_pb2.SPACE_ROLLBACK,
                expectation=absent,
                from_timestamp=start,
                until_timestamp=start + 1,
            ),
            pb.Condition(space=cells_pb2.SPACE_LOCK, expectation=absent),
            pb.Condition(space=cells_pb2.SPACE_WRITE, expectation=absent, from_timestamp=start),
        ],
        changes=[
            pb.Change(kind=pb.Change.KIND_PUT, space=cells_pb2.SPACE_LOCK, value=lock.encode())
        ],
    )


def commit(row: bytes, start: int, end: int, value: bytes = VALUE) -> pb.Mutation:
    own = start.to_bytes(8, "big")
    return pb.Mutation(
        row=row,
        column=COLUMN,
        not_below=start,
        conditions=[
            pb.Condition(
                space=cells_pb2.SPACE_WRITE,
                expectation=pb.Condition.EXPECTATION_ABSENT,
                from_timestamp=start,
                prefix=own,
            ),
            pb.Condition(
                space=cells_pb2.SPACE_LOCK,
                expectation=pb.Condition.EXPECTATION_PRESENT,
                prefix=own,
            ),
        ],
        changes=[
            pb.Change(kind=pb.Change.KIND_DELETE, space=cells_pb2.SPACE_LOCK),
            pb.Change(
                kind=pb.Change.KIND_PUT,
                space=cells_pb2.SPACE_WRITE,
                timestamp=end,
                value=WriteRecord(start, RecordKind.PUT, value).encode(),
            ),
        ],
    )


def encoded(mutations: list[pb.Mutation]) -> bytes:
    return pb.MutationBatch(target=TARGET, mutations=mutations).SerializeToString()


class Bench:
    """One tablet on LevelDB in a fresh directory."""

    def __init__(
        self,
        directory: Path,
        *,
        change_feed: bool = False,
        commit_timestamps: CommitTimestamps | None = None,
    ) -> None:
        self.pool = DiskThreads(1, "leveldb")
        directory.mkdir(exist_ok=True)
        self.storage = LevelDBStorage(directory, self.pool, create=True)
        identity = directory.stat().st_ino
        self.clock = MachineClock()
        self.tablet = Tablet(
            TabletIdentity(table_id=1, tablet_id=1, epoch=1, start=b"", end=b""),
            schema_version=1,
            storage=self.storage,
            clock=self.clock,
            ownership=MemoryOwnership(lambda: directory.stat().st_ino == identity),
            on_closed=self._closed,
            guard=TimestampGuard.by_own_clock(self.clock),
            change_feed=change_feed,
            timestamps=commit_timestamps,
        )
        self.timestamps = Timestamps()

    def _closed(self, error: PercolatorError) -> None:
        raise error

    async def mutate(self, request: bytes) -> None:
        """From the bytes of a request to the bytes of its response, as in a server."""
        batch = pb.MutationBatch.FromString(request)
        result = await self.tablet.mutate(
            batch, deadline_seconds=self.clock.monotonic_seconds() + 10
        )
        result.SerializeToString()
        if not result.mutations or result.unapplied:
            raise RuntimeError(f"not applied: {result}")

    async def read(self, request: bytes, found: int) -> None:
        result = await self.tablet.read(pb.ReadBatch.FromString(request))
        result.SerializeToString()
        if len(result.found.values) != found:
            raise RuntimeError(f"found {len(result.found.values)} of {found} values")

    async def fill(self, first: int, stop: int, batch: int = 500) -> None:
        """Prewrites and commits rows."""
        for at in range(first, stop, batch):
            rows = [row_name(i) for i in range(at, min(at + batch, stop))]
            start, end = self.timestamps.next(), self.timestamps.next()
            await self.mutate(encoded([prewrite(row, start) for row in rows]))
            await self.mutate(encoded([commit(row, start, end) for row in rows]))

    async def versions(self, row: bytes, count: int) -> None:
        for _ in range(count):
            start, end = self.timestamps.next(), self.timestamps.next()
            await self.mutate(encoded([prewrite(row, start)]))
            await self.mutate(encoded([commit(row, start, end)]))


async def measured(name: str, rows: int, work: Callable[[], Awaitable[None]]) -> float:
    cpu, wall = time.process_time(), time.perf_counter()
    await work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    print(f"{name:52s} {cpu / rows * 1e6:7.2f} us CPU/row  {rows / wall:10,.0f} rows/s", flush=True)
    return cpu / rows * 1e6


async def prewrites_and_commits(bench: Bench, name: str, rows: int, count: int, size: int) -> None:
    """Mutates `count` random rows among `rows`, `size` per batch."""
    prewrites, commits = [], []
    for _ in range(count // size):
        chosen = [row_name(i) for i in random.sample(range(rows), size)]
        start, end = bench.timestamps.next(), bench.timestamps.next()
        prewrites.append(encoded([prewrite(row, start) for row in chosen]))
        commits.append(encoded([commit(row, start, end) for row in chosen]))

    spent = {"prewrite": 0.0, "commit": 0.0}
    for first, second in zip(prewrites, commits, strict=True):
        before = time.process_time()
        await bench.mutate(first)
        between = time.process_time()
        await bench.mutate(second)
        spent["prewrite"] += between - before
        spent["commit"] += time.process_time() - between
    for what, seconds in spent.items():
        print(f"{name + ': ' + what:52s} {seconds / count * 1e6:7.2f} us CPU/row", flush=True)


async def reads(bench: Bench, name: str, rows: int, count: int, size: int) -> None:
    at = bench.timestamps.next()
    requests = [
        pb.ReadBatch(
            target=TARGET,
            reads=[
                pb.RowRead(row=row_name(random.randrange(rows)), columns=[COLUMN], timestamp=at)
                for _ in range(size)
            ],
        ).SerializeToString()
        for _ in range(count // size)
    ]

    async def work() -> None:
        for request in requests:
            await bench.read(request, size)

    await measured(f"{name}: read, batch {size}", count, work)


async def hot_reads(bench: Bench, name: str, row: bytes, at: int, found: int = 100) -> None:
    request = pb.ReadBatch(
        target=TARGET, reads=[pb.RowRead(row=row, columns=[COLUMN], timestamp=at)] * 100
    ).SerializeToString()

    async def work() -> None:
        for _ in range(50):
            await bench.read(request, found)

    await measured(name, 5000, work)


async def hot_refusals(bench: Bench, name: str, row: bytes, start: int) -> None:
    """Prewrites of a transaction that is too old, on a cell with many newer versions."""
    request = encoded([prewrite(row, start)] * 100)

    async def work() -> None:
        for _ in range(20):
            batch = pb.MutationBatch.FromString(request)
            await bench.tablet.mutate(batch, deadline_seconds=bench.clock.monotonic_seconds() + 10)

    await measured(name, 2000, work)


async def scan(bench: Bench, name: str, reverse: bool = False, limit: int = 0) -> None:
    request = pb.ScanRequest(
        target=TARGET,
        all_columns=True,
        timestamp=bench.timestamps.next(),
        reverse=reverse,
        row_limit=limit,
    )
    rows = 0
    cpu = time.process_time()
    async for page in bench.tablet.scan(request):
        page.SerializeToString()
        rows += len(page.found.rows)
    cpu = time.process_time() - cpu
    print(f"{name:52s} {cpu / rows * 1e6:7.2f} us CPU/row  {rows / cpu:10,.0f} rows/s of CPU")


async def run(directory: Path, rows: int) -> None:
    bench = Bench(directory)
    await bench.tablet.open()
    print(f"RSS at start {rss():.0f} MiB")
    await bench.fill(0, 10_000)
    await prewrites_and_commits(bench, "10k rows, batch 100", 10_000, 20_000, 100)
    await prewrites_and_commits(bench, "10k rows, batch 10", 10_000, 5_000, 10)
    await prewrites_and_commits(bench, "10k rows, batch 1", 10_000, 1_000, 1)
    await reads(bench, "10k rows", 10_000, 30_000, 100)
    await reads(bench, "10k rows", 10_000, 3_000, 1)
    await scan(bench, "10k rows: scan")
    await scan(bench, "10k rows: reverse scan", reverse=True)

    async def fill() -> None:
        await bench.fill(10_000, rows)

    await measured(f"filling up to {rows} rows (prewrite and commit)", rows - 10_000, fill)
    print(f"RSS {rss():.0f} MiB")
    name = f"{rows} rows"
    await prewrites_and_commits(bench, f"{name}, batch 100", rows, 20_000, 100)
    await reads(bench, name, rows, 30_000, 100)
    await scan(bench, f"{name}: scan")
    await scan(bench, f"{name}: reverse scan", reverse=True, limit=50_000)
    hot = row_name(0)
    oldest = bench.timestamps.next()
    await bench.versions(hot, 1)
    first = bench.timestamps.next()
    await hot_reads(bench, "few versions: newest read", hot, first)
    await hot_refusals(bench, "few versions: prewrite, conflict", hot, oldest)
    await bench.versions(hot, 1000)
    await hot_reads(bench, "1000 versions: newest read", hot, bench.timestamps.next())
    await hot_reads(bench, "1000 versions: oldest read", hot, first)
    await hot_refusals(bench, "1000 versions: prewrite, conflict", hot, oldest)
    print(f"RSS {rss():.0f} MiB, peak {rss_most():.0f} MiB")
    print(f"split at {await bench.tablet.propose_split()!r}")
    started = time.perf_counter()
    await bench.tablet.close()
    print(f"closed in {time.perf_counter() - started:.2f} s")
    started = time.perf_counter()
    bench = Bench(directory)
    await bench.tablet.open()
    print(f"opened in {time.perf_counter() - started:.2f} s")
    await bench.tablet.close()


def rss() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def rss_most() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tablet-core-"))
    try:
        if arguments.profile:
            profile = cProfile.Profile()
            profile.runcall(asyncio.run, run(directory, arguments.rows))
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        else:
            asyncio.run(run(directory, arguments.rows))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
