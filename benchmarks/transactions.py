"""make bench-transactions: what a transaction costs, compared with the raw operations in it.

One cluster of processes on this machine (three tablet servers, oracle, lock service, master) with
synced writes, real gRPC, and one client process. Figures are medians of seven runs in which all
slices take turns, so that other load on the machine spoils one run of each slice rather than all
runs of one. Ratios compare the CPU of all processes, which depends less on such load than
throughput does.

All slices run with Python's garbage collector set as docs/performance.md advises for programs with
thousands of transactions in flight; "default collector" shows the cost of leaving it alone.

A "read-write" transaction reads a cell and writes it back; a "write-only" one does not read it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, truediv
from pathlib import Path
from statistics import median

from benchmarks import postgresql
from benchmarks.postgresql import READ_WRITE, PostgresqlCost
from benchmarks.report import Report
from benchmarks.transaction_cost import KINDS, TABLET_SERVERS, Cost, Costs, Meter
from benchmarks.transaction_traffic import (
    Accounts,
    Traffic,
    lone_latencies,
    scans_of_one_percent,
    threads_read_write,
)
from percolator import Limits, Table, aio, tune_garbage_collector
from percolator.services.local.cluster import LocalCluster

RUNS = 7
SCAN_RUNS = 3
SERVERS = 3
IN_FLIGHT = 1_000
THREADS = 64
DEFAULT_COLLECTOR = gc.get_threshold()
LONE = 100
"""Transactions one after another, per run."""
TRANSACTIONS = 10_000
RAW = 40_000
BLOCKING = 4_000
POSTGRESQL = 4_000

ONE = Accounts.of("one-tablet", 100_000)
THIRTY = Accounts.of("thirty-tablets", 100_000)
TABLETS = 30
SMALL = Accounts.of("small", 10_000)
LARGE = Accounts.of("large", 1_000_000)
PLAIN = Accounts.of("plain", 20_000)
BY_HAND = Accounts.of("by-hand", 20_000)
ENTRIES = Table("entries-by-hand")
INDEXED = Accounts.of("indexed", 20_000)
TABLETS_OF_INDEXED = 9

ONE_TABLET = f"asyncio, {IN_FLIGHT:,} in flight, 1 tablet"
THIRTY_TABLETS = (
    f"asyncio, {IN_FLIGHT:,} in flight, {SERVERS} servers x {TABLETS // SERVERS} tablets"
)
BLOCKING_THREADS = f"{THREADS} blocking threads, 1 tablet"

WRITE_ONLY_MUST = 0.60
READ_WRITE_MUST = 0.40
SNAPSHOT_READ_MUST = 0.90
LONE_READ_MUST = 0.70
THIRTY_TABLETS_MUST = 2.0
THIRTY_TABLETS_SERVERS_MUST = 1.3
BLOCKING_MUST = 3.2
POSTGRESQL_CPU_MUST = 3.0
POSTGRESQL_RATE_MUST = 0.9
PSYCOPG_RATE_MUST = 1.5
PSYCOPG_LATENCY_MUST = 4.0
ROUND_TRIPS_MUST = (2.0, 3.0)
CHANGE_MUST = 1.25
INDEXED_MUST = 1.6
BY_HAND_MUST = 1.15


class Measurements:
    """Everything that was measured, by name."""

    def __init__(self) -> None:
        self.costs: defaultdict[str, Costs] = defaultdict(Costs)
        self.latencies: list[float] = []
        """In seconds."""
        self.postgresql: defaultdict[int, list[PostgresqlCost]] = defaultdict(list)
        """By connections of pgbench."""
        self.psycopg: list[PostgresqlCost] = []
        self.psycopg_latencies: list[float] = []
        """In seconds."""
        self.round_trips = (0, 0)
        self.tablets_by_server: list[int] = []


async def prepare(address: str, meter: Meter, measured: Measurements) -> None:
    """Creates the tables, with a value in every row."""
    async with aio.connect(address) as db:
        traffic = Traffic(db, meter)
        for accounts in (ONE, THIRTY, SMALL, LARGE):
            splits = accounts.splits(TABLETS if accounts is THIRTY else 1)
            await db.create_table(accounts.table, splits)
            await traffic.fill(accounts)
        measured.round_trips = await traffic.round_trips(ONE)
        measured.tablets_by_server = sorted((await _tablets(db)).values())


async def _tablets(db: aio.Database) -> Counter[str]:
    """How many tablets of the split table each server has."""
    engine = db._engine
    table_id = (await engine.table(THIRTY.table, engine.now() + 10)).table_id
    starts = ["", *THIRTY.splits(TABLETS)]
    found = [engine.tablets.locate(table_id, start.encode()) for start in starts]
    return Counter(location.address for location in found if location is not None)


async def run_asyncio(address: str, meter: Meter, measured: Measurements) -> None:
    """One run of the asyncio slices."""
    async with aio.connect(address) as db:
        traffic = Traffic(db, meter)
        costs = measured.costs
        # Not measured: connections, the tablet map and caches, which the first slice would pay for.
        await traffic.raw_writes(ONE, IN_FLIGHT, IN_FLIGHT)
        await traffic.read_write(THIRTY, IN_FLIGHT, IN_FLIGHT)
        costs["raw write"].add(await traffic.raw_writes(ONE, RAW, IN_FLIGHT))
        costs["write-only"].add(await traffic.write_only(ONE, TRANSACTIONS, IN_FLIGHT))
        costs["read-write"].add(await traffic.read_write(ONE, TRANSACTIONS, IN_FLIGHT))
        with _default_collector():
            costs["default raw"].add(await traffic.raw_writes(ONE, RAW, IN_FLIGHT))
            costs["default write-only"].add(await traffic.write_only(ONE, TRANSACTIONS, IN_FLIGHT))
        costs["raw read"].add(await traffic.raw_reads(ONE, RAW, IN_FLIGHT))
        costs["snapshot read"].add(await traffic.snapshot_reads(ONE, RAW, IN_FLIGHT))
        costs["lone read"].add(await traffic.lone_reads(ONE, RAW, IN_FLIGHT))
        costs["single read"].add(await traffic.single_reads(ONE, RAW, IN_FLIGHT))
        costs["two tablets"].add(await traffic.write_two(THIRTY, TRANSACTIONS, IN_FLIGHT))
        costs["thirty raw"].add(await traffic.raw_writes(THIRTY, RAW, IN_FLIGHT))
        costs["thirty"].add(await traffic.read_write(THIRTY, TRANSACTIONS, IN_FLIGHT))
        costs["small"].add(await traffic.read_write(SMALL, TRANSACTIONS, IN_FLIGHT))
        costs["large"].add(await traffic.read_write(LARGE, TRANSACTIONS, IN_FLIGHT))


async def run_two_phases(address: str, measured: Measurements, meter: Meter) -> None:
    """Transactions in two phases, as between tablets."""
    async with aio.connect(address, limits=Limits(one_round_cells_max=0)) as db:
        traffic = Traffic(db, meter)
        costs = measured.costs
        await traffic.read_write(ONE, IN_FLIGHT, IN_FLIGHT)
        costs["two phases write-only"].add(await traffic.write_only(ONE, TRANSACTIONS, IN_FLIGHT))
        costs["two phases read-write"].add(await traffic.read_write(ONE, TRANSACTIONS, IN_FLIGHT))


def run_threads(directory: Path, measured: Measurements) -> None:
    """Measures only the blocking threads, to compare two revisions quickly."""
    with LocalCluster(directory, tablet_servers=SERVERS) as cluster:
        meter = Meter(cluster)
        asyncio.run(_fill_one(cluster.address, meter))
        for _ in range(RUNS):
            cost = threads_read_write(cluster.address, meter, ONE, BLOCKING, THREADS)
            measured.costs["threads"].add(cost)


def run_scans(directory: Path, report: Report) -> None:
    """Measures only scans that keep one row of a hundred, in turns."""
    runs: defaultdict[str, list[Cost]] = defaultdict(list)
    with LocalCluster(directory, tablet_servers=SERVERS) as cluster:
        meter = Meter(cluster)
        asyncio.run(_fill_large(cluster.address, meter))
        for _ in range(SCAN_RUNS):
            for name, cost in scans_of_one_percent(cluster.address, meter, LARGE).items():
                runs[name].append(cost)
    for measure, of in (
        ("time", attrgetter("seconds")),
        ("CPU of all processes", lambda cost: sum(cost.cpu_seconds.values())),
    ):
        in_client, *others = ((name, [*map(of, costs)]) for name, costs in runs.items())
        for name, found in (in_client, *others):
            report.add(f"a million rows {name}, {measure}", median(found), "s")
        for name, found in others:
            ratio = median(map(truediv, in_client[1], found))
            report.add(f"{in_client[0]} ÷ {name}, {measure}", ratio, "×")


def run_indexes(directory: Path, report: Report) -> None:
    """Measures only writes of a column: without an index, with the same entries kept by hand, and
    with an index, in turns."""
    costs: defaultdict[str, Costs] = defaultdict(Costs)
    with LocalCluster(directory, tablet_servers=SERVERS) as cluster:
        asyncio.run(_measure_indexes(cluster.address, Meter(cluster), costs))
    for name, found in costs.items():
        title = f"read-write of a column, {name}, {IN_FLIGHT:,} in flight"
        report.add(title, found.rate, "/s")
        _cpu(report, title, found)
    indexed = costs["indexed"]
    for name, must in (("plain", INDEXED_MUST), ("entries by hand", BY_HAND_MUST)):
        other = costs[name]
        report.add(f"time: indexed / {name}", other.rate / indexed.rate, "×", must=must)
        ratio = indexed.cpu_micros / other.cpu_micros
        report.add(f"CPU: indexed / {name}", ratio, "×", must=must)


async def _measure_indexes(address: str, meter: Meter, costs: dict[str, Costs]) -> None:
    async with aio.connect(address) as db:
        traffic = Traffic(db, meter)
        for accounts in (PLAIN, BY_HAND, INDEXED):
            await db.create_table(accounts.table, accounts.splits(TABLETS_OF_INDEXED))
            await traffic.fill(accounts)
        await db.create_table(ENTRIES)
        await db.create_index(INDEXED.balance)
        count = TRANSACTIONS
        for run in range(RUNS + 1):
            found = {
                "plain": await traffic.read_write(PLAIN, count, IN_FLIGHT),
                "entries by hand": await traffic.read_write_with_entry(
                    BY_HAND, ENTRIES, count, IN_FLIGHT
                ),
                "indexed": await traffic.read_write(INDEXED, count, IN_FLIGHT),
            }
            if run:  # the first one pays for connections and caches
                for name, cost in found.items():
                    costs[name].add(cost)


async def _fill_large(address: str, meter: Meter) -> None:
    async with aio.connect(address) as db:
        await db.create_table(LARGE.table, LARGE.splits(SERVERS))
        await Traffic(db, meter).fill(LARGE)


async def _fill_one(address: str, meter: Meter) -> None:
    async with aio.connect(address) as db:
        await db.create_table(ONE.table)
        await Traffic(db, meter).fill(ONE)


def run(directory: Path, measured: Measurements) -> None:
    """Runs all measurements."""
    with (
        LocalCluster(directory, tablet_servers=SERVERS) as cluster,
        postgresql.running_if_installed() as other,
    ):
        meter = Meter(cluster)
        print("filling 1,210,000 rows", flush=True)
        asyncio.run(prepare(cluster.address, meter, measured))
        if other is not None:
            other.fill(ONE.rows)
        for number in range(RUNS):
            print(f"run {number + 1} of {RUNS}", flush=True)
            asyncio.run(run_asyncio(cluster.address, meter, measured))
            asyncio.run(run_two_phases(cluster.address, measured, meter))
            cost = threads_read_write(cluster.address, meter, ONE, BLOCKING, THREADS)
            measured.costs["threads"].add(cost)
            measured.latencies += lone_latencies(cluster.address, ONE, LONE)
            if other is not None:
                measured.postgresql[THREADS].append(
                    other.run_pgbench(READ_WRITE, POSTGRESQL, THREADS)
                )
                measured.postgresql[1].append(other.run_pgbench(READ_WRITE, LONE, 1))
                measured.psycopg.append(other.run_psycopg(READ_WRITE, POSTGRESQL, THREADS))
                measured.psycopg_latencies += other.run_psycopg(
                    READ_WRITE, LONE, 1, seed=2
                ).latencies


@contextmanager
def _default_collector() -> Iterator[None]:
    """Python's garbage collector with its default settings.

    With a thousand transactions in flight it repeatedly scans objects that would be freed anyway.
    """
    gc.unfreeze()
    gc.set_threshold(*DEFAULT_COLLECTOR)
    yield
    tune_garbage_collector()


# ---------------------------------------------------------------------------------- report


def fill_in(found: Report, measured: Measurements) -> None:
    costs = measured.costs
    _ratios(found, costs)
    _throughput(found, measured)
    writing, reading = measured.round_trips
    must_write, must_read = ROUND_TRIPS_MUST
    found.add("round trips, write-only", writing, "", must=must_write)
    found.add("round trips, read-write", reading, "", must=must_read)
    _latency(found, "read-write, 1 blocking thread", measured.latencies)
    growth = costs["large"].cpu_micros / costs["small"].cpu_micros
    found.add("CPU: read-write, 1,000,000 rows / 10,000 rows", growth, "×", must=CHANGE_MUST)
    for name, title in _TITLES.items():
        _cpu(found, title, costs[name])
    _other(found, measured)


def fill_in_threads(found: Report, costs: Costs) -> None:
    title = _TITLES["threads"]
    found.add(title, costs.rate, "/s")
    found.add("    cores used by all processes", costs.cores_used, "")
    _cpu(found, title, costs)


def _cpu(found: Report, title: str, costs: Costs) -> None:
    found.add(f"CPU, {title}", costs.cpu_micros, "µs")
    for kind in KINDS:
        found.add(f"    of which {kind}", costs.micros_of(kind), "µs")


_TITLES = {
    "raw write": f"raw write, {ONE_TABLET}",
    "write-only": f"write-only, {ONE_TABLET}",
    "read-write": f"read-write, {ONE_TABLET}",
    "two phases write-only": f"write-only in two phases, {ONE_TABLET}",
    "two phases read-write": f"read-write in two phases, {ONE_TABLET}",
    "two tablets": f"write-only over two tablets, asyncio, {IN_FLIGHT:,} in flight",
    "default raw": f"raw write, {ONE_TABLET}, default collector",
    "default write-only": f"write-only, {ONE_TABLET}, default collector",
    "raw read": f"raw read, {ONE_TABLET}",
    "snapshot read": f"snapshot read, {ONE_TABLET}",
    "lone read": f"read in its own snapshot, {ONE_TABLET}",
    "single read": f"read with db.get, {ONE_TABLET}",
    "thirty raw": f"raw write, {THIRTY_TABLETS}",
    "thirty": f"read-write, {THIRTY_TABLETS}",
    "threads": f"read-write, {BLOCKING_THREADS}",
}


def _ratios(found: Report, costs: dict[str, Costs]) -> None:
    default = "raw write / write-only, default collector"
    for raw, name, title, must in (
        ("raw write", "write-only", "raw write / write-only", WRITE_ONLY_MUST),
        ("default raw", "default write-only", default, None),
        ("raw write", "read-write", "raw write / read-write", READ_WRITE_MUST),
        ("raw write", "two phases write-only", "raw write / write-only in two phases", None),
        ("raw write", "two phases read-write", "raw write / read-write in two phases", None),
        ("raw write", "two tablets", "raw write / write-only over two tablets", None),
        ("raw read", "snapshot read", "raw read / read in one snapshot", SNAPSHOT_READ_MUST),
        ("raw read", "lone read", "raw read / read in its own snapshot", LONE_READ_MUST),
        ("raw read", "single read", "raw read / read with db.get", None),
    ):
        ratio = costs[raw].cpu_micros / costs[name].cpu_micros
        found.add(f"CPU: {title}", ratio, "×", must=must, at_least=True)
    for name, title, most in (
        ("thirty", "3 servers x 10 tablets / 1 tablet", THIRTY_TABLETS_MUST),
        ("threads", f"{THREADS} blocking threads / asyncio", BLOCKING_MUST),
    ):
        ratio = costs[name].cpu_micros / costs["read-write"].cpu_micros
        found.add(f"CPU: read-write, {title}", ratio, "×", must=most)
    spread, one = (costs[name].micros_of(TABLET_SERVERS) for name in ("thirty", "read-write"))
    name = "CPU of tablet servers: read-write, 3 servers x 10 tablets / 1 tablet"
    found.add(name, spread / one, "×", must=THIRTY_TABLETS_SERVERS_MUST)


def _throughput(found: Report, measured: Measurements) -> None:
    costs = measured.costs
    for name, title in _TITLES.items():
        found.add(f"{title}", costs[name].rate, "/s")
        if name in ("read-write", "thirty", "threads"):
            found.add("    cores used by all processes", costs[name].cores_used, "")
            client = 1e6 / costs[name].micros_of("client")
            found.add("    if the client's one core were the only limit", client, "/s")
    spread = measured.tablets_by_server
    found.add("fewest of the thirty tablets on one server", min(spread), "")


def _latency(found: Report, what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    found.add(f"latency, {what}, median", median(ordered) * 1e3, "ms")
    found.add(f"latency, {what}, 90 of 100", ordered[len(ordered) * 9 // 10] * 1e3, "ms")


def _other(found: Report, measured: Measurements) -> None:
    """PostgreSQL's figures, and ours against them."""
    if not measured.psycopg:
        return
    costs = measured.costs
    for connections, runs in measured.postgresql.items():
        _postgresql_cost(found, f"PostgreSQL read-write, {connections} connections", runs)
    _postgresql_cost(
        found, f"PostgreSQL read-write, psycopg in {THREADS} threads", measured.psycopg
    )
    _latency(found, "PostgreSQL read-write, psycopg in 1 thread", measured.psycopg_latencies)
    cpu = median(cost.cpu_micros for cost in measured.postgresql[THREADS])
    name = f"CPU: PostgreSQL, {THREADS} connections / read-write, {IN_FLIGHT:,} in flight"
    ratio = cpu / costs["read-write"].cpu_micros
    found.add(name, ratio, "×", must=POSTGRESQL_CPU_MUST, at_least=True)
    for what, runs, must in (
        (f"{THREADS} connections of pgbench", measured.postgresql[THREADS], POSTGRESQL_RATE_MUST),
        (f"psycopg in {THREADS} threads", measured.psycopg, PSYCOPG_RATE_MUST),
    ):
        name = f"rate: read-write, {THREADS} blocking threads / PostgreSQL, {what}"
        ratio = costs["threads"].rate / median(cost.rate for cost in runs)
        found.add(name, ratio, "×", must=must, at_least=True)
    ratio = median(measured.latencies) / median(measured.psycopg_latencies)
    name = "latency: read-write, 1 blocking thread / PostgreSQL, psycopg in 1 thread"
    found.add(name, ratio, "×", must=PSYCOPG_LATENCY_MUST)


