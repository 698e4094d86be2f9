"""make bench-loads: the loads that people have, beside PostgreSQL in the same run.

*Transfers* do what README's program does: read two random rows, write both. They run on a table of
100,000 and on one of 10,000 rows, in 9 tablets on 3 servers, so that nearly all commit in two
phases: 1,000 in flight (asyncio), from 64 threads (the blocking API and `@transactional`), and
alone (the same, one after another). PostgreSQL runs them from 64 connections of pgbench, from
psycopg in 64 threads, and from psycopg alone. Conflicts are retried on both sides, and a
transaction's latency includes its retries.

*Observed changes* are writes of a row with the smallest observer: it copies the cell. It is written
as `def` and as `async def`, and run by two workers: on a backlog of 10,000 changes, with 1,000 and
with 100 writers at the same time, and on changes so far apart that each is alone. The latency of a
change is the time from its commit to its observer's, by their timestamps (to the millisecond); a
backlog has none, since its changes wait for the workers to start. PostgreSQL has nothing like it:
its transfers show what a transaction costs there.

A *storm* is more changes than the workers can handle: 20,000, as fast as 1,000 writers can write
them while the workers run. In its middle, the oldest change that waits is compared with the oldest
that would wait if changes were handled in the order of their commits.

*Overload* is transfers that arrive at a fixed rate, whatever is answered (overload.py).

A *message* is a call that a process of the cluster has answered; a *sync* is a write that a tablet
server or the oracle waited for. Figures of a slice are medians over the runs, in which all slices
take turns; latencies are those of all runs. CPU includes all processes of the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

import percolator
from benchmarks import overload, postgresql
from benchmarks.observed import changes, copies, values
from benchmarks.overload import Overload
from benchmarks.postgresql import TRANSFER, Postgresql, PostgresqlCost
from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock
from benchmarks.transaction_cost import CLIENT, ORACLE, TABLET_SERVERS
from benchmarks.transaction_traffic import Accounts, row_key
from percolator import aio, transactional, tune_garbage_collector
from percolator.services.local.cluster import LocalCluster
from percolator.timestamps import SEQUENCE_BITS

SERVERS = 3
TABLETS = 9
WORKERS = 2
RUNS = 3
MANY = Accounts.of("accounts-100000", 100_000)
FEW = Accounts.of("accounts-10000", 10_000)

IN_FLIGHT = 1_000
THREADS = 64
TRANSFERS = 10_000
BLOCKING_TRANSFERS = 3_000
LONE_TRANSFERS = 100

BACKLOG = 10_000
WRITERS = (1_000, 100)
WRITTEN = 5_000
LONE_CHANGES = 60
STORM = 20_000
STORMY = "def"
APART_SECONDS = 0.05

_KINDS = {"tabletserver": TABLET_SERVERS, "oracle": ORACLE, "worker": "workers"}
_LOCK_SERVICE_AND_MASTER = "lock service and master"
_MESSAGES = ("percolator_rpc_finished_total",)
_SYNCS = ("percolator_tabletserver_tablet_batches_synced_total", "percolator_oracle_fsyncs_total")
_HANDLED = "percolator_observer_commits_total"
_POLL_SECONDS = 0.02
_LIMIT_SECONDS = 300.0


@dataclass
class Cost:
    """The cost of one slice of one run."""

    operations: int
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """CPU by kind of process."""
    messages: float = 0.0
    syncs: float = 0.0
    latencies: list[float] = field(default_factory=list)
    """Seconds of each operation."""


class Meter:
    """Reads the clocks and counters of all processes of the cluster, and this process's clock."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._clocks: defaultdict[str, list[int]] = defaultdict(list)
        self._clocks[CLIENT].append(time.CLOCK_PROCESS_CPUTIME_ID)
        self._metrics: list[str] = []
        self._workers: list[str] = []
        for name, process in cluster.processes.items():
            kind = _KINDS.get(name.partition("-")[0], _LOCK_SERVICE_AND_MASTER)
            self._clocks[kind].append(process_clock(process.pid))
            address = process.wait_ready(10.0).metrics_address
            self._metrics.append(address)
            if kind == "workers":
                self._workers.append(address)

    @contextmanager
    def measured(self, operations: int) -> Iterator[Cost]:
        """Fills in the cost when the block ends."""
        cost = Cost(operations)
        messages, syncs = self._counts()
        cpu, began = self._cpu(), time.perf_counter()
        yield cost
        cost.seconds = time.perf_counter() - began
        cost.cpu_seconds = {kind: now - cpu[kind] for kind, now in self._cpu().items()}
        messages_after, syncs_after = self._counts()
        cost.messages, cost.syncs = messages_after - messages, syncs_after - syncs

    def handled(self) -> float:
        """Observer runs that the workers have committed since they were started."""
        return sum(_sum(_metrics(address), (_HANDLED,)) for address in self._workers)

    def _cpu(self) -> dict[str, float]:
        return {
            kind: sum(time.clock_gettime(clock) for clock in clocks)
            for kind, clocks in self._clocks.items()
        }

    def _counts(self) -> tuple[float, float]:
        texts = [_metrics(address) for address in self._metrics]
        return (
            sum(_sum(text, _MESSAGES) for text in texts),
            sum(_sum(text, _SYNCS) for text in texts),
        )


