"""A driver of its own, which a test can kill: `python -m tests.spark.driver_program PLAN`.

The plan is JSON: where the session keeps its files, the batch writes, and the streams. All of them
run at the same time, so that one kill meets each of them at the gate where it halts; in a cluster
of executors, which has two slots, the writes run one after the other. A stream that fails ends the
program. The last line of its output says what each write ended with and, if there are executors,
what they read afterwards.

Streams are started one after the other: Spark gives up a source whose Python process needs more
than 10 s to start, which several at once do on a busy machine. One that is too slow even so is
started again: none of our code has run in it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.gates import GATES, Gates
from tests.spark.sessions import cluster_session, local_session
from tests.spark.tables import PAGES

TOO_SLOW = "Python worker failed to connect back"
SLOTS = 8
"""Halted tasks keep theirs."""


def write_batch(spark: SparkSession, given: Mapping[str, Any]) -> None:
    """Writes `rows`, in two tasks."""
    frame = spark.createDataFrame(given["rows"], PAGES).repartitionByRange(2, "url")
    writer = frame.write.format("gated").options(**given["options"])
    writer.mode(given["mode"]).save()


def _moments(spark: SparkSession, given: Mapping[str, Any]) -> list[int]:
    """When each cell was committed of the table that was written."""
    names = {name: given["options"][name] for name in ("address", "table")}
    cells = spark.read.format("percolator").options(**names).load()
    return [cell.commit_timestamp for cell in cells.select("commit_timestamp").collect()]


def start_stream(spark: SparkSession, given: Mapping[str, Any]) -> StreamingQuery:
    """From a table with a change feed into another table; each commit is a batch."""
    reader = spark.readStream.format("gated").options(**given["source"], rows_per_batch=1)
    rows = reader.load().select("url", "title", "visits")
    writing = rows.writeStream.format("gated").options(**given["sink"])
    return writing.trigger(availableNow=True).start()


def _started(spark: SparkSession, given: Mapping[str, Any]) -> StreamingQuery:
    """A stream whose source is at work."""
    gates, first = Gates(Path(os.environ[GATES])), f"{given['source']['table']}.asked"
    while True:
        query = start_stream(spark, given)

        def require_active(query: StreamingQuery = query) -> None:
            if not query.isActive:
                query.awaitTermination()  # raises what it has failed with
                raise RuntimeError("the stream ended before its first batch")

        try:
            gates.wait(first, require_active)
        except StreamingQueryException as error:
            if TOO_SLOW not in str(error):
                raise
            spark.streams.resetTerminated()
        else:
            return query


def main() -> None:
    plan = json.loads(sys.argv[1])
    directory = Path(plan["directory"])
    spark = cluster_session(directory) if plan["cluster"] else local_session(directory, SLOTS)
    ended: dict[str, str] = {}

    def run(given: Mapping[str, Any]) -> None:
        table = given["options"]["table"]
        try:
            write_batch(spark, given)
        except Exception as error:  # noqa: BLE001 - the test judges it
            ended[table] = str(error)
        else:
            ended[table] = ""

    # A stream that fails ends the program, also while a write halts at a gate.
    threads = [threading.Thread(target=run, args=[given], daemon=True) for given in plan["writes"]]
    for thread in threads:
        thread.start()
        if plan["cluster"]:
            thread.join()
    queries = [_started(spark, given) for given in plan["streams"]]
    while any(query.isActive for query in queries):
        spark.streams.awaitAnyTermination()  # raises what a query has failed with
        spark.streams.resetTerminated()
    for thread in threads:
        thread.join()
    # A cluster session's processes are forked without our imports.
    read = plan["writes"] if plan["cluster"] else []
    moments = {given["options"]["table"]: _moments(spark, given) for given in read}
    print(json.dumps({"ended": ended, "moments": moments}), flush=True)


if __name__ == "__main__":
    main()
