"""make bench-spark: rows per second between Spark and a cluster, on one machine.

`local[2]` Spark and a cluster of processes with one tablet server and synced writes share the
machine. The table has four tablets, keys of 10 bytes in random order, and values of 100 bytes.
Figures are medians of three runs, after a warm-up that pays for the session, the first job and the
connections. CPU time depends less on other load on the machine than the rate does; "if all cores
were free" is the number of cores divided by the CPU time per row.

The other sides of its ratios are measured in the same runs: local Parquet files, and PostgreSQL,
into which Spark's executors upsert the same rows, if it is installed (spark_others.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as spark_sql

import percolator
from benchmarks import postgresql
from benchmarks.postgresql import Postgresql
from benchmarks.report import Report
from benchmarks.spark_others import upsert
from benchmarks.spark_stream import stream_latencies
from percolator import Table
from percolator.spark.bulk_loading import bulk_load
from services.local.cluster import LocalCluster

ROWS = 200_000
RUNS = 3
TABLETS = 4
SPLITS = ["2500000000", "5000000000", "7500000000"]
KEYS = 9_999_999_967
"""A prime: multiples of another prime, modulo this one, are distinct and in no order."""
VALUE_BYTES = 100
TRANSACTION_ROWS = 1_000
CATALOG = json.dumps(
    {"key": {"name": "key", "type": "text"}, "columns": {"value": {"type": "text"}}}
)
TITLES = {
    "write": f"write, transactions of {TRANSACTION_ROWS:,} rows",
    "atomic": "write of all rows in one atomic job",
    "scan after atomic": "full scan after it, which settles its locks",
    "overwrite": "overwrite of a table of as many rows",
    "bulk load": "bulk load, arranging included",
    "full scan": "full scan",
    "parquet write": "Parquet, write",
    "parquet scan": "Parquet, scan",
    "postgresql": f"PostgreSQL, upserts of {TRANSACTION_ROWS:,} rows per transaction",
}
CPU_MUSTS = {
    ("bulk load", "write"): 0.25,
    ("full scan", "write"): 0.3,
    ("bulk load", "parquet write"): 1.0,
    ("full scan", "parquet scan"): 1.5,
}
"""CPU per row of all processes, as a share of the other's at most."""
RATE_MUSTS = {("atomic", "write"): 0.6, ("write", "postgresql"): 0.9}
"""Rows per second, as a share of the other's at least."""


class Cost:
    """The cost of one slice: wall time, and CPU by kind of process."""

    def __init__(self, seconds: float, cpu_seconds: dict[str, float]) -> None:
        self.rate = ROWS / seconds
        self.micros = {kind: cpu / ROWS * 1e6 for kind, cpu in cpu_seconds.items()}


def measured(work: Callable[[], None]) -> Cost:
    """The cost to this process and to all processes that it has started."""
    before, began = _cpu(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    after = _cpu()
    return Cost(seconds, {kind: after[kind] - before.get(kind, 0.0) for kind in after})


def _cpu() -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue  # it has ended
        found[_kind(command)] += times.user + times.system
        if "pyspark.daemon" in command:
            # Worker processes that have ended.
            found[_kind(command)] += times.children_user + times.children_system
    return dict(found)


def _kind(command: str) -> str:
    if "services.tabletserver" in command:
        return "tablet server"
    if "services." in command and "org.apache.spark" not in command:
        return "other services"
    return "Spark, Python" if "pyspark.daemon" in command else "Spark, Java and driver"


def session(directory: Path, memory: str = "1g") -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    found = (
        SparkSession.builder.master("local[2]")
        .appName("percolator-benchmark")
        .config("spark.driver.memory", memory)
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", str(TABLETS))
        .config("spark.sql.warehouse.dir", str(directory))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    found.sparkContext.setLogLevel("ERROR")
    return found


def rows(spark: SparkSession) -> DataFrame:
    """Rows cached in memory, so that making them is not measured."""
    number = spark_sql.col("id")
    key = spark_sql.format_string("%010d", (number * 2_654_435_761) % KEYS)
    value = spark_sql.rpad(number.cast("string"), VALUE_BYTES, "x")
    frame = spark.range(ROWS).select(key.alias("key"), value.alias("value"))
    frame = frame.repartition(TABLETS).cache()
    if frame.count() != ROWS:
        raise SystemExit(f"the data frame does not have {ROWS} rows")
    return frame


def run(directory: Path, costs: defaultdict[str, list[Cost]]) -> list[float]:
    """Fills in the costs, and returns the latencies of a stream in seconds."""
    spark = session(directory / "warehouse")
    frame = rows(spark)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "cluster", tablet_servers=1))
        db = stack.enter_context(percolator.connect(cluster.address))
        binaries = postgresql.found()
        if binaries is None:
            print("PostgreSQL is not installed (Debian: apt-get install postgresql); skipping it")
        other = None if binaries is None else stack.enter_context(postgresql.running(binaries))
        for number in range(RUNS + 1):
            print(f"run {number} of {RUNS}" if number else "warming up", flush=True)
            found = one_run(db, cluster.address, frame, number)
            found |= others(frame, directory / f"parquet-{number}", other)
            for name, cost in found.items():
                if number:
                    costs[name].append(cost)
        print("streaming", flush=True)
        latencies = stream_latencies(spark, db, cluster.address, directory / "checkpoint")
        spark.stop()
        return latencies


