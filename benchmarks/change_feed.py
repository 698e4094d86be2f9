"""make bench-changes: what a change feed costs, and that reading it does not depend on the table.

Two tablets on LevelDB are loaded, one with 100,000 cells and one with 10,000,000, and 10,000 cells
of each are then changed in transactions of a hundred. The changes are read from both in turn. Then
rows are written into two tablets, one with a feed and one without, in turn. All of this happens in
this process, as a tablet server does it but without gRPC and without a client: these would add the
same to both sides, so that the ratios would be nearer to 1. CPU includes the threads that sync and
compact.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.report import Report
from benchmarks.tablet_core import COLUMN, TARGET, Bench, commit, encoded, prewrite, row_name
from percolator.v1 import tabletserver_pb2 as pb

CELLS_FEW = 100_000
CELLS_MANY = 10_000_000
CHANGES = 10_000
PER_TRANSACTION = 100
ROWS_PER_LOAD = 2_000
VALUE = b"v" * 100
ROUNDS = 9
WRITE_ROUNDS = 10
WRITTEN_PER_ROUND = 5_000


async def opened(directory: Path, *, change_feed: bool = True) -> Bench:
    bench = Bench(directory, change_feed=change_feed)
    await bench.tablet.open()
    return bench


async def load(bench: Bench, cells: int) -> int:
    """Loads rows as a bulk load does. Returns the timestamp after which all is changes."""
    start, end = bench.timestamps.next(), bench.timestamps.next()
    fence = pb.LoadFence(name="load", run=start)
    for_fence = pb.FenceRequest(target=TARGET, fence=fence)
    for_fence.action = pb.FenceRequest.ACTION_RAISE
    await bench.tablet.fence(for_fence)
    for first in range(0, cells, ROWS_PER_LOAD):
        rows = [row_name(number) for number in range(first, min(first + ROWS_PER_LOAD, cells))]
        await bench.tablet.load(
            pb.LoadRequest(
                target=TARGET,
                name="load",
                start_timestamp=start,
                commit_timestamp=end,
                rows=rows,
                columns=[COLUMN] * len(rows),
                values=[VALUE] * len(rows),
            )
        )
    for_fence.fence.commit_timestamp = end
    for action in (pb.FenceRequest.ACTION_FINISH, pb.FenceRequest.ACTION_LIFT):
        for_fence.action = action
        await bench.tablet.fence(for_fence)
    return end


async def write(bench: Bench, rows: Sequence[bytes], per_transaction: int) -> float:
    """Writes rows in transactions; returns the seconds of CPU."""
    requests = []
    for first in range(0, len(rows), per_transaction):
        chosen = rows[first : first + per_transaction]
        start, end = bench.timestamps.next(), bench.timestamps.next()
        requests.append(encoded([prewrite(row, start, VALUE) for row in chosen]))
        requests.append(encoded([commit(row, start, end, VALUE) for row in chosen]))
    began = time.process_time()
    for request in requests:
        await bench.mutate(request)
    return time.process_time() - began


async def read(bench: Bench, after: int, *, before: bool) -> float:
    """Reads all changes, up to the bytes of the answers; returns the seconds it took."""
    request = pb.ScanChangesRequest(
        target=TARGET, after=after, until=bench.timestamps.next(), before=before
    )
    found = 0
    began = time.perf_counter()
    async for page in bench.tablet.scan_changes(request):
        page.SerializeToString()
        found += len(page.found.rows)
    seconds = time.perf_counter() - began
    if found != CHANGES:
        raise RuntimeError(f"{found} changes were read, of {CHANGES}")
    return seconds


async def reading(report: Report, directory: Path, cells_many: int) -> None:
    tablets: dict[int, tuple[Bench, int]] = {}
    for cells in (CELLS_FEW, cells_many):
        bench = await opened(directory / f"of-{cells}")
        after = await load(bench, cells)
        chosen = random.Random(1).sample(range(cells), CHANGES)
        await write(bench, [row_name(number) for number in chosen], PER_TRANSACTION)
        tablets[cells] = bench, after
    for before in (False, True):
        seconds: dict[int, list[float]] = {cells: [] for cells in tablets}
        for _ in range(ROUNDS):
            for cells, (bench, after) in tablets.items():
                seconds[cells].append(await read(bench, after, before=before))
        what = f"{CHANGES:,} changes" + (" with values before" if before else "")
        for cells, times in seconds.items():
            report.add(f"{what} among {cells:,} cells", median(times) * 1000, "ms")
        few, many = (median(times) for times in seconds.values())
        name = f"{what}: among {cells_many:,} cells, compared with {CELLS_FEW:,}"
        report.add(name, many / few, "×", must=None if before else 1.2)
    for bench, _ in tablets.values():
        await bench.tablet.close()
        bench.pool.close()


async def writing(report: Report, directory: Path) -> None:
    for per_transaction in (1, PER_TRANSACTION):
        sides = {
            feed: await opened(directory / f"written-{per_transaction}-{feed}", change_feed=feed)
            for feed in (False, True)
        }
        spent: dict[bool, list[float]] = {feed: [] for feed in sides}
        numbers = WRITTEN_PER_ROUND if per_transaction > 1 else WRITTEN_PER_ROUND // 10
        for turn in range(WRITE_ROUNDS):
            chosen = random.Random(turn).sample(range(CELLS_FEW), numbers)
            rows = [row_name(number) for number in chosen]
            for feed in sorted(sides, reverse=turn % 2 == 1):
                spent[feed].append(await write(sides[feed], rows, per_transaction) / numbers)
        of = f"{per_transaction} row{'s' if per_transaction > 1 else ''} per transaction"
        for feed, seconds in spent.items():
            what = "with" if feed else "without"
            report.add(f"CPU per row written {what} a feed, {of}", median(seconds) * 1e6, "µs")
        ratio = sum(spent[True]) / sum(spent[False])
        report.add(f"CPU with a feed, compared with none, {of}", ratio, "×", must=1.15)
        for bench in sides.values():
            await bench.tablet.close()
            bench.pool.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=CELLS_MANY, help="cells of the larger table")
    arguments = parser.parse_args()
    report = Report("change_feed")

    async def measure() -> None:
        with tempfile.TemporaryDirectory(prefix="change-feed-") as directory:
            await writing(report, Path(directory))
            await reading(report, Path(directory), arguments.cells)

    asyncio.run(measure())
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
