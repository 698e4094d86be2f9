"""How many transactions commit in one round while rows of the same tablet are loaded.

    python -m benchmarks.bulk_loads [--seconds N] [--rounds N]

One tablet on LevelDB, in this process, without a network: one event loop, as in a tablet server,
judges, encodes and answers everything, and a thread writes, one write at a time. What commits and
loads get of a server's core is measured, and not what clients on the same machine leave of it.

* Commits: `COMMITTERS` at a time. Each writes one row outside the range that is loaded, and the
  next one is sent when it is answered.
* Loads: 1 loader, then `LOADERS`. Each sends requests as large as the library's, and the next one
  when the last was answered. So one loader alone would take nearly all of the core.

Every rate is per CPU second of this process, with the thread that writes: per second of *the core*.
So neither other programs on the machine nor a slow disk change the figures. The store is in memory
(/dev/shm), if there is such a place, or the core would wait for the disk most of the time.

The measured side is the rate of commits beside 1 and beside `LOADERS` loaders. The expected side is
the rate beside *one loader's share of the core*: if the core is shared fairly between the commits
and one loader, however many loaders there are. Both would use all of the core when alone, since
neither pauses, so each has half of it, and

    expected = rate of commits without loads / 2

All is measured in turns, several times, and the medians are used. It fails, with exit code 1, if
less than 0.7 of the expected rate is measured, or if any transaction is not committed, or its
outcome is unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from benchmarks.report import Report
from benchmarks.tablet_core import COLUMN, TARGET, VALUE, Bench
from percolator.formats.records import KIND_PUT
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import RowRange

COMMITTERS = 256
LOADERS = 4
ROWS_PER_LOAD = 8_000
"""Names of 100 bytes. With more, the library would send several requests."""
SHARE_MIN = 0.7
ONE_LOADERS_SHARE = 0.5
CALL_SECONDS = 5.0
_REQUESTS = 16
"""So many are loaded, over and over again."""
_OUTSIDE = 10_000
"""So many rows are written, over and over again."""


@dataclass
class Pass:
    """The measurements of one slice, with some loaders and committers at work."""

    commits: float
    """Per CPU second."""
    cells: float
    """Loaded, per CPU second."""
    busy: float
    """CPU seconds per second."""
    worst_seconds: float
    """The longest commit."""


class Beside:
    """Commits and loads of one tablet."""

    def __init__(self, directory: Path) -> None:
        self._bench = Bench(directory, commit_timestamps=self._take)
        self._timestamps = self._bench.timestamps
        self._rows = count()
        self._run = 0
        self._requests: list[bytes] = []
        self._worst_seconds = 0.0
        self.failed: list[pb.MutationResult] = []
        """The commits that were not committed, or of which that is unknown."""

    async def begin(self) -> None:
        """Opens the tablet, and closes the range that is loaded."""
        await self._bench.tablet.open()
        self._run = self._timestamps.next()
        request = pb.FenceRequest(target=TARGET, action=pb.FenceRequest.ACTION_RAISE)
        request.fence.CopyFrom(
            pb.LoadFence(name="load", run=self._run, range=RowRange(start=b"load", end=b"loae"))
        )
        response = await self._bench.tablet.fence(request)
        if not response.HasField("fence"):
            raise RuntimeError(f"the range is not closed: {response}")
        self._requests = [self._encoded(number) for number in range(_REQUESTS)]

    async def end(self) -> None:
        await self._bench.tablet.close()
        self._bench.pool.close()

    async def _take(self, number: int) -> int:
        """The oracle. It takes a turn of the event loop, and no time."""
        await asyncio.sleep(0)
        first = self._timestamps.next()
        self._timestamps.last += number - 1
        return first

    async def measured(self, seconds: float, *, loaders: int, committers: int) -> Pass:
        commits = cells = 0
        ends = time.perf_counter() + seconds
        self._worst_seconds = 0.0

        async def commit_all_the_time() -> None:
            nonlocal commits
            while time.perf_counter() < ends:
                await self._commit()
                commits += 1

        async def load_all_the_time() -> None:
            nonlocal cells
            while time.perf_counter() < ends:
                await self._load()
                cells += ROWS_PER_LOAD

        began, busy = time.perf_counter(), time.process_time()
        await asyncio.gather(
            *(commit_all_the_time() for _ in range(committers)),
            *(load_all_the_time() for _ in range(loaders)),
        )
        took, busy = time.perf_counter() - began, time.process_time() - busy
        return Pass(commits / busy, cells / busy, busy / took, self._worst_seconds)

    async def _commit(self) -> None:
        batch = pb.TransactionBatch(
            target=TARGET,
            start_timestamps=[self._timestamps.next()],
            cells=[1],
            rows=[b"row%012d" % (next(self._rows) % _OUTSIDE)],
            columns=[COLUMN],
            kinds=[KIND_PUT],
            values=[VALUE],
        )
        began = time.perf_counter()
        result = await self._bench.tablet.commit(
            batch, deadline_seconds=self._bench.clock.monotonic_seconds() + CALL_SECONDS
        )
        self._worst_seconds = max(self._worst_seconds, time.perf_counter() - began)
        self.failed += [one.result for one in result.uncommitted]

    async def _load(self) -> None:
        """From the bytes of a request, as in a server. What its client does is not measured."""
        encoded = self._requests[next(self._rows) % len(self._requests)]
        await self._bench.tablet.load(pb.LoadRequest.FromString(encoded))

    def _encoded(self, number: int) -> bytes:
        rows = range(number * ROWS_PER_LOAD, (number + 1) * ROWS_PER_LOAD)
        request = pb.LoadRequest(
            target=TARGET,
            name="load",
            start_timestamp=self._run,
            commit_timestamp=self._run + 1,
            rows=[b"load%012d" % row for row in rows],
            columns=[COLUMN] * ROWS_PER_LOAD,
            values=[VALUE] * ROWS_PER_LOAD,
        )
        return request.SerializeToString()


@dataclass(frozen=True)
class Result:
    """The medians of all rounds. Rates are per CPU second."""

    alone: float
    """Commits without loads."""
    loads: float
    """Cells loaded by one loader without commits."""
    busy: float
    """CPU seconds per second, without loads."""
    beside: dict[int, float]
    """Commits, by the number of loaders."""
    cells: dict[int, float]
    """Cells loaded meanwhile."""
    worst_seconds: float
    failed: list[pb.MutationResult]

    @property
    def expected(self) -> float:
        """Commits beside one loader's share of the core."""
        return self.alone * ONE_LOADERS_SHARE

    @property
    def is_enough(self) -> bool:
        return not self.failed and min(self.beside.values()) >= SHARE_MIN * self.expected

    def __str__(self) -> str:
        lines = [
            f"{self.alone:9,.0f} commits per CPU second without loads, "
            f"with {self.busy:.2f} of a core in use",
            f"{self.loads:9,.0f} cells per CPU second are loaded by one loader without commits",
            f"{self.expected:9,.0f} commits per CPU second are expected beside one loader's share",
        ]
        lines += [
            f"{rate:9,.0f} commits per CPU second beside {loaders} loaders: "
            f"{rate / self.expected:.2f} of the expected; {self.cells[loaders]:,.0f} cells"
            for loaders, rate in self.beside.items()
        ]
        lines.append(
            f"{self.worst_seconds:9.3f} s for the longest commit beside loads; "
            f"{len(self.failed)} not committed or unknown"
        )
        return "\n".join([*lines, *(str(one) for one in self.failed[:3])])