def _metrics(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def _sum(text: str, names: tuple[str, ...]) -> float:
    """The sum of all series of these metrics."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(names) and not line.startswith("#")
    )


# ------------------------------------------------------------------------------ transfers


def pairs(accounts: Accounts, count: int, seed: int) -> list[list[str]]:
    """Random pairs of distinct rows. Different pairs may have rows in common."""
    chance = random.Random(seed)
    return [
        [row_key(number) for number in chance.sample(range(accounts.rows), 2)] for _ in range(count)
    ]


async def transfers_in_flight(
    address: str, meter: Meter, accounts: Accounts, count: int, seed: int
) -> Cost:
    balance = accounts.balance

    async def transfer(tx: aio.Transaction, source: str, target: str) -> None:
        tx.set(source, balance, await tx.get(source, balance, default=0) - 1)
        tx.set(target, balance, await tx.get(target, balance, default=0) + 1)

    async with aio.connect(address) as db:
        latencies: list[float] = []

        async def work(portion: Iterator[list[str]]) -> None:
            for source, target in portion:
                began = time.perf_counter()
                await db.run(transfer, source, target)
                latencies.append(time.perf_counter() - began)

        # Not measured: connections and the tablet map.
        first = iter(pairs(accounts, IN_FLIGHT, seed + 1))
        await asyncio.gather(*(work(first) for _ in range(IN_FLIGHT)))
        latencies.clear()
        numbers = iter(pairs(accounts, count, seed))
        with meter.measured(count) as cost:
            await asyncio.gather(*(work(numbers) for _ in range(IN_FLIGHT)))
        cost.latencies = latencies
    return cost


def transfers_in_threads(
    address: str, meter: Meter, accounts: Accounts, count: int, threads: int, seed: int
) -> Cost:
    balance = accounts.balance

    @transactional
    def transfer(tx: percolator.Transaction, source: str, target: str) -> None:
        tx.set(source, balance, tx.get(source, balance, default=0) - 1)
        tx.set(target, balance, tx.get(target, balance, default=0) + 1)

    with percolator.connect(address) as db, ThreadPoolExecutor(threads) as pool:

        def work(portion: list[list[str]]) -> list[float]:
            latencies = []
            for source, target in portion:
                began = time.perf_counter()
                transfer(db, source, target)
                latencies.append(time.perf_counter() - began)
            return latencies

        def in_all_threads(rows: list[list[str]]) -> list[float]:
            portions = [pool.submit(work, rows[first::threads]) for first in range(threads)]
            return [seconds for portion in portions for seconds in portion.result()]

        # Not measured: threads, connections and the tablet map.
        in_all_threads(pairs(accounts, max(threads, 2 * TABLETS), seed + 1))
        rows = pairs(accounts, count, seed)
        with meter.measured(count) as cost:
            cost.latencies = in_all_threads(rows)
    return cost


# ------------------------------------------------------------------------------ observed changes


async def write(address: str, way: str, rows: list[int], writers: int) -> None:
    """One transaction for each row, `writers` at the same time."""
    value = values[way]
    numbers = iter(rows)
    async with aio.connect(address) as db:

        async def work() -> None:
            for number in numbers:
                async with db.transaction() as tx:
                    tx.set(row_key(number), value, number)

        await asyncio.gather(*(work() for _ in range(writers)))


async def write_alone(address: str, way: str, rows: list[int]) -> None:
    """One change after another, each after its predecessor's observer has run."""
    async with aio.connect(address) as db:
        for number in rows:
            async with db.transaction() as tx:
                tx.set(row_key(number), values[way], number)
            await asyncio.sleep(APART_SECONDS)


async def delays(address: str, way: str, rows: list[int]) -> list[float]:
    """Seconds from each change's commit to the commit of the observer's run for it."""
    return [handled - written for written, handled in await commits(address, way, rows)]


async def commits(address: str, way: str, rows: list[int]) -> list[tuple[float, float]]:
    """When each change was committed, and its observer's run, in seconds."""
    committed: dict[bytes, dict[bytes, int]] = {row_key(number).encode(): {} for number in rows}
    async with aio.connect(address) as db, db.snapshot() as snapshot:
        async for page in snapshot.scan_cells(changes[way]):
            for row, column, at in zip(
                page.rows, page.columns, page.commit_timestamps, strict=True
            ):
                if row in committed:
                    committed[row][column] = at >> SEQUENCE_BITS
    value, copy = values[way].name, copies[way].name
    return [(cells[value] / 1e3, cells[copy] / 1e3) for cells in committed.values()]


def wait_handled(meter: Meter, count: float) -> None:
    deadline = time.perf_counter() + _LIMIT_SECONDS
    while meter.handled() < count:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"{meter.handled():,.0f} of {count:,.0f} changes were handled")
        time.sleep(_POLL_SECONDS)


