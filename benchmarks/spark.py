"""make bench-spark: rows per second between Spark and a cluster, on one machine.

`local[2]` Spark and a cluster of processes with one tablet server and synced writes share the
machine. The table has four tablets, keys of 10 bytes in random order, and values of 100 bytes.
Figures are medians of three runs, after a warm-up that pays for the session, the first job and the
connections. CPU time depends less on other load on the machine than the rate does; "if all cores
were free" is the number of cores divided by the CPU time per row.

The other sides of its ratios are measured in the same runs: local Parquet files, and PostgreSQL,
into which Spark's executors upsert the same rows, if it is installed (spark_others.py). What any
data source in Python costs at least is measured, too (spark_floor.py).

It can be run in parts, each of which measures both sides of its ratios: `make bench-spark
PARTS="append scan"`. A part replaces its own figures in var/benchmarks/spark.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as spark_sql

import percolator
from benchmarks import postgresql
from benchmarks.report import Report
from benchmarks.spark_steps import PARTS, ROWS, TABLETS, TRANSACTION_ROWS, Cost, Steps
from benchmarks.spark_stream import stream_latencies
from percolator.services.local.cluster import LocalCluster

RUNS = 3
KEYS = 9_999_999_967
"""A prime: multiples of another prime, modulo this one, are distinct and in no order."""
VALUE_BYTES = 100
TITLES = {
    "write": f"write, transactions of {TRANSACTION_ROWS:,} rows",
    "atomic": "write of all rows in one atomic job",
    "scan after atomic": "full scan after it, which settles its locks",
    "overwrite": "overwrite of a table of as many rows",
    "bulk load": "bulk load, arranging included",
    "floor of a load": "    the least for a Python data source: arranging, handing over",
    "full scan": "full scan",
    "floor of a scan": "    the least for a Python data source: handing over",
    "parquet write": "Parquet, write",
    "parquet scan": "Parquet, scan",
    "postgresql": f"PostgreSQL, upserts of {TRANSACTION_ROWS:,} rows per transaction",
}
CPU_MUSTS: dict[tuple[str, str], float | None] = {
    ("bulk load", "write"): None,
    ("full scan", "write"): None,
    ("bulk load", "parquet write"): 1.0,
    ("full scan", "parquet scan"): 1.5,
    ("floor of a load", "parquet write"): None,
    ("floor of a scan", "parquet scan"): None,
}
"""CPU per row of all processes, as a share of the other's at most."""
RATE_MUSTS = {("atomic", "write"): 0.6, ("write", "postgresql"): 0.9}
"""Rows per second, as a share of the other's at least."""


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


def run(
    directory: Path, parts: Iterable[str], runs: int, costs: defaultdict[str, list[Cost]]
) -> list[float]:
    """Fills in the costs, and returns the latencies of a stream in seconds, if it is a part."""
    wanted = {step for part in parts for step in PARTS[part]}
    with ExitStack() as stack:
        spark = session(directory / "warehouse")
        stack.callback(spark.stop)
        other = None
        if "postgresql" in wanted:
            binaries = postgresql.found()
            if binaries is None:
                raise SystemExit("PostgreSQL is not installed (Debian: apt-get install postgresql)")
            other = stack.enter_context(postgresql.running(binaries))
        cluster = stack.enter_context(LocalCluster(directory / "cluster", tablet_servers=1))
        db = stack.enter_context(percolator.connect(cluster.address))
        frame = rows(spark) if wanted else None
        for number in range(runs + 1 if frame is not None else 0):
            print(f"run {number} of {runs}" if number else "warming up", flush=True)
            assert frame is not None
            steps = Steps(db, cluster.address, frame, directory / f"parquet-{number}", other)
            for name, cost in steps.run(wanted, number).items():
                if number:
                    costs[name].append(cost)
        if "stream" not in parts:
            return []
        print("streaming", flush=True)
        return stream_latencies(spark, db, cluster.address, directory / "checkpoint")


def fill_in(report: Report, costs: dict[str, list[Cost]]) -> None:
    titles = {name: title for name, title in TITLES.items() if costs[name]}
    totals = {name: median(sum(cost.micros.values()) for cost in costs[name]) for name in titles}
    rates = {name: median(cost.rate for cost in costs[name]) for name in titles}
    for (name, other), must in RATE_MUSTS.items():
        if name in rates and other in rates:
            ratio = rates[name] / rates[other]
            report.add(f"rows/s: {name} / {other}", ratio, "×", must=must, at_least=True)
    for (name, other), most in CPU_MUSTS.items():
        if name in totals and other in totals:
            report.add(f"CPU: {name} / {other}", totals[name] / totals[other], "×", must=most)
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
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"after a warm-up ({RUNS})")
    parser.add_argument("--directory", type=Path, help="where the stores are (default: temporary)")
    given = parser.parse_args()
    parts = given.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    report = Report("spark")
    costs: defaultdict[str, list[Cost]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench-spark-", dir=given.directory) as directory:
        latencies = sorted(run(Path(directory), parts, given.runs, costs))
    fill_in(report, costs)
    if latencies:
        report.add("stream: commit to foreachBatch, median", median(latencies) * 1000, "ms")
        slow = latencies[len(latencies) * 19 // 20] * 1000
        report.add("    of 20, the slowest", slow, "ms")
    return report.finish(merge=True)


if __name__ == "__main__":
    sys.exit(main())