def one_run(
    db: percolator.Database, address: str, frame: DataFrame, number: int
) -> dict[str, Cost]:
    spark = frame.sparkSession
    written, locked, loaded = (f"{name}-{number}" for name in ("written", "locked", "loaded"))
    for name in (written, locked, loaded):
        db.create_table(Table(name), SPLITS)

    def options(table: str) -> dict[str, Any]:
        return {"address": address, "table": table, "catalog": CATALOG}

    def write(table: str, mode: str = "append", **more: object) -> None:
        writer = frame.write.format("percolator").options(**options(table) | more)
        writer.mode(mode).save()

    def scan(table: str) -> None:
        read = spark.read.format("percolator").options(**options(table)).load()
        read.write.format("noop").mode("overwrite").save()

    costs = {
        "write": measured(lambda: write(written, transaction_rows=TRANSACTION_ROWS)),
        "full scan": measured(lambda: scan(written)),
        "atomic": measured(lambda: write(locked, atomic="true")),
        "scan after atomic": measured(lambda: scan(locked)),
        "overwrite": measured(lambda: write(written, mode="overwrite")),
        "bulk load": measured(lambda: bulk_load(frame, **options(loaded))),
    }
    for name in (written, locked, loaded):
        found = spark.read.format("percolator").options(**options(name)).load().count()
        if found != ROWS:
            raise SystemExit(f"table {name} has {found} rows, not {ROWS}")
        db.drop_table(Table(name))
    return costs


def others(frame: DataFrame, files: Path, server: Postgresql | None) -> dict[str, Cost]:
    """What the same rows cost elsewhere."""
    spark = frame.sparkSession
    costs = {
        "parquet write": measured(lambda: frame.write.parquet(str(files))),
        "parquet scan": measured(
            lambda: spark.read.parquet(str(files)).write.format("noop").mode("overwrite").save()
        ),
    }
    if server is not None:
        server.create_pairs()
        before = server.server_seconds()
        cost = measured(lambda: upsert(frame, server.socket_directory, TRANSACTION_ROWS))
        # It is no child of this process.
        cost.micros["PostgreSQL"] = (server.server_seconds() - before) / ROWS * 1e6
        costs["postgresql"] = cost
    return costs


def fill_in(report: Report, costs: dict[str, list[Cost]]) -> None:
    titles = {name: title for name, title in TITLES.items() if costs[name]}
    totals = {name: median(sum(cost.micros.values()) for cost in costs[name]) for name in titles}
    rates = {name: median(cost.rate for cost in costs[name]) for name in titles}
    for (name, other), must in RATE_MUSTS.items():
        if other in rates:
            ratio = rates[name] / rates[other]
            report.add(f"rows/s: {name} / {other}", ratio, "×", must=must, at_least=True)
    for (name, other), must in CPU_MUSTS.items():
        report.add(f"CPU: {name} / {other}", totals[name] / totals[other], "×", must=must)
    for name, title in titles.items():
        report.add(title, rates[name], "rows/s")
        free = 1e6 * _cores() / totals[name]
        report.add(f"    if all {os.cpu_count()} cores were free", free, "rows/s")
        report.add("    CPU per row, all processes", totals[name], "µs")
        for kind in sorted({kind for cost in costs[name] for kind in cost.micros}):
            micros = median(cost.micros.get(kind, 0.0) for cost in costs[name])
            report.add(f"        {kind}", micros, "µs")


def _cores() -> int:
    return os.cpu_count() or 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the stores are (default: temporary)")
    given = parser.parse_args()
    report = Report("spark")
    costs: defaultdict[str, list[Cost]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench-spark-", dir=given.directory) as directory:
        latencies = sorted(run(Path(directory), costs))
    fill_in(report, costs)
    report.add("stream: commit to foreachBatch, median", median(latencies) * 1000, "ms")
    report.add("    of 20, the slowest", latencies[len(latencies) * 19 // 20] * 1000, "ms")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