def backlog(cluster: LocalCluster, way: str, rows: list[int]) -> Cost:
    """Changes that are there when the workers start.

    Measured from the moment when both workers say that they run the observers. What they have
    handled by then is not counted.
    """
    workers = [process for name, process in cluster.processes.items() if name in _worker_names()]
    for worker in workers:
        worker.kill()
    asyncio.run(write(cluster.address, way, rows, IN_FLIGHT))
    for worker in workers:
        worker.start()
    cluster.wait_workers()
    meter = Meter(cluster)
    with meter.measured(0) as cost:
        already = meter.handled()
        wait_handled(meter, len(rows))
    cost.operations = len(rows) - int(already)
    return cost


def trickle(cluster: LocalCluster, meter: Meter, way: str, rows: list[int], writers: int) -> Cost:
    """Changes of so many writers at the same time, until the last one is handled."""
    before = meter.handled()
    with meter.measured(len(rows)) as cost:
        asyncio.run(write(cluster.address, way, rows, writers))
        wait_handled(meter, before + len(rows))
    cost.latencies = asyncio.run(delays(cluster.address, way, rows))
    return cost


@dataclass
class Storm:
    """A storm of changes, in changes per second and in seconds."""

    written: float
    during: float
    """Changes handled while others were being written."""
    afterwards: float
    oldest: float
    """The longest that a change had waited when half of the storm was over."""
    oldest_in_order: float

    @classmethod
    def of(cls, times: list[tuple[float, float]]) -> Storm:
        """From the commits of all changes, and of their observers' runs."""
        written = sorted(one for one, _ in times)
        handled = sorted(one for _, one in times)
        began, ended, middle = written[0], written[-1], (written[0] + written[-1]) / 2
        during = sum(one < ended for one in handled)
        before_middle = sum(one < middle for one in handled)
        return cls(
            len(times) / (ended - began),
            during / (ended - began),
            (len(times) - during) / max(handled[-1] - ended, 0.001),
            middle - min(one for one, run in times if run >= middle),
            middle - written[before_middle],
        )


