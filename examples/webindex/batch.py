"""The pipeline from scratch as a Spark batch job, which computes `definition.py` at any size.

    python -m examples.webindex.batch [--address HOST:PORT] [--documents TABLE] [--serving TABLE]
                                      [--inlinks TABLE] [--replace]

It reads all documents at one snapshot, and loads the result into empty serving tables, or replaces
both tables at once. Spark's own functions do all the work: rows pass through Python only on
their way from and to the store.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as sql

from examples.webindex.documents import EDGE_SPACE, KEY_DIGITS, KEYS, LINK, PARAGRAPH_BREAK
from examples.webindex.spark_documents import add_address, stored
from examples.webindex.tables import DIGEST_DIGITS, INLINKS_CATALOG, SERVING_CATALOG


def parsed(documents: DataFrame) -> DataFrame:
    """Columns url, title, key0 to key2, and links, an array of target and anchor."""
    stripped = sql.transform(
        sql.split("body", PARAGRAPH_BREAK), lambda part: sql.regexp_replace(part, EDGE_SPACE, "")
    )
    paragraphs = sql.filter(stripped, lambda part: part != "")
    found = documents.select("url", "body", paragraphs.alias("p"))
    count = sql.size("p")
    parts = (
        sql.when(count > 0, sql.get("p", sql.lit(0))),
        sql.when(count > 1, sql.get("p", sql.lit(1))),
        sql.when(count > 2, sql.get("p", count - 1)),
    )
    keys = [_key(part).alias(f"key{number}") for number, part in enumerate(parts)]
    pattern = sql.lit(LINK)
    links = sql.arrays_zip(
        sql.regexp_extract_all("body", pattern, 2).alias("target"),
        sql.regexp_extract_all("body", pattern, 1).alias("anchor"),
    )
    title = sql.coalesce(sql.get("p", sql.lit(0)), sql.lit(""))
    return found.select("url", title.alias("title"), *keys, links.alias("links"))


def _key(part: Column) -> Column:
    own = sql.concat(sql.lit("url "), sql.col("url"))
    text = sql.coalesce(sql.concat(sql.lit("text "), part), own)
    return sql.substring(sql.md5(text.cast("binary")), 1, KEY_DIGITS)


def clusters(pages: DataFrame) -> DataFrame:
    """Columns url and canonical, for every document."""
    passes = []
    left = pages.select("url", *(f"key{number}" for number in range(KEYS)))
    for number in range(KEYS):
        group = Window.partitionBy(f"key{number}")
        best = sql.min(sql.struct(sql.length("url"), "url")).over(group)
        found = left.withColumn("best", best["url"])
        passes.append(found.select(sql.col("url").alias("member"), "best"))
        left = found.where("url = best").drop("best")
    labelled = passes[0]
    for later in passes[1:]:
        step = later.select(sql.col("member").alias("best"), sql.col("best").alias("better"))
        labelled = labelled.join(step, "best").select("member", sql.col("better").alias("best"))
    return labelled.select(sql.col("member").alias("url"), sql.col("best").alias("canonical"))


class Tables(NamedTuple):
    """The content of the serving tables, as described in `tables.py`."""

    serving: DataFrame
    """Columns url, title and documents, for every canonical page."""
    inlinks: DataFrame
    """Columns canonical, source, anchor_digest, target_digest and anchor."""


def served(documents: DataFrame) -> Tables:
    """Everything that is served."""
    pages = parsed(documents).cache()
    canonical = clusters(pages).cache()
    sizes = canonical.groupBy(sql.col("canonical").alias("url")).agg(
        sql.count(sql.lit(1)).alias("documents")
    )
    shown = sizes.join(pages.select("url", "title"), "url").select("url", "title", "documents")
    links = pages.select(sql.col("url").alias("source"), sql.inline("links")).distinct()
    inlinks = links.join(canonical.withColumnRenamed("url", "target"), "target").select(
        "canonical",
        "source",
        _digest("anchor").alias("anchor_digest"),
        _digest("target").alias("target_digest"),
        "anchor",
    )
    return Tables(shown, inlinks)


def _digest(column: str) -> Column:
    return sql.substring(sql.md5(sql.col(column).cast("binary")), 1, DIGEST_DIGITS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.webindex.batch")
    add_address(parser)
    parser.add_argument("--documents", default="documents", help="table to read")
    parser.add_argument("--serving", default="serving", help="empty table to load")
    parser.add_argument("--inlinks", default="inlinks", help="empty table to load")
    parser.add_argument("--replace", action="store_true", help="replace what the tables have")
    given = parser.parse_args(arguments)
    spark = SparkSession.builder.appName("webindex-batch").getOrCreate()
    found = served(stored(spark, given.address, given.documents))
    store = replace_served if given.replace else load_served
    store(found, given.address, given.serving, given.inlinks)
    return 0


def load_served(
    found: Tables, address: str, serving: str = "serving", inlinks: str = "inlinks"
) -> None:
    """Loads the result into empty tables."""
    from percolator.spark.bulk_load import bulk_load

    bulk_load(found.serving, address=address, table=serving, catalog=SERVING_CATALOG)
    bulk_load(found.inlinks, address=address, table=inlinks, catalog=INLINKS_CATALOG)


def replace_served(
    found: Tables, address: str, serving: str = "serving", inlinks: str = "inlinks"
) -> None:
    """Replaces both tables at once."""
    from percolator.spark import together

    with together(address=address) as job:
        for table, catalog, frame in (
            (serving, SERVING_CATALOG, found.serving),
            (inlinks, INLINKS_CATALOG, found.inlinks),
        ):
            writer = frame.write.format("percolator").options(**job.options)
            writer.options(table=table, catalog=catalog).mode("overwrite").save()


if __name__ == "__main__":
    sys.exit(main())
