"""Observers keep up to date exactly what the Spark batch job computes from scratch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import percolator
from examples.webindex import batch, tables
from examples.webindex.crawl import Crawl
from examples.webindex.definition import served
from examples.webindex.served import served_table
from examples.webindex.spark_documents import crawled
from examples.webindex.spark_load import load
from percolator import Table
from percolator.blocking import loop_thread
from percolator.cli.app import app
from percolator.services.local.cluster import LocalCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

DOCUMENTS = 300
UPDATED = range(40)
DELETED = range(40, 60)
CAUSES = {tables.cause.name}
"""A batch job knows of no cause."""
WAIT_SECONDS = 120.0

Cells = dict[tuple[bytes, bytes], bytes]


def waiting(cluster: LocalCluster) -> int:
    """The number of pending notifications."""
    arguments = ["--address", cluster.address, "--json", "notifications", "--count"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    return sum(one["cells"] for one in json.loads(shown.output))


def server_of(db: percolator.Database, cluster: LocalCluster, table: Table[Any]) -> str:
    """The name of the process that serves the first tablet of the table."""
    engine = db._asynchronous.internal.engine

    async def find() -> str:
        deadline = engine.now() + 10.0
        info = await engine.catalog.table(table.name, deadline)
        return (await engine.catalog.all_tablets(info.table_id, deadline))[0].address

    address = loop_thread.shared().call(find)
    (name,) = (
        name
        for name, process in cluster.processes.items()
        if process.ready is not None and process.ready.address == address
    )
    return name


def stored_cells(db: percolator.Database, table: Table[Any]) -> Cells:
    async def read() -> Cells:
        found: Cells = {}
        async with db._asynchronous.snapshot() as snapshot:
            async for page in snapshot.scan_cells(table):
                cells = zip(page.rows, page.columns, page.values, strict=True)
                found |= {(row, name): value for row, name, value in cells if name not in CAUSES}
        return found

    return loop_thread.shared().call(read)


def test_both_agree_after_updates_and_deletions_and_a_killed_worker_and_tablet_server(
    spark: SparkSession, tmp_path: Path
) -> None:
    crawl = Crawl(DOCUMENTS, seed=11)
    updated = [crawl.document(number, edition=1) for number in UPDATED]
    deleted = spark.createDataFrame([(crawl.url(number),) for number in DELETED], "url string")
    again, inlinks_again = Table("serving-again"), Table("inlinks-again", key=tables.inlinks.key)
    with (
        LocalCluster(
            tmp_path,
            tablet_servers=2,
            workers=2,
            observers=["examples.webindex.observers:observers"],
        ) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        tables.create_tables(db, ["http://site1", "http://site5"])
        cluster.wait_workers()
        load(crawled(spark, crawl), cluster.address, bulk=True)
        cluster.processes["worker"].kill()
        assert waiting(cluster), "the worker was killed too late"
        cluster.restart("worker")

        load(spark.createDataFrame(updated, "url string, body string"), cluster.address, bulk=False)
        deleting = deleted.write.format("percolator").mode("append")
        deleting.options(address=cluster.address, table="documents", operation="delete")
        deleting.option("catalog", tables.DOCUMENTS_CATALOG).save()
        killed = server_of(db, cluster, tables.groups)
        cluster.processes[killed].kill()
        # Nothing can be committed without its groups: this waits until they are served again.
        assert waiting(cluster), "the tablet server was killed too late"
        cluster.restart(killed)

        assert not db.wait_for_observers(timeout=WAIT_SECONDS).dead_letters
        db.create_table(again)
        db.create_table(inlinks_again)
        batch.main(
            ["--address", cluster.address, "--serving", again.name, "--inlinks", inlinks_again.name]
        )
        assert stored_cells(db, tables.serving) == stored_cells(db, again)
        assert stored_cells(db, tables.inlinks) == stored_cells(db, inlinks_again)
        unchanged = (crawl.document(number) for number in range(DELETED.stop, DOCUMENTS))
        assert served_table(db) == served([*updated, *unchanged])
