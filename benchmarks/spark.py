"""make bench-spark: rows per second between Spark and a cluster, on one machine.

`local[2]` Spark and a cluster of processes with one tablet server and synced writes share the
machine. The table has four tablets, keys of 10 bytes in random order, and values of 100 bytes.
Figures are medians of three runs, after a warm-up that pays for the session, the first job and the
connections. CPU time depends less on other load on the machine than the rate does; "if all cores
were free" is the number of cores divided by the CPU time per row.
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
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as spark_sql

import percolator
from benchmarks.report import Report
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
RATIO_MUSTS = {"bulk load": 0.25, "full scan": 0.3}
"""CPU per row of all processes, as a share of the CPU per row of transactional writes."""
TITLES = {
    "write": f"write, transactions of {TRANSACTION_ROWS:,} rows",
    "bulk load": "bulk load, arranging included",
    "full scan": "full scan",
}


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
    with (
        LocalCluster(directory / "cluster", tablet_servers=1) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        for number in range(RUNS + 1):
            print(f"run {number} of {RUNS}" if number else "warming up", flush=True)
            for name, cost in one_run(db, cluster.address, frame, number).items():
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
    written, loaded = f"written-{number}", f"loaded-{number}"
    for name in (written, loaded):
        db.create_table(Table(name), SPLITS)

    def options(table: str) -> dict[str, Any]:
        return {"address": address, "table": table, "catalog": CATALOG}

    def write() -> None:
        writer = frame.write.format("percolator").options(**options(written))
        writer.option("transaction_rows", TRANSACTION_ROWS).mode("append").save()

    def scan() -> None:
        read = spark.read.format("percolator").options(**options(written)).load()
        read.write.format("noop").mode("overwrite").save()

    costs = {
        "write": measured(write),
        "full scan": measured(scan),
        "bulk load": measured(lambda: bulk_load(frame, **options(loaded))),
    }
    for name in (written, loaded):
        found = spark.read.format("percolator").options(**options(name)).load().count()
        if found != ROWS:
            raise SystemExit(f"table {name} has {found} rows, not {ROWS}")
        db.drop_table(Table(name))
    return costs


def fill_in(report: Report, costs: dict[str, list[Cost]]) -> None:
    totals = {name: median(sum(cost.micros.values()) for cost in costs[name]) for name in TITLES}
    for name, must in RATIO_MUSTS.items():
        report.add(f"CPU: {name} / write", totals[name] / totals["write"], "×", must=must)
    for name, title in TITLES.items():
        rate = median(cost.rate for cost in costs[name])
        report.add(title, rate, "rows/s")
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
