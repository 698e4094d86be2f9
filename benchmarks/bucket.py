"""make bench-bucket: what it costs to keep a cluster's data in an object store.

The store is `benchmarks/object_store.py`, which answers 5 and 20 ms late and counts its requests;
with and without leases, next to a directory. Where Ceph is installed, a real one runs as well,
whose requests are not counted. Each place has a cluster of its own, and all of them take turns, so
that other load on the machine meets them alike: what is judged are ratios within one run, and
counts.

A "read-write" reads a cell and writes it back; a "read" has a snapshot, and so a timestamp, of its
own. Calls "in the way" are those for which an operation waits: creations of log entries, looks at
the log of a tablet, and looks at the oracle's record.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import structlog

from benchmarks import failover_tablets
from benchmarks.failover_tablets import SERVERS
from benchmarks.object_store import ObjectStore, object_store
from benchmarks.report import Report
from benchmarks.transaction_cost import TABLET_SERVERS, Costs, Meter
from benchmarks.transaction_traffic import Accounts, Traffic
from percolator import Limits, aio, tune_garbage_collector
from percolator.bucket.bucket import Bucket
from percolator.bucket.place import UNFINISHED, parse_bucket
from percolator.bucket.s3 import s3_attempts
from percolator.services.chassis.files import DiskThreads
from percolator.services.local.cluster import LocalCluster
from percolator.services.tabletserver.bucket_store import BucketStorage, BucketTabletStore
from percolator.services.tabletserver.leveldb_cache import LevelDBCaches
from percolator.services.tabletserver.storage import Ancestry
from percolator.tablet.state import TabletIdentity
from percolator.world import MachineClock, machine_random
from tests.bucket.ceph import CephError, started_ceph

RUNS = 3
ONE = Accounts.of("one-tablet", 20_000)
THIRTY = Accounts.of("thirty-tablets", 20_000)
TABLETS = 30
IN_FLIGHT = 1_000
READERS = 64
LONE = 40
WRITES = 4_000
READS = 2_000
PATIENT = Limits(call_seconds=60.0)
LEASE_SECONDS = 1.0
TITLES = {ONE: "1 tablet", THIRTY: f"{TABLETS} tablets"}

IDLE_TABLETS = 100
IDLE_SECONDS = 30.0
MANY_TABLETS = 1_000
KILLED_TABLETS = 90
"""A third of them are on the server that is killed."""
KILLED_BYTES = 16 << 20
OVERWRITTEN_ROWS = 65_536
ROW_BYTES = 1_024
BATCHES_PER_HOUR = 36_000
"""Ten in a second."""

LOCAL = "a directory"
CALLS_PER_COMMIT_MUST = 1.0
LONE_CALLS_MUST = 4.0
LONE_CALLS_WITH_LEASES_MUST = 2.0
READ_CALLS_MUST = 0.1
RATE_MUST = 0.5
CPU_MUST = 1.3
FIRST_SECONDS_MUST = 2.0
ALL_SECONDS_MUST = 10.0
UPLOADED_MUST = 6.0
IDLE_REQUESTS_MUST = 5.0
MEMORY_MUST = 1.2


class Place(NamedTuple):
    """Where a cluster keeps its data."""

    name: str
    address: str = ""
    """Address of the bucket; empty for a directory."""
    counted: ObjectStore | None = None
    milliseconds: float = 0.0
    lease_seconds: float = 0.0

    def program(self, _: str, service: str) -> list[str]:
        leased = self.lease_seconds and service in ("oracle", "tabletserver")
        return [service, *([f"--lease-seconds={self.lease_seconds}"] if leased else [])]


class Measured:
    """Figures of one place."""

    def __init__(self, place: Place, cluster: LocalCluster) -> None:
        self.place = place
        self.cluster = cluster
        self.meter = Meter(cluster)
        self.costs: defaultdict[str, Costs] = defaultdict(Costs)
        self.operations: Counter[str] = Counter()
        self.requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By the name of the operation."""
        self.commits = 0.0
        """Group commits of read-writes."""

    @contextmanager
    def counting(self, name: str, operations: int) -> Iterator[None]:
        """Counts the requests at the store until the block ends."""
        counted = self.place.counted
        before = counted.counts()[0] if counted else Counter[str]()
        yield
        if counted:
            self.requests[name] += counted.counts()[0] - before
            self.operations[name] += operations

    def calls(self, name: str, *kinds: str) -> float:
        """Requests of these kinds per operation."""
        return sum(self.requests[name][kind] for kind in kinds) / self.operations[name]

    def group_commits(self) -> float:
        found = 0.0
        for server, process in self.cluster.processes.items():
            if server.startswith("tabletserver"):
                address = process.wait_ready(1.0).metrics_address
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
                lines = re.findall(r"^\w+_batches_synced_total{.*} (.+)$", text, re.MULTILINE)
                found += sum(map(float, lines))
        return found