async def measure(directory: Path, *, rounds: int, seconds: float) -> Result:
    """Measures all in turns, so many times, each for so long."""
    alone: list[Pass] = []
    loader: list[Pass] = []
    beside: dict[int, list[Pass]] = {1: [], LOADERS: []}
    bench = Beside(directory)
    await bench.begin()
    for _ in range(rounds):
        alone.append(await bench.measured(seconds, loaders=0, committers=COMMITTERS))
        loader.append(await bench.measured(seconds, loaders=1, committers=0))
        for loaders, passes in beside.items():
            passes.append(await bench.measured(seconds, loaders=loaders, committers=COMMITTERS))
    await bench.end()
    return Result(
        median(one.commits for one in alone),
        median(one.cells for one in loader),
        median(one.busy for one in alone),
        {loaders: median(one.commits for one in passes) for loaders, passes in beside.items()},
        {loaders: median(one.cells for one in passes) for loaders, passes in beside.items()},
        max(one.worst_seconds for passes in beside.values() for one in passes),
        bench.failed,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each pass takes")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured")
    options = parser.parse_args()
    in_memory = Path("/dev/shm")
    directory = Path(
        tempfile.mkdtemp(prefix="bulk-loads-", dir=in_memory if in_memory.is_dir() else None)
    )
    try:
        result = asyncio.run(
            measure(directory / "tablet", rounds=options.rounds, seconds=options.seconds)
        )
    finally:
        shutil.rmtree(directory)
    print(result)
    report = Report("bulk_loads")
    report.add("commits without loads", result.alone, "/CPU s")
    report.add("commits expected beside one loader's share of the core", result.expected, "/CPU s")
    for loaders, rate in result.beside.items():
        report.add(f"commits beside {loaders} loaders", rate, "/CPU s")
        report.add(
            f"share of the expected beside {loaders} loaders",
            rate / result.expected,
            "×",
            must=SHARE_MIN,
            at_least=True,
        )
    report.add("commits not committed or unknown", len(result.failed), "", must=0)
    return report.finish() or not result.is_enough


if __name__ == "__main__":
    sys.exit(main())
