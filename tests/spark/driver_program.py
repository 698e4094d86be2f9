"""A driver of its own, which a test can kill: `python -m tests.spark.driver_program PLAN`.

The plan is JSON: where the session keeps its files, the batch writes, and the streams. All of them
run at the same time, so that one kill strikes each of them at the gate where it halts; in a cluster
of executors, which has two slots, the writes run one after the other. The last line of its output
says what each write ended with.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.spark.sessions import cluster_session, local_session
from tests.spark.tables import PAGES

SLOTS = 8
"""Halted tasks keep theirs."""


def write_batch(spark: SparkSession, given: Mapping[str, Any]) -> None:
    """Writes `rows`, in two tasks."""
    frame = spark.createDataFrame(given["rows"], PAGES).repartitionByRange(2, "url")
    writer = frame.write.format("gated").options(**given["options"])
    writer.mode(given["mode"]).save()


def start_stream(spark: SparkSession, given: Mapping[str, Any]) -> StreamingQuery:
    """From a table with a change feed into another table; each commit is a batch."""
    reader = spark.readStream.format("gated").options(**given["source"], rows_per_batch=1)
    rows = reader.load().select("url", "title", "visits")
    writing = rows.writeStream.format("gated").options(**given["sink"])
    return writing.trigger(availableNow=True).start()


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

    threads = [threading.Thread(target=run, args=[given]) for given in plan["writes"]]
    for thread in threads:
        thread.start()
        if plan["cluster"]:
            thread.join()
    for query in [start_stream(spark, given) for given in plan["streams"]]:
        query.awaitTermination()
    for thread in threads:
        thread.join()
    print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    main()