def storm(cluster: LocalCluster, meter: Meter, way: str, rows: list[int]) -> Storm:
    before = meter.handled()
    asyncio.run(write(cluster.address, way, rows, IN_FLIGHT))
    wait_handled(meter, before + len(rows))
    return Storm.of(asyncio.run(commits(cluster.address, way, rows)))


def lone(cluster: LocalCluster, meter: Meter, way: str, rows: list[int]) -> Cost:
    before = meter.handled()
    with meter.measured(len(rows)) as cost:
        asyncio.run(write_alone(cluster.address, way, rows))
        wait_handled(meter, before + len(rows))
    cost.latencies = asyncio.run(delays(cluster.address, way, rows))
    return cost


def _worker_names() -> list[str]:
    return ["worker", *(f"worker-{number}" for number in range(2, WORKERS + 1))]


# ------------------------------------------------------------------------------ runs


class Measurements:
    """The costs of each slice, by its name."""

    def __init__(self) -> None:
        self.ours: defaultdict[str, list[Cost]] = defaultdict(list)
        self.postgresql: defaultdict[str, list[PostgresqlCost]] = defaultdict(list)
        self.storms: list[Storm] = []
        self.overload = Overload()

    def measure_transfers(
        self, address: str, meter: Meter, other: Postgresql | None, seed: int
    ) -> None:
        for accounts in (MANY, FEW):
            name = f"transfers among {accounts.rows:,}"
            cost = asyncio.run(transfers_in_flight(address, meter, accounts, TRANSFERS, seed))
            self.ours[f"{name}, {IN_FLIGHT:,} in flight"].append(cost)
            for count, threads in ((BLOCKING_TRANSFERS, THREADS), (LONE_TRANSFERS, 1)):
                cost = transfers_in_threads(address, meter, accounts, count, threads, seed)
                self.ours[f"{name}, {_threads(threads)}"].append(cost)
            if other is not None:
                other.fill(accounts.rows)
                theirs = other.run_pgbench(TRANSFER, BLOCKING_TRANSFERS, THREADS)
                self.postgresql[f"{name}, pgbench, {THREADS} connections"].append(theirs)
                for count, threads in ((BLOCKING_TRANSFERS, THREADS), (LONE_TRANSFERS, 1)):
                    theirs = other.run_psycopg(TRANSFER, count, threads, seed)
                    self.postgresql[f"{name}, psycopg, {_threads(threads)}"].append(theirs)

    def measure_changes(self, cluster: LocalCluster, rows: Rows) -> None:
        for way in changes:
            name = f"observed changes, {way}"
            cost = backlog(cluster, way, rows.take(way, BACKLOG))
            self.ours[f"{name}, backlog of {BACKLOG:,}"].append(cost)
            meter = Meter(cluster)
            for writers in WRITERS:
                cost = trickle(cluster, meter, way, rows.take(way, WRITTEN), writers)
                self.ours[f"{name}, {writers:,} in flight"].append(cost)
            cost = lone(cluster, meter, way, rows.take(way, LONE_CHANGES))
            self.ours[f"{name}, alone"].append(cost)
        self.storms.append(storm(cluster, Meter(cluster), STORMY, rows.take(STORMY, STORM)))


class Rows:
    """Rows for the slices of observed changes: in random order, and none of them twice."""

    def __init__(self, runs: int) -> None:
        self.count = (BACKLOG + WRITTEN * len(WRITERS) + LONE_CHANGES + STORM) * runs
        self._left = {
            way: iter(random.Random(1).sample(range(self.count), self.count)) for way in changes
        }

    def take(self, way: str, count: int) -> list[int]:
        return list(islice(self._left[way], count))


def _threads(count: int) -> str:
    return "alone" if count == 1 else f"{count} threads"


