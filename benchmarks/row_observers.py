"""Cost of observers on a row store, next to tablet servers: a part of `make bench-bigtable`.

A cluster on Bigtable's emulator and one on tablet servers take turns, each with one worker that
runs the chain of three observers of `benchmarks/observers.py`. Nothing announces changes on a row
store, so the delay of an observer is that of polling, mostly.

How 100 changed cells are found is measured in a client that runs an observer itself, on a small
table and on a large one in turns.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks import observers as chains
from benchmarks.report import Report
from percolator import Table, aio, codecs, observes, tune_garbage_collector
from percolator.aio import Transaction
from percolator.aio.bulk_load import LoadPlan
from percolator.aio.row_load import RowLoad
from percolator.bigtable.place import EMULATOR_VARIABLE
from percolator.services.local.cluster import LocalCluster
from tests.bigtable.emulator_process import emulator

RUNS_MUST = 0.15
DELAY_MUST_MILLISECONDS = 500.0
FINDING_MUST = 1.25
"""The figure, but for what one machine measures differently from one run to the next."""

_STORE = "bigtable://bench-project/observers"
_OBSERVERS = "benchmarks.observed:observers"
_BACKLOG = 1_000
_TURNS = 3
_WARM_UP = 20
_CHANGES = 40
_CHANGES_PER_SECOND = 0.8
"""So rare that the worker is idle in between, and polls as seldom as it ever does."""
_CHAIN_SECONDS = 5.0
_LIMIT_SECONDS = 60.0
_DIRTY = 100
_CLEAN = {"10,000": 10_000, "1,000,000": 1_000_000}
_FINDING_TURNS = 5
_LOADED_AT_ONCE = 20_000


def worked_off(data: Path, store: str) -> chains.Worked:
    """A backlog, on a new cluster."""
    with LocalCluster(
        data, store=store, tablet_servers=0 if store else 1, workers=1, observers=[_OBSERVERS]
    ) as cluster:
        worker = cluster.processes["worker"]
        worker.kill()
        asyncio.run(chains.prepare(cluster.address, _BACKLOG))
        worker.start()
        return chains.worked_off(cluster, _BACKLOG)


def throughput(data: Path, report: Report) -> None:
    """Runs per second of a chain, on both engines in turns."""
    found: defaultdict[str, list[chains.Worked]] = defaultdict(list)
    for turn in range(_TURNS):
        for engine, store in (("tablet servers", ""), ("row store", f"{_STORE}-{turn}")):
            found[engine].append(worked_off(data / f"{turn} {engine}", store))
    for engine, works in found.items():
        report.add(f"chain of three observers, {engine}", median(one.rate for one in works), "/s")
        per_run = median(one.cpu_seconds["worker"] / one.runs for one in works)
        report.add("    CPU of the worker for each run", per_run * 1e6, "µs")
    pairs = list(zip(found["row store"], found["tablet servers"], strict=True))
    report.add(
        "chain of three observers: row store / tablet servers",
        median(there.rate / here.rate for there, here in pairs),
        "×",
        must=RUNS_MUST,
        at_least=True,
    )


def delay(data: Path, report: Report) -> None:
    """How soon an idle worker runs an observer, and the next ones."""
    with LocalCluster(
        data, store=f"{_STORE}-delay", tablet_servers=0, workers=1, observers=[_OBSERVERS]
    ) as cluster:
        asyncio.run(chains.prepare(cluster.address, _WARM_UP))
        chains.worked_off(cluster, _WARM_UP)
        hops = asyncio.run(
            chains.delays(cluster.address, _WARM_UP, _CHANGES, _CHANGES_PER_SECOND, _CHAIN_SECONDS)
        )
    for name, hop in zip(("first", "second", "third"), hops, strict=True):
        report.add(f"commit to the {name} observer's commit, median", median(hop), "ms")
        report.add("    the slowest", max(hop), "ms")
    report.add(
        f"commit to observer's commit, of the {DELAY_MUST_MILLISECONDS:g} ms that it may take",
        100.0 * max(map(median, hops)) / DELAY_MUST_MILLISECONDS,
        "%",
        must=100.0,
    )


class Finding:
    """A table with an observed column, whose cells are clean, but for some."""

    def __init__(self, clean: int) -> None:
        self.clean = clean
        self.table = Table(f"clean-{clean}", key=codecs.raw)
        self.column = column = self.table.column("value", codecs.raw)
        self.handled = asyncio.Event()
        self._left = 0

        @observes(column, name="counts", backfill=False)
        async def counts(tx: Transaction, row: bytes) -> None:
            self._left -= 1
            if not self._left:
                self.handled.set()

        self._observers = [counts]

    async def fill(self, db: aio.Database) -> None:
        load = RowLoad(db, LoadPlan(self.table.name, "fill", start=b"", end=b"", notify=False))
        timestamps = await load.begin()
        for first in range(0, self.clean, _LOADED_AT_ONCE):
            last = min(first + _LOADED_AT_ONCE, self.clean)
            cells = [(b"%07d" % number, b"value", b"clean") for number in range(first, last)]
            await load.load(cells, timestamps)
        await load.finish(timestamps)
        async with db.run_observers(self._observers):
            pass  # registers them

    async def handle(self, db: aio.Database, turn: int) -> float:
        """Changes some cells, and then has them found and handled. Returns seconds of CPU."""
        step = self.clean // _DIRTY
        async with db.transaction() as tx:
            for number in range(turn, self.clean, step):
                tx.set(b"%07d" % number, self.column, b"dirty")
        self._left = _DIRTY
        self.handled.clear()
        await asyncio.sleep(0.2)  # what the commit leaves to the background
        began = time.process_time()
        async with db.run_observers(self._observers):
            async with asyncio.timeout(_LIMIT_SECONDS):
                await self.handled.wait()
        return time.process_time() - began


async def finding(address: str, report: Report) -> None:
    spent: defaultdict[str, list[float]] = defaultdict(list)
    async with aio.connect(address) as db:
        tables = {name: Finding(clean) for name, clean in _CLEAN.items()}
        for table in tables.values():
            await table.fill(db)
        for turn in range(_FINDING_TURNS + 1):
            for name, table in tables.items():
                seconds = await table.handle(db, turn)
                if turn:  # the first one warms up
                    spent[name].append(seconds)
    for name, seconds_of in spent.items():
        what = f"{_DIRTY} dirty cells among {name} clean ones"
        report.add(what, median(seconds_of) * 1e3, "ms CPU")
    small, large = (spent[name] for name in _CLEAN)
    report.add(
        f"{_DIRTY} dirty cells among 1,000,000 / among 10,000",
        median(many / few for many, few in zip(large, small, strict=True)),
        "×",
        must=FINDING_MUST,
    )


def measure(report: Report) -> None:
    """Adds all figures of observers to the report."""
    with tempfile.TemporaryDirectory() as directory, emulator() as address:
        os.environ[EMULATOR_VARIABLE] = address
        data = Path(directory)
        throughput(data, report)
        delay(data / "delay", report)
        with LocalCluster(data / "finding", store=f"{_STORE}-finding", tablet_servers=0) as cluster:
            asyncio.run(finding(cluster.address, report))
        del os.environ[EMULATOR_VARIABLE]


def main() -> int:
    tune_garbage_collector()
    report = Report("row_observers")
    measure(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