IN_THE_WAY = ("create log", "head log", "read oracle")


async def prepare(measured: Measured) -> None:
    async with aio.connect(measured.cluster.address, limits=PATIENT) as db:
        made = Traffic(db, measured.meter)
        for accounts in TITLES:
            splits = accounts.splits(TABLETS if accounts is THIRTY else 1)
            await db.create_table(accounts.table, splits)
            await made.fill(accounts)


async def run_slices(measured: Measured) -> None:
    """One turn of a place."""
    async with aio.connect(measured.cluster.address, limits=PATIENT) as db:
        made = Traffic(db, measured.meter)
        for accounts in TITLES:  # from here on, connections and caches are there
            await made.read_write(accounts, IN_FLIGHT, IN_FLIGHT)
        with measured.counting("lone", LONE):
            measured.costs["lone"].add(await made.read_write(ONE, LONE, 1))
        for accounts, title in TITLES.items():
            with measured.counting(f"read {title}", READS):
                await made.lone_reads(accounts, READS, READERS)
            commits = measured.group_commits()
            with measured.counting(f"read-write {title}", WRITES):
                cost = await made.read_write(accounts, WRITES, IN_FLIGHT)
            measured.commits += measured.group_commits() - commits
            measured.costs[f"read-write {title}"].add(cost)


def beside_a_directory(directory: Path, place: Place) -> tuple[Measured, Measured]:
    """The place, and a directory, measured in turns: other load on the machine meets both."""
    with ExitStack() as stack:
        both = []
        for one in (Place(LOCAL), place):
            cluster = LocalCluster(
                directory / one.name.replace(" ", "-"),
                store=one.address,
                tablet_servers=SERVERS,
                program=one.program,
            )
            both.append(Measured(one, stack.enter_context(cluster)))
        for measured in both:
            asyncio.run(prepare(measured))
        for number in range(RUNS):
            print(f"{place.name}: run {number + 1} of {RUNS}", flush=True)
            for measured in both:
                asyncio.run(run_slices(measured))
    local, other = both
    return local, other


def traffic(directory: Path, report: Report) -> None:
    for milliseconds in (5, 20):
        for lease, leases in ((0.0, ""), (LEASE_SECONDS, ", leases")):
            with object_store() as store:
                store.delay(milliseconds)
                place = Place(
                    f"{milliseconds} ms away{leases}",
                    store.address("traffic"),
                    store,
                    milliseconds,
                    lease,
                )
                local, other = beside_a_directory(directory / place.name, place)
            _report_calls(report, other)
            _report_ratios(report, local, other)


def on_ceph(directory: Path, report: Report) -> None:
    """Traffic on Ceph, without counts of calls, if it is installed."""
    with ExitStack() as stack:
        try:
            ceph = stack.enter_context(started_ceph())
        except CephError as error:
            print(f"not on Ceph: {error}")
            return
        os.environ |= ceph.account.environment()
        place = Place("Ceph on this machine", str(ceph.new_bucket()))
        local, other = beside_a_directory(directory, place)
    _report_ratios(report, local, other)