def _postgresql_cost(found: Report, what: str, runs: list[PostgresqlCost]) -> None:
    found.add(what, median(cost.rate for cost in runs), "/s")
    found.add(f"CPU, {what}", median(cost.cpu_micros for cost in runs), "µs")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transactions", description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the stores are (default: temporary)")
    parser.add_argument(
        "--threads",
        action="store_true",
        help="measure only the blocking threads, and write no file",
    )
    parser.add_argument(
        "--scans",
        action="store_true",
        help="measure only scans with a condition, and write no file (about 2 minutes)",
    )
    parser.add_argument(
        "--indexes",
        action="store_true",
        help="measure only writes with and without an index, and write no file (about a minute)",
    )
    options = parser.parse_args()
    report = Report("transactions")
    measured = Measurements()
    tune_garbage_collector()
    # On a busy machine all of a thousand concurrent transactions are slow and would be logged.
    logging.getLogger("percolator.transactions").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="bench-tx-", dir=options.directory) as directory:
        if options.scans:
            run_scans(Path(directory), report)
            return report.show()
        if options.indexes:
            run_indexes(Path(directory), report)
            return report.show()
        if options.threads:
            run_threads(Path(directory), measured)
            fill_in_threads(report, measured.costs["threads"])
            return report.show()
        run(Path(directory), measured)
    fill_in(report, measured)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
