"""make bench-incremental: how soon a changed document is served, compared with a batch job.

The paper's figure 7 on this machine. `examples/webindex` is loaded with two repositories, one after
the other, in the state in which observers would leave it. Then, for each:

    batch pass   the Spark batch job reads all documents and loads empty serving tables. A changed
                 document waits for at least one whole pass, however few have changed. The second
                 pass is reported, since its Spark session is warm.
    burst        changes written as fast as possible, to find the rate that one worker's observers
                 keep up with
    three rates  1 % of the larger repository per hour; half the rate that observers keep up with in
                 the smaller one; and one and a half times that rate

The latency of a changed document runs from before its transaction to the last commit that served
any of its effects, by the oracle's clock: `tables.cause` says which change caused a served row.

Below the rate that observers keep up with, their latency hardly depends on the rate or on the size
of the repository. Above it, the backlog grows forever, and sooner or later a batch pass would be
faster; that rate is the crossover. Cluster, worker, Spark and the crawler share the machine. The
results are a table, var/benchmarks/incremental.json and incremental.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

import percolator
from benchmarks.collection import megabytes
from benchmarks.incremental_crawl import Stage, all_stages, say, three_rates
from benchmarks.incremental_plot import Curve, Point, draw
from benchmarks.report import RUNS, Report
from benchmarks.spark import session
from examples.webindex import batch, tables
from examples.webindex.crawl import Crawl
from examples.webindex.spark_documents import stored
from percolator import Table, codecs
from percolator.services.local.cluster import LocalCluster

SIZES = [100_000, 1_000_000]
SECONDS = 60.0
BURST = 3_000
TABLETS = 4
PERCENT_AN_HOUR = 1.0
SLOWEST_PER_SECOND = 2.0
"""In a small repository, one percent an hour would be too few changes to measure."""
OBSERVERS = "examples.webindex.observers:observers"
SPARK_MEMORY = "3g"

TIMES_MUST = 100.0
GROWTH_MUST = 25.0


@dataclass(frozen=True)
class Measured:
    """Measurements with one repository."""

    documents: int
    batch_seconds: float
    burst: Stage
    at_rates: list[Stage]

    @property
    def keeps_up(self) -> float:
        """The changes per second that observers keep up with."""
        return self.burst.done_per_second

    def percent_an_hour(self, per_second: float) -> float:
        return per_second * 3600 / self.documents * 100


# ---------------------------------------------------------------------------- the batch job


def batch_pass(
    spark: SparkSession, db: percolator.Database, address: str, crawl: Crawl, number: int
) -> float:
    """Runs the batch job into its own empty tables, and returns the seconds it took."""
    serving = Table(f"batch_serving_{number}")
    inlinks = Table(f"batch_inlinks_{number}", key=tables.inlinks.key)
    documents = serving.column(tables.size.name, codecs.integer)
    splits = crawl.splits(TABLETS)
    db.create_table(serving, splits)
    db.create_table(inlinks, [(url, "", "", "") for url in splits])
    began = time.perf_counter()
    found = batch.served(stored(spark, address))
    batch.load_served(found, address, serving.name, inlinks.name)
    seconds = time.perf_counter() - began
    spark.catalog.clearCache()
    with db.snapshot() as snapshot:
        served = sum(row[documents] for row in snapshot.scan(serving, columns=[documents]))
    if served != crawl.documents:
        raise SystemExit(f"the batch job served {served} documents, not {crawl.documents}")
    db.drop_table(serving)
    db.drop_table(inlinks)
    return seconds


# ---------------------------------------------------------------------------- measurement


def measure(
    spark: SparkSession,
    directory: Path,
    burst: int,
    seconds: float,
    documents: int,
    rates: Callable[[float], Sequence[float]],
) -> Measured:
    """Measures one repository in its own cluster, which is deleted afterwards.

    `rates` returns the rates to crawl at, given the changes per second that observers keep up with.
    """
    crawl = Crawl(documents)
    with LocalCluster(directory, tablet_servers=1, workers=1, observers=[OBSERVERS]) as cluster:
        # A running worker would register the observers, and take CPU from the batch job.
        worker = cluster.processes["worker"]
        worker.kill()
        say(f"loading {documents:,} documents, as observers would leave them")
        load(cluster.address, crawl)
        say(f"size of the store: {megabytes(directory):,.0f} MB")
        with percolator.connect(cluster.address) as db:
            cold = batch_pass(spark, db, cluster.address, crawl, 1)
            warm = batch_pass(spark, db, cluster.address, crawl, 2)
            say(f"batch passes: {cold:.1f} s, {warm:.1f} s")
        worker.start()
        cluster.wait_workers()
        crawling = all_stages(cluster.address, crawl, burst, seconds, rates)
        burst_, *at_rates = asyncio.run(crawling)
        say(f"size of the store: {megabytes(directory):,.0f} MB")
    shutil.rmtree(directory)
    return Measured(documents, warm, burst_, at_rates)


def load(address: str, crawl: Crawl) -> None:
    """Loads in a separate process, because it needs some kilobytes of memory per document."""
    command = [sys.executable, "-m", "examples.webindex.initial", "--address", address]
    command += ["--documents", str(crawl.documents), "--seed", str(crawl.seed)]
    subprocess.run([*command, "--tablets", str(TABLETS)], check=True)


def fill_in(report: Report, all_measured: Sequence[Measured]) -> None:
    for one in all_measured:
        size = f"{one.documents:,} documents"
        report.add(f"{size}: Spark batch pass", one.batch_seconds, "s")
        for found in one.at_rates:
            percent = _short(one.percent_an_hour(found.per_second))
            rate = f"{size}, {_short(found.per_second)} changes/s ({percent} % an hour)"
            report.add(f"    {rate}: median", found.median * 1000, "ms")
            report.add(f"    {rate}: 99 of 100", found.p99 * 1000, "ms")
        report.add(f"    {size}: crossover, where observers no longer keep up", one.keeps_up, "/s")
        report.add(f"    {size}: in an hour", one.percent_an_hour(one.keeps_up), "% of all")
        share = one.keeps_up * one.batch_seconds / one.documents * 100
        report.add(f"    {size}: during one batch pass", share, "% of all")
    small, large = all_measured[0], all_measured[-1]
    before, after = small.at_rates[0].median, large.at_rates[0].median
    percent = _short(large.percent_an_hour(large.at_rates[0].per_second))
    report.add(
        f"batch pass over {large.documents:,} / median at {percent} % an hour",
        large.batch_seconds / after,
        "times",
        must=TIMES_MUST,
        at_least=True,
    )
    report.add(
        f"that median, from {small.documents:,} to {large.documents:,}: difference",
        abs(after / before - 1) * 100,
        "%",
        must=GROWTH_MUST,
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def plot(all_measured: Sequence[Measured], path: Path) -> None:
    curves = [
        Curve(
            one.documents,
            one.batch_seconds,
            one.keeps_up,
            [Point(found.per_second, found.median, found.p99) for found in one.at_rates],
        )
        for one in all_measured
    ]
    draw(curves, path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.incremental", description=__doc__)
    parser.add_argument(
        "--sizes", type=int, nargs=2, default=SIZES, help="documents in each repository"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="how long to crawl at each rate"
    )
    parser.add_argument("--burst", type=int, default=BURST, help="changes in the burst")
    parser.add_argument("--directory", type=Path, help="where the stores are (default: temporary)")
    parser.add_argument("--results", type=Path, default=RUNS, help="where the results go")
    given = parser.parse_args()
    report = Report("incremental")
    small, large = sorted(given.sizes)
    slowest = max(PERCENT_AN_HOUR / 100 * large / 3600, SLOWEST_PER_SECOND)
    with tempfile.TemporaryDirectory(prefix="bench-incremental-", dir=given.directory) as name:
        directory = Path(name)
        # Before this process uses the client: Java is started with a fork.
        spark = session(directory / "warehouse", memory=SPARK_MEMORY)
        measured = partial(measure, spark, directory / "cluster", given.burst, given.seconds)
        first = measured(small, partial(three_rates, slowest))
        rates = [one.per_second for one in first.at_rates]
        found = [first, measured(large, lambda _: rates)]
        spark.stop()
    fill_in(report, found)
    given.results.mkdir(parents=True, exist_ok=True)
    plot(found, given.results / "incremental.svg")
    return report.finish(runs=given.results)


if __name__ == "__main__":
    sys.exit(main())