def _report_calls(report: Report, found: Measured) -> None:
    place = found.place
    appended = sum(
        found.requests[f"read-write {title}"][kind]
        for title in TITLES.values()
        for kind in ("create log", "read log")
    )
    report.add(
        f"appended batch: calls per group commit, {place.name}",
        appended / found.commits,
        "",
        must=CALLS_PER_COMMIT_MUST,
    )
    must = LONE_CALLS_WITH_LEASES_MUST if place.lease_seconds else LONE_CALLS_MUST
    report.add(
        f"lone read-write: calls in the way, {place.name}",
        found.calls("lone", *IN_THE_WAY),
        "",
        must=must,
    )
    _each_kind(report, found, "lone")
    for title in TITLES.values():
        name = f"read {title}"
        report.add(
            f"read, {READERS} in flight, {title}: calls each, {place.name}",
            found.calls(name, *IN_THE_WAY),
            "",
            must=READ_CALLS_MUST if title == TITLES[ONE] else None,
        )
        _each_kind(report, found, name)


def _each_kind(report: Report, found: Measured, name: str) -> None:
    for kind in IN_THE_WAY:
        report.add(f"    of which {kind}", found.calls(name, kind), "")


def _report_ratios(report: Report, local: Measured, other: Measured) -> None:
    place = other.place
    lone = [one.costs["lone"].rate for one in (local, other)]
    report.add(f"lone read-write: time, {place.name} / {LOCAL}", lone[0] / lone[1], "×")
    is_judged = place.milliseconds == 20
    for title in TITLES.values():
        name = f"read-write {title}"
        what = f"read-write, {IN_FLIGHT:,} in flight, {title}, {place.name} / {LOCAL}"
        rates = [one.costs[name].rate for one in (local, other)]
        report.add(
            f"rate: {what}",
            rates[1] / rates[0],
            "×",
            must=RATE_MUST if is_judged else None,
            at_least=True,
        )
        micros = [one.costs[name].micros_of(TABLET_SERVERS) for one in (local, other)]
        report.add(f"CPU of tablet servers: {what}", micros[1] / micros[0], "×", must=CPU_MUST)
        if place.counted:
            _each_kind(report, other, name)


# ---------------------------------------------------------------------------------- failover


async def fail_over(directory: Path, report: Report, store: str, name: str) -> None:
    async with failover_tablets.site(directory, KILLED_TABLETS, store) as at:
        await at.create()
        await at.fill_logs(KILLED_BYTES)
        killed = len(await at.of_victim())
        found = await at.fail_over()
    title = f"{killed} tablets of {KILLED_BYTES >> 20} MiB after kill -9, {name}"
    is_judged = bool(store)
    # Seconds are counted, as an exception: users wait for them, and a timeout is most of it.
    report.add(f"{title}: seconds until the first is served", found.first_seconds, "",
               must=FIRST_SECONDS_MUST if is_judged else None)  # fmt: skip
    report.add(f"{title}: seconds until all are served", found.all_seconds, "",
               must=ALL_SECONDS_MUST if is_judged else None)  # fmt: skip


def failovers(directory: Path, report: Report) -> None:
    asyncio.run(fail_over(directory / "local", report, "", LOCAL))
    with object_store() as store:
        store.delay(5)
        asyncio.run(fail_over(directory / "bucket", report, store.address("f"), "5 ms away"))
        requests, uploaded = store.counts()
    report.add("    requests until then", requests.total(), "")
    report.add("    uploaded", uploaded >> 20, "MiB")


# ---------------------------------------------------------------------------------- idle clusters


async def idle(directory: Path, report: Report) -> None:
    with object_store() as store:
        async with failover_tablets.site(directory, IDLE_TABLETS, store.address("i")) as at:
            await at.create()
            await asyncio.sleep(IDLE_SECONDS / 3)
            before, began = store.counts()[0], time.monotonic()
            await asyncio.sleep(IDLE_SECONDS)
            requests = store.counts()[0] - before
            seconds = time.monotonic() - began
    title = f"idle cluster of {IDLE_TABLETS} tablets: requests per second"
    report.add(title, requests.total() / seconds, "", must=IDLE_REQUESTS_MUST)
    for kind, count in sorted(requests.items()):
        report.add(f"    of which {kind}", count / seconds, "")


