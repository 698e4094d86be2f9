"""Two streams in a chain, each from a table into a table, compared with plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import percolator
from percolator.services.local.cluster import LocalCluster
from tests.spark.tables import CATALOG, Followed, Pages

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Chain = Callable[[Pages, Any, tuple[str, str]], StreamingQuery]


@pytest.fixture
def chain(spark: SparkSession, cluster: LocalCluster, tmp_path: Path) -> Iterator[Chain]:
    def chaining(source: Pages, sink: Followed, expressions: tuple[str, str]) -> StreamingQuery:
        given = {"address": cluster.address, "catalog": CATALOG, "timeout_seconds": "60"}
        reader = spark.readStream.format("percolator").options(**given, table=source.name)
        # A commit is never cut, so each is a batch of its own, and has each row once.
        reader = reader.options(starting_from=str(int(sink.began)), rows_per_batch=1)
        rows = reader.load().selectExpr("url", *expressions)
        writing = rows.writeStream.format("percolator").options(**given, table=sink.name)
        writing = writing.options(nulls="delete", checkpointLocation=str(tmp_path / sink.name))
        return writing.trigger(processingTime="0 seconds").start()

    yield chaining
    for query in spark.streams.active:
        query.stop()


def test_two_streams_do_what_plain_python_does_for_each_commit(
    chain: Chain, db: percolator.Database, cluster: LocalCluster
) -> None:
    """A server dies and tablets move meanwhile. Each commit of the first table is one of the second
    and of the third."""
    first, second, third = (Followed(db) for _ in range(3))
    queries = [
        chain(first, second, ("upper(title) AS title", "visits")),
        chain(second, third, ("title", "visits * 2 AS visits")),
    ]

    def commit(number: int) -> None:
        with db.transaction() as tx:
            for letter in "abcd"[: number % 4 + 1]:
                tx.set(f"{letter}{number % 2}", first.title, f"title {number}")
                tx.set(f"{letter}{number % 2}", first.visits, number)
            if number % 3 == 2:
                for column in (first.title, first.visits):
                    tx.delete("a0", column)

    for number in range(3):
        commit(number)
    cluster.processes["tabletserver-1"].kill()
    for number in range(3, 6):
        commit(number)
    cluster.restart("tabletserver-1")
    second.flush(cluster.address)
    commit(6)
    for query in queries:
        query.processAllAvailable()

    history = first.history()
    assert len(history) == 7
    upper = [
        {url: (title.upper(), visits) for url, (title, visits) in rows.items()} for rows in history
    ]
    assert second.history() == upper
    twice = [{url: (title, 2 * visits) for url, (title, visits) in rows.items()} for rows in upper]
    assert third.history() == twice
    assert third.stored() == twice[-1]
