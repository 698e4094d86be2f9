"""Documents as a DataFrame of url and body: from a cluster, from text files, or synthetic."""

from __future__ import annotations

import argparse
import os

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql

from examples.webindex.crawl import FILLER, HEX_DIGITS, LINKS_PER_DOCUMENT, Crawl
from examples.webindex.documents import HEADING
from examples.webindex.tables import DOCUMENTS_CATALOG


def add_address(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the address of the cluster, with the default of all programs."""
    parser.add_argument(
        "--address",
        default=os.environ.get("PERCOLATOR_ADDRESS", "localhost:7100"),
        help="host:port of masters or gateways; PERCOLATOR_ADDRESS",
    )


def stored(spark: SparkSession, address: str, table: str = "documents") -> DataFrame:
    """The documents of a cluster at one snapshot, as url and body."""
    reader = spark.read.format("percolator").options(address=address, table=table)
    return reader.option("catalog", DOCUMENTS_CATALOG).load()


def read_text(spark: SparkSession, path: str) -> DataFrame:
    """The documents of text files, in the format of `documents.read_text`."""
    whole = spark.read.text(path, wholetext=True)
    parts = sql.split(sql.concat(sql.lit("\n"), "value"), f"\n{HEADING}")
    document = whole.select(sql.explode(sql.slice(parts, 2, 2**30)).alias("document"))
    line_end = sql.expr("locate('\n', concat(document, '\n'))")
    body = sql.substring("document", line_end + 1, sql.length("document"))
    return document.select(
        sql.trim(sql.substring("document", sql.lit(1), line_end - 1)).alias("url"),
        sql.regexp_replace(body, "\n+$", "").alias("body"),
    )


def crawled(spark: SparkSession, crawl: Crawl, edition: int = 0) -> DataFrame:
    """The documents that `crawl` makes one by one."""
    number = sql.col("id").cast("string")
    drawn = sql.concat(number, sql.lit(f".{edition}"))

    def draw(of: Column, what: str, below: int) -> Column:
        text = sql.concat(sql.lit(f"{crawl.seed}:"), of, sql.lit(f":{what}"))
        digits = sql.substring(sql.md5(text.cast("binary")), 1, HEX_DIGITS)
        return (sql.conv(digits, 16, 10).cast("bigint") % below).cast("string")

    def url(of: Column) -> Column:
        return sql.concat(
            sql.lit("http://site"), draw(of, "s", crawl.sites), sql.lit(".example/"), of
        )

    title, opening, ending = (draw(drawn, key, crawl.keys) for key in ("t", "o", "e"))
    links = []
    for link in range(LINKS_PER_DOCUMENT):
        target = draw(drawn, f"l{link}", crawl.documents)
        links.append(
            sql.concat(sql.lit("[page "), target, sql.lit("]("), url(target), sql.lit(")"))
        )
    body = sql.concat(
        sql.lit("Title "), title, sql.lit("\n\nOpening "), opening, sql.lit(f". {FILLER}\n\n"),
        sql.concat_ws(" ", *links), sql.lit("\n\nEnding "), ending, sql.lit(".\n"),
    )  # fmt: skip
    return spark.range(crawl.documents).select(url(number).alias("url"), body.alias("body"))