async def memory(directory: Path, store: str) -> float:
    """The size of a server with a third of many idle tablets."""
    async with failover_tablets.site(directory, MANY_TABLETS, store) as at:
        await at.create()
        return float(psutil.Process(at.victim.pid).memory_info().rss)


def memories(directory: Path, report: Report) -> None:
    local = asyncio.run(memory(directory / "local", ""))
    with object_store() as store:
        other = asyncio.run(memory(directory / "bucket", store.address("m")))
    title = f"memory of a tablet server with {MANY_TABLETS // SERVERS} idle tablets"
    report.add(f"{title}, a bucket / {LOCAL}", other / local, "×", must=MEMORY_MUST)


# ---------------------------------------------------------------------------------- overwriting


async def overwritten(directory: Path, store: ObjectStore, rows_per_batch: int) -> float:
    """Uploaded bytes per written byte, of one tablet whose rows are overwritten at random for an
    hour, in as little time as that takes."""
    place = parse_bucket(store.address(f"o{rows_per_batch}"))
    clock, world_random = MachineClock(), machine_random()
    attempts = s3_attempts(place, attempt_seconds=30.0)
    bucket = Bucket(attempts, clock, world_random, attempt_seconds=30.0, seconds=60.0)
    log = structlog.get_logger("benchmark")
    chance = random.Random(rows_per_batch)
    with DiskThreads(2, "overwritten") as threads:
        caches = LevelDBCaches(directory, threads, world_random)
        tablets = BucketTabletStore(bucket, caches, clock, world_random, log)
        ownership = await tablets.take_over(TabletIdentity(1, 1, 1, b"", b""), Ancestry())
        storage = await tablets.open(ownership, open_tablets=1)
        for first in range(0, OVERWRITTEN_ROWS, 512):
            await _write(storage, range(first, first + 512), chance)
        before, written = store.counts()[1], 0
        for _ in range(BATCHES_PER_HOUR):
            some = [chance.randrange(OVERWRITTEN_ROWS) for _ in range(rows_per_batch)]
            written += await _write(storage, some, chance)
        uploaded = store.counts()[1] - before
        await storage.close()
    return uploaded / written


async def _write(
    storage: BucketStorage, rows: Iterator[int] | range | list[int], chance: random.Random
) -> int:
    batch, size = storage.batch(), 0
    for row in rows:
        key, value = b"%016d" % row, chance.randbytes(ROW_BYTES)
        batch.put(key, value)
        size += len(key) + len(value)
    await storage.write(batch)
    if storage._checkpointing is not None:
        # In an hour there is time for it between two batches.
        await asyncio.wait([storage._checkpointing])
    return size


def overwrites(directory: Path, report: Report) -> None:
    with object_store() as store:
        for rows in (1, 10):
            path = directory / str(rows)
            path.mkdir()
            ratio = asyncio.run(overwritten(path, store, rows))
            report.add(
                f"uploaded / written bytes: {OVERWRITTEN_ROWS * ROW_BYTES >> 20} MiB overwritten "
                f"at random for an hour, {10 * rows} KiB/s",
                ratio,
                "×",
                must=UPLOADED_MUST,
            )


PARTS = {
    "traffic": traffic,
    "ceph": on_ceph,
    "failover": failovers,
    "idle": lambda directory, report: asyncio.run(idle(directory, report)),
    "memory": memories,
    "overwrites": overwrites,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"only some of them: {', '.join(PARTS)}")
    chosen = parser.parse_args().parts or list(PARTS)
    if unknown := [one for one in chosen if one not in PARTS]:
        parser.error(f"not known: {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    os.environ[UNFINISHED] = "1"
    tune_garbage_collector()
    # On a busy machine all of a thousand concurrent transactions are slow and would be logged.
    logging.getLogger("percolator.transactions").setLevel(logging.ERROR)
    report = Report("bucket")
    with tempfile.TemporaryDirectory(prefix="bench-bucket-") as directory:
        for part in chosen:
            path = Path(directory) / part
            path.mkdir()
            PARTS[part](path, report)
    return report.finish(merge=chosen != list(PARTS))


if __name__ == "__main__":
    sys.exit(main())