async def prepare(address: str, rows: int) -> None:
    """Creates all tables, each in nine tablets, and gives every account some money."""
    async with aio.connect(address) as db:
        for table in changes.values():
            splits = [row_key(rows * number // TABLETS) for number in range(1, TABLETS)]
            await db.create_table(table, splits)
        for accounts in (MANY, FEW):
            await db.create_table(accounts.table, accounts.splits(TABLETS))
            balances = ((row_key(row), {accounts.balance: 100}) for row in range(accounts.rows))
            await db.set_many(balances)


def run(cluster: LocalCluster, other: Postgresql | None, runs: int) -> Measurements:
    measured, rows = Measurements(), Rows(runs)
    print(f"filling {MANY.rows + FEW.rows:,} rows", flush=True)
    asyncio.run(prepare(cluster.address, rows.count))
    cluster.wait_workers()  # their tables are there now
    meter = Meter(cluster)
    for number in range(runs):
        print(f"run {number + 1} of {runs}: transfers", flush=True)
        measured.measure_transfers(cluster.address, meter, other, seed=10 * number)
        print(f"run {number + 1} of {runs}: observed changes", flush=True)
        measured.measure_changes(cluster, rows)
        meter = Meter(cluster)  # the workers are new processes
        print(f"run {number + 1} of {runs}: overload", flush=True)
        servers = {name: one.pid for name, one in cluster.processes.items() if "tablet" in name}
        pids = {name: one.pid for name, one in cluster.processes.items()}
        asyncio.run(measured.overload.measure(cluster.address, MANY, pids, servers))
    return measured


# ------------------------------------------------------------------------------ report


def fill_in(report: Report, measured: Measurements) -> None:
    for name, costs in measured.ours.items():
        kinds = [kind for kind in costs[0].cpu_seconds if costs[0].cpu_seconds[kind]]
        report.add(name, median(cost.operations / cost.seconds for cost in costs), "/s")
        all_cpu = _each(costs, lambda cost: sum(cost.cpu_seconds.values()))
        report.add(f"CPU, {name}", all_cpu, "µs")
        for kind in kinds:
            report.add(f"    of which {kind}", _each(costs, _cpu_of(kind)), "µs")
        report.add("    messages each", _each(costs, lambda cost: cost.messages, 1), "")
        report.add("    syncs each", _each(costs, lambda cost: cost.syncs, 1), "")
        _latencies(report, name, [seconds for cost in costs for seconds in cost.latencies])
    for name, others in measured.postgresql.items():
        title = f"PostgreSQL, {name}"
        report.add(title, median(cost.rate for cost in others), "/s")
        report.add(f"CPU, {title}", median(cost.cpu_micros for cost in others), "µs")
        _latencies(report, title, [seconds for cost in others for seconds in cost.latencies])
    _ratios(report, measured)
    _storms(report, measured)
    overload.fill_in(report, measured.overload)


def _storms(report: Report, measured: Measurements) -> None:
    backlogs = measured.ours[f"observed changes, {STORMY}, backlog of {BACKLOG:,}"]
    peak = median(cost.operations / cost.seconds for cost in backlogs)
    name = f"a storm of {STORM:,} observed changes, {STORMY}"
    storms = measured.storms
    report.add(name, median(one.written for one in storms), "/s")
    report.add("    handled while it lasts", median(one.during for one in storms), "/s")
    report.add("    handled afterwards", median(one.afterwards for one in storms), "/s")
    report.add("    oldest change in its middle", median(one.oldest for one in storms), "s")
    in_order = median(one.oldest_in_order for one in storms)
    report.add("    oldest, if handled in order", in_order, "s")
    ratio = median(one.afterwards for one in storms) / peak
    report.add(f"rate: {name}, afterwards / backlog of {BACKLOG:,}", ratio, "×")


def _each(costs: list[Cost], of: Callable[[Cost], float], factor: float = 1e6) -> float:
    return median(of(cost) / cost.operations * factor for cost in costs)


def _cpu_of(kind: str) -> Callable[[Cost], float]:
    return lambda cost: cost.cpu_seconds[kind]


def _latencies(report: Report, name: str, seconds: list[float]) -> None:
    if seconds:
        ordered = sorted(seconds)
        report.add(f"latency, {name}, median", median(ordered) * 1e3, "ms")
        report.add("    99 of 100", ordered[len(ordered) * 99 // 100] * 1e3, "ms")


def _ratios(report: Report, measured: Measurements) -> None:
    """Both sides of each ratio stand above. No ratio has a must here."""

    def rate(name: str) -> float:
        return median(cost.operations / cost.seconds for cost in measured.ours[name])

    def cpu(name: str) -> float:
        return _each(measured.ours[name], lambda cost: sum(cost.cpu_seconds.values()))

    in_flight = [f"{writers:,} in flight" for writers in WRITERS]
    for load in (f"backlog of {BACKLOG:,}", *in_flight):
        plain, asynchronous = (f"observed changes, {way}, {load}" for way in changes)
        ratio = rate(plain) / rate(asynchronous)
        report.add(f"rate: observed changes, {load}, def / async def", ratio, "×")
        ratio = cpu(plain) / cpu(asynchronous)
        report.add(f"CPU: observed changes, {load}, def / async def", ratio, "×")
    many, few = in_flight
    for way in changes:
        name = f"observed changes, {way}"
        ratio = cpu(f"{name}, {few}") / cpu(f"{name}, {many}")
        report.add(f"CPU: {name}, {few} / {many}", ratio, "×")
    many, few = (f"transfers among {one.rows:,}, {IN_FLIGHT:,} in flight" for one in (MANY, FEW))
    report.add(f"rate: {few} / among {MANY.rows:,}", rate(few) / rate(many), "×")
    if not measured.postgresql:
        return
    (transfers,) = (
        others
        for name, others in measured.postgresql.items()
        if "pgbench" in name and f"{MANY.rows:,}" in name
    )
    for way in changes:
        name = f"observed changes, {way}, backlog of {BACKLOG:,}"
        ratio = rate(name) / median(other.rate for other in transfers)
        report.add(f"rate: {name} / PostgreSQL's transfers, pgbench", ratio, "×")
        ratio = cpu(name) / median(other.cpu_micros for other in transfers)
        report.add(f"CPU: {name} / PostgreSQL's transfers, pgbench", ratio, "×")
    for accounts in (MANY, FEW):
        name = f"transfers among {accounts.rows:,}"
        for ours, theirs in (
            (f"{IN_FLIGHT:,} in flight", f"pgbench, {THREADS} connections"),
            (f"{THREADS} threads", f"psycopg, {THREADS} threads"),
        ):
            others = measured.postgresql[f"{name}, {theirs}"]
            ratio = rate(f"{name}, {ours}") / median(other.rate for other in others)
            report.add(f"rate: {name}, {ours} / PostgreSQL, {theirs}", ratio, "×")
            ratio = cpu(f"{name}, {ours}") / median(other.cpu_micros for other in others)
            report.add(f"CPU: {name}, {ours} / PostgreSQL, {theirs}", ratio, "×")
        ours_alone = [s for cost in measured.ours[f"{name}, alone"] for s in cost.latencies]
        others = measured.postgresql[f"{name}, psycopg, alone"]
        ratio = median(ours_alone) / median(s for other in others for s in other.latencies)
        report.add(f"latency: {name}, alone / PostgreSQL, psycopg, alone", ratio, "×")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=RUNS, help=f"default {RUNS}")
    parser.add_argument("--directory", type=Path, help="where the store is (default: temporary)")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs: expected at least 1, got {options.runs}")
    report = Report("loads")
    tune_garbage_collector()
    # On a busy machine all of a thousand concurrent transactions are slow and would be logged.
    logging.getLogger("percolator.transactions").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory(prefix="bench-loads-", dir=options.directory) as directory,
        LocalCluster(
            Path(directory),
            tablet_servers=SERVERS,
            workers=WORKERS,
            observers=["benchmarks.observed:smallest"],
        ) as cluster,
        postgresql.running_if_installed() as other,
    ):
        measured = run(cluster, other, options.runs)
    fill_in(report, measured)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
