"""Loads a crawl into the store with Spark: a synthetic one, or text files of documents.

    python -m examples.webindex.spark_load --synthetic 100000 --bulk
    python -m examples.webindex.spark_load --text 'crawl/*.txt'

With `--bulk`, documents are loaded into an empty table, and observers that are registered by then
are notified of them. Otherwise documents are written in transactions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from examples.webindex.crawl import Crawl
from examples.webindex.spark_documents import add_address, crawled, read_text
from examples.webindex.tables import DOCUMENTS_CATALOG
from percolator.spark.bulk_load import bulk_load


def load(documents: DataFrame, address: str, table: str = "documents", *, bulk: bool) -> None:
    """Writes the url and body of each document."""
    options: dict[str, Any] = {"address": address, "table": table, "catalog": DOCUMENTS_CATALOG}
    if bulk:
        bulk_load(documents, **options, notify="true", load_name="crawl")
    else:
        documents.write.format("percolator").options(**options).mode("append").save()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.webindex.spark_load", description=__doc__
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--synthetic", type=int, metavar="N", help="number of documents")
    source.add_argument("--text", metavar="PATH", help="text files; see documents.read_text")
    parser.add_argument("--seed", type=int, default=0)
    add_address(parser)
    parser.add_argument("--table", default="documents")
    parser.add_argument(
        "--bulk", action="store_true", help="load without transactions, into an empty table"
    )
    given = parser.parse_args(arguments)
    spark = SparkSession.builder.appName("webindex-load").getOrCreate()
    if given.text is not None:
        documents = read_text(spark, given.text)
    else:
        documents = crawled(spark, Crawl(given.synthetic, given.seed))
    load(documents, given.address, given.table, bulk=given.bulk)
    return 0


if __name__ == "__main__":
    sys.exit(main())
