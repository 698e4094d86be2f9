"""The Spark batch job of the document pipeline computes what its definition says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import percolator
from examples.webindex import batch, spark_documents, spark_load, tables
from examples.webindex.crawl import Crawl
from examples.webindex.definition import Inlink, Served, served
from examples.webindex.documents import Document, parse, read_text
from examples.webindex.served import served_table
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
