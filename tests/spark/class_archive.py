"""Makes the archive of Spark's Java classes: `python -m tests.spark.class_archive FILE`.

Each Java process of these tests loads the same ten thousand classes, which takes half of what a
short one costs. With an archive it maps them into memory instead. This program has Java load most
of them once, without a cluster. Another Java than the one that made the archive goes without.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from tests.spark.sessions import local_session

ROWS = 8


def _work(spark: SparkSession, directory: Path) -> None:
    """Runs a bit of all that tests do often: rows of Python, files, a join, SQL and a stream."""
    files, copy = str(directory / "files"), str(directory / "copy")
    rows = [(f"url-{number}", number) for number in range(ROWS)]
    frame = spark.createDataFrame(rows, "url string, visits bigint").repartitionByRange(2, "url")
    spark.createDataFrame(frame.rdd.mapPartitions(list), frame.schema).write.parquet(files)
    found = spark.read.parquet(files)
    found.createOrReplaceTempView("files")
    spark.sql("SELECT url, sum(visits) AS visits FROM files WHERE url > 'a' GROUP BY url").join(
        found.select("url"), "url"
    ).orderBy("url").collect()
    stream = spark.readStream.schema(frame.schema).parquet(files).writeStream
    stream = stream.option("checkpointLocation", str(directory / "checkpoint"))
    stream.trigger(availableNow=True).start(copy, format="parquet").awaitTermination()
    assert spark.read.parquet(copy).count() == ROWS


def _end_java(spark: SparkSession) -> None:
    """Waits until Java has written the archive, which it does when it ends."""
    gateway = SparkContext._gateway
    assert gateway is not None
    spark.stop()
    java = gateway.proc
    gateway.shutdown()
    java.stdin.close()
    java.wait()


def main() -> None:
    archive = Path(sys.argv[1]).absolute()
    made = archive.with_suffix(".new")
    made.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as name:
        spark = local_session(Path(name), 2, java=f'"-XX:ArchiveClassesAtExit={made}"')
        _work(spark, Path(name))
        _end_java(spark)
    made.rename(archive)


if __name__ == "__main__":
    main()
