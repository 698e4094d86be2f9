"""The Spark batch job of the document pipeline computes what its definition says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import percolator
from examples.webindex import batch, spark_copy, spark_documents, spark_load, tables
from examples.webindex.crawl import Crawl
from examples.webindex.definition import Inlink, Served, served
from examples.webindex.documents import Document, parse, read_text
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

ODD = [
    Document("http://empty", ""),
    Document("http://blank", " \n\n \n"),
    Document("http://title", "Title"),
    Document("http://title/longer", "\n\nTitle\n \n"),
    Document("http://two", 'Title\n\nüber [ä \\ "q"](http://title/longer)'),
    Document("http://three", "x\n\ny\n\n\nz [](http://two) [a](b c) [n\n](http://two)"),
    Document(
        "http://nowhere", "x2\n\ny2\n\nz2 [gone](http://gone) [x](http://three)[y](http://three)"
    ),
    Document("http://same", "other\n\ny\n\nend"),
]


def _by_url(found: batch.Tables) -> dict[str, Served]:
    inlinks: dict[str, set[Inlink]] = {}
    for row in found.inlinks.collect():
        inlinks.setdefault(row.canonical, set()).add(Inlink(row.source, row.anchor))
    return {
        row.url: Served(row.title, row.documents, tuple(sorted(inlinks.get(row.url, ()))))
        for row in found.serving.collect()
    }


def test_spark_makes_the_same_crawl_as_python(spark: SparkSession) -> None:
    crawl = Crawl(200, seed=5)
    rows = spark_documents.crawled(spark, crawl, 2).collect()
    found = [Document(row.url, row.body) for row in rows]
    assert found == [crawl.document(number, 2) for number in range(200)]


def test_spark_parses_as_python_does(spark: SparkSession) -> None:
    found = batch.parsed(spark.createDataFrame(ODD, "url string, body string")).collect()
    for row, document in zip(found, ODD, strict=True):
        page = parse(document)
        assert (row.title, (row.key0, row.key1, row.key2)) == (page.title, page.keys)
        assert [(link.target, link.anchor) for link in row.links] == list(page.links)


@pytest.mark.parametrize("documents", [ODD, list(Crawl(600, seed=7))], ids=["odd", "crawl"])
def test_what_is_served_is_what_the_definition_says(
    spark: SparkSession, documents: list[Document]
) -> None:
    frame = spark.createDataFrame(documents, "url string, body string")
    assert _by_url(batch.served(frame)) == served(documents)


def test_text_files_are_read_as_in_python(spark: SparkSession, tmp_path: Path) -> None:
    text = "= http://a \nOne\n\n= two\n\n= http://c"
    (tmp_path / "crawl.txt").write_text(text)
    found = spark_documents.read_text(spark, str(tmp_path / "*.txt")).collect()
    expected = list(read_text(text.splitlines(keepends=True)))
    assert [Document(row.url, row.body) for row in found] == expected


def test_a_crawl_goes_into_the_store_and_what_is_served_comes_out(
    spark: SparkSession,
    db: percolator.Database,
    cluster: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs the two programs, which find the cluster through the environment."""
    monkeypatch.setenv("PERCOLATOR_ADDRESS", cluster.address)
    crawl = Crawl(400, seed=9)
    splits = ["http://site3", "http://site6"]
    tables.create_tables(db, splits)
    spark_load.main(["--synthetic", "400", "--seed", "9", "--bulk"])
    changed = [crawl.document(number, edition=1) for number in range(20)]
    frame = spark.createDataFrame(changed, "url string, body string")
    spark_load.load(frame, cluster.address, bulk=False)
    with db.transaction() as tx:
        for number in range(20, 30):
            tx.delete(crawl.url(number), tables.body)
    batch.main([])
    expected = served(changed + [crawl.document(number) for number in range(30, 400)])
    assert served_table(db) == expected

    with db.transaction() as tx:
        for number in range(30, 60):
            tx.delete(crawl.url(number), tables.body)
    batch.main(["--replace"])
    expected = served(changed + [crawl.document(number) for number in range(60, 400)])
    assert served_table(db) == expected


# The Parquet copy of what is served is exact, also after its query was killed at some step.

TABLE = Table("serving-copied")
TITLE = TABLE.column("title", tables.title.codec)
SIZE = TABLE.column("documents", tables.size.codec)


def _served(db: percolator.Database) -> list[tuple[Any, ...]]:
    with db.snapshot() as snapshot:
        return [(row.key, row.get(TITLE), row.get(SIZE)) for row in snapshot.scan(TABLE)]


def _copy(spark: SparkSession, directory: Path) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, spark_copy.copied(spark, directory).collect()))


def test_the_copy_is_exact_however_its_last_batch_ended(
    spark: SparkSession, cluster: LocalCluster, db: percolator.Database, tmp_path: Path
) -> None:
    db.create_table(TABLE, ["http://m"])  # it gets its change feed from the copy

    def run() -> None:
        spark_copy.main(
            [str(tmp_path), "--address", cluster.address, "--table", TABLE.name, "--once"]
        )

    with pytest.raises(FileNotFoundError, match="no complete version"):
        spark_copy.copied(spark, tmp_path)
    db.set_many((f"http://{letter}", {TITLE: letter, SIZE: 1}) for letter in "abxyz")
    run()
    assert _copy(spark, tmp_path) == _served(db)

    with db.transaction() as tx:
        tx.set("http://a", SIZE, 2)
        tx.set("http://new", TITLE, "new")
    with db.transaction() as tx:
        tx.set("http://a", SIZE, 3)
        for column in (TITLE, SIZE):
            tx.delete("http://x", column)
    run()
    assert _copy(spark, tmp_path) == _served(db)

    # As if killed while the version was being written: the batch is repeated.
    _forget_commit(tmp_path, 1)
    (tmp_path / "version-1/_SUCCESS").unlink()
    assert len(_copy(spark, tmp_path)) == 5, "the version before is still the newest"
    run()
    assert _copy(spark, tmp_path) == _served(db)

    # As if killed when the version was complete, and before the checkpoint said so.
    complete = _files(tmp_path / "version-1")
    _forget_commit(tmp_path, 1)
    with db.transaction() as tx:
        tx.set("http://x", TITLE, "again")
    run()
    assert _copy(spark, tmp_path) == _served(db)
    assert _files(tmp_path / "version-1") == complete, "others may be reading it"
    assert {path.name for path in tmp_path.glob("version-*")} == {"version-1", "version-2"}


def _files(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def _forget_commit(directory: Path, number: int) -> None:
    for name in (f"{number}", f".{number}.crc"):
        (directory / "checkpoint/commits" / name).unlink(missing_ok=True)


# Observers keep up to date exactly what the Spark batch job computes from scratch.

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
