"""How long after a commit the rows of a stream are in `foreachBatch`, with a trigger of 0."""

from __future__ import annotations

import json
import queue
import random
import time
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import percolator
from percolator import Table, codecs

COMMITS = 100
WARM_UP = 10
PAUSE_SECONDS_MAX = 0.3
"""Commits come at any moment of the stream's pause between two looks."""
WAIT_SECONDS = 60.0
CATALOG = json.dumps(
    {"key": {"name": "key", "type": "text"}, "columns": {"number": {"type": "integer"}}}
)


def stream_latencies(
    spark: SparkSession, db: percolator.Database, address: str, checkpoint: Path
) -> list[float]:
    """Seconds from the end of a commit until `foreachBatch` has collected its row."""
    table = Table("followed")
    number = table.column("number", codecs.integer)
    db.create_table(table, ["5"], change_feed=True)
    arrived: queue.Queue[list[int]] = queue.Queue()

    def collect(batch: DataFrame, _: int) -> None:
        arrived.put([row.number for row in batch.collect()])

    source = spark.readStream.format("percolator").options(
        address=address, table=table.name, catalog=CATALOG, starting_from="now"
    )
    query = (
        source.load()
        .writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(checkpoint))
        .trigger(processingTime="0 seconds")
        .start()
    )
    arrived.get(timeout=WAIT_SECONDS)  # the first batch, without rows: it has noted where it begins
    found = []
    chance = random.Random(1)
    for count in range(COMMITS + WARM_UP):
        # At any moment of a trigger: commits in step with it would all wait equally long.
        time.sleep(chance.uniform(0, PAUSE_SECONDS_MAX))
        with db.transaction() as tx:
            tx.set(str(count % 10), number, count)
        committed = time.perf_counter()
        if arrived.get(timeout=WAIT_SECONDS) != [count]:
            raise SystemExit(f"the batch of commit {count} has other rows")
        if count >= WARM_UP:
            found.append(time.perf_counter() - committed)
    query.stop()
    db.drop_table(table)
    return found
