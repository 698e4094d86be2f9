"""A Parquet copy of what is served, kept exact by a stream of the changes of `serving`.

    python -m examples.webindex.spark_copy DIRECTORY [--address HOST:PORT] [--once]

Each batch of changes makes a new version of the copy from the version before:

    DIRECTORY/checkpoint    how far the stream has come
    DIRECTORY/version-7     the copy after batch 7, complete once it has the file `_SUCCESS`

A version is the table as it was at one commit. A query that was killed repeats its last batch, from
the version before, so nothing is lost or applied twice. A complete version is never written again,
since others may be reading it, and the version before the newest is kept for those who still do.

A batch reads and writes the whole copy, so `--seconds` says how often at most there is one.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.readwriter import DataStreamWriter

from examples.webindex import tables
from examples.webindex.spark_documents import add_address
from percolator import Table

_VERSION = "version-"


def following(
    spark: SparkSession, directory: Path, address: str, table: str = "serving"
) -> DataStreamWriter:
    """The query that keeps the copy, yet to be given a trigger and started. Gives the table a
    change feed if it has none."""
    from percolator.spark import database

    database(address).set_change_feed(Table(table), on=True)
    options = {"address": address, "table": table, "catalog": tables.SERVING_CATALOG}
    changes = spark.readStream.format("percolator").options(**options)
    frame = changes.option("starting_from", "snapshot").load()
    writing = frame.writeStream.option("checkpointLocation", str(directory / "checkpoint"))
    return writing.foreachBatch(partial(_make_version, directory))


def copied(spark: SparkSession, directory: Path) -> DataFrame:
    """The newest version, as url, title and documents. Raises `FileNotFoundError` if none is
    complete."""
    numbers = _complete(directory)
    if not numbers:
        raise FileNotFoundError(f"{directory} has no complete version of the copy")
    return spark.read.parquet(str(_version(directory, numbers[-1])))


def applied(changes: DataFrame, copy: DataFrame | None) -> DataFrame:
    """The copy after these changes; the first changes are the whole table."""
    row = sql.struct("title", "documents", "change_kind")
    newest = changes.groupBy("url").agg(sql.max_by(row, "commit_timestamp").alias("row"))
    newest = newest.select("url", "row.*")
    written = newest.where("change_kind <> 'delete'").drop("change_kind")
    if copy is None:
        return written
    return copy.join(newest, "url", "left_anti").unionByName(written)


def _make_version(directory: Path, changes: DataFrame, number: int) -> None:
    numbers = _complete(directory)
    if number not in numbers:
        before = None
        if number > 0:
            before = changes.sparkSession.read.parquet(str(_version(directory, number - 1)))
        changes.persist()  # it is read twice, and each time from the cluster otherwise
        try:
            made = applied(changes, before)
            made.write.mode("overwrite").parquet(str(_version(directory, number)))
        finally:
            changes.unpersist()
    for old in numbers:
        if old < number - 1:
            shutil.rmtree(_version(directory, old))


def _complete(directory: Path) -> list[int]:
    """The numbers of the complete versions, in order."""
    found = directory.glob(f"{_VERSION}*/_SUCCESS")
    return sorted(int(path.parent.name.removeprefix(_VERSION)) for path in found)


def _version(directory: Path, number: int) -> Path:
    return directory / f"{_VERSION}{number}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.webindex.spark_copy")
    parser.add_argument("directory", type=Path, help="where the driver and all executors see it")
    add_address(parser)
    parser.add_argument("--table", default="serving", help="table to copy")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time between two batches at least"
    )
    parser.add_argument("--once", action="store_true", help="end when the copy is up to date")
    given = parser.parse_args(arguments)
    spark = SparkSession.builder.appName("webindex-copy").getOrCreate()
    query = following(spark, given.directory, given.address, given.table)
    if given.once:
        query = query.trigger(availableNow=True)
    else:
        query = query.trigger(processingTime=f"{given.seconds} seconds")
    query.start().awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
